"""Forwards through an SSH connection: from a local loopback port to the board's, and back.

Closing their sockets cuts them at any time, so that a stock TVM client, which blocks, fails. `ssh.py` opens the
connection and `board_link.py` restores it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import paramiko

from farm.closing import Closing
from farm.connectivity.frames import RefusedError
from farm.connectivity.ssh import SshConnection
from farm.errors import FarmError, TransientError
from farm.processes.listening import accept_clients, start_thread

_CHUNK = 1 << 18
# The target is a port on this machine's loopback.
_CONNECT_TIMEOUT_S = 5.0
_BACKLOG = 16
# Concurrent connections of one forward, each with two threads and a descriptor: an agent serves one session and holds
# one line to the tracker, so only a hostile board or client comes near.
MAX_LINKS = 32

# The present connection; raises FarmError without one.
Provider = Callable[[], SshConnection]
# Rewrites a board's bytes. Raises ValueError for invalid ones, EOFError at the board's end.
Rewrite = Callable[[bytes], bytes]


class Link:
    """One connection: a local socket joined to a channel. Two threads carry the bytes; `cut` ends both."""

    def __init__(
        self,
        sock: socket.socket,
        channel: paramiko.Channel,
        on_end: Callable[[Link, bool], None],
        rewrite: Rewrite | None = None,
    ) -> None:
        """Own both. `on_end` learns whether the far side ended first; `rewrite` processes the board's bytes."""
        self._sock = sock
        self._channel = channel
        self._on_end = on_end
        self._rewrite = rewrite
        self.refused = ""
        self._near_ended = threading.Event()
        self._gone = False

    def start(self) -> bool:
        """Start carrying; without resources for its threads, close both ends and return False."""
        if start_thread("farm-ssh-in", self._carry_in):
            if start_thread("farm-ssh-out", self._carry_out):
                return True
            self.cut()
            _close(self._channel)
            return False
        self._on_end(self, False)
        _hang_up(self._sock)
        _close(self._channel)
        return False

    def cut(self) -> None:
        """End it now. Never blocks: only the socket is closed, the channel follows in its threads."""
        self._gone = True
        self._near_ended.set()
        _hang_up(self._sock)

    def _carry_out(self) -> None:
        view = memoryview(bytearray(_CHUNK))
        while True:
            try:
                count = self._sock.recv_into(view)
            except OSError:
                count, self._gone = 0, True
            if not count:
                self._near_ended.set()
                break
            try:
                self._channel.sendall(view[:count])  # type: ignore[arg-type]  # any buffer will do
            except (OSError, EOFError, paramiko.SSHException):  # `_carry_in` notices it
                break
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            # After half-closing, a client still reads; after a cut it does not.
            if self._gone:
                self._channel.close()
            else:
                self._channel.shutdown_write()

    def _carry_in(self) -> None:
        far_first = False
        while True:
            try:
                data = self._channel.recv(_CHUNK)
            except (OSError, EOFError, paramiko.SSHException):
                data = b""
            if not data:
                far_first = not self._near_ended.is_set()
                break
            try:
                self._sock.sendall(self._rewrite(data) if self._rewrite else data)
            except EOFError:
                far_first = not self._near_ended.is_set()
                break
            except (OSError, ValueError) as error:
                self.refused = str(error) if isinstance(error, RefusedError) else ""
                break
        # Before the client notices, so that a question after its error is answered.
        self._on_end(self, far_first)
        _hang_up(self._sock)
        _close(self._channel)


