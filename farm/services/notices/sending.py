"""Sending one notice once, within a deadline. When to try again is `notifier`'s business."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.parse

from farm.errors import PermanentError, TransientError
from farm.processes import children
from farm.services.notices.document import WayDocument

TIMEOUT_S = 10.0
_ANSWER_BYTES = 1 << 12
# What a server may answer to be asked again.
_AGAIN = (408, 425, 429)


@dataclasses.dataclass(frozen=True)
class Notice:
    """What somebody hears. `id` is the same when it is sent again; `at` is seconds since the epoch."""

    id: str
    kind: str
    at: float
    subject: str
    text: str

    def to_document(self) -> dict[str, object]:
        """What is sent, as JSON."""
        return {"id": self.id, "class": self.kind, "at": self.at, "subject": self.subject, "text": self.text} | {
            "farm": socket.gethostname()
        }


def send(way: WayDocument, notice: Notice, timeout_s: float = TIMEOUT_S) -> None:
    """Send it. Raises TransientError where it is worth trying again, PermanentError; neither tells what is secret."""
    body = json.dumps(notice.to_document()).encode()
    if way.command:
        children.run(way.command, timeout_s, stdin=body, environment={"FARM_NOTICE_CLASS": notice.kind})
    else:
        _post(way, body, timeout_s)


def _post(way: WayDocument, body: bytes, timeout_s: float) -> None:
    parts = urllib.parse.urlsplit(way.webhook or "")
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    line = _Line(timeout_s)
    try:
        # `connection` lets go of its socket before the answer's end: the deadline needs one of its own.
        connection.sock = line.open(connection.host, connection.port, secure)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # No redirect is followed: the next server is not the one that was named.
        connection.request("POST", path, body, {"Content-Type": "application/json", **way.headers})
        answer = connection.getresponse()
        answer.read(_ANSWER_BYTES)
        status = answer.status
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TransientError(f"{way.shown} does not answer: {type(error).__name__}") from None
    finally:
        line.close()
        connection.close()
    if line.is_over:
        raise TransientError(f"{way.shown} does not answer: not whole within {timeout_s:g} s")
    if status >= 500 or status in _AGAIN:
        raise TransientError(f"{way.shown} answered {status}")
    if status >= 300:
        raise PermanentError(f"{way.shown} answered {status}")


class _Line:
    """A socket that is hung up at a deadline, whatever it is in: connecting, the handshake, a head or a body."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._sock: socket.socket | None = None
        self._watch = threading.Timer(timeout_s, self._hang_up)
        self._watch.daemon = True
        self._watch.start()
        self.is_over = False

    def open(self, host: str, port: int, secure: bool) -> socket.socket:
        """Connect, to the first address that answers. Raises OSError."""
        last: OSError = TimeoutError("no time is left")
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                break
            self._sock = sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(left_s)
                sock.connect(address)
                return self._secure(sock, host) if secure else sock
            except OSError as error:
                last = error
                sock.close()
        raise last

    def _secure(self, sock: socket.socket, host: str) -> socket.socket:
        context = ssl.create_default_context()
        self._sock = secured = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        try:
            secured.do_handshake()
        except BaseException:
            secured.close()
            raise
        return secured

    def close(self) -> None:
        """Forget the deadline."""
        self._watch.cancel()

    def _hang_up(self) -> None:
        self.is_over = True
        if self._sock is not None:
            with contextlib.suppress(OSError):
                # Of an SSLSocket this ends the connection alone: another thread still reads with its TLS state.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
