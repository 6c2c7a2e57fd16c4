"""Threads and clocks, in the words that stand beside every latency."""

from __future__ import annotations

from device_agent.protocol import OperatingPoint, Outcome, Status
from device_agent.protocol.outcome import Evidence
from farm.points.conditions import format_clocks, format_conditions


def ran_at(point: OperatingPoint | None = None, gpu_hz: int | None = None, **hz: int) -> Outcome:
    """A run at whose end cores were at these clocks."""
    after = Evidence(cpu_freq_hz={core.removeprefix("cpu"): value for core, value in hz.items()}, gpu_freq_hz=gpu_hz)
    return Outcome(Status.OK, latency_s=(1e-3,), after=after, point=point)


def test_threads_and_clocks_stand_in_a_few_words() -> None:
    """Where no clock can be read, what was asked for stands there."""
    assert format_conditions(1, "a57=1479MHz", "default") == "1 thread, a57=1479MHz"
    assert format_conditions(4, "", "default") == "4 threads, clocks: default"


def test_each_cluster_has_the_clock_of_its_slowest_core() -> None:
    """A core that is offline has none; a clock that was held is told as it was asked for."""
    outcome = ran_at(cpu0=1_479_000_000, cpu1=921_600_000, cpu4=2_035_200_000)
    clusters = {"a57": (0, 1, 2), "denver": (4, 5), "none": (7,)}
    assert format_clocks(outcome, clusters) == "a57=921.6MHz denver=2035.2MHz"
    held = ran_at(OperatingPoint(cpu_freq_hz={"a57": 1_428_000_000}), cpu0=1_427_411_000)
    assert format_clocks(held, {"a57": (0,)}) == "a57=1428MHz"


def test_code_for_a_gpu_has_its_clock_too() -> None:
    """And other code has not."""
    outcome = ran_at(gpu_hz=921_600_000, cpu0=1_479_000_000)
    assert format_clocks(outcome, {"a57": (0,)}, on_gpu=True) == "a57=1479MHz gpu=921.6MHz"
    assert format_clocks(outcome, {"a57": (0,)}) == "a57=1479MHz"


def test_cores_that_nobody_has_described_have_one_clock() -> None:
    """The median of all, as on a user's own machine; a board that does not say has none."""
    outcome = ran_at(cpu0=2_900_000_000, cpu1=3_100_000_000, cpu2=1_200_000_000)
    assert format_clocks(outcome, {}) == "cpu=2900MHz"
    assert format_clocks(Outcome(Status.OK), {"a57": (0,)}) == ""
    assert format_clocks(ran_at(), {"a57": (0,)}) == ""
