"""A loopback relay that owns the bytes between a TVM client and an agent, so that the farm can cut a blocked call.

TVM's client waits in C++ without a time-out. Closing the relay's sockets ends the wait with an error at once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

CONNECT_TIMEOUT_S = 5.0
_CHUNK = 1 << 18


class Relay:
    """Carries one connection. `address` is where the client connects to; `board_ended` tells who hung up first."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on a free loopback port for the one connection that goes on to `host`:`port`."""
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1)
        self.address: tuple[str, int] = self._listener.getsockname()
        self.board_ended = threading.Event()
        self._sockets: list[socket.socket] = [self._listener]
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._serve, name="farm-relay", daemon=True).start()

    def cut(self) -> None:
        """End the connection from both sides now. Safe to call twice and from any thread."""
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
        try:
            client, _ = self._listener.accept()
            board = socket.create_connection(self._target, timeout=CONNECT_TIMEOUT_S)
        except OSError:
            self.board_ended.set()
            self.cut()
            return
        board.settimeout(None)
        with self._lock:
            if self._closed:
                client.close()
                board.close()
                return
            self._sockets += [client, board]
        for sock in (client, board):
            # Small RPC frames must not wait for the peer's delayed acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._pump, args=(client, board), name="farm-relay-up", daemon=True).start()
        self._pump(board, client)
        if not self._closed:
            self.board_ended.set()
        self.cut()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        buffer = bytearray(_CHUNK)
        view = memoryview(buffer)
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer):
                sink.sendall(view[:count])
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
