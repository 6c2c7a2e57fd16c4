"""What boards last showed of temperature, power and clocks: from the evidence of their trials, kept for an hour.

Nothing here asks a board: looking at a page costs none of them anything.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from farm.errors import FarmError
from farm.inventory.board_types import require_board_type
from farm.store import Store
from farm.values import DEFAULT_POINT

KEPT_S = 3600.0
# Of all boards together at a start, and of one board in memory.
_AT_START, _MOST = 2000, 1200


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a board showed of one trial; what it cannot read is None or missing.

    `clocks_hz` by domain: a clock that was held, or the CPU's upper limit in force. What is read of other clocks before
    and after a run is an idle board's.
    """

    at: float
    point: str
    temperature_c: float | None
    power_w: float | None
    clocks_hz: Mapping[str, float]


class Gauges:
    """The readings of all boards. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = -1
        self._readings: dict[str, collections.deque[Reading]] = {}

    def update(self, store: Store, trial: int) -> None:
        """Take in the trials up to this number."""
        with self._lock:
            after = self._last if self._last >= 0 else trial - _AT_START
            if trial <= after:
                return
            self._last = trial
            for row in store.fetch_newest_outcomes(after, _AT_START):
                if (reading := read_outcome(row)) is not None:
                    self._readings.setdefault(row["board"], collections.deque(maxlen=_MOST)).append(reading)

    def find_latest(self, board: str) -> Reading | None:
        """A board's newest reading."""
        with self._lock:
            readings = self._readings.get(board)
            return readings[-1] if readings else None

    def list_since(self, board: str, since: float) -> Sequence[Reading]:
        """A board's readings after a time, oldest first."""
        with self._lock:
            return [each for each in self._readings.get(board, ()) if each.at >= since]


def read_outcome(row: Mapping[str, Any]) -> Reading | None:
    """The reading in a row of `Store.fetch_newest_outcomes`; None where its board saw nothing."""
    outcome = row["outcome"]
    seen = outcome.get("after") or outcome.get("before")
    if not seen:
        return None
    temperatures = _numbers(seen.get("temperature_c"))
    held = outcome.get("point") or {}
    clocks = {"gpu": held.get("gpu_freq_hz"), "memory": held.get("memory_freq_hz")}
    clocks["cpu"] = max(_numbers(held.get("cpu_freq_hz")) or _numbers(seen.get("cpu_max_hz")), default=None)
    total = ((outcome.get("power") or {}).get("total") or {}).get("power_w")
    return Reading(
        float(row["recorded_at"]),
        "" if row["operating_point"] == DEFAULT_POINT else str(row["operating_point"]),
        max(temperatures, default=None),
        float(total) if isinstance(total, int | float) else None,
        {name: float(hz) for name, hz in clocks.items() if isinstance(hz, int | float)},
    )


@functools.cache
def find_limit_c(board_type: str) -> float | None:
    """Above which temperature boards of a type slow down, as their type says; None where it does not."""
    try:
        limit = (require_board_type(board_type).simulation or {}).get("thermal", {}).get("trip_c")
    except FarmError:
        return None
    return float(limit) if limit else None


def _numbers(values: Any) -> list[float]:
    return [float(each) for each in (values or {}).values() if isinstance(each, int | float)]
