"""Has events of the store become notices and sends them: a thread for each way, with a mark of its own in the store, so
that no route waits for one that fails, and a restart sends again rather than never.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from farm.errors import FarmError, PermanentError, TransientError
from farm.services.notices.sending import TIMEOUT_S, Notice, NoticesDocument, WayDocument, read_notices, send
from farm.settings import Settings
from farm.store import Store
from farm.store.events import MARK_KIND, Mark, StoreEvent
from farm.values import Health

_PERIOD_S, _DISK_PERIOD_S = 1.0, 60.0
# What waits stays in the store: this many are taken at once.
_MOST = 100
# Tried again after these, doubling, until a notice is too old to be news.
_FIRST_PAUSE_S, _LAST_PAUSE_S, _GIVE_UP_S = 1.0, 60.0, 3600.0
# An attempt under way may end first.
_STOP_TIMEOUT_S = TIMEOUT_S + 5.0
_NEARLY_FULL = "store_nearly_full"
_OVER = ("campaign_finished", "campaign_failed", "campaign_cancelled")

_log = logging.getLogger(__name__)


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
        owner = name_mark(self._settings.home_path, name)
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


def name_mark(home: Path, way: str) -> str:
    """Whose mark it is: hosts that share a store send their own notices."""
    return f"notices {way} of {socket.gethostname()}:{home}"


def read_mark(store: Store, owner: str) -> Mark | None:
    """How far a way has been served; None where it never was."""
    marks = [row for row in store.events.fetch(owner) if row.kind == MARK_KIND]
    with contextlib.suppress(ValueError, TypeError):
        return Mark(*json.loads(marks[-1].message)) if marks else None
    return None


def write_mark(store: Store, owner: str, mark: Mark) -> None:
    """Note how far a way has been served."""
    store.events.add(MARK_KIND, owner, json.dumps(list(mark)))
