"""The boards of a run, each driven by a thread of its own: this machine, one board by name, or several of a type.

The main thread only waits, so that it hears signals, and can have all boards' work end at once.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from farm.connectivity.services import using_services
from farm.crew.choice import plan_choice, plan_pool
from farm.crew.driven_board import DrivenBoard
from farm.crew.leased_site import FleetSite
from farm.crew.local import LocalFarm
from farm.crew.site import Site
from farm.errors import FarmError, UsageError
from farm.inventory.board_types import BoardType
from farm.processes.machine import machine_lock
from farm.settings import Settings
from farm.store import Store
from farm.values import Health

# How often the main thread looks up while it waits.
_LOOK_S = 0.1
# Between being told to end and ending: jobs are cut, so what is left is giving sessions and leases back.
_END_TIMEOUT_S = 5.0
# Boards that nobody has probed yet, as after services were started for this command.
_PROBE_TIMEOUT_S = 45.0

T = TypeVar("T")
OpenSite = Callable[[Store], contextlib.AbstractContextManager[Site]]


class BoardThread:
    """One board, and the thread on which all its work is done. `store` is the thread's own."""

    def __init__(
        self, settings: Settings, open_site: OpenSite, stopping: threading.Event, note: Callable[[str], None]
    ) -> None:
        """Start the thread; it takes the board at once (`ready` tells how that went)."""
        self._settings, self._open_site = settings, open_site
        self._stopping, self._note = stopping, note
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[DrivenBoard, Store], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._board: DrivenBoard | None = None
        self.ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, name="farm-board", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The board's name; "" before it is taken."""
        return self._board.name if self._board else ""

    def submit(self, job: Callable[[DrivenBoard, Store], T]) -> Future[T]:
        """Have the thread do `job` after what it was given before."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self, timeout_s: float) -> None:
        """Give the board back once its work is done; waits for `timeout_s` at most."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _live(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                store = stack.enter_context(Store(self._settings.store_location))
                site = stack.enter_context(self._open_site(store))
                log = self._settings.home_path / "logs" / "boards.log"
                board = self._board = DrivenBoard(site, self._stopping, self._note, log)
                stack.callback(board.close)
                self.ready.set_result(None)
                while (item := self._jobs.get()) is not None:
                    _carry_out(*item, board, store)
        except (FarmError, OSError) as error:
            if not self.ready.done():
                self.ready.set_exception(error)


def _carry_out(future: Future[Any], job: Callable[..., Any], *arguments: Any) -> None:
    try:
        result = job(*arguments)
    except BaseException as error:  # noqa: BLE001  the edge of a thread: whoever waits gets it
        future.set_exception(error)
    else:
        future.set_result(result)


def wait_for(future: Future[T], timeout_s: float | None = None) -> T:
    """A future's result, in pieces so that signals are heard. Raises what it raised, FutureTimeoutError."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            return future.result(_LOOK_S)
        except FutureTimeoutError:
            if future.done() or (deadline is not None and time.monotonic() >= deadline):
                raise


class Crew:
    """The boards of one sweep. Used from the main thread."""

    def __init__(self, settings: Settings, note: Callable[[str], None]) -> None:
        self.boards: list[BoardThread] = []
        self.stopping = threading.Event()
        self._settings, self._note = settings, note
        self._open_more: Callable[[], OpenSite] | None = None

    def add(self, open_site: OpenSite) -> BoardThread:
        """Take a board. Raises what opening its site raises."""
        board = BoardThread(self._settings, open_site, self.stopping, self._note)
        self.boards.append(board)
        wait_for(board.ready)
        return board

    def end(self) -> None:
        """Give all boards back, whose jobs under way end."""
        self.stopping.set()
        for board in self.boards:
            board.close(_END_TIMEOUT_S)


@contextlib.contextmanager
def open_crew(
    settings: Settings,
    store: Store,
    board_type: BoardType,
    name: str | None,
    wait_s: float,
    purpose: str,
    note: Callable[[str], None],
) -> Iterator[tuple[Crew, Callable[[int], None]]]:
    """A crew of one board: `name`, or any of the type; and what takes up to so many more that are free just now.

    Raises UsageError, UnavailableError, DeadlineError, BoardUnsafeError.
    """
    with contextlib.ExitStack() as stack:
        crew = Crew(settings, note)
        if name is None and board_type.host_is_board:
            stack.enter_context(machine_lock(wait_s, note))
            # From the main thread, which lives as long as the children do.
            local = stack.enter_context(LocalFarm(settings.tracker_port, settings.home_path / "logs"))
            first: OpenSite = lambda _: contextlib.nullcontext(local)  # noqa: E731
            pool: tuple[str, ...] = ()
        else:
            if board_type.target is None:
                raise UsageError(
                    f"boards of type {board_type.name!r} are whatever machine asks: there is no target to compile for",
                    "Leave --board out to sweep this machine; a board elsewhere needs a type with a target of its own.",
                )
            pool = plan_pool(store.fetch_boards(), board_type.name, name)
            services = stack.enter_context(using_services(settings, pool, note))

            def take(board: str | None, own: Store, patience_s: float = wait_s) -> FleetSite:
                return FleetSite(
                    services, own, board_type.name, board, purpose, patience_s, note, stopping=crew.stopping
                )

            first = functools.partial(take, name)

        def add_more(count: int) -> None:
            if count <= 0 or len(pool) <= 1:
                return
            rows = [row for row in store.fetch_boards() if row["name"] in pool]
            if unproven := [row["name"] for row in rows if row["health"] == Health.SUSPECT]:
                note(f"waiting for probes of {', '.join(unproven)}")
                services.probe(unproven, _PROBE_TIMEOUT_S)
            for board in plan_choice(store.fetch_boards(), pool).free[:count]:
                try:
                    # At once or not at all: what waits for another board meanwhile holds its own.
                    crew.add(functools.partial(take, board, patience_s=0.0))
                except FarmError as error:
                    crew.boards.pop()
                    note(f"going on without {board}: {error}")

        stack.callback(crew.end)
        crew.add(first)
        yield crew, add_more
