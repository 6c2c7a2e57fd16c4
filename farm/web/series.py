"""Series kept in memory: a campaign's trials and best latencies over time, readings of boards, golden kernels.

A campaign's trials are read once; each later look reads only newer ones.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from farm.crew.calibration import DRIFT_TOLERANCE, MIN_SAMPLES
from farm.errors import FarmError
from farm.inventory.board_types import require_board_type
from farm.report.campaign_document import Gain, TaskId
from farm.store import Store
from farm.store.campaign_rows import TrialOutcome
from farm.values import DEFAULT_POINT

KEPT_S = 3600.0
# Readings of all boards at the start, and of one board in memory.
_AT_START, _MOST = 2000, 1200
# Runs of each board: enough for its past and its present.
_RUNS = 40
_FIRST_BREAK_S = 0.5
MINUTE_S = 60.0


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
        """Read the trials up to this number."""
        with self._lock:
            after = self._last if self._last >= 0 else trial - _AT_START
            if trial <= after:
                return
            self._last = trial
            for row in store.trials.fetch_newest_outcomes(after, _AT_START):
                if (reading := read_outcome(row)) is not None:
                    self._readings.setdefault(row.board, collections.deque(maxlen=_MOST)).append(reading)

    def find_latest(self, board: str) -> Reading | None:
        """Return a board's newest reading."""
        with self._lock:
            readings = self._readings.get(board)
            return readings[-1] if readings else None

    def list_since(self, board: str, since: float) -> Sequence[Reading]:
        """Return a board's readings after a time, oldest first."""
        with self._lock:
            return [each for each in self._readings.get(board, ()) if each.at >= since]


def read_outcome(row: TrialOutcome) -> Reading | None:
    """Return the reading in a trial's outcome; None where its board read nothing."""
    outcome = row.outcome
    seen = outcome.get("after") or outcome.get("before")
    if not seen:
        return None
    temperatures = _numbers(seen.get("temperature_c"))
    held = outcome.get("point") or {}
    clocks = {"gpu": held.get("gpu_freq_hz"), "memory": held.get("memory_freq_hz")}
    clocks["cpu"] = max(_numbers(held.get("cpu_freq_hz")) or _numbers(seen.get("cpu_max_hz")), default=None)
    total = ((outcome.get("power") or {}).get("total") or {}).get("power_w")
    return Reading(
        row.recorded_at,
        "" if row.operating_point == DEFAULT_POINT else row.operating_point,
        max(temperatures, default=None),
        float(total) if isinstance(total, int | float) else None,
        {name: float(hz) for name, hz in clocks.items() if isinstance(hz, int | float)},
    )


@functools.cache
def find_limit_c(board_type: str) -> float | None:
    """Return the temperature at which boards of a type throttle, by their type's file; None where it does not say."""
    try:
        limit = (require_board_type(board_type).simulation or {}).get("thermal", {}).get("trip_c")
    except FarmError:
        return None
    return float(limit) if limit else None


def _numbers(values: Any) -> list[float]:
    return [float(each) for each in (values or {}).values() if isinstance(each, int | float)]


@dataclasses.dataclass(frozen=True)
class GoldenDrift:
    """A board's latest run, and the median of its newest runs over that of its earlier ones; None: too few."""

    kernel: str
    median_s: float
    at: float
    ratio: float | None

    @property
    def is_large(self) -> bool:
        """Return whether the drift exceeds the variation from run to run."""
        return self.ratio is not None and max(self.ratio, 1 / self.ratio) > 1 + DRIFT_TOLERANCE


class GoldenRuns:
    """The newest runs of all boards. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._runs: dict[str, collections.deque[tuple[str, str, float, float]]] = {}

    def update(self, store: Store) -> None:
        """Read the newer runs."""
        with self._lock:
            for number, run in store.golden.fetch_since(self._last, _RUNS):
                self._last = max(self._last, number)
                runs = self._runs.setdefault(run.board, collections.deque(maxlen=_RUNS))
                runs.append((run.kernel, run.operating_point, run.median_s, run.at))

    def forget(self, board: str) -> None:
        """Start a board's history anew."""
        with self._lock:
            self._runs.pop(board, None)

    def find(self, board: str) -> GoldenDrift | None:
        """Return a board's drift."""
        with self._lock:
            runs = list(self._runs.get(board, ()))
        if not runs:
            return None
        kernel, point, median_s, at = runs[-1]
        alike = [each[2] for each in runs if each[:2] == (kernel, point)]
        newest, earlier = alike[-MIN_SAMPLES:], alike[:-MIN_SAMPLES]
        ratio = statistics.median(newest) / statistics.median(earlier) if len(earlier) >= MIN_SAMPLES else None
        return GoldenDrift(kernel, median_s, at, ratio)


