"""The services' one loop: keep tracker and connections up, probe boards, update the store.

Everything runs on the main thread; requests arrive by `submit`. `daemon` has the commands' requests, `probe_rules`
plans probes, `farm.crew.health` judges observations.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import queue
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio

from farm import emulation
from farm.connectivity.host_keys import FILE_NAME, KnownHosts
from farm.connectivity.tracker import Tracker
from farm.crew.health import Kind, Observation
from farm.crew.leased_board import free_orphans
from farm.errors import FarmError
from farm.gpu import code
from farm.inventory.board_types import require_board_type
from farm.processes import children
from farm.processes.children import Backoff, Restarts
from farm.processes.machine import name_coordinator
from farm.services.foreign_clients import ForeignClients
from farm.services.powering import BY, Powering, tell
from farm.services.probing import Probing
from farm.services.routes import (
    DirectRoute,
    ForeignRoute,
    KeptBoard,
    Route,
    RouteLeases,
    RouteState,
    SshRoute,
    VirtualRoute,
)
from farm.settings import Settings
from farm.store import Store
from farm.store.standing import parse_transport, unknown_board
from farm.types.documents import BoardInfo
from farm.values import Direct, Health, Ssh, State, Transport, Virtual

# The loop's period without events: the store shows a lost board this much later.
TICK_S = 0.5
_BOARDS_PERIOD_S = 1.0
_LEASES_PERIOD_S = 5.0
# How often old events and logs are removed; a rack of boards adds some thousand rows meanwhile.
_TIDY_PERIOD_S = 600.0
# Agents register with a restarted tracker within 2 s (`device_agent/listener/tracker.py`).
_REGISTRATION_GRACE_S = 6.0
# Each virtual board that starts computes for over a second, and waits for its simulator and its helper meanwhile.
_STARTING_PER_CORE = 4
# The tracker's summary comes within milliseconds; one that does not answer is restarted.
_SUMMARY_TIMEOUT_S = 2.0
# The pauses after a failed start of the tracker.
_BACKOFF = Backoff(first_s=0.5, last_s=15.0)

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Keeper:
    """Keeps the boards called `wanted` (None: all that are registered) connected until `stop`."""

    def __init__(
        self, settings: Settings, store: Store, cores: int, wanted: Collection[str] | None, logs: Path
    ) -> None:
        """Start the tracker. Raises UnavailableError where it cannot."""
        self._settings, self._store, self._logs = settings, store, logs
        self._me = name_coordinator(settings.home_path)
        self._wanted: set[str] | None = None if wanted is None else set(wanted)
        self._most_starting = _STARTING_PER_CORE * cores
        self._known_hosts = KnownHosts(settings.home_path / FILE_NAME)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # The boards that are kept, by name; and all boards as the store showed them last.
        self.boards: dict[str, KeptBoard] = {}
        self.rows: list[BoardInfo] = []
        self._stopping = False
        self.tracker = Tracker.start(settings.tracker_port, logs / "tracker.log")
        self.tracker_restarts = 0
        self._tracker_since = time.monotonic()
        self._tracker_tries = Restarts(_BACKOFF)
        self._boards_at = self._leases_at = self._tidied_at = 0.0
        self.probing = Probing(settings, (self.tracker.host, self.tracker.port), self._inbox.put)
        self.powering = Powering(store, self._inbox.put)
        self._foreign_clients = ForeignClients(store)
        self.leases = RouteLeases(store, self._me)
        # Called on every turn, such as the exporter of metrics.
        self.watchers: list[Callable[[Keeper], None]] = []

    # From any thread

    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Have the loop do `work`; the future has its result."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - passed on to the caller
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def stop(self) -> None:
        """End the loop soon. Safe in a signal handler."""
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        """Have the loop check everything now. Safe in a signal handler."""
        self._inbox.put(lambda: None)

    # On the main thread

    def run(self, may_end: Callable[[], bool]) -> None:
        """Keep everything up until `stop`, or until `may_end` returns true."""
        while not self._stopping and not may_end():
            self.step()
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=TICK_S)()
                while True:
                    self._inbox.get_nowait()()

    def step(self) -> None:
        """Check everything once."""
        self._keep_tracker()
        now = time.monotonic()
        try:
            if now - self._boards_at >= _BOARDS_PERIOD_S:
                self._boards_at = now
                self.rows = self._store.boards.fetch()
                self._look_at_leases()
                self._reconcile()
            if now - self._leases_at >= _LEASES_PERIOD_S:
                self._leases_at = now
                for name in self._store.leases.expire(BY):
                    _log.info("the lease of %s expired", name, extra={"board": name})
                rows = {row.name: row for row in self._store.boards.fetch()}
                for name in free_orphans(self._store, rows, rows):
                    _log.info("the holder of %s is gone", name, extra={"board": name})
            if now - self._tidied_at >= _TIDY_PERIOD_S:
                self._tidied_at = now
                children.trim_logs(self._logs)
                if gone := self._store.pruning.prune_events():
                    _log.info("%d old events were forgotten", gone)
            self._look_at_boards()
            reachable = set(self._list_lent())
            mine = {name for name, board in self.boards.items() if not isinstance(board.route, ForeignRoute)}
            kept = [row for row in self.rows if row.name in mine]
            refused = {name for name in mine if self.boards[name].state.refused}
            self.powering.step(kept, reachable, refused, self.probing.past)
            self.probing.step(self.rows, reachable - self.powering.find_booting(reachable))
        except FarmError as error:  # the store is busy or its disk is full: connections stay up
            _log.warning("%s", error)
        for watch in self.watchers:
            watch(self)

    def need(self, names: Collection[str] | None) -> None:
        """Keep these boards as well, or all. Raises UsageError for one that is not registered."""
        if names is None:
            self._wanted = None
        else:
            known = {row.name for row in self._store.boards.fetch()}
            if missing := sorted(set(names) - known):
                raise unknown_board(missing[0], known)
            if self._wanted is not None:
                self._wanted |= set(names)
            self.leases.want(names)
        self._boards_at = 0.0

    def retry(self, names: Collection[str]) -> None:
        """Reconnect these boards now, as after a host key was confirmed."""
        for name in set(names) & self.boards.keys():
            if not self.boards[name].state.up:
                self.boards.pop(name).route.close()
        self._boards_at = 0.0

    def close(self) -> None:
        """End every connection, probes and the tracker, and set the boards offline in the store."""
        self.probing.close()
        self.powering.close()
        self._foreign_clients.close()
        boards = list(self.boards.values())
        _close_all(boards)
        for board in boards:
            if (board.registered or board.state.up) and self.leases.is_mine(board.name):
                self._tell(board.name, Kind.LOST, "the farm's services ended")
        self.boards.clear()
        try:
            self.leases.close()
        except FarmError as error:  # others get them once they have expired
            _log.warning("%s", error)
        self.tracker.stop()

    def _keep_tracker(self) -> None:
        if self.tracker.is_alive or not self._tracker_tries.due:
            return
        host, port = self.tracker.host, self.tracker.port
        _log.warning("the tracker ended; starting it again")
        self.tracker.stop()
        try:
            # On its port: agents, forwards and clients know no other.
            self.tracker = Tracker.start(port, self._logs / "tracker.log", tries=1)
        except FarmError as error:
            _log.error("the tracker at %s:%d cannot be started again: %s", host, port, error)
            self._tracker_tries.note_end()
            return
        self._tracker_tries.note_up()
        self.tracker_restarts += 1
        self._tracker_since = time.monotonic()

    def _reconcile(self) -> None:
        """Have one connection for each board that is wanted and registered, and for no other."""
        seen = set()
        for row in self.rows:
            name = row.name
            if not self._is_wanted(row):
                continue
            seen.add(name)
            transport = parse_transport(row.transport)
            kept, leased = self.boards.get(name), self.leases.find(name)
            # Virtual boards run here, whichever coordinator owns them; a board elsewhere has one connection.
            others = isinstance(transport, Ssh) and not self.leases.is_mine(name)
            same = kept is not None and (kept.transport, kept.board_type) == (transport, row.board_type)
            if kept is not None and same and others == isinstance(kept.route, ForeignRoute):
                kept.route = ForeignRoute(leased.keeper) if others else kept.route
                continue
            if kept is not None:
                kept.route.close()
            if others:
                route: Route = ForeignRoute(leased.keeper)
                self.boards[name] = KeptBoard(name, row.board_type, transport, route, route.look())
                continue
            route = self._make_route(row, transport, leased.session)
            gone = leased.before if leased.before not in ("", self._me) else ""
            why = f"{gone} had its connection and is gone" if gone else "not tried yet"
            untried = RouteState(False, time.monotonic(), why)
            self.boards[name] = KeptBoard(name, row.board_type, transport, route, untried)
        for name in [name for name in self.boards if name not in seen]:
            self.boards.pop(name).route.close()

    def _make_route(self, row: BoardInfo, transport: Transport, left: str) -> Route:
        """Make a board's connection, without starting it. `left`: see `SshRoute`."""
        tracker, home = (self.tracker.host, self.tracker.port), self._settings.home_path
        match transport:
            case Ssh():
                return SshRoute(transport, f"{row.board_type}/{row.name}", tracker, self._known_hosts, left)
            case Virtual():
                folders = (self._logs / "boards", emulation.find_work_folder(home), code.find_folder(home))
                emulator = functools.partial(self._find_emulator, row.board_type)
                about = (row.name, row.board_type, transport, tracker)
                return VirtualRoute(*about, *folders, emulator, self._may_start)
            case Direct():
                return DirectRoute()

    def _list_lent(self) -> list[str]:
        """List the connected boards that this coordinator owns."""
        return [name for name, board in self.boards.items() if board.reachable and self.leases.is_mine(name)]

    def _look_at_leases(self) -> None:
        """Renew our leases of connections, and release those that others get."""
        names = [row.name for row in self.rows if self._is_wanted(row)]
        sessions = {name: self.boards[name].route.session if name in self.boards else "" for name in names}
        self.leases.look(sessions)
        asked = self.leases.list_asked()
        handed = {
            name: (to, self.boards[name].route.session if name in self.boards else "") for name, to in asked.items()
        }
        left = [name for name in asked if name in self.boards and isinstance(self.boards[name].transport, Ssh)]
        _close_all([self.boards.pop(name) for name in left])
        self.leases.hand(handed)

    def _replace_row(self, row: BoardInfo, **changes: Any) -> None:
        self.rows = [each.model_copy(update=changes) if each is row else each for each in self.rows]

    def _is_wanted(self, row: BoardInfo) -> bool:
        """Whether a board is kept connected, here or elsewhere. On-demand ones are left to their users: their agents
        start at another tracker.
        """
        chosen = self._wanted is None or row.name in self._wanted
        return chosen and row.health != Health.RETIRED and not row.on_demand

    def _find_emulator(self, board_type: str) -> Path | None:
        """Return the emulator's parts for virtual boards of the type. Raises FarmError."""
        own = emulation.runs_own_code(require_board_type(board_type))
        return emulation.prepare(self._settings) if own else None

    def _may_start(self) -> bool:
        return sum(board.route.starting for board in self.boards.values()) < self._most_starting

    def _look_at_boards(self) -> None:
        for board in self.boards.values():
            board.state = board.route.look()
            if refused := board.route.take_refused():
                self._tell(board.name, Kind.HOSTILE, f"it sent a client {refused}")
        summary = self._note_registered()
        said = {row.name: row for row in self.rows}
        for board in list(self.boards.values()):
            row = said.get(board.name)
            if row is None or not self.leases.is_mine(board.name):
                continue
            if board.reachable:
                self.leases.note_up(board.name)
            elif self.leases.is_settling(board.name):
                continue
            elif self.leases.give_up(board.name, board.trouble):
                board.route.close()
                self.boards.pop(board.name)
            if board.reachable == (row.state != State.OFFLINE):
                why = Observation(Kind.LOST, board.trouble).text
                if not board.reachable and row.state_reason != why:
                    self._store.boards.note_unreachable(board.name, why)
                    self._replace_row(row, state_reason=why)
                continue
            if board.reachable:
                self._tell(board.name, Kind.BACK, "")
            else:
                self._tell(board.name, Kind.LOST, board.trouble)
            # Valid until the rows are read again.
            state = State.IDLE if board.reachable else State.OFFLINE
            self._replace_row(row, state=state, health=Health.SUSPECT if row.health is Health.GOOD else row.health)
            self._boards_at = 0.0
        if summary:
            keys = {name: self.boards[name].key for name in self._list_lent()}
            self._foreign_clients.look(summary, keys, self.rows, time.monotonic())

    def _note_registered(self) -> dict[str, Any]:
        """Read which agents have registered; return the tracker's summary, empty where it does not answer."""
        try:
            summary = anyio.run(self.tracker.fetch_summary, _SUMMARY_TIMEOUT_S)
        except FarmError as error:
            _log.warning("%s", error)
            return {}
        names = {str(info.get("key", "")).removeprefix("server:") for info in summary.get("server_info", ())}
        settling = time.monotonic() - self._tracker_since < _REGISTRATION_GRACE_S and self.tracker_restarts
        for board in self.boards.values():
            board.registered = board.key in names or bool(settling and board.registered)
        return summary

    def _tell(self, name: str, kind: Kind, detail: str) -> None:
        if not tell(self._store, name, kind, detail):  # repeated on the next turn
            self._boards_at = 0.0


def _close_all(boards: Sequence[KeptBoard]) -> None:
    """Close several boards together: each takes some seconds where a board does not answer."""
    if boards:
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda board: board.route.close(), boards))
