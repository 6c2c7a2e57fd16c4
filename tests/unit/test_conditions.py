"""Threads and clocks, in the words that stand beside every latency."""

from __future__ import annotations

from device_agent.protocol import OperatingPoint, Outcome, Status
from device_agent.protocol.power import Evidence
from farm.points.values import format_clocks, format_conditions


def ran_at(point: OperatingPoint | None = None, **limits_hz: int) -> Outcome:
    limits = {core.removeprefix("cpu"): hz for core, hz in limits_hz.items()}
    after = Evidence(cpu_freq_hz=dict.fromkeys(limits, 102_000_000), cpu_max_hz=limits, gpu_freq_hz=76_800_000)
    return Outcome(Status.OK, latency_s=(1e-3,), after=after, point=point)


def test_threads_and_clocks_stand_in_a_few_words() -> None:
    """Where no clock can be read, what was asked for stands there."""
    assert format_conditions(1, "a57=1479MHz", "default") == "1 thread, a57=1479MHz"
    assert format_conditions(4, "", "default") == "4 threads, clocks: default"


def test_a_clock_that_follows_the_load_is_told_by_its_limit() -> None:
    """What is read once a run is over is an idle core's; a core that is offline says nothing."""
    outcome = ran_at(cpu0=1_479_000_000, cpu1=1_479_000_000, cpu4=2_035_200_000)
    clusters = {"a57": (0, 1, 2), "denver": (4, 5), "none": (7,)}
    assert format_clocks(outcome, clusters) == "a57 up to 1479MHz, denver up to 2035.2MHz"


def test_a_clock_that_was_held_is_told_as_it_was_asked_for() -> None:
    """A GPU's only where that ran the code."""
    held = ran_at(OperatingPoint(cpu_freq_hz={"a57": 1_428_000_000}, gpu_freq_hz=921_600_000), cpu0=1_428_000_000)
    assert format_clocks(held, {"a57": (0,)}) == "a57=1428MHz"
    assert format_clocks(held, {"a57": (0,)}, on_gpu=True) == "a57=1428MHz, gpu=921.6MHz"


def test_cores_that_nobody_has_described_are_taken_together() -> None:
    """As on a user's own machine; a board that does not say has no clocks."""
    assert format_clocks(ran_at(cpu0=2_900_000_000, cpu1=3_100_000_000), {}) == "cpu up to 3100MHz"
    assert format_clocks(Outcome(Status.OK), {"a57": (0,)}) == ""
    assert format_clocks(ran_at(), {"a57": (0,)}) == ""
