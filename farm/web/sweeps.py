"""Sweeps' documents, kept in memory: what a sweep says changes with its visits and with what is asked of it alone."""

from __future__ import annotations

import collections
import threading
from typing import Any

from farm.points.values import Goal
from farm.store import Store
from farm.sweep import stored
from farm.sweep.export.document import make_document

_KEPT = 64


class SweepDocuments:
    """Those that were asked for last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[tuple[Any, ...], dict[str, Any]] = collections.OrderedDict()

    def find(self, store: Store, sweep: int, goal: Goal | None = None) -> dict[str, Any]:
        """A sweep's document, its picks for its own goal or for `goal`. Raises UsageError where there is none."""
        row = store.require_sweep(sweep)
        goal = goal or stored.goal_from_dict(row["goal"])
        key = (sweep, row["state"], row["visits"], row["finished_at"], goal)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        document = make_document(store, sweep, goal)
        with self._lock:
            self._kept[key] = document
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return document
