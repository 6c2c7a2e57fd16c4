"""Which process is the engine of campaigns, and whether it takes orders: a lock and a small file under FARM_HOME.

The lock decides, because the kernel releases it at any end of its holder. The file says that the engine will read the
store once more before it ends, so that no order is lost to an ending engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from farm import folders
from farm.connectivity.services_state import hold_lock, is_locked, write_whole
from farm.errors import FarmError
from farm.processes.machine import process_identity
from farm.settings import StoreLocation
from farm.store import Store
from farm.store.engines import ENGINE_TTL_S

# Two may fail before others take the engine for gone.
_BEATS_PER_TTL = 3
# Longer than a store's own deadline of 30 s, in which the heartbeat's thread may be.
_STOP_TIMEOUT_S = 35.0

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def beating(location: StoreLocation, me: Mapping[str, Any], ttl_s: float = ENGINE_TTL_S) -> Iterator[None]:
    """Write heartbeats of the engine `me` during the block, on a thread with its own store. Raises UnavailableError.

    A store in a file needs none: its users are on one machine.
    """
    if not isinstance(location, str):
        yield
        return
    with Store(location) as store:
        store.engines.note(me, ttl_s)
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(location, me, ttl_s, ended), name="farm-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_STOP_TIMEOUT_S)
        with contextlib.suppress(FarmError), Store(location) as store:
            store.engines.forget(me)


def _beat(location: StoreLocation, me: Mapping[str, Any], ttl_s: float, ended: threading.Event) -> None:
    while not ended.wait(ttl_s / _BEATS_PER_TTL):
        try:
            with Store(location) as store:
                store.engines.note(me, ttl_s)
        except FarmError as error:
            _log.warning("no heartbeat could be written: %s", error)


# The exit code of an engine that finds another one; no error of ours has it.
ANOTHER_RUNS = 75
_LOCK, _FILE, _WORDS = "engine.lock", "engine.json", "engine.words"
_WORDS_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """The engine's process (`farm.processes.machine.process_identity`)."""

    identity: Mapping[str, Any]

    @property
    def pid(self) -> int:
        """Its process number on this machine."""
        return int(self.identity["pid"])


def find_engine(home: Path) -> EngineInfo | None:
    """Return the engine of this FARM_HOME; None where none runs, or it is starting or ending."""
    if not is_held(home):
        return None
    try:
        document = json.loads((home / _FILE).read_text())
        return EngineInfo({**document, "pid": int(document["pid"]), "created": document["created"]})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def is_held(home: Path) -> bool:
    """Whether a process is the engine of this FARM_HOME, ready or not."""
    return is_locked(home / _LOCK)


@contextlib.contextmanager
def engine_lock(home: Path) -> Iterator[None]:
    """Be the engine of this FARM_HOME for the block, or keep one from starting.

    Raises UnavailableError where another process is.
    """
    refusal = "the engine of this farm's campaigns runs already"
    with hold_lock(home / _LOCK, refusal, "`farm campaign list` shows what it does."):
        withdraw(home)  # left by a killed engine
        _reserve_words(home)
        try:
            yield
        finally:
            withdraw(home)


def publish(home: Path) -> None:
    """Write that this process is the engine and takes orders, atomically."""
    write_whole(home / _FILE, json.dumps(process_identity()))


def withdraw(home: Path) -> None:
    """Take no more orders. Earlier ones are in the store by now; the caller must look there once more."""
    (home / _FILE).unlink(missing_ok=True)


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


def _reserve_words(home: Path) -> None:
    """Reserve space for the last words. A full disk is reported by the next writer."""
    with contextlib.suppress(OSError), folders.open_private(home / _WORDS, os.O_WRONLY | os.O_TRUNC, "wb") as file:
        file.write(b" " * _WORDS_BYTES)
        file.flush()
        os.fsync(file.fileno())  # some file systems allocate at sync, not at write
