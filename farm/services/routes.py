"""Routes to boards, one per board: an SSH link, a virtual board as a child process, or an agent on this machine.

A route repairs itself when it is polled. A board is reachable once its agent has also registered with the tracker,
which the keeper checks. Here is also which coordinator owns the route to each board.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from device_agent.protocol.interpreters import python_command
from farm.connectivity.board_link import BoardLink, LinkState
from farm.connectivity.frames import FrameFilter
from farm.connectivity.host_keys import KnownHosts
from farm.connectivity.ssh_config import to_ssh_address
from farm.connectivity.tunnels import Forward
from farm.errors import FarmError
from farm.processes import children
from farm.processes.children import Backoff, Restarts
from farm.store import Store
from farm.store.routes import OVERDUE_S, BoardRoute
from farm.values import Ssh, Transport, Virtual

# Time for a board from another coordinator to connect: a connection, and an agent that looks for its tracker every 2 s.
# Until then it keeps its state.
SETTLE_S = 20.0
# How long a board named by a command here is requested.
_WANTED_S = 60.0

_log = logging.getLogger(__name__)

# The pause before a refused login is tried again; the key may have been corrected.
FINAL_RETRY_S = 30.0
# Where `device-agent metrics` listens on the board, by its own default.
METRICS_PORT = 9101
# Virtual boards listen above TVM's own range of ports, which agents of this machine use.
_FIRST_PORT, _LAST_PORT = 10090, 11989
# A board that ends again and again is started with growing pauses, as an SSH link is.
_BACKOFF = Backoff(first_s=0.5, last_s=30.0)
# Importing TVM takes seconds, and many start at once.
_VIRTUAL_START_S = 120.0


class RouteLeases:
    """The connections that this coordinator owns. Used by the keeper's main thread alone."""

    def __init__(self, store: Store, me: str) -> None:
        """`me`: this coordinator's unique name."""
        self._store, self._me = store, me
        self._routes: dict[str, BoardRoute] = {}
        self._settling: dict[str, float] = {}
        self._late_since: dict[str, float] = {}
        self._wanted: dict[str, float] = {}

    def look(self, sessions: Mapping[str, str]) -> None:
        """Renew, take and request connections; `sessions` has the boards, each with its session id, if any.

        Raises what the store does; then all stays as it was, and connections stay up.
        """
        now = time.monotonic()
        self._wanted = {name: until for name, until in self._wanted.items() if until > now}
        overdue = {name for name, since in self._late_since.items() if now - since >= OVERDUE_S}
        before, self._routes = self._routes, self._store.routes.keep(self._me, sessions, self._wanted.keys(), overdue)
        self._late_since = {
            name: self._late_since.get(name, now)
            for name, route in self._routes.items()
            if route.lapsed and route.keeper
        }
        for name, route in self._routes.items():
            if route.keeper == self._me and (name not in before or before[name].keeper != self._me):
                self._wanted.pop(name, None)
                if route.handed:
                    self._settling[name] = now + SETTLE_S
                if route.before not in ("", self._me):
                    _log.info("%s is gone: the connection to %s is ours", route.before, name, extra={"board": name})
        self._settling = {name: until for name, until in self._settling.items() if self.is_mine(name)}

    def want(self, names: Collection[str]) -> None:
        """Request these boards, which a command here named."""
        self._wanted |= dict.fromkeys(names, time.monotonic() + _WANTED_S)

    def find(self, name: str) -> BoardRoute:
        """Return a board's owner as last seen."""
        return self._routes.get(name, BoardRoute(""))

    def is_mine(self, name: str) -> bool:
        """Whether this coordinator connects a board for all."""
        return self.find(name).keeper == self._me

    def note_up(self, name: str) -> None:
        """Note that a board is reachable."""
        self._settling.pop(name, None)

    def is_settling(self, name: str) -> bool:
        """Whether a board that was passed to us still has time to connect."""
        return self._settling.get(name, 0.0) > time.monotonic()

    def list_asked(self) -> dict[str, str]:
        """List the boards of ours that others get now, and who."""
        return {name: route.asked_by for name, route in self._routes.items() if route.asked_by and self.is_mine(name)}

    def hand(self, boards: Mapping[str, tuple[str, str]]) -> None:
        """Pass on connections, which are closed, to their requesters: `boards` has requester and session."""
        for name in self._store.routes.hand_over(self._me, boards) if boards else ():
            self._routes[name] = BoardRoute(boards[name][0])
            _log.info("the connection to %s goes to %s", name, boards[name][0], extra={"board": name})

    def give_up(self, name: str, reason: str) -> bool:
        """Give up a board that was passed to us and does not connect; False where it is ours to keep."""
        if name not in self._settling:
            return False
        del self._settling[name]
        self._store.routes.bar(self._me, name, reason)
        self._routes[name] = BoardRoute("")
        return True

    def close(self) -> None:
        self._store.routes.release(self._me)


