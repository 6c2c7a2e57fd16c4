"""A board's own time: what its windows, waits and sensors go by.

A real board's is this machine's; a simulated board's may pass as fast as it can be computed (`virtual/lapse.py`).
Deadlines of calls, leases and processes are none of its business: they are always this machine's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from device_agent.power.sampler import Sampler
from device_agent.power.sensors import PowerSensors
from device_agent.power.trace import Trace


class Ticker(Protocol):
    """Time that goes on while one looks: calling it tells the time in s."""

    def __call__(self) -> float: ...

    def sleep(self, seconds: float) -> None:
        """Let so much of it pass."""
        ...


class Watch(Protocol):
    """Samples power from `start` to `stop`; then `trace` is what was seen."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """Raises SensorError where a sensor does not answer."""
        ...

    def trace(self) -> Trace: ...


class BoardTime(Protocol):
    """Seconds that never run backwards within a session."""

    def now_s(self) -> float:
        """The time now."""
        ...

    def sleep(self, seconds: float) -> float:
        """Let so much time pass; return how much did."""
        ...

    def begin(self) -> None:
        """A session begins."""
        ...

    def look(self, seconds: float) -> contextlib.AbstractContextManager[Ticker]:
        """A stretch of time in which sensors are read, at most `seconds` long."""
        ...

    def make_watch(self, sensors: PowerSensors, rate_hz: float) -> Watch:
        """What samples beside a worker."""
        ...

    def own(self) -> BoardTime:
        """The same time for a worker, which lives alone in it as long as it runs."""
        ...


class HostTime:
    """The monotonic clock of this machine."""

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> float:
        began_s = time.monotonic()
        time.sleep(seconds)
        return time.monotonic() - began_s

    def begin(self) -> None:
        """Nothing: it goes on."""

    @contextlib.contextmanager
    def look(self, seconds: float) -> Iterator[Ticker]:
        """Time goes on by itself."""
        del seconds
        yield _HostTicker()

    def make_watch(self, sensors: PowerSensors, rate_hz: float) -> Watch:
        """A thread, beside the worker."""
        return Sampler(sensors, rate_hz)

    def own(self) -> BoardTime:
        """It is everybody's."""
        return self


class _HostTicker:
    def __call__(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
