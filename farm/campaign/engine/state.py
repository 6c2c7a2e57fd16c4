"""The engine of campaigns as a process: one per FARM_HOME, its heartbeat, and why the last one ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from farm import folders
from farm.errors import FarmError
from farm.processes.home_process import HomeProcess
from farm.processes.machine import process_identity
from farm.settings import StoreLocation
from farm.store import Store
from farm.store.routes import ENGINE_TTL_S

# Two may fail before others take the engine for gone.
_BEATS_PER_TTL = 3
# Longer than a store's own deadline of 30 s, in which the heartbeat's thread may be.
_STOP_TIMEOUT_S = 35.0

_log = logging.getLogger(__name__)
_WORDS = "engine.words"
_WORDS_BYTES = 4096


@contextlib.contextmanager
def beating(location: StoreLocation, me: Mapping[str, Any], ttl_s: float = ENGINE_TTL_S) -> Iterator[None]:
    """Write heartbeats of the engine `me` during the block, on a thread with its own store. Raises UnavailableError.

    A store in a file needs none: its users are on one machine.
    """
    if not isinstance(location, str):
        yield
        return
    ended = threading.Event()

    def note() -> None:
        with Store(location) as store:
            store.engines.note(me, ttl_s)

    def beat() -> None:
        while not ended.wait(ttl_s / _BEATS_PER_TTL):
            try:
                note()
            except FarmError as error:
                _log.warning("no heartbeat could be written: %s", error)

    note()
    thread = threading.Thread(target=beat, name="farm-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_STOP_TIMEOUT_S)
        with contextlib.suppress(FarmError), Store(location) as store:
            store.engines.forget(me)


def leave_last_words(home: Path, reason: str) -> None:
    """Write why this engine ends into reserved space: the disk may be too full for the store."""
    text = json.dumps({"engine": process_identity(), "reason": reason[: _WORDS_BYTES // 8]})
    with contextlib.suppress(OSError):
        number = os.open(home / _WORDS, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(number, text.encode().ljust(_WORDS_BYTES), 0)
        finally:
            os.close(number)


def read_last_words(home: Path, engine: Mapping[str, Any]) -> str:
    """Return why the engine that was this process ended; "" where it was killed."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        words = json.loads((home / _WORDS).read_bytes())
        if words["engine"] == dict(engine):
            return str(words["reason"])
    return ""


def _reserve_words(home: Path, _: Mapping[str, Any]) -> None:
    """Reserve space for the last words. A full disk is reported by the next writer."""
    with contextlib.suppress(OSError), folders.open_private(home / _WORDS, os.O_WRONLY | os.O_TRUNC, "wb") as file:
        file.write(b" " * _WORDS_BYTES)
        file.flush()
        os.fsync(file.fileno())  # some file systems allocate at sync, not at write


# Its file says that it will read the store once more before it ends, so that no order is lost to an ending engine.
ENGINE = HomeProcess(
    name="engine",
    title="the engine of campaigns",
    module="farm.campaign.engine",
    refusal=("the engine of this farm's campaigns runs already", "`farm campaign list` shows what it does."),
    # Loading TVM and Ray takes 3 s; five times that on a busy machine, and an ending engine may come first.
    start_timeout_s=60.0,
    # For noting campaigns, returning boards and ending Ray.
    stop_timeout_s=30.0,
    failure_hint="`farm doctor` examines the farm.",
    kill_hint="`kill -9` ends it; no trial is lost, and `farm campaign resume` goes on.",
    refused=75,  # no error of ours has it
    begin=_reserve_words,
)