@dataclasses.dataclass(frozen=True)
class RouteState:
    """Whether the connection is up, since when (monotonic seconds), why not, and how often it came up.

    `refused`: the board is up and refuses our login.
    """

    up: bool
    since: float
    error: str = ""
    connects: int = 0
    refused: bool = False


class Route:
    """The connection to one board. Used by the keeper's main thread alone.

    `metrics_address` is the local address of the board's own metrics, if it is forwarded.
    """

    metrics_address: tuple[str, int] | None = None

    def __init__(self, state: RouteState) -> None:
        self._state = state

    @property
    def starting(self) -> bool:
        """Whether it is starting at a cost to this machine."""
        return False

    @property
    def session(self) -> str:
        """The connection's session on the board, for its next owner; "" where there is none."""
        return ""

    def look(self) -> RouteState:
        """Return its state; restart what ended. Never waits."""
        return self._state

    def take_refused(self) -> str:
        """Return an attack of the board on its clients since the last call; "" for none, or where clients connect to
        an agent of this machine.
        """
        return ""

    def close(self) -> None:
        """Close it. Blocks for some seconds at most."""


class SshRoute(Route):
    """An SSH connection that reconnects, with a forward to the agent and one back to the tracker."""

    def __init__(
        self, transport: Ssh, key: str, tracker: tuple[str, int], known_hosts: KnownHosts, left: str = ""
    ) -> None:
        """`left` is another coordinator's session on the board, which is ended where it has our port."""
        super().__init__(RouteState(False, time.monotonic(), "not tried yet"))
        self._left = left
        self._transport, self._key, self._tracker, self._known_hosts = transport, key, tracker, known_hosts
        self._link: BoardLink | None = None
        self._agent: Forward | None = None
        self._connects = 0

    @property
    def session(self) -> str:
        return "" if self._link is None else self._link.session

    def look(self) -> RouteState:
        now = time.monotonic()
        if self._link is not None:
            state = self._link.state
            if state.final and now - state.since >= FINAL_RETRY_S:
                self.close()
            else:
                return self._show(state)
        elif self._state.since + FINAL_RETRY_S > now and self._state.error != "not tried yet":
            return self._state
        try:
            self._link = self._open()
        except FarmError as error:  # a missing key file
            self._state = RouteState(False, now, str(error), self._connects)
            return self._state
        return self._show(self._link.state)

    def take_refused(self) -> str:
        if self._agent is None:
            return ""
        refused, self._agent.refused = self._agent.refused, ""
        return refused

    def close(self) -> None:
        if self._link is not None:
            self._connects += self._link.state.connects
            self._link.close()
            self._link = self.metrics_address = None

    def _open(self) -> BoardLink:
        link = BoardLink(to_ssh_address(self._transport), self._known_hosts, left=self._left)
        try:
            self._agent = forward = link.add_forward(self._transport.agent_port, FrameFilter)
            link.add_tracker(self._transport.tracker_port, self._tracker, self._key, forward)
            self.metrics_address = link.add_forward(METRICS_PORT).address
            link.start()
        except FarmError:
            link.close()
            raise
        return link

    def _show(self, state: LinkState) -> RouteState:
        error = "" if state.up else str(state.error) if state.error else "connecting"
        return RouteState(state.up, state.since, error, self._connects + state.connects, state.final)


