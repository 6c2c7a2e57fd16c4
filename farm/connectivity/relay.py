"""A loopback relay that owns the bytes between a TVM client and an agent, so that the farm can cut a blocked call.

TVM's client waits in C++ without a timeout. Closing the relay's sockets ends the wait with an error at once. From the
board, only what `frames` accepts reaches the client.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

from farm.connectivity.frames import FrameFilter, RefusedError

# The agent accepts at once; after this the client's connection is closed.
CONNECT_TIMEOUT_S = 5.0
_CHUNK = 1 << 18


class Relay:
    """Carries one connection. The client connects to `address`.

    `board_ended` is set once the board hung up or was unreachable: before the client notices, and never because the
    client left or `cut` was called. `refused` describes an illegal frame from the board, for which the connection was
    cut; "" for none. `sent_bytes` counts the client's bytes that the board's side has taken.
    """

    def __init__(self, host: str, port: int) -> None:
        """Listen on a free loopback port for the one connection to forward to `host`:`port`."""
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1)
        self.address: tuple[str, int] = self._listener.getsockname()
        self.board_ended = threading.Event()
        self.refused = ""
        self.sent_bytes = 0
        self._client_ended = threading.Event()
        self._sockets: list[socket.socket] = [self._listener]
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._serve, name="farm-relay", daemon=True).start()

    def cut(self) -> None:
        """Close both sides now. Idempotent and thread-safe."""
        with self._lock:
            self._closed = True
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()
            self._sockets.clear()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()

    def _serve(self) -> None:
        """Connect both sides and carry the board's bytes; a thread carries the other direction."""
        try:
            client, _ = self._listener.accept()
        except OSError:  # cut before a client connected
            return
        # Registered before the board answers: `cut` must free a client of a board that never does.
        if not self._own(client):
            return
        try:
            board = socket.create_connection(self._target, timeout=CONNECT_TIMEOUT_S)
        except OSError:
            self._end_by_board()
            self.cut()
            return
        board.settimeout(None)
        if not self._own(board):
            return
        threading.Thread(target=self._carry_up, args=(client, board), name="farm-relay-up", daemon=True).start()
        self._carry_down(board, client)
        self.cut()

    def _own(self, sock: socket.socket) -> bool:
        """Add a socket to the set that `cut` closes; if already cut, close it and return False."""
        with self._lock:
            if self._closed:
                sock.close()
                return False
            self._sockets.append(sock)
        with contextlib.suppress(OSError):
            # Small RPC frames must not wait for the peer's delayed acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return True

    def _carry_up(self, client: socket.socket, board: socket.socket) -> None:
        view = memoryview(bytearray(_CHUNK))
        while True:
            try:
                count = client.recv_into(view)
            except OSError:
                count = 0
            if not count:
                self._client_ended.set()
                break
            try:
                board.sendall(view[:count])
                self.sent_bytes += count
            except OSError:  # `_carry_down` notices a board that left
                break
        with contextlib.suppress(OSError):
            board.shutdown(socket.SHUT_WR)

    def _carry_down(self, board: socket.socket, client: socket.socket) -> None:
        view = memoryview(bytearray(_CHUNK))
        check = FrameFilter()
        while True:
            try:
                count = board.recv_into(view)
            except OSError:
                count = 0
            try:
                if not count:
                    raise EOFError
                client.sendall(check(view[:count]))
            except EOFError:
                self._end_by_board()
                break
            except RefusedError as error:  # recorded before the client notices the cut
                self.refused = str(error)
                break
            except OSError:
                break

    def _end_by_board(self) -> None:
        with self._lock:
            if not self._closed and not self._client_ended.is_set():
                self.board_ended.set()
