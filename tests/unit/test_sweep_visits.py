"""How a board is asked for a visit, and what its answer is taken for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from device_agent.protocol import (
    Description,
    Energy,
    Evidence,
    OperatingPoint,
    Outcome,
    PowerWindow,
    RailPower,
    SensorInfo,
    Status,
)
from farm.crew import visits
from farm.crew.visits import Window
from farm.errors import PermanentError
from farm.points.values import DomainSetting, GridPoint


def description(period_s: float | None = None, rails: tuple[str, ...] = ()) -> Description:
    return Description(
        name="b", board_type="t", agent_version="1", protocol_version=3, simulated=True, architecture="x86_64",
        cpu_model="c", cores_online=(0,), cpu_freq_range_hz={}, memory_bytes=1, engines=(), engine_versions={},
        rails=rails, thermal_zones=(), total_rails=rails[:1],
        sensors=tuple(SensorInfo(rail, "ina3221-iio", period_s) for rail in rails),
    )  # fmt: skip


def point(hz: int, units: int = 4, memory_hz: int | None = None) -> GridPoint:
    domains = (DomainSetting("cpu", hz, units), DomainSetting("memory", memory_hz, held=False))
    return GridPoint(f"cpu={hz} x{units}", OperatingPoint(cpu_freq_hz={"cpu": hz}), domains)


def rail(name: str, watts: float) -> RailPower:
    return RailPower(name, watts, (watts * 0.98, watts * 1.02), watts, (watts * 0.98, watts * 1.02), 100, 10)


def outcome(status: Status = Status.OK, **fields: Any) -> Outcome:
    """A visit of 20 ms a run at 2 W, with an idle baseline of 1.5 W."""
    busy = PowerWindow(0.0, 1.0, (rail("IN", 2.0), rail("CPU", 0.5)), rail("IN", 2.0), "board", 50)
    energy = Energy(busy, None, 0.04, (0.039, 0.041), 0.01, (0.009, 0.011))
    values: dict[str, Any] = {
        "latency_s": (0.019, 0.02, 0.021) * 5,
        "energy": energy,
        "after": Evidence(temperature_c={"a": 40, "b": 51}),
        "simulated": True,
    }
    return Outcome(status, **values | fields)


def test_a_window_is_as_long_as_asked_or_as_the_sensor_needs() -> None:
    """Without a sensor runs fill it; a slow sensor makes it longer, and that is said."""
    assert visits.plan_window(description(), 5.0) == Window(5.0)
    quick = visits.plan_window(description(0.0066, ("IN",)), 5.0)
    assert quick.seconds == 5.0
    assert quick.min_updates > 700
    assert not quick.note
    slow = visits.plan_window(description(0.42, ("IN",)), 0.5)
    assert slow.seconds == pytest.approx(2.1)
    assert slow.min_updates == 3
    assert "0.42 s" in slow.note
    assert visits.plan_window(description(None, ("IN",)), 0.5, 0.42).seconds == slow.seconds
    unknown = visits.plan_window(description(None, ("IN",)), 5.0).to_energy()
    assert unknown.limit_s == 5.0


def test_runs_fill_a_part_of_the_window_or_all_of_it() -> None:
    """Few runs of a slow model, many of a fast one; the board's deadline lies beyond all of them."""
    with_sensor = Window(5.0, 2.0, 10)
    assert visits.plan_visit(with_sensor, 0.01, 4, 1).runs == 100
    assert visits.plan_visit(Window(5.0), 0.01, 4, 1).runs == 500
    assert visits.plan_visit(with_sensor, 1e-6, 4, 1).runs == 2000
    slow = visits.plan_visit(with_sensor, 20.0, 4, 1)
    assert (slow.runs, slow.warmup) == (3, 0)
    assert slow.limits.timeout_s >= 5 * 60
    assert slow.energy is not None
    assert visits.plan_visit(Window(5.0), 0.01, 4, 1).energy is None


def test_a_latency_is_expected() -> None:
    """Half the clock, or half the cores, at most double the time; the best of several guesses counts."""
    known = [(point(1000), 1.0), (point(250), 3.0)]
    assert visits.guess_latency_s(known, point(500)) == 2.0
    assert visits.guess_latency_s(known, point(125)) == 6.0
    assert visits.guess_latency_s(known, point(1000, units=1)) == 4.0
    assert visits.guess_latency_s([(point(1000, memory_hz=800), 1.0)], point(1000, memory_hz=200)) == 4.0
    assert visits.guess_latency_s([], point(1)) is None
    assert visits.count_cores(point(1, units=2), 4) == 2


def test_an_answer_becomes_a_measurement() -> None:
    """Median with interval, total and rails, energy with and without idle, the hottest zone."""
    found = visits.to_measurement(outcome(), "k", 7.0, "b", needs_total=True)
    assert found.is_valid
    assert found.latency.value == 0.02
    assert 0.019 <= found.latency.low <= found.latency.high <= 0.021
    assert found.latency_p95_s == pytest.approx(0.021)
    assert found.power.value == 2.0
    assert (found.energy.low, found.energy.value, found.energy.high) == (0.039, 0.04, 0.041)
    assert found.energy_above_idle is not None
    assert found.rail_power_w == {"IN": 2.0, "CPU": 0.5}
    assert found.temperature_c == 51
    assert found.simulated
    assert (found.board, found.at_s) == ("b", 7.0)


def test_without_a_sensor_energy_is_null() -> None:
    """Null, not zero; and a load that cannot be distinguished from idle has no energy above it."""
    found = visits.to_measurement(outcome(energy=None), "k", 0.0, "b")
    assert found.is_valid
    assert found.power is found.energy is found.energy_above_idle is None
    energy = outcome().energy
    assert energy is not None
    weak = outcome(energy=dataclasses.replace(energy, above_idle_j=-0.001, above_idle_ci_j=(-0.002, 0.001)))
    measured = visits.to_measurement(weak, "k", 0.0, "b")
    assert measured.energy_above_idle is None


@pytest.mark.parametrize("status", [Status.THROTTLED, Status.CLOCK_DRIFTED, Status.NOISY])
def test_a_spoilt_visit_says_why_and_may_be_repeated(status: Status) -> None:
    """It is kept, and counts for nothing."""
    found = visits.to_measurement(outcome(status, message="why"), "k", 0.0, "b")
    assert not found.is_valid
    assert found.retry
    assert found.invalid == "why"
    assert found.throttled == (status is Status.THROTTLED)
    assert visits.to_measurement(outcome(status, latency_s=()), "k", 0.0, "b") is None


def test_a_sensor_that_gave_nothing_spoils_a_visit() -> None:
    """Where the board has one, a point without power would not be comparable."""
    found = visits.to_measurement(outcome(energy=None), "k", 0.0, "b", needs_total=True)
    assert "no total" in found.invalid


@pytest.mark.parametrize("status", [Status.CRASHED, Status.RUN_TIMEOUT, Status.OUT_OF_MEMORY, Status.LOAD_FAILED])
def test_a_program_that_does_not_run_ends_the_sweep(status: Status) -> None:
    """No other visit would help."""
    with pytest.raises(PermanentError, match="does not run on b at k"):
        visits.to_measurement(outcome(status, latency_s=()), "k", 0.0, "b")
