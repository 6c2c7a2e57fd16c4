"""Read every rail at a fixed rate on the board's monotonic clock, beside the measured kernel.

A trace records when each rail's value changed, and the reads in between: only changes are kept, so that
memory grows with updates, not with time. `energy.py` and `calibrate.py` interpret them.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from device_agent.errors import SensorError
from device_agent.power.rail import Rail
from device_agent.power.sensors import PowerSensors

Array = NDArray[np.float64]
# Initial and maximal entries per rail: 40 MB at most, an hour of a sensor with 200 updates a second.
_FIRST_ENTRIES, MAX_ENTRIES = 1024, 1_000_000


@dataclasses.dataclass(frozen=True)
class RailTrace:
    """One rail over time, on the board's monotonic clock in s.

    Entry i: `values_w[i]` was first seen at `times_s[i]`; the read before was at `since_s[i]`. `changed[i]` is false
    for an unchanged value: the first entry, the end of a hole, the last read. `counts[i]` counts good reads up to this
    one.
    """

    rail: str
    chip: str
    driver: str
    times_s: Array
    since_s: Array
    values_w: Array
    changed: NDArray[np.bool_]
    counts: NDArray[np.int64]
    bad_s: Array  # when reads failed
    resolution_w: float | None
    longest_period_s: float
    problem: str = ""  # message of the last failed read

    @property
    def reads(self) -> int:
        return int(self.counts[-1]) if self.counts.size else 0

    @property
    def spacing_s(self) -> float:
        """Mean spacing of reads; 0 with fewer than two."""
        return float(self.times_s[-1] - self.times_s[0]) / (self.reads - 1) if self.reads > 1 else 0.0

    @property
    def change_s(self) -> Array:
        """When values changed: the middle of the known range."""
        return (self.times_s[self.changed] + self.since_s[self.changed]) / 2

    def zero_s(self, end_s: float) -> float:
        """How long it has read nothing above 0 W until `end_s`."""
        known = int((self.times_s <= end_s).sum())
        above = np.flatnonzero(self.values_w[:known] > 0)
        first = int(above[-1]) + 1 if above.size else 0
        return end_s - float(self.times_s[first]) if first < known else 0.0

    def count_reads(self, start_s: float, end_s: float) -> int:
        """Good reads in a window; assumed evenly spread between entries."""
        if not self.counts.size:
            return 0
        low, high = np.interp([start_s, end_s], self.times_s, self.counts, left=0)
        return round(float(high - low))


@dataclasses.dataclass(frozen=True)
class Trace:
    """All rails over one stretch of time."""

    rails: tuple[RailTrace, ...]

    def find(self, rail: str) -> RailTrace | None:
        return next((trace for trace in self.rails if trace.rail == rail), None)

    def updates(self, start_s: float) -> dict[str, tuple[tuple[float, float], ...]]:
        """Per rail [seconds since `start_s`, W] of every new value, as in `PowerTrace.samples`."""
        result = {}
        for trace in self.rails:
            new = trace.changed.copy()
            new[:1] = True
            pairs = zip(trace.times_s[new] - start_s, trace.values_w[new], strict=True)
            result[trace.rail] = tuple((round(float(t), 6), round(float(w), 6)) for t, w in pairs)
        return result


class Recorder:
    """Collects one rail's reads. A pause longer than `hole_s` becomes a hole."""

    def __init__(self, hole_s: float) -> None:
        self._hole_s = hole_s
        self._floats = np.empty((_FIRST_ENTRIES, 4))  # time, since, value, changed
        self._counts = np.empty(_FIRST_ENTRIES, dtype=np.int64)
        self._entries = 0
        self._reads = 0
        self._last_s = self._last_w = 0.0
        self._bad_s: list[float] = []
        self._problem = ""

    def add(self, time_s: float, value_w: float) -> bool:
        """Add a good read; return whether its value is new."""
        self._reads += 1
        first = self._reads == 1
        changed = not first and value_w != self._last_w
        since_s = time_s if first else self._last_s
        if first or changed or time_s - since_s > self._hole_s:
            self._keep(time_s, since_s, value_w, changed)
        self._last_s, self._last_w = time_s, value_w
        return changed

    def add_bad(self, time_s: float, problem: str) -> None:
        """Add a failed read."""
        self._problem = problem
        if len(self._bad_s) < MAX_ENTRIES:
            self._bad_s.append(time_s)

    def _keep(self, time_s: float, since_s: float, value_w: float, changed: bool) -> None:
        if self._entries == len(self._counts):
            if self._entries >= MAX_ENTRIES:
                return
            self._floats = np.concatenate([self._floats, np.empty_like(self._floats)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._floats[self._entries] = time_s, since_s, value_w, changed
        self._counts[self._entries] = self._reads
        self._entries += 1

    def finish(self, rail: Rail) -> RailTrace:
        """Return the trace of `rail` so far; recording may go on."""
        rows, counts = self._floats[: self._entries].copy(), self._counts[: self._entries].copy()
        if self._reads and counts[-1] != self._reads and self._entries < MAX_ENTRIES:
            rows = np.vstack([rows, [self._last_s, self._last_s, self._last_w, False]])
            counts = np.append(counts, self._reads)
        return RailTrace(
            rail.name,
            rail.chip,
            rail.driver,
            times_s=rows[:, 0],
            since_s=rows[:, 1],
            values_w=rows[:, 2],
            changed=rows[:, 3].astype(bool),
            counts=counts,
            bad_s=np.array(self._bad_s),
            resolution_w=rail.resolution_w(),
            longest_period_s=rail.longest_period_s(),
            problem=self._problem,
        )


__all__ = ["DEFAULT_RATE_HZ", "Collector", "Sampler", "Trace", "collect"]

DEFAULT_RATE_HZ = 100.0
# How often a waiting thread checks for a stop request.
_LOOK_S = 0.02
# A blocked read delays `stop`; a driver that hangs longer is abandoned.
_STOP_TIMEOUT_S = 2.0
# A pause of so many turns is a hole with missed updates.
_HOLE_TURNS = 2.5
# Reads shift by up to half a turn in an aperiodic sequence (golden ratio), so that a kernel that repeats at the same
# rate is not always sampled in the same phase.
_MOVE, _GOLDEN = 0.5, 0.6180339887498949


class Collector:
    """The reads of one stretch of time, turn by turn, in the caller's thread."""

    def __init__(self, sensors: PowerSensors, rate_hz: float, clock: Callable[[], float]) -> None:
        self._sensors, self._clock = sensors, clock
        self._turn_s = 1 / rate_hz
        self._turn = 0
        self._started_s = clock()
        self._rails: list[tuple[Rail, Recorder]] = []
        for name in sensors.rails:
            rail = sensors.rail(name)
            rail.start()
            self._rails.append((rail, Recorder(_HOLE_TURNS * self._turn_s)))

    def next_s(self) -> float:
        """When the next turn is; turns missed by far are skipped."""
        late = math.floor((self._clock() - self._started_s) / self._turn_s)
        self._turn = max(self._turn, late)
        moved = self._turn + _MOVE * ((self._turn * _GOLDEN) % 1.0)
        return self._started_s + moved * self._turn_s

    def read(self) -> list[str]:
        """Read every rail once; return the rails with a new value."""
        self._turn += 1
        new = []
        clock = self._clock
        for rail, recorder in self._rails:
            before_s = clock()
            try:
                value_w = self._sensors.read(rail.name)
            except SensorError as error:
                recorder.add_bad(before_s, str(error))
                continue
            if value_w is not None and recorder.add((before_s + clock()) / 2, value_w):
                new.append(rail.name)
        return new

    def trace(self) -> Trace:
        return Trace(tuple(recorder.finish(rail) for rail, recorder in self._rails))


class Sampler:
    """Samples in a thread, from `start` to `stop`.

    Start it after forking the worker and stop it before the next fork: a process with threads must not fork.
    """

    def __init__(
        self, sensors: PowerSensors, rate_hz: float = DEFAULT_RATE_HZ, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sensors, self._rate_hz, self._clock = sensors, rate_hz, clock
        self._collector: Collector | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self) -> None:
        """Begin a new trace; without sensors no thread starts."""
        self.stop()
        self._stopping = False
        self._collector = Collector(self._sensors, self._rate_hz, self._clock)
        if self._sensors.rails:
            self._thread = threading.Thread(target=self._run, args=(self._collector,), name="power", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the trace and the thread. Raises SensorError if the thread hangs in a driver: then no fork is safe."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)
            if self._thread.is_alive():
                raise SensorError(f"a power sensor has not answered for {_STOP_TIMEOUT_S:g} s")
            self._thread = None

    def trace(self) -> Trace:
        """Return the trace since `start`. Call it after `stop`."""
        return self._collector.trace() if self._collector else Trace(())

    def _run(self, collector: Collector) -> None:
        while not self._stopping:
            # No lock with a timeout: those follow the system's time on Python 3.10.
            left_s = collector.next_s() - self._clock()
            if left_s <= 0:
                collector.read()
            else:
                time.sleep(min(left_s, _LOOK_S))


def collect(
    sensors: PowerSensors,
    seconds: float,
    rate_hz: float = DEFAULT_RATE_HZ,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Trace:
    """Sample in the caller's thread for this long."""
    collector = Collector(sensors, rate_hz, clock)
    end_s = clock() + seconds
    while True:
        next_s = collector.next_s()
        if next_s > end_s:
            break
        if (left_s := next_s - clock()) > 0:
            sleep(left_s)
        collector.read()
    if (left_s := end_s - clock()) > 0:
        sleep(left_s)
    return collector.trace()
