"""A board's own time, for windows, waits and sensors.

A real board's is this machine's; a simulated board's may be faster (`virtual/lapse.py`). Deadlines of calls, leases and
processes always use this machine's time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from device_agent.power.sampler import Sampler, Trace
from device_agent.power.sensors import PowerSensors


class Ticker(Protocol):
    """Time during a stretch of sampling; a call returns the time in s."""

    def __call__(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class Watch(Protocol):
    """Samples power from `start` to `stop`; `trace` then returns the result."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """Raises SensorError if a sensor does not answer."""

    def trace(self) -> Trace: ...


class BoardTime(Protocol):
    """Seconds that never run backwards within a session."""

    def now_s(self) -> float: ...

    def sleep(self, seconds: float) -> float:
        """Let `seconds` pass; return how many did."""

    def begin(self) -> None:
        """Begin a session."""

    def look(self, seconds: float) -> contextlib.AbstractContextManager[Ticker]:
        """A stretch of time for reading sensors, up to `seconds` long."""

    def make_watch(self, sensors: PowerSensors, rate_hz: float) -> Watch:
        """Create a power sampler to run beside a worker."""

    def own(self) -> BoardTime:
        """Return the time for a worker, its only user while it runs."""


class HostTime:
    """The monotonic clock of this machine."""

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> float:
        began_s = time.monotonic()
        time.sleep(seconds)
        return time.monotonic() - began_s

    def begin(self) -> None:
        """Do nothing: this time never restarts."""

    @contextlib.contextmanager
    def look(self, seconds: float) -> Iterator[Ticker]:
        del seconds
        yield _HostTicker()

    def make_watch(self, sensors: PowerSensors, rate_hz: float) -> Watch:
        return Sampler(sensors, rate_hz)

    def own(self) -> BoardTime:
        return self


class _HostTicker:
    def __call__(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
