"""TVM's protocols, as the listening loop needs them: the connection to the tracker, and the handshake with a client.

The tracker is offered the board, its match key is refreshed; after a restart the agent reconnects. Never blocks:
the listening loop asks which events to wait for, and until when. The protocol is length-prefixed JSON; the tracker
decides who may use the board. The loop over connections is in `rpc.py`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import json
import logging
import random
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

from device_agent.protocol import RPC_MAGIC, RPC_MISMATCH, RPC_SUCCESS

TRACKER_MAGIC = 0x2F271
_SUCCESS = 0
_PUT = 3
_UPDATE_INFO = 5
_GET_PENDING_MATCHKEYS = 7

# Reconnect after 0.1, 0.2 … 2 s: a restarted tracker sees the board within 2 s, a dead one costs nothing.
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 2.0
# How often to ask the tracker whether the match key was given out, and how long a client may take to use it (both as
# in TVM's own server).
_PING_PERIOD_S = 2.0
_UNUSED_KEY_S = 6.0
# A tracker silent for this long is frozen: start over.
_ANSWER_TIMEOUT_S = 5.0
# Tracker messages are short JSON lists; the limit is TVM's.
_MAX_MESSAGE_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class TrackerLink:
    """Keeps one board registered under `key` with the tracker at `address`.

    `port` is the board's. Not thread-safe. The caller passes times in monotonic seconds.
    """

    def __init__(self, address: tuple[str, int], key: str, port: int) -> None:
        self._address = address
        self._key = key
        self._port = port
        self._sock: socket.socket | None = None
        self._connected = False
        self._greeted = False
        self._offered = False
        self._out = b""
        self._in = b""
        self._answers: collections.deque[Callable[[Any], None]] = collections.deque()
        self._waiting_since = 0.0
        self._now = 0.0
        self._retry_at = 0.0
        self._retry_s = _FIRST_RETRY_S
        self._ping_at = 0.0
        self._unused_since: float | None = None
        self.match_key: str | None = None
        self.registered = False

    def offer(self, now: float) -> None:
        """Offer the board to the tracker under a new match key."""
        self._now = now
        self._offered = True
        if self._greeted:
            self._put()

    def withdraw(self) -> None:
        """Mark the board as taken; the tracker knows, since it gave the key to the client."""
        self._offered = False
        self.registered = False
        self.match_key = None

    def close(self) -> None:
        """Close the connection, which makes the tracker forget the board."""
        if self._sock is not None:
            self._sock.close()
        self._sock = None

    def watched(self) -> tuple[int, int] | None:
        """The file descriptor and poll events to wait for; None while disconnected."""
        if self._sock is None:
            return None
        return self._sock.fileno(), select.POLLIN | (select.POLLOUT if self._out or not self._connected else 0)

    def tick(self, now: float) -> float:
        """Do what is due at `now`; return the next due time."""
        self._now = now
        if self._sock is None:
            if now >= self._retry_at:
                self._connect()
            return self._retry_at if self._sock is None else now + _ANSWER_TIMEOUT_S
        if not self._greeted or self._answers:
            if now - self._waiting_since >= _ANSWER_TIMEOUT_S:
                self._drop("it does not answer")
                return self._retry_at
            return self._waiting_since + _ANSWER_TIMEOUT_S
        if not self.registered:
            return now + _ANSWER_TIMEOUT_S
        if now >= self._ping_at:
            self._ping_at = now + _PING_PERIOD_S
            self._ask([_GET_PENDING_MATCHKEYS], self._on_pending_keys)
        return self._ping_at

    def handle(self, events: int, now: float) -> None:
        self._now = now
        if self._sock is None:
            return
        try:
            if not self._connected:
                self._finish_connecting()
            if self._connected and events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._receive()
            self._send()
        except (OSError, ValueError) as error:
            self._drop(str(error))

    def _connect(self) -> None:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
            self._sock = socket.socket(family, kind, protocol)
            self._sock.setblocking(False)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            code = self._sock.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, errno.errorcode.get(code, str(code)))
        except OSError as error:
            self._drop(str(error))
            return
        self._out, self._in, self._waiting_since = struct.pack("<i", TRACKER_MAGIC), b"", self._now
        self._answers.clear()

    def _finish_connecting(self) -> None:
        assert self._sock is not None
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, str(code)))
        self._connected = True

    def _receive(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("connection closed by the tracker")
        self._in += data
        while len(self._in) >= 4 and self._sock is not None:
            (number,) = struct.unpack_from("<i", self._in)
            if not self._greeted:
                if number != TRACKER_MAGIC:
                    raise ValueError("this is not a TVM tracker")
                self._in = self._in[4:]
                self._on_greeted()
                continue
            if not 0 < number <= _MAX_MESSAGE_BYTES or not self._answers:
                raise ValueError(f"unexpected message of {number} bytes")
            if len(self._in) < 4 + number:
                return
            value = json.loads(self._in[4 : 4 + number])
            self._in = self._in[4 + number :]
            self._waiting_since = self._now
            self._answers.popleft()(value)

    def _send(self) -> None:
        if self._sock is not None and self._connected and self._out:
            try:
                self._out = self._out[self._sock.send(self._out) :]
            except BlockingIOError:
                return

    def _ask(self, message: list[Any], on_answer: Callable[[Any], None]) -> None:
        text = json.dumps(message).encode()
        if not self._answers:
            self._waiting_since = self._now
        self._out += struct.pack("<i", len(text)) + text
        self._answers.append(on_answer)

    def _on_greeted(self) -> None:
        self._greeted = True
        self._retry_s = _FIRST_RETRY_S
        _log.info("connected to the tracker at %s:%d", *self._address)
        self._ask([_UPDATE_INFO, {"key": f"server:{self._key}", "addr": [None, self._port]}], _expect_success)
        if self._offered:
            self._put()

    def _put(self) -> None:
        self.registered = False
        self._unused_since = None
        self.match_key = f"{self._key}:{random.random()}"  # the tracker splits it at the last colon
        match_key = self.match_key

        def on_answer(value: Any) -> None:
            _expect_success(value)
            if self.match_key == match_key:
                self.registered = True
                self._ping_at = self._now + _PING_PERIOD_S

        self._ask([_PUT, self._key, [self._port, match_key], None], on_answer)

    def _on_pending_keys(self, value: Any) -> None:
        if not self._offered or not isinstance(value, list):
            return
        if self.match_key in value:
            self._unused_since = None
        elif self._unused_since is None:
            self._unused_since = self._now
        elif self._now - self._unused_since >= _UNUSED_KEY_S:
            _log.info("a client took the match key and never connected; offering the board again")
            self._put()

    def _drop(self, reason: str) -> None:
        if self._greeted or self._retry_s == _FIRST_RETRY_S:
            _log.warning("no tracker at %s:%d (%s); trying again", *self._address, reason)
        self.close()
        self._connected = self._greeted = self.registered = False
        self._retry_at = self._now + self._retry_s
        self._retry_s = min(self._retry_s * 2, _LAST_RETRY_S)


def _expect_success(value: Any) -> None:
    if value != _SUCCESS:
        raise ValueError(f"the tracker refused: {value!r}")


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
