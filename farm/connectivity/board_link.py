"""A board kept within reach: one SSH connection that comes back after a loss, and the forwards that outlive it.

A wrong key is not tried again; everything else is, with growing pauses, until `give_up_s` have passed.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time

from farm.closing import Closing
from farm.connectivity.frames import FrameFilter
from farm.connectivity.host_keys import KnownHosts
from farm.connectivity.ssh import SshConnection
from farm.connectivity.ssh_handshake import CONNECT_TIMEOUT_S, SshAddress
from farm.connectivity.tracker_ports import PortRewriter
from farm.connectivity.tunnels import Forward, ReverseForward
from farm.errors import DeadlineError, FarmError, TransientError
from farm.processes.listening import is_lack
from farm.processes.restarts import Backoff, Restarts

_JOIN_S = 5.0
_FIND_TIMEOUT_S = 10.0

# Who on the board carries this connection: the nearest process above that is one of sshd's (`sshd-session` since 9.8),
# by its number and when it began (proc(5): field 22 of stat; sshd's name has no blanks), which no other process shares
# until the board boots again.
_FIND_SESSION = (
    'p=$$; while [ "$p" -gt 1 ]; do case $(cat /proc/$p/comm) in sshd*) echo $p $(cut -d" " -f22 /proc/$p/stat); exit;;'
    " esac; p=$(awk '/^PPid:/{print $2}' /proc/$p/status); done; exit 1"
)
_END_SESSION = (
    'case $(cat /proc/{pid}/comm) in sshd*) [ "$(cut -d" " -f22 /proc/{pid}/stat)" = {began} ] && kill -9 {pid};; esac'
)
_SESSION = re.compile(r"\d{1,10} \d{1,20}")


@dataclasses.dataclass(frozen=True)
class LinkState:
    """Whether the board can be reached, since when (monotonic seconds), why not, and what was tried.

    `failures` are those in a row; `connects` counts every success. `final`: nothing more is tried.
    """

    up: bool
    since: float
    error: FarmError | None = None
    failures: int = 0
    connects: int = 0
    final: bool = False


class BoardLink(Closing):
    """The way to one board. Forwards are added before `start`; their local addresses stay for good. Thread-safe."""

    def __init__(
        self,
        address: SshAddress,
        known_hosts: KnownHosts | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        left: str = "",
    ) -> None:
        """`left`: the `session` of an earlier connection, another coordinator's too, that may still have our ports."""
        self.address = address
        self._known_hosts = known_hosts
        self._backoff = backoff or Backoff()
        self._connect_timeout_s = connect_timeout_s
        self._forwards: list[Forward] = []
        self._reverses: list[ReverseForward] = []
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._connection: SshConnection | None = None
        # A connection that may be dead and still have our ports on the board: the last one of ours, or what was told.
        self._left = [left] if _SESSION.fullmatch(left) else []
        self.session = ""
        self._state = LinkState(False, time.monotonic())
        self._thread = threading.Thread(target=self._keep, name="farm-board-link", daemon=True)

    def add_forward(self, board_port: int, local_port: int = 0) -> Forward:
        """A port here, by default a free one, that leads to a port of the board."""
        return self._keep_forward(Forward(self.require_connection, board_port, local_port))

    def add_agent(self, board_port: int) -> Forward:
        """A port here that leads to the board's agent. Whoever comes there is protected by `FrameFilter`."""
        return self._keep_forward(Forward(self.require_connection, board_port, check=FrameFilter))

    def add_reverse(self, board_port: int, target: tuple[str, int]) -> ReverseForward:
        """A port on the board (0: any) that leads to an address here."""
        reverse = ReverseForward(board_port, target)
        self._reverses.append(reverse)
        return reverse

    def add_tracker(self, board_port: int, tracker: tuple[str, int], key: str, agent: Forward) -> ReverseForward:
        """A port on the board that leads to the tracker, where the agent is made known under `agent`'s address.

        `agent` follows the agent to whatever port it names.
        """

        def find_local_port(port: int) -> int:
            agent.board_port = port
            return agent.address[1]

        reverse = ReverseForward(board_port, tracker, lambda: PortRewriter(key, find_local_port))
        self._reverses.append(reverse)
        return reverse

    def start(self) -> None:
        """Begin to connect; see `wait_up`. Raises TransientError where no thread can be had."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise TransientError(f"there is no thread for the link to {self.address}: {error}") from error

    def wait_up(self, timeout_s: float) -> SshConnection:
        """Wait for the connection. Raises why it failed for good, else DeadlineError with the latest reason."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.up or self._state.final, timeout_s)
            state, connection = self._state, self._connection
        if state.up and connection is not None:
            return connection
        raise DeadlineError(
            f"the board at {self.address} could not be reached within {timeout_s:g} s: {_why_not(state)}"
        )

    def require_connection(self) -> SshConnection:
        """The connection of now. Raises TransientError, or why it failed for good; never waits."""
        with self._changed:
            state, connection = self._state, self._connection
        if connection is not None and not connection.lost.is_set():
            return connection
        raise TransientError(f"the board at {self.address} is out of reach: {_why_not(state)}")

    @property
    def state(self) -> LinkState:
        """How it stands."""
        with self._changed:
            return self._state

    def close(self) -> None:
        """End the connection, the forwards and every thread. Safe to call twice; blocks for some seconds at most."""
        self._stop.set()
        for forward in self._forwards:
            forward.cut()
        for reverse in self._reverses:
            reverse.cut()
        with self._changed:
            connection = self._connection
        if connection is not None:
            connection.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        self._set(up=False, error=TransientError(f"the link to {self.address} was closed"), final=True)

    def __enter__(self) -> BoardLink:
        self.start()
        return self

    def _keep_forward(self, forward: Forward) -> Forward:
        self._forwards.append(forward)
        return forward

    def _keep(self) -> None:
        restarts, failing_since = Restarts(self._backoff), time.monotonic()
        while not self._stop.is_set():
            try:
                connection = self._connect()
            except TransientError as error:
                reason: FarmError = error
            except FarmError as error:  # the key or the file is wrong: somebody has to act
                self._set(up=False, error=error, failures=restarts.failures + 1, final=True)
                return
            else:
                restarts.note_up()
                # Set at the latest when the peer has been silent for `KEEPALIVE_S` and `SILENCE_S`.
                connection.lost.wait()
                connection.close()
                failing_since = time.monotonic()
                reason = TransientError(f"the connection to {self.address} ended: {connection.reason}")
            if self._stop.is_set():
                return
            # Even the first attempt after a loss waits a moment: a board may hang up on every login.
            pause_s = restarts.note_end()
            final = time.monotonic() + pause_s - failing_since > self._backoff.give_up_s
            self._set(up=False, error=reason, failures=restarts.failures, final=final)
            if final or self._stop.wait(pause_s):
                return

    def _connect(self) -> SshConnection:
        try:
            connection = SshConnection.connect(self.address, self._known_hosts, self._connect_timeout_s)
        except (FarmError, OSError, RuntimeError) as error:
            if isinstance(error, FarmError) and not is_lack(error.__cause__):
                raise
            raise TransientError(f"there is no room here for a connection to {self.address}: {error}") from error
        # Before the board can be told to anybody: it registers with the tracker as soon as it reaches it.
        with self._changed:
            self._connection = connection
        try:
            for reverse in self._reverses:
                self._attach(reverse, connection)
            found = connection.exec(_FIND_SESSION, _FIND_TIMEOUT_S)
            session = found.out.decode(errors="replace").strip()
            self.session = session if found.code == 0 and _SESSION.fullmatch(session) else ""
            self._left = [self.session] if self.session else []
            with self._changed:
                if self._stop.is_set():
                    raise TransientError(f"the link to {self.address} was closed")
                self._state = LinkState(True, time.monotonic(), connects=self._state.connects + 1)
                self._changed.notify_all()
        except BaseException:
            connection.close()
            raise
        return connection

    def _attach(self, reverse: ReverseForward, connection: SshConnection) -> None:
        try:
            reverse.attach(connection)
        except TransientError:
            # A connection that died without a farewell keeps its ports until the board's kernel gives up on it.
            if not self._left or connection.lost.is_set():
                raise
            pid, began = self._left.pop().split()
            connection.exec(_END_SESSION.format(pid=pid, began=began), _FIND_TIMEOUT_S)
            reverse.attach(connection)

    def _set(self, up: bool, error: FarmError | None = None, failures: int = 0, final: bool = False) -> None:
        with self._changed:
            self._state = LinkState(up, time.monotonic(), error, failures, self._state.connects, final)
            self._changed.notify_all()


def _why_not(state: LinkState) -> str:
    """Why there is no connection yet. Raises why there will be none."""
    if state.final and state.error is not None:
        raise state.error
    return state.error.message if state.error else "still connecting"
