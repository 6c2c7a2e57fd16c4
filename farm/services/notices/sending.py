"""`notices.yaml` in FARM_HOME: who hears of what, and how; and sending one notice once.

`notifier` decides when to try again. Nothing of the file that may be secret is ever shown.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import stat
import urllib.parse
from pathlib import Path
from typing import Annotated, Literal

import apprise
import pydantic
import requests

from device_agent.protocol import is_name
from farm.errors import PermanentError, TransientError, UsageError
from farm.inventory import documents
from farm.processes import children

# Its warnings may hold parts of a URL, which are secrets.
logging.getLogger("apprise").setLevel(logging.CRITICAL)

FILE_NAME = "notices.yaml"
MOST_WAYS = 16

Class = Literal[
    "campaign_over", "campaign_interrupted", "campaign_waiting", "board_quarantined", "board_unsafe", "board_lost",
    "store_nearly_full",
]  # fmt: skip
CLASSES: tuple[Class, ...] = Class.__args__  # type: ignore[attr-defined]


# For one attempt to send a notice.
TIMEOUT_S = 10.0
# What a server may answer to be asked again.
_AGAIN = (408, 425, 429)


class WayDocument(documents.StrictModel):
    """A command, which gets the notice on its standard input; the URL of a webhook; or a URL of Apprise."""

    classes: list[Class] = pydantic.Field(default_factory=lambda: list(CLASSES), min_length=1)
    command: Annotated[list[str], pydantic.Field(min_length=1)] | None = None
    webhook: str | None = None
    url: str | None = None
    headers: dict[str, str] = pydantic.Field(default_factory=dict)

    @property
    def shown(self) -> str:
        """What people may see of it: the program, or scheme and host. A path or a header may hold a token."""
        if self.command:
            return f"command {self.command[0]}"
        if self.url:
            return f"url {self.url.partition('://')[0]}://…"
        parts = urllib.parse.urlsplit(self.webhook or "")
        return f"webhook {parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}/…"


class NoticesDocument(documents.StrictModel):
    """The whole file. `nearly_full`: the share of the disk of FARM_HOME that is free when it is time to hear of it."""

    ways: dict[str, WayDocument]
    nearly_full: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.05


def read_notices(home: Path) -> NoticesDocument | None:
    """What is wanted; None where there is no file. Raises UsageError, without what may be secret."""
    path = home / FILE_NAME
    if not path.exists():
        return None
    document = documents.read_document(path, NoticesDocument)
    if len(document.ways) > MOST_WAYS:
        raise UsageError(f"{path}: there are more than {MOST_WAYS} ways")
    for name, way in document.ways.items():
        _check(path, name, way)
    if any(way.webhook or way.url for way in document.ways.values()) and path.stat().st_mode & (
        stat.S_IRWXG | stat.S_IRWXO
    ):
        raise UsageError(f"{path} holds URLs and can be read by others", f"chmod 600 {path}")
    return document


def _check(path: Path, name: str, way: WayDocument) -> None:
    if not is_name(name):
        raise UsageError(f"{path}: {name!r} cannot be a way's name")
    if [way.command, way.webhook, way.url].count(None) != 2:
        raise UsageError(f"{path}: ways.{name} needs one of `command`, `webhook` and `url`")
    if way.url is not None and not apprise.Apprise().add(way.url):
        raise UsageError(f"{path}: ways.{name}.url is no URL of Apprise", "https://appriseit.com/services/ lists them.")
    if way.webhook is None:
        return
    try:
        parts = urllib.parse.urlsplit(way.webhook)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        is_url = is_url and way.webhook.isascii() and way.webhook.isprintable() and " " not in way.webhook
    except ValueError:
        is_url = False
    if not is_url or any("\n" in text or "\r" in text for pair in way.headers.items() for text in pair):
        raise UsageError(f"{path}: ways.{name}.webhook, or a header, is none", "It is http:// or https://HOST/PATH.")


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
    else:
        sender = apprise.Apprise()
        sender.add(way.url or "")
        if not sender.notify(body=f"{notice.text}\n{notice.id}", title=f"{notice.kind}: {notice.subject}"):
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
