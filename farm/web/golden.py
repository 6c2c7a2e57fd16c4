"""How far each board's golden kernel has drifted, kept in memory: only new runs are read from the store."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import threading

from farm.crew.calibration import DRIFT_TOLERANCE, MIN_SAMPLES
from farm.store import Store

# Of each board: enough for what it was, and what it is.
_RUNS = 40


@dataclasses.dataclass(frozen=True)
class GoldenDrift:
    """A board's latest run, and the median of its newest runs over that of its earlier ones; None: too few."""

    kernel: str
    median_s: float
    at: float
    ratio: float | None

    @property
    def is_large(self) -> bool:
        """Whether it is more than what boards differ by from run to run."""
        return self.ratio is not None and max(self.ratio, 1 / self.ratio) > 1 + DRIFT_TOLERANCE


class GoldenRuns:
    """The newest runs of all boards. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._runs: dict[str, collections.deque[tuple[str, str, float, float]]] = {}

    def update(self, store: Store) -> None:
        """Take in what has been written since."""
        with self._lock:
            for number, run in store.fetch_golden_since(self._last, _RUNS):
                self._last = max(self._last, number)
                runs = self._runs.setdefault(run.board, collections.deque(maxlen=_RUNS))
                runs.append((run.kernel, run.operating_point, run.median_s, run.at))

    def forget(self, board: str) -> None:
        """A board's history begins anew."""
        with self._lock:
            self._runs.pop(board, None)

    def find(self, board: str) -> GoldenDrift | None:
        """What is known of a board."""
        with self._lock:
            runs = list(self._runs.get(board, ()))
        if not runs:
            return None
        kernel, point, median_s, at = runs[-1]
        alike = [each[2] for each in runs if each[:2] == (kernel, point)]
        newest, earlier = alike[-MIN_SAMPLES:], alike[:-MIN_SAMPLES]
        ratio = statistics.median(newest) / statistics.median(earlier) if len(earlier) >= MIN_SAMPLES else None
        return GoldenDrift(kernel, median_s, at, ratio)