class VirtualRoute(Route):
    """A virtual board: an agent of our own, which lives as long as we do. Start from the main thread only."""

    def __init__(
        self,
        name: str,
        board_type: str,
        transport: Virtual,
        tracker: tuple[str, int],
        folder: Path,
        work: Path | None = None,
        gpu: Path | None = None,
        emulator: Callable[[], Path | None] = lambda: None,
        may_start: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start nothing before `look`, and then only while it `may_start`.

        `folder` takes its log; `work` caches what programs cost on this machine, for all boards of a home; `gpu` is the
        folder of its GPU's parts. If `emulator` returns the emulator's parts, called before each start, it runs its own
        aarch64 code.
        """
        super().__init__(RouteState(False, time.monotonic(), "not started yet"))
        self._ready_file = folder / f"{name}.ready"
        self._log = folder / f"{name}.log"
        self._command = [
            *python_command("-m", "farm.virtual", "serve", "--virtual", board_type, "--seed", str(transport.seed)),
            *("--name", name, "--tracker", f"{tracker[0]}:{tracker[1]}", "--exit-with-parent"),
            *("--port", str(_FIRST_PORT), "--port-end", str(_LAST_PORT), "--ready-file", str(self._ready_file)),
            *(word for fault in transport.faults for word in ("--fault", fault)),
            *(("--work-folder", str(work)) if work else ()),
            *(("--time", "live") if transport.live else ()),
            *(("--gpu-folder", str(gpu)) if gpu else ()),
            *(("--meter", transport.meter) if transport.meter else ()),
        ]
        self._find_emulator = emulator
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._restarts, self._connects = Restarts(_BACKOFF), 0
        self._may_start = may_start

    @property
    def starting(self) -> bool:
        return self._process is not None and not self._state.up

    def look(self) -> RouteState:
        now = time.monotonic()
        if self._process is None:
            if self._restarts.due and self._may_start():
                self._start(now)
        elif self._process.poll() is not None:
            self._give_up(now, f"its agent ended: {children.tail(self._log, 1)}")
        elif not self._state.up and self._ready_file.exists():
            self._connects += 1
            self._restarts.note_up()
            self._state = RouteState(True, now, "", self._connects)
        elif not self._state.up and now - self._began > _VIRTUAL_START_S:
            self._give_up(now, f"its agent was not ready within {_VIRTUAL_START_S:g} s")
        return self._state

    def close(self) -> None:
        if self._process is not None:
            children.stop(self._process)
            self._process = None
        with contextlib.suppress(OSError):
            self._ready_file.unlink()

    def _start(self, now: float) -> None:
        with contextlib.suppress(OSError):
            self._ready_file.unlink()
        self._began = now
        try:
            emulator = self._find_emulator()
            own = ("--emulator-folder", str(emulator)) if emulator else ()
            self._process = children.start([*self._command, *own], self._log, os.environ)
        except FarmError as error:
            self._give_up(now, error.message)
            return
        self._state = RouteState(False, now, "starting", self._connects)

    def _give_up(self, now: float, error: str) -> None:
        self.close()
        self._restarts.note_end()
        self._state = RouteState(False, now, error, self._connects)


class DirectRoute(Route):
    """An agent on this machine that another process starts: it is up when it has registered with our tracker."""

    def __init__(self) -> None:
        super().__init__(RouteState(True, time.monotonic()))


class ForeignRoute(DirectRoute):
    """A board that another coordinator connects."""

    def __init__(self, keeper: str) -> None:
        self.keeper = keeper
        text = f"{keeper} has its connection" if keeper else "other coordinators have it for a while"
        self._state = RouteState(False, time.monotonic(), text)


@dataclasses.dataclass
class KeptBoard:
    """A board whose connection is kept."""

    name: str
    board_type: str
    transport: Transport
    route: Route
    state: RouteState
    registered: bool = False

    @property
    def key(self) -> str:
        """Its name at the tracker."""
        return f"{self.board_type}/{self.name}"

    @property
    def reachable(self) -> bool:
        """Whether its agent is connected now."""
        return self.state.up and self.registered

    @property
    def trouble(self) -> str:
        """Explain why it is not connected; empty where it is."""
        if self.reachable:
            return ""
        if not self.state.up:
            return self.state.error
        hint = "" if isinstance(self.route, DirectRoute) else f"; `farm doctor {self.name}` looks closer"
        return f"its agent has not registered with the tracker{hint}"
