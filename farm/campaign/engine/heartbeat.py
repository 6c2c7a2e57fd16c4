"""An engine's sign of life in a store that hosts share: nobody else can see whether its process is there."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from farm.errors import FarmError
from farm.settings import StoreLocation
from farm.store import Store
from farm.store.engines import ENGINE_TTL_S

# Two may fail before others believe that it is gone.
_BEATS_PER_TTL = 3
_STOP_TIMEOUT_S = 35.0

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def beating(location: StoreLocation, me: Mapping[str, Any], ttl_s: float = ENGINE_TTL_S) -> Iterator[None]:
    """Note for the block, on a thread with a store of its own, that the engine `me` is there. Raises UnavailableError.

    A store in a file needs none: its users are on one machine.
    """
    if not isinstance(location, str):
        yield
        return
    with Store(location) as store:
        store.note_engine(me, ttl_s)
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(location, me, ttl_s, ended), name="farm-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_STOP_TIMEOUT_S)
        with contextlib.suppress(FarmError), Store(location) as store:
            store.forget_engine(me)


def _beat(location: StoreLocation, me: Mapping[str, Any], ttl_s: float, ended: threading.Event) -> None:
    while not ended.wait(ttl_s / _BEATS_PER_TTL):
        try:
            with Store(location) as store:
                store.note_engine(me, ttl_s)
        except FarmError as error:
            _log.warning("no sign of life could be given: %s", error)
