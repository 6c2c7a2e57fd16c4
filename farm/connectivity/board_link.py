"""A persistent SSH connection to a board that reconnects after a loss, and the forwards that outlive it.

A wrong key is final; every other failure is retried with growing pauses until `give_up_s` have passed.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from device_agent.protocol import load_json
from farm.closing import Closing
from farm.connectivity.frames import FrameFilter
from farm.connectivity.host_keys import KnownHosts
from farm.connectivity.ssh import SshConnection
from farm.connectivity.ssh_handshake import CONNECT_TIMEOUT_S, SshAddress
from farm.connectivity.tunnels import Forward, ReverseForward
from farm.errors import DeadlineError, FarmError, TransientError
from farm.processes.children import Backoff, Restarts
from farm.processes.listening import is_lack

# From tvm/rpc/base.py of 0.27.
_MAGIC = struct.pack("<i", 0x2F271)
_PUT, _UPDATE_INFO, _GET_PENDING_MATCHKEYS = 3, 5, 7
# The tracker's limit for agents, as in `device_agent/listener/tracker.py`.
_MAX_MESSAGE_BYTES = 1 << 20

_JOIN_S = 5.0
# For a command on the board that finds, or ends, the SSH session of an earlier connection.
_FIND_TIMEOUT_S = 10.0
# Identifies the connection on the board: the nearest ancestor that is sshd's (`sshd-session` since 9.8), by pid and
# start time (proc(5): field 22 of stat; sshd's name has no blanks), unique until the board's next boot.
_FIND_SESSION = (
    'p=$$; while [ "$p" -gt 1 ]; do case $(cat /proc/$p/comm) in sshd*) echo $p $(cut -d" " -f22 /proc/$p/stat); exit;;'
    " esac; p=$(awk '/^PPid:/{print $2}' /proc/$p/status); done; exit 1"
)
_END_SESSION = (
    'case $(cat /proc/{pid}/comm) in sshd*) [ "$(cut -d" " -f22 /proc/{pid}/stat)" = {began} ] && kill -9 {pid};; esac'
)
_SESSION = re.compile(r"\d{1,10} \d{1,20}")


class PortRewriter:
    """Rewrites the bytes of an agent's connection to the tracker.

    `key` is the board's key at the tracker. `find_local_port` maps the agent's port to the local one.
    """

    def __init__(self, key: str, find_local_port: Callable[[int], int]) -> None:
        self._key = key
        self._find_local_port = find_local_port
        self._pending = bytearray()
        self._greeted = False

    def __call__(self, data: bytes) -> bytes:
        """Return the bytes to forward; incomplete messages wait. Raises ValueError for an invalid message."""
        self._pending += data
        out = bytearray()
        if not self._greeted:
            if not _MAGIC.startswith(self._pending[:4]):
                raise ValueError("this is no agent's greeting")
            if len(self._pending) < 4:
                return b""
            self._greeted = True
            out += _MAGIC
            del self._pending[:4]
        while len(self._pending) >= 4:
            (size,) = struct.unpack_from("<i", self._pending)
            if not 0 < size <= _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {size} bytes")
            if len(self._pending) < 4 + size:
                break
            message = self._rewrite(load_json(bytes(self._pending[4 : 4 + size])))
            del self._pending[: 4 + size]
            text = json.dumps(message).encode()
            out += struct.pack("<i", len(text)) + text
        return bytes(out)

    def _rewrite(self, message: Any) -> Any:
        match message:
            case [int(code), str(key), [int(port), str(match_key)], _] if code == _PUT:
                self._require_own(key)
                _require_port(port)
                # No address: the tracker uses the peer's, which is the tunnel's end here.
                return [_PUT, key, [self._find_local_port(port), match_key], None]
            case [int(code), {"key": str(name), "addr": [_, int(port)]}] if code == _UPDATE_INFO:
                self._require_own(name.removeprefix("server:"))
                _require_port(port)
                return [_UPDATE_INFO, {"key": name, "addr": [None, self._find_local_port(port)]}]
            case [int(code)] if code == _GET_PENDING_MATCHKEYS:
                return message
        raise ValueError("this is nothing that an agent says to a tracker")

    def _require_own(self, key: str) -> None:
        if key != self._key:
            raise ValueError(f"the board {self._key!r} speaks for {key!r}")


def _require_port(port: int) -> None:
    if not 0 < port < 1 << 16:
        raise ValueError(f"{port} is no port")


@dataclasses.dataclass(frozen=True)
class LinkState:
    """Whether the board is reachable, since when (monotonic seconds), why not, and the attempts.

    `failures` are consecutive; `connects` counts every success. `final`: no further attempts.
    """

    up: bool
    since: float
    error: FarmError | None = None
    failures: int = 0
    connects: int = 0
    final: bool = False


class BoardLink(Closing):
    """The route to one board. Add forwards before `start`; their local addresses are permanent. Thread-safe."""

    def __init__(
        self,
        address: SshAddress,
        known_hosts: KnownHosts | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        left: str = "",
    ) -> None:
        """`left`: the `session` of an earlier connection, also another coordinator's, that may still hold our ports."""
        self.address = address
        self._known_hosts = known_hosts
        self._backoff = backoff or Backoff()
        self._connect_timeout_s = connect_timeout_s
        self._forwards: list[Forward] = []
        self._reverses: list[ReverseForward] = []
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._connection: SshConnection | None = None
        # Connections that may be dead and still hold our ports on the board: our last one, or the given one.
        self._left = [left] if _SESSION.fullmatch(left) else []
        self.session = ""
        self._state = LinkState(False, time.monotonic())
        self._thread = threading.Thread(target=self._keep, name="farm-board-link", daemon=True)

    def add_forward(self, board_port: int, check: type[FrameFilter] | None = None) -> Forward:
        """A free local port that leads to a port of the board. To its agent, `FrameFilter` protects the clients."""
        forward = Forward(self.require_connection, board_port, check=check)
        self._forwards.append(forward)
        return forward

    def add_reverse(self, board_port: int, target: tuple[str, int]) -> ReverseForward:
        """A port on the board (0: any) that leads to a local address."""
        reverse = ReverseForward(board_port, target)
        self._reverses.append(reverse)
        return reverse

    def add_tracker(self, board_port: int, tracker: tuple[str, int], key: str, agent: Forward) -> ReverseForward:
        """A port on the board that leads to the tracker, where the agent is registered under `agent`'s address.

        `agent` follows the agent's port.
        """

        def find_local_port(port: int) -> int:
            agent.board_port = port
            return agent.address[1]

        reverse = ReverseForward(board_port, tracker, lambda: PortRewriter(key, find_local_port))
        self._reverses.append(reverse)
        return reverse

    def start(self) -> None:
        """Start to connect; see `wait_up`. Raises TransientError if no thread can start."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise TransientError(f"there is no thread for the link to {self.address}: {error}") from error

    def wait_up(self, timeout_s: float) -> SshConnection:
        """Wait for the connection. Raises its final error, else DeadlineError with the latest reason."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.up or self._state.final, timeout_s)
            state, connection = self._state, self._connection
        if state.up and connection is not None:
            return connection
        raise DeadlineError(
            f"the board at {self.address} could not be reached within {timeout_s:g} s: {_why_not(state)}"
        )

    def require_connection(self) -> SshConnection:
        """The present connection. Raises TransientError, or its final error; never waits."""
        with self._changed:
            state, connection = self._state, self._connection
        if connection is not None and not connection.lost.is_set():
            return connection
        raise TransientError(f"the board at {self.address} is out of reach: {_why_not(state)}")

    @property
    def state(self) -> LinkState:
        with self._changed:
            return self._state

    def close(self) -> None:
        """End the connection, the forwards and all threads. Idempotent; blocks for some seconds at most."""
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

    def _keep(self) -> None:
        restarts, failing_since = Restarts(self._backoff), time.monotonic()
        while not self._stop.is_set():
            try:
                connection = self._connect()
            except TransientError as error:
                reason: FarmError = error
            except FarmError as error:  # the key or the file is wrong: only the user can correct it
                self._set(up=False, error=error, failures=restarts.failures + 1, final=True)
                return
            else:
                restarts.note_up()
                # Set at the latest after `KEEPALIVE_S` and `SILENCE_S` of silence.
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
        # Before the board is announced: it registers with the tracker at once.
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
            # A dead connection holds its ports until the board's kernel gives up on it.
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
    """Why there is no connection yet. Raises a final error."""
    if state.final and state.error is not None:
        raise state.error
    return state.error.message if state.error else "still connecting"