# Campaigns in memory, and stretches of work of one board: beyond these, short gaps are dropped.
_MOST_CAMPAIGNS, _MOST_STRETCHES = 8, 1500


@dataclasses.dataclass
class Stretches:
    """When a board worked: stretches of time (s since the epoch), in order; gaps below `break_s` are left out."""

    break_s: float = _FIRST_BREAK_S
    spans: list[list[float]] = dataclasses.field(default_factory=list)
    held_s: float = 0.0

    def add(self, began: float, ended: float) -> None:
        """Add a piece of work, which ends at or after all before it."""
        self.held_s += ended - began
        self._append(began, ended)
        if len(self.spans) > _MOST_STRETCHES:
            # Drop the shortest gaps.
            self.break_s *= 2
            spans, self.spans = self.spans, []
            for span in spans:
                self._append(*span)

    def _append(self, began: float, ended: float) -> None:
        if self.spans and began - self.spans[-1][1] <= self.break_s:
            last = self.spans[-1]
            last[:] = min(last[0], began), max(last[1], ended)
        else:
            self.spans.append([began, ended])

    def list_gaps(self, least_s: float, until: float) -> list[tuple[float, float]]:
        """Return the longer gaps after the first piece of work."""
        ends = [span[1] for span in self.spans]
        begins = [*(span[0] for span in self.spans[1:]), until]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if begin - end >= least_s]


@dataclasses.dataclass
class Course:
    """Sum up a campaign's trials, in order. `minutes` has the counted ones by the minute in which they were written."""

    last: int = 0
    counted: int = 0
    gains: list[Gain] = dataclasses.field(default_factory=list)
    best_s: dict[TaskId, float] = dataclasses.field(default_factory=dict)
    boards: dict[str, Stretches] = dataclasses.field(default_factory=dict)
    minutes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    began: float = 0.0
    ended: float = 0.0

    def update(self, store: Store, campaign: int) -> None:
        """Read the newer trials."""
        best, boards, minutes = self.best_s, self.boards, self.minutes
        for row in store.trials.fetch_since(campaign, self.last):
            self.last, board_type, workload, point, counted, median_s, board, at, held_s = row
            self.began = self.began or at - (held_s or 0.0)
            self.ended = at
            if board and held_s:
                if (own := boards.get(board)) is None:
                    own = boards[board] = Stretches()
                own.add(at - held_s, at)
            if counted:
                self.counted += 1
                minutes[int(at // MINUTE_S)] += 1
                if median_s is not None and 1e-12 <= median_s <= 1e9:
                    key = (board_type, point, workload)
                    if median_s < best.get(key, float("inf")):
                        best[key] = median_s
                        self.gains.append((self.counted, key, median_s))

    def pace(self, bins: int) -> tuple[list[float], float]:
        """Return counted trials per minute in equal parts of the time, and the minutes of each part."""
        if not self.minutes:
            return [], 1.0
        first, last = min(self.minutes), max(self.minutes)
        width = max(1, -(-(last - first + 1) // bins))
        counts = [0.0] * ((last - first) // width + 1)
        for minute, trials in self.minutes.items():
            counts[(minute - first) // width] += trials / width
        return counts, float(width)


class Courses:
    """The campaigns that were viewed last. Thread-safe; one thread at a time reads a campaign."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[int, tuple[threading.Lock, Course]] = collections.OrderedDict()

    @contextlib.contextmanager
    def read(self, store: Store, campaign: int) -> Iterator[Course]:
        """Return a campaign's series up to now, unchanged within the block."""
        with self._lock:
            lock, course = self._kept.setdefault(campaign, (threading.Lock(), Course()))
            self._kept.move_to_end(campaign)
            while len(self._kept) > _MOST_CAMPAIGNS:
                self._kept.popitem(last=False)
        with lock:
            course.update(store, campaign)
            yield course