class _Links:
    """The open links of a forward, and whether it accepts more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._closed = False

    def add(self, link: Link) -> bool:
        """Return False if the forward has been cut, or carries `MAX_LINKS` already."""
        with self._lock:
            if self._closed or len(self._links) >= MAX_LINKS:
                return False
            self._links.add(link)
            return True

    def replace(self, waiting: Link, link: Link) -> bool:
        """Replace a reserved place by a link; False if it was cut meanwhile."""
        with self._lock:
            if waiting not in self._links:
                return False
            self._links.remove(waiting)
            self._links.add(link)
            return True

    def discard(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)

    def cut(self, for_good: bool) -> bool:
        """End all links; False if the forward was already cut for good."""
        with self._lock:
            was_closed, self._closed = self._closed, self._closed or for_good
            links = list(self._links)
            self._links.clear()
        for link in links:
            link.cut()
        return not was_closed

    def __len__(self) -> int:
        return len(self._links)


class Forward(Closing):
    """A local loopback port that leads to a port on the board's loopback. `address` survives reconnections.

    `board_ended` is set once the board hung up first or was unreachable, on any connection: before the client notices,
    and never because the client left or `cut` was called. `refused` describes the last illegal frame (see
    `RefusedError`), "" for none.
    """

    def __init__(
        self, provider: Provider, board_port: int, local_port: int = 0, check: Callable[[], Rewrite] | None = None
    ) -> None:
        """Listen on 127.0.0.1, by default on a free port. Raises TransientError for a taken `local_port`.

        `check` makes, for each connection, a filter for the board's bytes.
        """
        self.board_port = board_port
        self.board_ended = threading.Event()
        self.last_error: FarmError | None = None
        self.refused = ""
        self._provider = provider
        self._check = check
        self._links = _Links()
        try:
            self._listener = socket.create_server(("127.0.0.1", local_port), backlog=_BACKLOG)
        except OSError as error:
            raise TransientError(f"the local port {local_port} cannot be used: {error.strerror}") from error
        self.address: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._accept, name="farm-ssh-forward", daemon=True).start()

    def __len__(self) -> int:
        """The number of open connections."""
        return len(self._links)

    def cut_links(self) -> None:
        """End the present connections and go on listening. Never blocks."""
        self._links.cut(for_good=False)

    def close(self) -> None:
        """End every connection and stop listening. Never blocks; idempotent and thread-safe."""
        if self._links.cut(for_good=True):
            _hang_up(self._listener)

    cut = close

    def _accept(self) -> None:
        for client in accept_clients(self._listener):
            waiting = _Waiting(client)
            if not self._links.add(waiting):
                waiting.cut()
            # Opening a channel waits for the board; the next client must not wait.
            elif not start_thread("farm-ssh-open", self._open, client, waiting):
                self._links.discard(waiting)
                waiting.cut()

    def _open(self, client: socket.socket, waiting: _Waiting) -> None:
        set_no_delay(client)
        try:
            channel = self._provider().open_to(self.board_port)
        except FarmError as error:
            self.last_error = error
            if not waiting.was_cut:
                self.board_ended.set()
            self._links.discard(waiting)
            _hang_up(client)
            return
        link = Link(client, channel, self._note_end, self._check and self._check())
        # Atomic, so that a cut never misses the client.
        if self._links.replace(waiting, link):
            link.start()
            return
        _hang_up(client)
        _close(channel)

    def _note_end(self, link: Link, board_first: bool) -> None:
        if board_first:
            self.board_ended.set()
        if link.refused:
            self.refused = link.refused
        self._links.discard(link)


class _Waiting(Link):
    """The place of a connection that is not joined yet: a cut still frees its client, if any."""

    def __init__(self, client: socket.socket | None = None) -> None:
        self._client = client
        self.was_cut = False

    def cut(self) -> None:
        self.was_cut = True
        if self._client is not None:
            _hang_up(self._client)


class ReverseForward:
    """A port on the board's loopback that leads to a local address, such as the tracker's.

    `attach` requests it on a connection, again after each loss.
    """

    def __init__(self, board_port: int, target: tuple[str, int], rewrite: Callable[[], Rewrite] | None = None) -> None:
        """`board_port` 0: any free one. `rewrite` makes, for each connection, a rewriter of its bytes."""
        self.board_port = board_port
        self.target = target
        self.last_error = ""
        self._rewrite = rewrite
        self._links = _Links()

    def attach(self, connection: SshConnection) -> int:
        """Make the board listen; return the port there, always the same. Raises as `listen`."""
        self.board_port = connection.listen(self.board_port, self._serve)
        return self.board_port

    def cut(self) -> None:
        """End every connection and refuse new ones. Never blocks."""
        self._links.cut(for_good=True)

    close = cut

    def _serve(self, channel: paramiko.Channel) -> None:
        """Serve a channel; paramiko's thread calls it, so it must not wait."""
        waiting = _Waiting()
        if self._links.add(waiting):
            if start_thread("farm-ssh-back", self._open, channel, waiting):
                return
            self._links.discard(waiting)
        start_thread("farm-ssh-refuse", _close, channel)

    def _open(self, channel: paramiko.Channel, waiting: _Waiting) -> None:
        try:
            sock = socket.create_connection(self.target, timeout=_CONNECT_TIMEOUT_S)
            sock.settimeout(None)
            set_no_delay(sock)
        except OSError as error:
            self.last_error = f"{self.target[0]}:{self.target[1]} cannot be reached: {error}"
            self._links.discard(waiting)
            _close(channel)
            return
        link = Link(sock, channel, lambda ended, _: self._links.discard(ended), self._rewrite and self._rewrite())
        if self._links.replace(waiting, link):
            link.start()
            return
        sock.close()
        _close(channel)


def set_no_delay(sock: socket.socket) -> None:
    """Disable Nagle's algorithm: small RPC frames must not wait for delayed acknowledgements."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _hang_up(sock: socket.socket) -> None:
    """Close the socket and wake the threads that wait on it, on both sides."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _close(channel: paramiko.Channel) -> None:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        channel.close()
