"""Sending one notice once, within a deadline. When to try again is `notifier`'s business."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import urllib.parse

from farm.errors import PermanentError, TransientError
from farm.processes import user_commands
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
        user_commands.run(way.command, timeout_s, stdin=body, environment={"FARM_NOTICE_CLASS": notice.kind})
    else:
        _post(way, body, timeout_s)


def _post(way: WayDocument, body: bytes, timeout_s: float) -> None:
    parts = urllib.parse.urlsplit(way.webhook or "")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)

    def hang_up() -> None:
        # A server that sends a byte now and then would keep us for ever.
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    watch = threading.Timer(timeout_s, hang_up)
    watch.daemon = True
    watch.start()
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # No redirect is followed: the next server is not the one that was named.
        connection.request("POST", path, body, {"Content-Type": "application/json", **way.headers})
        answer = connection.getresponse()
        answer.read(_ANSWER_BYTES)
        status = answer.status
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TransientError(f"{way.shown} does not answer: {type(error).__name__}") from None
    finally:
        watch.cancel()
        connection.close()
    if status >= 500 or status in _AGAIN:
        raise TransientError(f"{way.shown} answered {status}")
    if status >= 300:
        raise PermanentError(f"{way.shown} answered {status}")
