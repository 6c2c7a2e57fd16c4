"""A simulated board's figures do not depend on whether its time is waited for: live and lapsed agree."""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path

import pytest

from device_agent.board_types import load_board_types
from device_agent.platforms.board_time import BoardTime, HostTime
from device_agent.platforms.evidence import Sensors
from device_agent.power import calibrate
from device_agent.power.sensors import find_sensors
from device_agent.protocol import Energy, EnergySpec
from device_agent.session.measurement import Observer
from device_agent.worker.plan import Plan
from farm.virtual.board import TOTAL, VirtualBoard
from farm.virtual.history import OwnClock
from farm.virtual.lapse import LapsedTime, LookBack
from farm.virtual.pace import Pace
from farm.virtual.tree import VirtualTree
from farm.virtual.work import Work, WorkBook

# Of all boards that of the quickest sensors, so that live windows are short.
_TYPE = load_board_types()["jetson-orin-nano-8gb"]
WORK = Work(2e-4, 3e-4)
# Of a live window, which then lasts for half a second.
UPDATES = 60


def measure(seed: int, live: bool, folder: Path, updates: int = 5) -> tuple[float, Energy, float]:
    """Time and watch a kernel on one board: latency in s, energy, and the exact mean power of the window in W."""
    board = VirtualBoard(_TYPE, seed, time.monotonic if live else OwnClock())
    tree = VirtualTree(board)
    files = LookBack(tree)
    passing: BoardTime = HostTime() if live else LapsedTime(tree, files)
    passing.begin()
    sensors = find_sensors(files, _TYPE)
    with passing.look(0.6) as ticker:
        infos = calibrate.measure_sensors(sensors, 0.6, ticker, ticker.sleep)
    observer = Observer(sensors, infos, passing)
    spec = EnergySpec(min_updates=updates, limit_s=1.5, idle_s=0.3)
    plan = Plan(Sensors(tree), time=passing)
    plan.idle_s, plan.busy_s, plan.margin_s = observer.plan_window(spec)
    plan.pace = Pace(tree, passing, "", 2, 60.0, folder, "k")
    with observer.beside():
        plan.rest()
        plan.mark("timing_start_s")
        plan.pace.begin()
        latency_s = [plan.pace.take(lambda calls: 0.0, 1) for _ in range(20)]
        plan.pace.settle()
        plan.fill_window(lambda calls: 0.0, statistics.median(latency_s))
        plan.pace.end()
    phases = plan.marks.read()
    energy = observer.read_energy(phases, spec)
    assert energy is not None
    drawn_j = board.exact_energy_j(TOTAL, phases.busy_start_s, phases.busy_end_s)
    return statistics.median(latency_s), energy, drawn_j / (phases.busy_end_s - phases.busy_start_s)


@pytest.mark.parametrize("seed", range(10))
def test_live_and_lapsed_agree(seed: int, tmp_path: Path) -> None:
    """Latencies are the same, powers lie in each other's intervals, and both cover the truth.

    How many calls a live window holds is also the host's affair: on a busy one fewer than the board's time has.
    """
    WorkBook(tmp_path).keep("k", WORK)
    # A sampler that a busy host keeps waiting has seen nothing of a short window: such a one is taken again.
    tries = (measure(seed, True, tmp_path, UPDATES) for _ in range(5))
    latency_s, live, live_w = next(each for each in tries if each[1].busy.total is not None)
    lapsed_s, lapsed, lapsed_w = measure(seed, False, tmp_path, UPDATES)
    assert lapsed_s == pytest.approx(latency_s, rel=1e-9)
    for power, exact_w in ((live.busy.total, live_w), (lapsed.busy.total, lapsed_w)):
        assert power.power_ci_w[0] <= exact_w <= power.power_ci_w[1]
    assert live.busy.total.power_ci_w[0] <= lapsed.busy.total.power_ci_w[1]
    assert lapsed.busy.total.power_ci_w[0] <= live.busy.total.power_ci_w[1]
    assert lapsed.per_call_j == pytest.approx(lapsed_w * lapsed_s, rel=0.03)


def test_lapsed_is_the_same_again_to_the_digit_and_is_not_waited_for(tmp_path: Path) -> None:
    """Two boards of a seed say the same; so does one board in its next session, after any earlier session."""
    WorkBook(tmp_path).keep("k", WORK)
    began = time.process_time()
    first, second = measure(3, False, tmp_path), measure(3, False, tmp_path)
    assert time.process_time() - began < 2
    assert first == second
    board = VirtualBoard(_TYPE, 3, OwnClock())
    tree = VirtualTree(board)
    files = LookBack(tree)
    passing = LapsedTime(tree, files)
    sensors = find_sensors(files, _TYPE)
    seen = []
    for load in ("{}", '{"cores": 4}'):
        passing.begin()
        with passing.look(1.0) as ticker, contextlib.suppress(OSError):
            texts = []
            while ticker() < 1001:
                texts.append([sensors.read(rail) for rail in sensors.rails])
                ticker.sleep(0.01)
        seen.append((texts, tree.read("/sys/virtual/energy")))
        tree.write("/sys/virtual/load", load)
        passing.sleep(50)
        tree.write("/sys/virtual/load", "{}")
    assert seen[0] == seen[1]
