"""The boards of a run, all driven by one thread: this machine, one by name, or some of a type.

The command's main thread only waits, so that signals reach it and never a lease in progress.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, TypeVar

from farm.closing import Closing
from farm.connectivity.services import using_services
from farm.crew.choice import plan_choice, plan_pool, require_fixed_target
from farm.crew.coroutines import Find, Loop, Waiter
from farm.crew.driven_board import DrivenBoard
from farm.crew.leased_site import FleetSite
from farm.crew.local import LocalFarm
from farm.crew.site import Site
from farm.errors import FarmError, TransientError
from farm.inventory.board_types import BoardType
from farm.processes.children import room_for_process
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
    """Boards, and the one thread that drives them all. Use as a context manager; `boards` are those that were taken.

    Work is a coroutine that awaits boards (`DrivenBoard`) and anything else that can be polled (`coroutines`).
    """

    def __init__(
        self,
        settings: Settings,
        note: Callable[[str], None],
    ) -> None:
        """Start the thread, and take no board. `note` gets what is waited for.

        Raises TransientError where there is no memory for a thread.
        """
        self.boards: list[DrivenBoard] = []
        # The thread's own, for work alone.
        self.store: Store
        self._location, self._note = settings.store_location, note
        self._held: dict[DrivenBoard, contextlib.ExitStack] = {}
        self._inbox: queue.SimpleQueue[tuple[Future[Any], Coroutine[Find, Any, Any]]] = queue.SimpleQueue()
        self._loop = Loop()
        with room_for_process():
            self._waiting = Waiter()
        self._stopping = threading.Event()
        self._over = threading.Event()
        # The error for work that arrives after the end.
        self._error: BaseException = WorkStoppedError()
        self._thread = threading.Thread(target=self._live, name="farm-crew", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # what Python makes of EAGAIN and ENOMEM
            self._waiting.close()
            raise TransientError(f"a thread for boards cannot be started: {error}") from error

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    def start(self, work: Coroutine[Find, Any, T]) -> Future[T]:
        """Start `work` on the thread. From any thread."""
        future: Future[T] = Future()
        self._inbox.put((future, work))
        self._waiting.ring()
        if self._over.is_set():
            self._refuse_rest()
        return future

    def call(self, work: Coroutine[Find, Any, T]) -> T:
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
        """End all work where it waits (its waiters get WorkStoppedError), and return all boards."""
        self._stopping.set()
        self._waiting.ring()
        self._thread.join(_END_TIMEOUT_S)

    def _live(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                self.store = stack.enter_context(Store(self._location))
                stack.callback(self._end)
                while not self._stopping.is_set():
                    self._take_in()
                    self._loop.run()
                    self._waiting.wait(_LOOK_S)
        except BaseException as error:  # noqa: BLE001  the edge of a thread: the waiter gets it
            self._error = error
        self._over.set()
        self._refuse_rest()
        self._waiting.close()

    def _take_in(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._loop.start(_carry_out(*self._inbox.get_nowait()))

    def _end(self) -> None:
        with contextlib.ExitStack() as stack:  # if one of them raises, all are still closed
            for board, held in self._held.items():
                stack.push(held)
                board.hang_up()  # all at once, so that closing waits for none
            self._loop.close()

    def _refuse_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                future, work = self._inbox.get_nowait()
                work.close()
                future.set_exception(self._error)


async def _carry_out(future: Future[T], work: Coroutine[Find, Any, T]) -> None:
    try:
        future.set_result(await work)
    except GeneratorExit:
        future.set_exception(WorkStoppedError())
        raise
    except BaseException as error:  # noqa: BLE001  the edge of a thread: the waiter gets it
        future.set_exception(error)


def wait_for(future: Future[T]) -> T:
    """Return a future's result, waiting in pieces so that signals are handled. Raises what it raised."""
    while True:
        try:
            return future.result(_LOOK_S)
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
