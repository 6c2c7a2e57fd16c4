"""Read every rail at a fixed rate on the board's monotonic clock, beside the measured kernel.

Records when values changed (`trace.py`), not what they mean.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from device_agent.errors import SensorError
from device_agent.power.rail import Rail
from device_agent.power.sensors import PowerSensors
from device_agent.power.trace import Recorder, Trace

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
