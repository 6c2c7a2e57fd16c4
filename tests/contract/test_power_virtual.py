"""Energy of virtual boards against their models' exact integrals: reported intervals must cover the truth."""

from __future__ import annotations

import random
import statistics

import pytest

from device_agent.board_types import load_board_types
from device_agent.power import calibrate, energy, sampler
from device_agent.power.sensors import PowerSensors, find_sensors
from farm.virtual.board import TOTAL, VirtualBoard
from farm.virtual.clocks import Load
from farm.virtual.tree import VirtualTree
from tests.clocks import Clock

_TYPES = load_board_types()
WINDOWS = 102
WINDOW_S, IDLE_S = 4.0, 2.0


def make(name: str, seed: int) -> tuple[VirtualBoard, PowerSensors, Clock]:
    """A board that has been up for a while, its sensors measured as at the agent's start."""
    clock = Clock()
    board = VirtualBoard(_TYPES[name], seed, clock)
    sensors = find_sensors(VirtualTree(board), _TYPES[name], clock=clock)
    clock.sleep(3.0)
    calibrate.measure_sensors(sensors, 2.0, clock, clock.sleep)
    return board, sensors, clock


@pytest.mark.parametrize(
    ("name", "rate_hz", "widest"),
    # Slow sensors lose nothing by being read less often, and this file stays fast.
    [("jetson-nano", 25.0, 0.08), ("jetson-tx2", 25.0, 0.06), ("jetson-orin-nano-8gb", 50.0, 0.03)],
)
def test_truth_lies_in_the_interval(name: str, rate_hz: float, widest: float) -> None:
    """Of 102 windows over kernels of every load, that begin and end with the window or within it, at least 95 % cover
    the exact integral; so do the idle windows before them.
    """
    draws = random.Random(11)
    widths, missed, idle_missed = [], [], []
    board, sensors, clock = make(name, 0)
    for index in range(WINDOWS):
        if index % 34 == 0:
            board, sensors, clock = make(name, index)
        clusters = [*board.clusters]
        load = Load(
            cluster=draws.choice(clusters),
            cores=draws.uniform(0.5, 4),
            memory=draws.random(),
            gpu=draws.choice([0.0, draws.random()]),
        )
        margin_s = energy.plan_margin(sensors.infos)
        idle_start_s = clock() + margin_s
        start_s = idle_start_s + IDLE_S
        end_s = start_s + WINDOW_S
        late_s = draws.choice([0.0, 0.0, draws.uniform(0, 1)])  # two in three fill the window
        board.schedule(start_s + late_s - clock(), lambda board=board, load=load: board.set_load("kernel", load))  # type: ignore[misc]
        board.schedule(end_s - late_s / 2 - clock(), lambda board=board: board.set_load("kernel", None))  # type: ignore[misc]
        trace = sampler.collect(sensors, end_s + margin_s - clock(), rate_hz, clock, clock.sleep)
        busy = energy.integrate(trace, start_s, end_s, sensors, calls=10)
        idle = energy.integrate(trace, idle_start_s, start_s, sensors)
        assert busy.enough, busy.note
        truth_j = board.exact_energy_j(TOTAL, start_s, end_s)
        low_j, high_j = busy.total.energy_ci_j
        if not low_j <= truth_j <= high_j:
            missed.append((truth_j, busy.total))
        widths.append((high_j - low_j) / 2 / busy.total.energy_j)
        assert idle.total is not None
        truth_j = board.exact_energy_j(TOTAL, idle_start_s, start_s)
        if not idle.total.energy_ci_j[0] <= truth_j <= idle.total.energy_ci_j[1]:
            idle_missed.append((truth_j, idle.total))
        clock.sleep(draws.uniform(0.1, 1.0))
    assert len(missed) <= 0.05 * WINDOWS, missed
    assert len(idle_missed) <= 0.05 * WINDOWS, idle_missed
    assert statistics.median(widths) < widest, statistics.median(widths)
