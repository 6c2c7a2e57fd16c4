"""When values are read: at a fixed rate on the monotonic clock, under any load."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from device_agent.errors import SensorError
from device_agent.power import rail as rails
from device_agent.power.rail import open_reader
from device_agent.power.sampler import Sampler, collect
from device_agent.power.sensors import PowerSensors
from device_agent.sysfs import FileTree
from tests.unit.test_power_calibrate import Rail


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


class Counter(Rail):
    def __init__(self, name: str = "IN", reading: Callable[[], None] = lambda: None) -> None:
        self.name, self._reading, self.reads = name, reading, 0

    def start(self) -> None:
        self.reads = 0

    def read(self) -> float:
        self._reading()
        self.reads += 1
        return float(self.reads % 100)


def test_a_sampler_keeps_its_turns() -> None:
    """100 Hz for 10 s are 1000 reads that never drift, each within its own turn. Over many turns reads fall on every
    part of the first half of a turn. A read of 25 ms at 100 Hz is not caught up with: fewer reads, no burst of them.
    Half of the time that reading takes.
    """
    clock = Clock()
    trace = collect(PowerSensors([Counter()]), 10.0, 100.0, clock, clock.sleep)
    (rail,) = trace.rails
    assert rail.reads == pytest.approx(1000, abs=1)
    turns = [int((time_s - 100.0) * 100 + 1e-6) for time_s in rail.times_s]
    assert turns == list(range(len(turns)))
    assert clock() == pytest.approx(110.0)
    clock = Clock()
    (rail,) = collect(PowerSensors([Counter()]), 10.0, 100.0, clock, clock.sleep).rails
    phases = sorted(((time_s - 100.0) * 100) % 1.0 for time_s in rail.times_s)
    assert max(b - a for a, b in itertools.pairwise(phases)) < 0.01
    assert phases[-1] == pytest.approx(0.5, abs=0.01)
    clock = Clock()
    slow = Counter(reading=lambda: clock.sleep(0.025))
    (rail,) = collect(PowerSensors([slow]), 2.0, 100.0, clock, clock.sleep).rails
    assert rail.reads == pytest.approx(70, abs=12)
    assert min(b - a for a, b in zip(rail.times_s, rail.times_s[1:], strict=False)) >= 0.025 - 1e-9
    clock = Clock()
    (rail,) = collect(PowerSensors([Counter(reading=lambda: clock.sleep(0.002))]), 1.0, 10.0, clock, clock.sleep).rails
    assert rail.times_s[0] == pytest.approx(100.001)


def test_holes_are_kept() -> None:
    """A gap of 0.5 s is known afterwards."""
    clock = Clock()
    rail = Counter()
    pauses = {50: 0.5}
    rail._reading = lambda: clock.sleep(pauses.get(rail.reads, 1e-6))
    (trace,) = collect(PowerSensors([rail]), 2.0, 100.0, clock, clock.sleep).rails
    assert max(trace.times_s - trace.since_s) == pytest.approx(0.26, abs=0.02)


def wait_for_reads(rail: Counter, count: int) -> None:
    """Look until a rail has been read so often, for 10 s at most."""
    deadline = time.monotonic() + 10
    reached = threading.Event()
    while rail.reads < count and time.monotonic() < deadline:
        reached.wait(0.002)
    assert rail.reads >= count


def test_a_sampler_has_a_thread_from_start_to_stop() -> None:
    """None before and none after, so that forking is safe; it can be started again."""
    before = threading.active_count()
    rail = Counter()
    sampler = Sampler(PowerSensors([rail]), 500.0)
    assert sampler.trace().rails == ()
    for _ in range(2):
        sampler.start()
        assert threading.active_count() == before + 1
        wait_for_reads(rail, 10)
        sampler.stop()
        assert threading.active_count() == before
        assert sampler.trace().rails[0].reads == rail.reads
    sampler.stop()


def test_without_sensors_nothing_is_started() -> None:
    """No thread, an empty trace."""
    before = threading.active_count()
    sampler = Sampler(PowerSensors())
    sampler.start()
    assert threading.active_count() == before
    sampler.stop()
    assert sampler.trace().rails == ()


def test_a_driver_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping has a deadline; no fork is safe while the thread is there."""
    monkeypatch.setattr("device_agent.power.sampler._STOP_TIMEOUT_S", 0.05)
    hanging, begun = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        hanging.wait(10)

    sampler = Sampler(PowerSensors([Counter(reading=hang)]))
    sampler.start()
    assert begun.wait(10)
    with pytest.raises(SensorError, match="has not answered"):
        sampler.stop()
    hanging.set()
    monkeypatch.setattr("device_agent.power.sampler._STOP_TIMEOUT_S", 10)
    sampler.stop()


def test_a_jump_of_the_systems_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling knows the monotonic clock alone: with the time of day a year off and running backwards it goes on."""
    rail = Counter()
    sampler = Sampler(PowerSensors([rail]), 500.0)
    started_s = time.monotonic()
    sampler.start()
    wait_for_reads(rail, 5)
    jumps = iter(range(10**9, 0, -(10**6)))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    wait_for_reads(rail, 15)
    sampler.stop()
    times_s = sampler.trace().rails[0].times_s
    assert (times_s[1:] > times_s[:-1]).all()
    assert started_s <= times_s[0] < times_s[-1] <= time.monotonic()


def test_kernel_files_stay_open() -> None:
    """A file of the machine itself is read again without being opened again, and is not left open."""
    reader = open_reader(FileTree(), "/proc/sys/kernel/pid_max")
    assert isinstance(reader, rails._KernelFile)
    assert int(reader()) == int(reader()) > 0
    fd = reader._fd
    link = Path(f"/proc/self/fd/{fd}")
    assert str(link.readlink()) == "/proc/sys/kernel/pid_max"
    del reader
    assert not (link.is_symlink() and str(link.readlink()) == "/proc/sys/kernel/pid_max")


def test_a_missing_kernel_file_is_an_error() -> None:
    """Each time anew: it may come back."""
    reader = open_reader(FileTree(), "/proc/sys/kernel/no_such_file")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            reader()
