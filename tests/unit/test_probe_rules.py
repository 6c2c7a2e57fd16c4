"""What a probe's evidence says of a board."""

from __future__ import annotations

import dataclasses
import platform

import numpy as np
import pytest

from device_agent.protocol import Description, Evidence, Outcome, SensorInfo, Status
from farm.crew.health import Kind
from farm.errors import UnavailableError
from farm.inventory.board_types import load_board_types
from farm.search.codegen import golden
from farm.services import probe_rules

DESCRIPTION = Description(
    name="nano-01",
    board_type="jetson-nano",
    agent_version="1",
    protocol_version=2,
    simulated=False,
    architecture="aarch64",
    cpu_model="",
    cores_online=(0,),
    cpu_freq_range_hz={"0": [102_000_000, 1_479_000_000]},
    memory_bytes=4 << 30,
    engines=(),
    engine_versions={},
    rails=(),
    thermal_zones=(),
)
OK = Outcome(Status.OK, latency_s=(1.0,))


def outputs(scale: float = 1.0) -> dict[str, np.ndarray]:
    x, y, z, _ = golden.make_inputs().values()
    return {"out_003": (scale * (np.outer(x, y) @ z)).astype("float32")}


@pytest.mark.parametrize(
    ("board_type", "detected", "words"),
    [
        ("jetson-nano", "", ""),
        ("jetson-nano", "jetson-nano", ""),
        ("jetson-tx2", "", "its agent says that it is a jetson-tx2"),
        ("jetson-nano", "jetson-tx2", "its device tree says jetson-tx2"),
    ],
)
def test_a_wrong_type_is_named(board_type: str, detected: str, words: str) -> None:
    """Both the agent's configuration and the device tree must be what is registered."""
    said = dataclasses.replace(DESCRIPTION, board_type=board_type, detected_type=detected)
    why = probe_rules.find_wrong_type("jetson-nano", said)
    assert (why == "") == (words == "")
    assert words in why


@pytest.mark.parametrize(
    ("period_s", "expected_s", "slow"),
    [(0.42, 0.4224, False), (2.0, 0.4224, True), (0.05, 0.0066, False), (0.15, 0.0066, True), (None, 0.4, False)],
)
def test_sensors_far_slower_than_their_type_are_slow(period_s: float | None, expected_s: float, slow: bool) -> None:
    """Not those that are a little slower, nor those that are fast enough for anything."""
    why = probe_rules.find_slow_sensors([SensorInfo("VDD_IN", "ina3221-iio", period_s)], expected_s)
    assert ("VDD_IN" in why) == slow
    assert probe_rules.find_slow_sensors([SensorInfo("VDD_IN", "ina3221-iio", period_s)], None) == ""


def test_every_type_with_sensors_says_how_often_they_have_a_value() -> None:
    """And a virtual board of the type does just that: both are of the chip's settings."""
    for board_type in load_board_types().values():
        assert (board_type.power.update_period_s is not None) == bool(board_type.power.chips), board_type.name
        if "sensor" in board_type.simulation:
            samples = board_type.simulation["sensor"]["samples"]
            assert board_type.power.update_period_s == pytest.approx(samples * 2 * 0.0011 * 3)


@pytest.mark.parametrize(
    ("outcome", "scale", "kind", "words"),
    [
        (OK, 1.0, None, ""),
        (OK, 1.01, Kind.PROBE_FAILED, "wrong"),
        (OK, float("nan"), Kind.PROBE_FAILED, "not finite"),
        (Outcome(Status.CRASHED, "killed by SIGILL"), 1.0, Kind.PROBE_FAILED, "crashed: killed by SIGILL"),
        (Outcome(Status.FARM_ERROR, "no space left"), 1.0, Kind.PROBE_FAILED, "no space left"),
        (Outcome(Status.THROTTLED, "too hot"), 1.0, Kind.THROTTLED, "too hot"),
        (Outcome(Status.THROTTLED, "too hot"), 2.0, Kind.PROBE_FAILED, "wrong"),
        (Outcome(Status.CLOCK_DRIFTED, "cpu0"), 1.0, Kind.DRIFTED, "cpu0"),
    ],
)
def test_a_run_is_judged_by_its_result_first(outcome: Outcome, scale: float, kind: Kind | None, words: str) -> None:
    """A board that computes wrong fails, however it feels otherwise; the code is known to be good."""
    finding = probe_rules.judge_run(outcome, outputs(scale))
    assert (finding.kind if finding else None) == kind
    assert words in (finding.detail if finding else "")


def test_a_run_that_gives_nothing_back_fails() -> None:
    """No output is a wrong one."""
    finding = probe_rules.judge_run(OK, {})
    assert finding.kind is Kind.PROBE_FAILED


def test_a_real_board_is_held_to_three_percent_and_a_simulated_one_to_thirty() -> None:
    """A virtual board's time is its host's, and that is a busy one."""
    history = [1.0, 1.001, 0.999, 1.0, 1.0]
    assert probe_rules.is_off(1.05, history, simulated=False)
    assert probe_rules.is_off(0.95, history, simulated=False)
    assert not probe_rules.is_off(1.05, history, simulated=True)
    assert not probe_rules.is_off(9.0, history[:4], simulated=False)  # no history yet
    assert "its own history" in probe_rules.find_drift(history, [1.05] * 5, simulated=False)
    assert probe_rules.find_drift(history, [1.05] * 5, simulated=True) == ""
    assert "its own history" in probe_rules.find_drift(history, [1.5] * 5, simulated=True)


def test_what_a_probe_compares() -> None:
    """Of a thousand boards some tell the type's time as well. A board in another power mode is slow for a reason that
    can be read. Times of two targets, or of two compilers, are never compared.
    """
    medians = {f"board-{number:03}": [1.0] * 10 for number in range(200)} | {"slow": [1.4] * 10}
    factor, why = probe_rules.find_outlier("slow", medians, simulated=False)
    assert factor == pytest.approx(1.4)
    assert f"{probe_rules.MOST_PEERS + 1} boards" in why
    assert probe_rules.find_outlier("slow", {"slow": [1.4] * 10}, simulated=False) == (None, "")
    assert probe_rules.find_outlier("slow", {}, simulated=False) == (None, "")
    limited = dataclasses.replace(OK, before=Evidence(cpu_max_hz={"0": 921_600_000}))
    assert "cpu0 is limited to 921.6 of 1479 MHz" in probe_rules.describe_limits(limited, DESCRIPTION)
    assert probe_rules.describe_limits(OK, DESCRIPTION) == ""
    names = {golden.name_kernel(golden.plan_target(None, machine))[0] for machine in ("x86_64", "aarch64")}
    assert len(names) == 2
    assert all(name.startswith(f"{golden.NAME}+") for name in names)


def test_the_golden_kernels_target_is_the_boards() -> None:
    """The type's where the architecture is its own; a virtual board runs its host's code; nothing is guessed."""
    nano = load_board_types()["jetson-nano"].target
    assert golden.plan_target(nano.to_tvm(), "aarch64")["mcpu"] == "cortex-a57"
    assert golden.plan_target(nano.to_tvm(), "x86_64")["mtriple"] == "x86_64-linux-gnu"
    assert golden.plan_target(None, platform.machine())["mtriple"].startswith(platform.machine())
    with pytest.raises(UnavailableError, match="riscv64"):
        golden.plan_target(nano.to_tvm(), "riscv64")
