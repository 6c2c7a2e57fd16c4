"""`notices.yaml` in FARM_HOME: who hears of what, and how; and sending one notice once, and again where that failed.

Nothing of the file that may be secret is ever shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import shutil
import socket
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import apprise
import pydantic
import requests

from device_agent.protocol import is_name
from farm.errors import FarmError, PermanentError, TransientError, UsageError
from farm.inventory import documents
from farm.processes import children
from farm.settings import Settings
from farm.store import Store
from farm.store.events import MARK_KIND, Mark, StoreEvent
from farm.values import Health

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
# What waits stays in the store: this many are taken at once.
_MOST = 100
# An attempt under way may end first.
_STOP_TIMEOUT_S = TIMEOUT_S + 5.0
_NEARLY_FULL = "store_nearly_full"
_OVER = ("campaign_finished", "campaign_failed", "campaign_cancelled")
_log = logging.getLogger(__name__)


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


_PERIOD_S, _DISK_PERIOD_S = 1.0, 60.0
# Tried again after these, doubling, until a notice is too old to be news.
_FIRST_PAUSE_S, _LAST_PAUSE_S, _GIVE_UP_S = 1.0, 60.0, 3600.0


class Notifier:
    """Sends until `close`; nothing is sent where FARM_HOME has no notices.yaml, or a bad one, which the log names."""

    def __init__(self, settings: Settings, period_s: float = _PERIOD_S, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        self._settings, self._period_s, self._first_pause_s = settings, period_s, first_pause_s
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        try:
            document = read_notices(settings.home_path)
        except (FarmError, OSError) as error:
            _log.error("no notices are sent: %s", error)
            return
        if document is not None:
            self._start(document)

    def close(self) -> None:
        """End all threads; what is being sent is waited for, at most for its deadline."""
        self._ended.set()
        for thread in self._threads:
            thread.join(_STOP_TIMEOUT_S)

    def _start(self, document: NoticesDocument) -> None:
        works: list[Callable[[Store], None]] = []
        works.append(functools.partial(self._watch_disk, nearly_full=document.nearly_full))
        works += [functools.partial(self._serve, name=name, way=way) for name, way in document.ways.items()]
        for work in works:
            self._threads.append(threading.Thread(target=self._keep, args=(work,), name="farm-notices", daemon=True))
            self._threads[-1].start()

    def _keep(self, work: Callable[[Store], None]) -> None:
        while not self._ended.is_set():
            try:
                with Store(self._settings.store_location) as store:
                    work(store)
            except (FarmError, OSError) as error:  # the store is busy, or gone for a while
                _log.warning("notices: %s", error)
            self._ended.wait(self._period_s)

    def _watch_disk(self, store: Store, nearly_full: float) -> None:
        is_told = False
        while not self._ended.is_set():
            disk = shutil.disk_usage(self._settings.home_path)
            if (is_full := disk.free < nearly_full * disk.total) and not is_told:
                store.events.add(_NEARLY_FULL, "store", f"{disk.free >> 20} MiB are free of {disk.total >> 20} MiB")
            # Told again only once there was clearly more.
            is_told = is_full or (is_told and disk.free < 1.2 * nearly_full * disk.total)
            self._ended.wait(_DISK_PERIOD_S)

    def _serve(self, store: Store, name: str, way: WayDocument) -> None:
        # Hosts that share a store send their own notices.
        owner = f"notices {name} of {socket.gethostname()}:{self._settings.home_path}"
        mark = read_mark(store, owner)
        if mark is None:  # a new way hears of what happens from now on
            mark = store.events.fetch_mark()
            write_mark(store, owner, mark)
        while not self._ended.is_set():
            happened = store.events.fetch_after(mark, _MOST)
            for event in happened:
                notice = to_notice(event)
                if notice is not None and notice.kind in way.classes:
                    if not self._deliver(name, way, notice):
                        return
                    write_mark(store, owner, event.mark)
            if happened:
                mark = happened[-1].mark
            if len(happened) < _MOST:
                self._ended.wait(self._period_s)

    def _deliver(self, name: str, way: WayDocument, notice: Notice) -> bool:
        """Try until it is sent or given up; False where the stop comes first."""
        pause_s, deadline = self._first_pause_s, time.monotonic() + _GIVE_UP_S
        while not self._ended.is_set():
            try:
                send(way, notice)
                return True
            except (TransientError, PermanentError) as error:
                if isinstance(error, PermanentError) or time.monotonic() > deadline:
                    _log.error("notice %s is not sent by %s: %s", notice.id, name, error.message)
                    return True
                _log.warning("notice %s: %s; trying again in %g s", notice.id, error.message, pause_s)
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return False


def to_notice(event: StoreEvent) -> Notice | None:
    """What an event is to operators; None for what they need not hear of."""
    kind = None
    if event.of_board and event.after != event.before:
        kind = {str(Health.QUARANTINED): "board_quarantined", str(Health.UNSAFE): "board_unsafe"}.get(event.after)
    if event.of_board:
        kind = kind or ("board_lost" if event.kind == "lost" else None)
    elif event.kind in _OVER:
        kind = "campaign_over"
    elif event.kind in ("campaign_interrupted", "campaign_waiting", _NEARLY_FULL):
        kind = event.kind
    if kind is None:
        return None
    text = f"{event.kind}: {event.text}" if kind == "campaign_over" else event.text
    return Notice(f"{'board' if event.of_board else 'event'}-{event.id}", kind, event.at, event.subject, text)


def read_mark(store: Store, owner: str) -> Mark | None:
    """How far a way has been served; None where it never was."""
    marks = [row for row in store.events.fetch(owner) if row.kind == MARK_KIND]
    with contextlib.suppress(ValueError, TypeError):
        return Mark(*json.loads(marks[-1].message)) if marks else None
    return None


def write_mark(store: Store, owner: str, mark: Mark) -> None:
    """Note how far a way has been served."""
    store.events.add(MARK_KIND, owner, json.dumps(list(mark)))
