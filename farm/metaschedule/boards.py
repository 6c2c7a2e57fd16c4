"""The boards of one script: work handed to whichever is free, faults of theirs tried elsewhere.

Each is driven as a sweep's is (`farm.crew`). What is measured and what MetaSchedule is told of it is in `runner`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from device_agent.protocol import FaultSide, MeasureSpec, Outcome, Status
from farm.connectivity.tracker import Tracker
from farm.crew.driven_board import DrivenBoard, WorkStoppedError
from farm.crew.leased_site import FleetSite
from farm.crew.site import COMMON
from farm.errors import FarmError, InternalError, TransientError, UnavailableError
from farm.settings import StoreLocation
from farm.store import Store

# How often a candidate is measured where nobody can say that it is to blame; on other boards as far as there are any.
MAX_ATTEMPTS = 3
# How often a board without work is looked at.
_LOOK_S = 0.5
# What is wrong with a board is looked at again this soon.
_AGAIN_S = 1.0
# A script that ends cuts its calls; what is left is giving sessions and leases back.
_END_TIMEOUT_S = 15.0


@dataclasses.dataclass(frozen=True)
class BoardOrder:
    """Which board is wanted, and where things are. `name` None: any of the type."""

    store: StoreLocation
    tracker: tuple[str, int]
    board_type: str
    name: str | None
    purpose: str


class _Reach:
    """The tracker that the script's services keep."""

    def __init__(self, tracker: tuple[str, int]) -> None:
        self.tracker = Tracker(*tracker)


class Measurement:
    """One candidate on its way; `wait` gives its outcome."""

    def __init__(self, spec: MeasureSpec, library: bytes) -> None:
        self.spec, self.library = spec, library
        # Boards that it was tried on in vain.
        self.tried: list[str] = []
        # For how long the board was busy with it, the last time.
        self.board_s = 0.0
        self._ended = threading.Event()
        self._outcome: Outcome | None = None
        self._error: FarmError | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._ended.is_set()

    def wait(self) -> Outcome:
        """The outcome, once there is one. Raises UnavailableError where no board can be had.

        Every board's call has a deadline and so has the wait for boards; the threads that drive them end all waits.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def conclude(self, outcome: Outcome) -> None:
        """Once, by a board's thread."""
        self._outcome = outcome
        self._ended.set()

    def give_up(self, error: FarmError) -> None:
        """Once, by a board's thread, or when the script ends."""
        self._error = error
        self._ended.set()


@dataclasses.dataclass(eq=False)
class _Slot:
    """A thread's board: "" while it has none that may be given work."""

    name: str = ""
    board: DrivenBoard | None = None


