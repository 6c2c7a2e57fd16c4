"""The handshake of TVM's RPC server with a connection that has no session yet. The loop over them is in `rpc.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct

from device_agent.protocol import RPC_MAGIC, RPC_MISMATCH, RPC_SUCCESS

# A client greets at once; a silent connection is a port scanner.
GREETING_TIMEOUT_S = 5.0
_MAX_KEY_BYTES = 4096
# Clients that vanish (power cut, network split) are dropped after 10 + 3 x 5 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}


@dataclasses.dataclass(eq=False)
class Greeting:
    """A connection without a session yet. `key` is the client's requested key; None until it is complete."""

    sock: socket.socket
    peer: str
    deadline: float
    data: bytes = b""
    key: str | None = None

    @classmethod
    def accept(cls, listener: socket.socket, now: float) -> Greeting | None:
        """Accept the next connection; None if the client is already gone."""
        try:
            sock, address = listener.accept()
        except OSError:
            return None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if option := getattr(socket, name, None):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        return cls(sock, f"{address[0]}:{address[1]}", now + GREETING_TIMEOUT_S)

    def read(self) -> str | None:
        """The client's key once complete. Raises ValueError or OSError for anything but a client."""
        try:
            chunk = self.sock.recv(_MAX_KEY_BYTES)
        except BlockingIOError:
            return None
        if not chunk:
            raise ConnectionResetError("connection closed")
        self.data += chunk
        if len(self.data) >= 4 and struct.unpack_from("<i", self.data)[0] != RPC_MAGIC:
            raise ValueError("not a TVM RPC client")
        if len(self.data) < 8:
            return None
        (size,) = struct.unpack_from("<i", self.data, 4)
        if not 0 < size <= _MAX_KEY_BYTES:
            raise ValueError(f"key of {size} bytes")
        if len(self.data) >= 8 + size:
            self.key = self.data[8 : 8 + size].decode()
        return self.key

    def accept_with(self, text: str) -> None:
        """Accept the client's key and send `text`. Raises OSError."""
        answer = text.encode()
        self.sock.sendall(struct.pack("<ii", RPC_SUCCESS, len(answer)) + answer)

    def refuse(self) -> None:
        """Reject the client's key."""
        with contextlib.suppress(OSError):
            self.sock.sendall(struct.pack("<i", RPC_MISMATCH))
