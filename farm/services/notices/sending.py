"""Send one notice once: by a command, a webhook, or a URL of Apprise. `notifier` decides when to try again."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
from typing import TYPE_CHECKING

import apprise
import requests

from farm.errors import PermanentError, TransientError
from farm.processes import children

if TYPE_CHECKING:
    from farm.services.notices.document import WayDocument

# Its warnings may hold parts of a URL, which are secrets.
logging.getLogger("apprise").setLevel(logging.CRITICAL)


def is_url(url: str) -> bool:
    """Whether Apprise knows what to do with a URL."""
    return apprise.Apprise().add(url)


def notify(url: str, title: str, body: str) -> bool:
    """Send a text to a URL; returns whether its service accepted it."""
    sender = apprise.Apprise()
    sender.add(url)
    return bool(sender.notify(body=body, title=title))


# For one attempt to send a notice.
TIMEOUT_S = 10.0
# What a server may answer to be asked again.
_AGAIN = (408, 425, 429)


@dataclasses.dataclass(frozen=True)
class Notice:
    """A notice as operators receive it. `id` is the same when it is sent again; `at` is seconds since the epoch."""

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
    elif way.webhook:
        _post(way, way.webhook, body, timeout_s)
    elif not notify(way.url or "", f"{notice.kind}: {notice.subject}", f"{notice.text}\n{notice.id}"):
        raise TransientError(f"{way.shown} did not accept it")


def _post(way: WayDocument, url: str, body: bytes, timeout_s: float) -> None:
    headers = {"Content-Type": "application/json", **way.headers}
    try:
        with requests.Session() as session:
            session.trust_env = False  # neither a proxy nor .netrc may change what the file says
            # No redirect is followed: the next server is not the one that was named.
            status = session.post(
                url, body, headers=headers, timeout=timeout_s, allow_redirects=False, stream=True
            ).status_code
    except (requests.RequestException, ValueError) as error:
        raise TransientError(f"{way.shown} does not answer: {type(error).__name__}") from None
    if status >= 500 or status in _AGAIN:
        raise TransientError(f"{way.shown} answered {status}")
    if status >= 300:
        raise PermanentError(f"{way.shown} answered {status}")
