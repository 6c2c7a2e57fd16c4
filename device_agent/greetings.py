"""Connections that have just come in: TVM's handshake up to the client's key. What the key gets is up to `rpc.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct

from device_agent.protocol import RPC_MAGIC, RPC_MISMATCH, RPC_SUCCESS

# A client sends its greeting at once; one that does not is a port scanner.
GREETING_TIMEOUT_S = 5.0
_MAX_KEY_BYTES = 4096
# Clients that vanish without a word (power cut, network split) are given up after 10 + 3 x 5 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}


@dataclasses.dataclass(eq=False)
class Greeting:
    """A connection that has no session yet. `key` is what the client said that it wants, None until it has."""

    sock: socket.socket
    peer: str
    deadline: float
    data: bytes = b""
    key: str | None = None

    @classmethod
    def accept(cls, listener: socket.socket, now: float) -> Greeting | None:
        """Take the next connection; None where the client is gone already."""
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
        """The client's key once it is complete. Raises ValueError or OSError when this is no client."""
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
        """Tell the client that its key is right, and `text`. Raises OSError."""
        answer = text.encode()
        self.sock.sendall(struct.pack("<ii", RPC_SUCCESS, len(answer)) + answer)

    def refuse(self) -> None:
        """Tell the client that its key is wrong."""
        with contextlib.suppress(OSError):
            self.sock.sendall(struct.pack("<i", RPC_MISMATCH))
