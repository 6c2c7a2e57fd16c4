"""Open stores for requests that run at once on several threads: a store is one thread's at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from farm.settings import StoreLocation
from farm.store import Store


class Stores:
    """Lends stores of one database. Thread-safe; there are as many as were ever lent at once."""

    def __init__(self, location: StoreLocation) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._free: list[Store] = []

    @contextlib.contextmanager
    def lend(self) -> Iterator[Store]:
        """A store for the block. Raises what opening one does."""
        with self._lock:
            store = self._free.pop() if self._free else None
        store = store or Store(self._location)
        try:
            yield store
        finally:
            with self._lock:
                self._free.append(store)

    def close(self) -> None:
        """Let go of those that are not lent."""
        with self._lock:
            free, self._free = self._free, []
        for store in free:
            store.close()
