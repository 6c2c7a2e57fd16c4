"""Threads and clocks, in the words that stand beside every latency."""

from __future__ import annotations

from device_agent.protocol import OperatingPoint, Outcome, Status
from device_agent.protocol.outcome import Evidence
from farm.points.values import format_clocks, format_conditions


def ran_at(point: OperatingPoint | None = None, **limits_hz: int) -> Outcome:
    limits = {core.removeprefix("cpu"): hz for core, hz in limits_hz.items()}
    after = Evidence(cpu_freq_hz=dict.fromkeys(limits, 102_000_000), cpu_max_hz=limits, gpu_freq_hz=76_800_000)
    return Outcome(Status.OK, latency_s=(1e-3,), after=after, point=point)


def test_clocks_are_told_as_limits_or_as_held() -> None:
    """What is read once a run is over is an idle core's; a core that is offline says nothing. A GPU's only where that
    ran the code. As on a user's own machine; a board that does not say has no clocks. Where no clock can be read,
    what was asked for stands there.
    """
    outcome = ran_at(cpu0=1_479_000_000, cpu1=1_479_000_000, cpu4=2_035_200_000)
    clusters = {"a57": (0, 1, 2), "denver": (4, 5), "none": (7,)}
    assert format_clocks(outcome, clusters) == "a57 up to 1479MHz, denver up to 2035.2MHz"
    held = ran_at(OperatingPoint(cpu_freq_hz={"a57": 1_428_000_000}, gpu_freq_hz=921_600_000), cpu0=1_428_000_000)
    assert format_clocks(held, {"a57": (0,)}) == "a57=1428MHz"
    assert format_clocks(held, {"a57": (0,)}, on_gpu=True) == "a57=1428MHz, gpu=921.6MHz"
    assert format_clocks(ran_at(cpu0=2_900_000_000, cpu1=3_100_000_000), {}) == "cpu up to 3100MHz"
    assert format_clocks(Outcome(Status.OK), {"a57": (0,)}) == ""
    assert format_clocks(ran_at(), {"a57": (0,)}) == ""
    assert format_conditions(1, "a57=1479MHz", "default") == "1 thread, a57=1479MHz"
    assert format_conditions(4, "", "default") == "4 threads, clocks: default"
