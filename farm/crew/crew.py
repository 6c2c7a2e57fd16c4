"""The boards of a run, all driven by one thread: this machine, one by name, or some of a type.

The command's main thread only waits, so that signals reach it and never a lease in progress. A pool is for jobs that
any board of a type may run, such as a script's candidates: on any free one, and on another after a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, TypeVar

import anyio

from device_agent.protocol import FaultSide, Outcome, Status
from farm.closing import Closing
from farm.connectivity.services import using_services
from farm.crew.choice import plan_choice, plan_pool, require_fixed_target
from farm.crew.driven_board import DrivenBoard
from farm.crew.leased_site import FleetSite
from farm.crew.local import LocalFarm
from farm.crew.site import COMMON, Site
from farm.errors import FarmError, InternalError, TransientError
from farm.inventory.board_types import BoardType
from farm.measure.blocking import LoopThread
from farm.processes.machine import machine_lock
from farm.settings import Settings
from farm.store import Store
from farm.values import Health

# How often the main thread wakes while it waits.
_LOOK_S = 0.1
# For the thread to end: jobs are cut, so only sessions and leases are left.
_END_TIMEOUT_S = 10.0
# For first probes of boards, as after services were started for this command.
_PROBE_TIMEOUT_S = 45.0

T = TypeVar("T")
OpenSite = Callable[[Store], contextlib.AbstractContextManager[Site]]


class WorkStoppedError(Exception):
    """The crew has ended: answers of its boards no longer matter."""


class Crew(Closing):
    """Boards, and the one thread with the loop that drives them all. Use as a context manager.

    Work is a coroutine that awaits boards (`DrivenBoard`). `boards` are those that were taken; `store` is the thread's
    own, for work alone: its statements hold up no session, since these have a loop of their own.
    """

    store: Store

    def __init__(self, settings: Settings, note: Callable[[str], None]) -> None:
        """Start the thread, and take no board. `note` gets what is waited for.

        Raises what opening the store raises, and TransientError where there is no memory for a thread.
        """
        self.boards: list[DrivenBoard] = []
        self._location, self._note = settings.store_location, note
        self._held: dict[DrivenBoard, contextlib.ExitStack] = {}
        self._loop = LoopThread("farm-crew", self._live)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the thread. From any thread. It is cancelled at the crew's end."""
        try:
            return self._loop.start(work)
        except RuntimeError:  # the loop is closed
            work.close()
            over: Future[T] = Future()
            over.cancel()
            return over

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the thread and wait, so that signals are handled. Raises what it raises."""
        return wait_for(self.start(work))

    async def take(self, open_site: OpenSite) -> DrivenBoard:
        """Take a board, waiting for it, until `give_back`. Raises what opening its site raises."""
        with contextlib.ExitStack() as stack:
            site = stack.enter_context(open_site(self.store))
            board = DrivenBoard(site, self._note)
            stack.callback(board.close)
            await board.take()
            self._held[board] = stack.pop_all()
        self.boards.append(board)
        return board

    def give_back(self, board: DrivenBoard) -> None:
        """Release a board. For work alone."""
        self.boards.remove(board)
        self._held.pop(board).close()

    def close(self) -> None:
        """Cancel all work (its waiters get WorkStoppedError), and return all boards. Safe to call twice."""
        self._loop.stop(_END_TIMEOUT_S)

    @contextlib.contextmanager
    def _live(self) -> Iterator[None]:
        with Store(self._location) as self.store, contextlib.ExitStack() as stack:
            try:
                yield
            finally:
                for board, held in self._held.items():  # if one of them raises, all are still closed
                    stack.push(held)
                    board.hang_up()  # all at once, so that closing waits for none


def wait_for(future: Future[T]) -> T:
    """Return a future's result, waiting in pieces so that signals are handled.

    Raises what it raised, WorkStoppedError where the crew has ended.
    """
    while True:
        try:
            return future.result(_LOOK_S)
        except CancelledError:
            raise WorkStoppedError from None
        except FutureTimeoutError:
            if future.done():
                raise


@contextlib.contextmanager
def open_crew(
    settings: Settings,
    store: Store,
    board_type: BoardType,
    name: str | None,
    wait_s: float,
    purpose: str,
    note: Callable[[str], None],
    *,
    is_timed: bool = True,
) -> Iterator[tuple[Crew, Callable[[int], None]]]:
    """Provide a crew with one board, `name` or any of the type, and a function that takes more free ones.

    Work that is not timed does not wait for other commands that measure on this machine. Raises UsageError,
    UnavailableError, DeadlineError, BoardUnsafeError.
    """
    with contextlib.ExitStack() as stack:
        if name is None and board_type.host_is_board:
            folder = settings.home_path / "logs"
            if is_timed:
                stack.enter_context(machine_lock(wait_s, note))
            else:
                # The home's own folder belongs to the holder of the lock.
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farm-local-")))
            # From the main thread, which lives as long as the children do.
            local = stack.enter_context(LocalFarm(settings.tracker_port, folder))
            first: OpenSite = lambda _: contextlib.nullcontext(local)  # noqa: E731
            pool: tuple[str, ...] = ()
        else:
            require_fixed_target(board_type)
            pool = plan_pool(store.boards.fetch(), board_type.name, name)
            services = stack.enter_context(using_services(settings, pool, note))

            def take(board: str | None, own: Store, patience_s: float = wait_s) -> FleetSite:
                return FleetSite(services, own, board_type.name, board, purpose, patience_s, note)

            first = functools.partial(take, name)

        def add_more(count: int) -> None:
            if count <= 0 or len(pool) <= 1:
                return
            rows = [row for row in store.boards.fetch() if row.name in pool]
            if unproven := [row.name for row in rows if row.health == Health.SUSPECT]:
                note(f"waiting for probes of {', '.join(unproven)}")
                services.probe(unproven, _PROBE_TIMEOUT_S)
            for board in plan_choice(store.boards.fetch(), pool).free[:count]:
                try:
                    # At once or not at all: work that waits for another board holds its own meanwhile.
                    crew.call(crew.take(functools.partial(take, board, patience_s=0.0)))
                except FarmError as error:
                    note(f"going on without {board}: {error}")

        crew = stack.enter_context(Crew(settings, note))
        crew.call(crew.take(first))
        yield crew, add_more


# How often a job of unknown fault is tried; on different boards as far as there are any.
MAX_ATTEMPTS = 3
# How often an idle board is checked.
_IDLE_LOOK_S = 0.5
# The pause before a failed board is tried again.
_AGAIN_S = 1.0

Job = Callable[[DrivenBoard], Awaitable[Outcome]]


@dataclasses.dataclass(frozen=True)
class Tried:
    """The outcome that counts, the board's time for it, and boards where it failed before."""

    outcome: Outcome
    board_s: float
    tried: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class _Slot:
    """Room for a board; `board` is None while there is no usable one."""

    board: DrivenBoard | None = None
    busy: bool = False
    lost: bool = False


