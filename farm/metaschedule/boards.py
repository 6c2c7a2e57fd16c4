"""The boards of one script: a child process each, work handed to whichever is free, faults of theirs tried elsewhere.

What is measured and what MetaSchedule is told of it is in `runner`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from device_agent.protocol import FaultSide, MeasureSpec, Outcome, Status
from farm.crew.site import COMMON, find_difference
from farm.errors import FarmError, InternalError, UnavailableError
from farm.measure.session import plan_deadline_s
from farm.metaschedule.board_process import REQUEST_TIMEOUT_S, BoardOrder
from farm.processes.worker_processes import Child

# How often a candidate is measured where nobody can say that it is to blame; on other boards as far as there are any.
MAX_ATTEMPTS = 3
# A child that dies on its way to a board so often in a row will not get there.
_MAX_DEATHS_IN_A_ROW = 3
# What a call may take besides its own deadline and opening a session, which asks, connects and describes.
_GRACE_S = 2 * REQUEST_TIMEOUT_S + 30.0
_MODULE = "farm.metaschedule.board_process"


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

        Every board's call has a deadline and so has the wait for boards; the pump that minds them ends all waits.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def conclude(self, outcome: Outcome) -> None:
        """Once, by the pump."""
        self._outcome = outcome
        self._ended.set()

    def give_up(self, error: FarmError) -> None:
        """Once, by the pump, or when the script ends."""
        self._error = error
        self._ended.set()


@dataclasses.dataclass(eq=False)
class _Held:
    """A child and what is known of its board: "" while it has none."""

    child: Child
    board: str = ""
    work: Measurement | None = None
    deadline: float = 0.0


class Boards:
    """Up to `count` boards, minded on a thread. `close` gives them back."""

    def __init__(
        self,
        order: BoardOrder,
        count: int,
        wait_s: float,
        log: Path,
        note: Callable[[str], None],
    ) -> None:
        """Start to take boards. `wait_s`: how long work may wait while there is no board at all."""
        self._order, self._wait_s, self._log, self._note = order, wait_s, log, note
        self._lock = threading.Lock()
        self._queue: deque[Measurement] = deque()
        self._closing = False
        self._deaths = 0
        self._said = ""
        self._reasons: dict[Child, str] = {}
        self._described = threading.Event()
        self.description: Mapping[str, Any] = {}
        self.failure: FarmError | None = None
        self._bell_out, self._bell_in = os.pipe()
        self._boardless_since = time.monotonic()
        self._held: list[_Held] = []
        try:
            while len(self._held) < count:
                self._held.append(self._start())
        except FarmError:
            for held in self._held:
                held.child.kill()
            raise
        self._thread = threading.Thread(target=self._pump, name="farm-boards", daemon=True)
        self._thread.start()

    def submit(self, spec: MeasureSpec, library: bytes) -> Measurement:
        """Queue a candidate; returns at once."""
        work = Measurement(spec, library)
        with self._lock:
            if self.failure is None:
                self._queue.append(work)
            else:
                work.give_up(self.failure)
        self._ring()
        return work

    def require_description(self) -> Mapping[str, Any]:
        """What the first board says of itself; waits for one. Raises UnavailableError."""
        self._described.wait()  # ended by the pump, when boards were waited for in vain too
        if not self.description:
            assert self.failure is not None
            raise self.failure
        return self.description

    def pids(self) -> dict[str, int]:
        """Process id of each board's child, for tests that harm it."""
        return {held.board: held.child.process.pid for held in self._held if held.board}

    def close(self) -> None:
        """Give the boards back. Safe to call twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self.failure = self.failure or UnavailableError("the runner was closed before this was measured")
        self._ring()
        self._thread.join()
        for held in self._held:
            held.child.hang_up()
        for held in self._held:
            held.child.stop()
        os.close(self._bell_in)
        os.close(self._bell_out)

    # The pump; all below runs on its thread.

    def _pump(self) -> None:
        try:
            self._mind()
        except FarmError as error:
            self.failure = error
        finally:
            # Nobody may wait for a thread that is no more.
            self._fail(self.failure or InternalError("the thread that minds the boards has ended"))

    def _mind(self) -> None:
        while not self._closing:
            connections: dict[Any, _Held] = {held.child.connection: held for held in self._held}
            for ready in wait([self._bell_out, *connections], self._plan_wait_s()):
                if ready == self._bell_out:
                    os.read(self._bell_out, 4096)
                else:
                    self._receive(connections[ready])
            self._expire()
            self._dispatch()

    def _plan_wait_s(self) -> float:
        ends = [held.deadline for held in self._held if held.work is not None]
        if not self._has_board:
            ends.append(self._boardless_since + self._wait_s)
        return max(0.0, min(ends) - time.monotonic()) if ends else 60.0

    def _receive(self, held: _Held) -> None:
        connection: Connection = held.child.connection
        try:
            message = connection.recv()
        except (EOFError, OSError):
            self._replace(held, f"the process that held it died ({held.child.describe_end()})")
            return
        match message:
            case ("board", str(name), description):
                self._admit(held, name, description)
            case ("no_board", str(name)):
                held.board = ""
                self._note_boardless()
            case ("note", str(text)):
                self._reasons[held.child] = text
                self._say(text)
            case ("gone", str(text), str(hint)):
                self._lose(held, UnavailableError(text, hint))
            case ("measured", str(text), float(board_s)):
                self._conclude(held, Outcome.from_json(text), board_s)

    def _admit(self, held: _Held, name: str, description: Mapping[str, Any]) -> None:
        """Take a board into use. The first one says what the others have to be like."""
        known = self.description or description
        if different := find_difference(description, {field: known[field] for field in COMMON}):
            self._lose(held, UnavailableError(f"{name} cannot work for this script: {different}"))
            return
        self._deaths = 0
        self._reasons.pop(held.child, None)
        held.board = name
        if not self.description:
            self.description = dict(description)
            self._described.set()

    def _conclude(self, held: _Held, outcome: Outcome, board_s: float = 0.0) -> None:
        work, held.work = held.work, None
        if work is None:
            return
        work.board_s = board_s
        side = outcome.status.fault_side
        if side in (None, FaultSide.CANDIDATE):
            work.conclude(outcome)
            return
        work.tried.append(held.board or outcome.board)
        if len(work.tried) >= MAX_ATTEMPTS:
            work.conclude(outcome)
            return
        with self._lock:
            self._queue.appendleft(work)

    def _expire(self) -> None:
        now = time.monotonic()
        for held in list(self._held):
            if held.work is not None and held.deadline <= now:
                self._replace(held, "it did not answer in time")
        if self._has_board or now < self._boardless_since + self._wait_s:
            return
        with self._lock:
            waiting = bool(self._queue) or not self._described.is_set()
        if waiting:
            self._fail(
                UnavailableError(
                    f"no {self._order.board_type} could be had for {self._wait_s:g} s"
                    f" ({'; '.join(dict.fromkeys(self._reasons.values())) or 'no reason was given'})",
                    "`farm board list` shows who holds what; FarmRunner(wait=600) waits longer.",
                )
            )
        else:
            self._boardless_since = now

    def _dispatch(self) -> None:
        for held in self._held:
            if held.work is not None or not held.board:
                continue
            with self._lock:
                work = self._choose(held.board)
                if work is None:
                    continue
                self._queue.remove(work)
            held.work = work
            held.deadline = time.monotonic() + plan_deadline_s(work.spec, len(work.library)) + _GRACE_S
            # Where the child is gone, its connection's end comes next.
            held.child.send("measure", work.spec.to_json(), work.library)

    def _choose(self, board: str) -> Measurement | None:
        """The first candidate that this board may have: one it was tried on only where there is no other board."""
        others = {held.board for held in self._held if held.board} - {board}
        return next(
            (work for work in self._queue if board not in work.tried or not others - set(work.tried)),
            None,
        )

    @property
    def _has_board(self) -> bool:
        return any(held.board for held in self._held)

    def _note_boardless(self) -> None:
        if not self._has_board:
            self._boardless_since = time.monotonic()

    def _replace(self, held: _Held, reason: str) -> None:
        """A child died or hangs: its work is done again, another takes its place."""
        self._say(f"{held.board or 'a board'}: {reason}")
        held.child.kill()
        self._held.remove(held)
        self._conclude(held, Outcome(Status.FARM_ERROR, reason, board=held.board))
        self._deaths += 1
        if self._deaths >= _MAX_DEATHS_IN_A_ROW and not self._has_board:
            self._fail(UnavailableError(f"boards cannot be held: {reason}", f"See {self._log}."))
            return
        self._note_boardless()
        self._held.append(self._start())

    def _lose(self, held: _Held, error: FarmError) -> None:
        """A child found that there is no board for it to wait for."""
        self._reasons[held.child] = error.message
        self._held.remove(held)
        held.child.stop()
        self._conclude(held, Outcome(Status.FARM_ERROR, error.message, board=held.board))
        self._note_boardless()
        if not self._held:
            self._fail(error)

    def _fail(self, error: FarmError) -> None:
        self.failure = error
        self._give_up(error)
        self._described.set()

    def _give_up(self, error: FarmError) -> None:
        with self._lock:
            waiting = [*self._queue, *(held.work for held in self._held if held.work is not None)]
            self._queue.clear()
        for work in waiting:
            work.give_up(error)
        self._described.set()

    def _say(self, text: str) -> None:
        """Tell the script's user, once where several children wait for the same."""
        if text != self._said:
            self._said = text
            self._note(text)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._bell_in, b"!")

    def _start(self) -> _Held:
        child = Child.start(_MODULE, self._log, os.environ)
        child.send("order", self._order)
        return _Held(child)