class Boards:
    """Up to `count` boards, each driven by a thread. `close` gives them back."""

    def __init__(self, order: BoardOrder, count: int, wait_s: float, log: Path, note: Callable[[str], None]) -> None:
        """Start to take boards. `wait_s`: how long work may wait while there is no board at all."""
        self._order, self._wait_s, self._log, self._note = order, wait_s, log, note
        self._changed = threading.Condition()
        self._queue: deque[Measurement] = deque()
        self._under_way: set[Measurement] = set()
        self._stopping = threading.Event()
        self._said = ""
        self._described = threading.Event()
        self.description: Mapping[str, Any] = {}
        self.failure: FarmError | None = None
        self._slots = [_Slot() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._live, args=(slot,), name="farm-board", daemon=True) for slot in self._slots
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, spec: MeasureSpec, library: bytes) -> Measurement:
        """Queue a candidate; returns at once."""
        work = Measurement(spec, library)
        with self._changed:
            if self.failure is None:
                self._queue.append(work)
                self._changed.notify_all()
            else:
                work.give_up(self.failure)
        return work

    def require_description(self) -> Mapping[str, Any]:
        """What the first board says of itself; waits for one. Raises UnavailableError."""
        self._described.wait()  # ended by the threads, when boards were waited for in vain too
        if not self.description:
            assert self.failure is not None
            raise self.failure
        return self.description

    def pids(self) -> dict[str, int]:
        """Process id of each board's process, for tests that harm it."""
        found = {slot.name: slot.board.pid for slot in self._slots if slot.name and slot.board is not None}
        return {name: pid for name, pid in found.items() if pid is not None}

    def close(self) -> None:
        """Give the boards back. Safe to call twice."""
        self._stopping.set()
        self._fail(UnavailableError("the runner was closed before this was measured"))
        for thread in self._threads:
            thread.join(_END_TIMEOUT_S)

    # All below runs on the boards' threads.

    def _live(self, slot: _Slot) -> None:
        try:
            with Store(self._order.store) as store:
                while not self._stopping.is_set():
                    self._try_to_serve(slot, store)
        except WorkStoppedError:
            pass
        except FarmError as error:
            self._fail(error)
        finally:
            # Nobody may wait for threads that are no more.
            slot.name = ""
            if not any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread()):
                self._fail(InternalError("the threads that drive the boards have ended"))

    def _try_to_serve(self, slot: _Slot, store: Store) -> None:
        """Have a board and serve with it. Raises FarmError where nobody can go on, WorkStoppedError."""
        order = self._order
        reach = _Reach(order.tracker)
        try:
            with FleetSite(
                reach,
                store,
                order.board_type,
                order.name,
                order.purpose,
                self._wait_s,
                self._say,
                stopping=self._stopping,
            ) as site:
                slot.board = board = DrivenBoard(site, self._stopping, self._say, self._log)
                try:
                    self._serve(slot, board)
                finally:
                    slot.name = ""
                    board.close()
        except FarmError as error:
            if self._stopping.is_set():
                raise WorkStoppedError from None
            slot.name = ""
            with self._changed:
                waiting = bool(self._queue or self._under_way) or not self._described.is_set()
                others = any(each.name for each in self._slots)
            if waiting and not others:
                raise
            self._say(error.message)
            self._stopping.wait(_AGAIN_S)

    def _serve(self, slot: _Slot, board: DrivenBoard) -> None:
        """Measure what comes, on this board or what takes its place. Raises FarmError, WorkStoppedError."""
        while True:
            if not slot.name:
                slot.name = self._open(board)
            if not board.look():
                slot.name = ""
            elif (work := self._take(board.name)) is not None:
                slot.name = self._measure(board, work)

    def _open(self, board: DrivenBoard) -> str:
        """Open a session; its board's name. The first one says what the others have to be like."""
        with self._changed:
            known = self.description
        if known:
            board.require_like({field: known[field] for field in COMMON})
        try:
            found = board.open()
        except TransientError as error:
            self._say(f"{board.name}: {error.message}")
            board.pause(_AGAIN_S)
            return ""
        with self._changed:
            self.description = self.description or found.to_dict()
        self._described.set()
        return board.name

    def _measure(self, board: DrivenBoard, work: Measurement) -> str:
        """Measure a candidate; the board's name, "" where it has to be found again."""
        name = board.name
        try:
            outcome = board.measure(work.spec, work.library)
        except FarmError as error:
            status = Status.BOARD_LOST if isinstance(error, TransientError) else Status.FARM_ERROR
            outcome = Outcome(status, error.message, board=name)
            name = ""
        work.board_s = board.board_s
        self._conclude(work, outcome)
        return name

    def _take(self, board: str) -> Measurement | None:
        """The first candidate that this board may have: one it was tried on only where there is no other board."""
        with self._changed:
            for wait in (True, False):
                others = {slot.name for slot in self._slots if slot.name} - {board}
                for work in self._queue:
                    if board not in work.tried or not others - set(work.tried):
                        self._queue.remove(work)
                        self._under_way.add(work)
                        return work
                if wait:
                    self._changed.wait(_LOOK_S)
        return None

    def _conclude(self, work: Measurement, outcome: Outcome) -> None:
        with self._changed:
            self._under_way.discard(work)
            if work.done:  # given up meanwhile
                return
            if outcome.status.fault_side in (None, FaultSide.CANDIDATE):
                work.conclude(outcome)
                return
            work.tried.append(outcome.board)
            if len(work.tried) >= MAX_ATTEMPTS:
                work.conclude(outcome)
                return
            self._queue.appendleft(work)
            self._changed.notify_all()

    def _fail(self, error: FarmError) -> None:
        """All that waits, and whatever comes, ends with this."""
        with self._changed:
            self.failure = self.failure or error
            for work in [*self._queue, *self._under_way]:
                if not work.done:
                    work.give_up(error)
            self._queue.clear()
        self._described.set()

    def _say(self, text: str) -> None:
        """Tell the script's user, once where several threads wait for the same."""
        if text != self._said:
            self._said = text
            self._note(text)