class BoardPool:
    """Up to `count` boards, all like the first one. They are returned when the crew ends."""

    def __init__(self, crew: Crew, open_site: OpenSite, count: int, note: Callable[[str], None]) -> None:
        """Begin to take boards. Their sites limit how long jobs wait without any board."""
        self._crew, self._open_site, self._note = crew, open_site, note
        self._under_way = 0
        self._failure: FarmError | None = None
        self._description: Mapping[str, Any] = {}
        self._changed = anyio.Event()
        self._slots = [_Slot() for _ in range(count)]
        for slot in self._slots:
            crew.start(self._keep(slot))

    async def describe(self) -> Mapping[str, Any]:
        """Return the first board's description; waits for one. Raises UnavailableError."""
        self._under_way += 1
        try:
            return await self._until(lambda: self._description or None)
        finally:
            self._under_way -= 1

    async def run(self, job: Job) -> Tried:
        """Run `job` on the first free board, and on another where neither the job nor we are to blame.

        Raises UnavailableError where there is no board.
        """
        tried: list[str] = []
        self._under_way += 1
        try:
            while True:
                slot = await self._until(lambda: self._find_free(tried))
                outcome, board_s = await self._try(slot, job)
                good = outcome.status.fault_side in (None, FaultSide.CANDIDATE)
                if not good:
                    tried.append(outcome.board)
                if good or len(tried) >= MAX_ATTEMPTS:
                    return Tried(outcome, board_s, tuple(tried))
        finally:
            self._under_way -= 1

    async def _until(self, find: Callable[[], T | None]) -> T:
        """Wait until `find` returns a value, and return that. Raises the pool's failure."""
        while True:
            if self._failure is not None:
                raise self._failure
            if (found := find()) is not None:
                return found
            await self._changed.wait()

    def _note_change(self) -> None:
        """Have those look again that wait."""
        self._changed.set()
        self._changed = anyio.Event()

    def _find_free(self, tried: list[str]) -> _Slot | None:
        """Return a free board: one that failed the job before only where there is no other."""
        others = {slot.board.name for slot in self._slots if slot.board is not None} - set(tried)
        for slot in self._slots:
            if slot.board is not None and not slot.busy and not slot.lost and (slot.board.name in others or not others):
                return slot
        return None

    async def _try(self, slot: _Slot, job: Job) -> tuple[Outcome, float]:
        board = slot.board
        assert board is not None  # it was free
        slot.busy, name = True, board.name
        try:
            outcome = await job(board)
        except FarmError as error:
            status = Status.BOARD_LOST if isinstance(error, TransientError) else Status.FARM_ERROR
            outcome = Outcome(status, error.message, board=name)
            slot.lost = True
        finally:
            slot.busy = False
            self._note_change()
        return outcome, board.board_s

    async def _keep(self, slot: _Slot) -> None:
        """Keep a board in a slot, replaced when it is lost, until no board can be had."""
        while self._failure is None:
            try:
                board = await self._crew.take(self._open_site)
                try:
                    while True:
                        await self._open(slot, board)
                        await self._look_after(slot, board)
                finally:
                    slot.board = None
                    self._crew.give_back(board)
            except FarmError as error:
                waiting = self._under_way or not self._description
                if waiting and not any(each.board for each in self._slots):
                    self._failure = error
                    self._note_change()
                    return
                self._note(error.message)
                await anyio.sleep(_AGAIN_S)
            except Exception as error:  # waiting jobs must not wait for ever
                self._failure = InternalError(f"boards are driven no more: {error!r}")
                self._note_change()
                raise

    async def _open(self, slot: _Slot, board: DrivenBoard) -> None:
        """Open a session. The first board determines the others' description."""
        while True:
            if self._description:
                board.require_like({field: self._description[field] for field in COMMON})
            try:
                found = await board.open()
                break
            except TransientError as error:
                self._note(f"{board.name}: {error.message}")
                await anyio.sleep(_AGAIN_S)
        self._description = self._description or found.to_dict()
        slot.board, slot.lost = board, False
        self._note_change()

    async def _look_after(self, slot: _Slot, board: DrivenBoard) -> None:
        """Check the board until its session, or the board itself, has to be replaced."""
        while not slot.lost:
            with anyio.move_on_after(_IDLE_LOOK_S):
                await self._until(lambda: slot.lost or None)
            slot.lost = slot.lost or (not slot.busy and not board.look())
        slot.board = None
