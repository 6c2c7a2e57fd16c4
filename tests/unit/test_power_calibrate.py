"""What a sensor's changes say about how often it is refreshed and how far apart its values lie."""

from __future__ import annotations

import random

import numpy as np
import pytest

from device_agent.power.calibrate import estimate_period, smallest_difference
from device_agent.power.energy import half_width_95, scatter, t_95
from device_agent.power.sampler import RailTrace, Recorder


class Rail:
    name, driver, chip, note = "IN", "ina3221-iio", "6-0040", ""

    def start(self) -> None: ...

    def read(self) -> float | None:
        return None

    def read_current_a(self) -> float | None:
        return None

    def resolution_w(self) -> float | None:
        return None

    def longest_period_s(self) -> float:
        return 0.422


def watch(
    period_s: float, seconds: float, same: float, poll_s: float = 0.001, torn: float = 0.0, seed: int = 1
) -> RailTrace:
    """A rail polled about every `poll_s`; a share `same` of updates repeats the value, `torn` are seen in two parts."""
    draws = random.Random(seed)
    recorder = Recorder(1.0)
    now_s, phase_s, value, refresh, half_seen = 100.0, draws.uniform(0, period_s), 0, -1, False
    while now_s < 100.0 + seconds:
        if half_seen:
            value, half_seen = value + 1, False
        seen = int((now_s + phase_s) / period_s)
        if seen != refresh:
            if draws.random() >= same:
                value += 1
                half_seen = draws.random() < torn
            refresh = seen
        recorder.add(now_s, float(value))
        now_s += poll_s * draws.uniform(0.5, 1.5)
    return recorder.finish(Rail())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("period_s", "seconds", "same", "torn"),
    [
        (0.422, 2.5, 0.0, 0.0),
        (0.422, 8.0, 0.5, 0.0),
        (0.0066, 1.0, 0.0, 0.15),
        (0.0066, 2.0, 0.4, 0.1),
        (0.05, 2.0, 0.5, 0.1),
    ],
)
def test_period_is_found(period_s: float, seconds: float, same: float, torn: float, seed: int) -> None:
    """Within 3 %, though many values come out equal and some reads fall into a refresh."""
    found = estimate_period([watch(period_s, seconds, same, torn=torn, seed=seed)])
    assert found == pytest.approx(period_s, rel=0.03)


def test_rails_help_each_other_and_reading_bounds_a_period() -> None:
    """Three rails that rarely change tell together what one does not. A sensor that converts on every read has no
    slower period than reading.
    """
    rails = [watch(0.422, 4.0, 0.5, seed=seed) for seed in (3, 4, 5)]
    assert estimate_period(rails) == pytest.approx(0.422, rel=0.03)
    assert estimate_period([watch(1e-5, 0.5, 0.3)]) == pytest.approx(0.001, rel=0.5)


@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_too_few_changes_tell_no_period(seconds: float) -> None:
    """Null instead of a guess."""
    assert estimate_period([watch(0.422, seconds, 0.0)]) is None
    assert estimate_period([watch(0.422, 4.0, 1.0)]) is None
    assert estimate_period([]) is None


def test_a_recorder_keeps_changes() -> None:
    """A slow sensor takes room for its updates, at any rate; reads in a window are still counted. More updates than
    there is room for at first are all kept.
    """
    trace = watch(0.422, 60.0, 0.0)
    assert trace.times_s.size < 150
    assert trace.reads == pytest.approx(60_000, rel=0.02)
    assert trace.count_reads(110.0, 120.0) == pytest.approx(10_000, rel=0.02)
    assert trace.count_reads(0.0, 50.0) == 0
    assert watch(1e-5, 5.0, 0.0).times_s.size == pytest.approx(5000, rel=0.05)


def test_steps_and_scatter_are_told_from_noise() -> None:
    """Three values may be steps apart; rounding is no step. A ramp does not scatter; what repeats over a few updates
    does.
    """
    assert smallest_difference(np.array([1.0, 1.5, 2.0])) is None
    assert smallest_difference(np.array([1.0, 1.041, 1.0411, 1.123, 1.5])) == pytest.approx(0.041, abs=1e-3)
    assert scatter(np.linspace(0, 10, 400)) < 0.5
    assert scatter(np.tile([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0], 50)) > 0.7
    assert half_width_95(np.array([1.0, 2.0])) == pytest.approx(t_95(1) / 2**0.5)


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (15, 2.131), (16, 2.120), (30, 2.042), (120, 1.980)])
def test_quantiles_are_students(degrees: int, quantile: float) -> None:
    """Against a printed table."""
    assert t_95(degrees) == pytest.approx(quantile, rel=0.005)
