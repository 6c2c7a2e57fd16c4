"""How virtual boards stretch time: by clocks, cores and utilisation."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

from device_agent.platforms.board_time import HostTime
from device_agent.platforms.evidence import Sensors
from device_agent.worker.plan import Plan
from farm.virtual import gpu_time
from farm.virtual.board import TOTAL, VirtualBoard
from farm.virtual.gpu_time import Kernel
from farm.virtual.history import OwnClock
from farm.virtual.lapse import LapsedTime, LookBack
from farm.virtual.pace import Pace
from farm.virtual.tree import CLOCKS, FAULT, VirtualTree
from farm.virtual.work import Work, WorkBook
from tests.unit.virtual_boards import make_board

SECOND = Work(1.0, 0.0)


def make_pace(
    board: VirtualBoard,
    cluster: str = "",
    host_cores: int = 1,
    folder: Path | None = None,
    key: str = "k",
    draw: int = 1,
    on_gpu: bool = False,
) -> Pace:
    tree = VirtualTree(board, privileged=False)
    return Pace(tree, HostTime(), cluster, host_cores, 60.0, folder, key, draw, on_gpu=on_gpu)


def measure(board: VirtualBoard, cluster: str = "", work: Work = SECOND) -> float:
    pace = make_pace(board, cluster)
    return statistics.fmean(pace.board_seconds(work) for _ in range(200))


def hold(board: VirtualBoard, cpu_hz: int, memory_hz: int | None = None) -> None:
    with board.change():
        for cluster in board.clusters.values():
            cluster.clock.set_limits(cpu_hz, cpu_hz)
        if board.memory and memory_hz:
            board.memory.locked = True
            board.memory.rate_hz = memory_hz


def test_pace_follows_clocks_and_heat() -> None:
    """One host core against one Cortex-A57. The clock that is, counts; not the one that was asked for."""
    board, _ = make_board()
    hold(board, 1_479_000_000, 1_600_000_000)
    assert measure(board) == pytest.approx(6.0, rel=0.01)
    board, _ = make_board()
    hold(board, 1_479_000_000, 1_600_000_000)
    fast = measure(board)
    with board.change():
        board.throttle()
    assert measure(board) > 1.5 * fast


def test_time_goes_with_core_clock_and_memory_clock() -> None:
    """Half the core clock costs the core's share again; half the memory clock the memory's."""
    board, _ = make_board()
    share = board.parameters.latency.core_share
    hold(board, 1_479_000_000, 1_600_000_000)
    fast = measure(board)
    hold(board, 710_400_000, 1_600_000_000)
    assert measure(board) / fast == pytest.approx(share * 1479 / 710.4 + 1 - share, rel=0.01)
    hold(board, 1_479_000_000, 800_000_000)
    assert measure(board) / fast == pytest.approx(share + 2 * (1 - share), rel=0.01)


def test_a_slow_board_takes_longer_and_shows_nothing() -> None:
    """The fault stretches time by its factor until it is cleared; no clock tells of it."""
    board, _ = make_board()
    hold(board, 1_479_000_000, 1_600_000_000)
    tree = VirtualTree(board)
    sound, clocks = measure(board), tree.read(CLOCKS)
    tree.write(FAULT, "slow:1.3")
    assert measure(board) == pytest.approx(1.3 * sound, rel=0.01)
    assert tree.read(CLOCKS) == clocks
    tree.write(FAULT, "clear")
    assert measure(board) == pytest.approx(sound, rel=0.01)


def test_parallel_work_is_spread_over_the_boards_cores() -> None:
    """Two core-seconds that can be shared: four cores of a Nano take a quarter each."""
    board, _ = make_board()
    hold(board, 1_479_000_000, 1_600_000_000)
    assert measure(board, work=Work(0.0, 2.0)) == pytest.approx(6.0 * 2 / 4, rel=0.01)
    with board.change():
        for cpu in (2, 3):
            board.set_online(cpu, False)
    assert measure(board, work=Work(0.0, 2.0)) == pytest.approx(6.0, rel=0.01)


def test_a_cluster_has_a_pace_of_its_own() -> None:
    """Denver cores are faster than the A57 beside them, and what may run anywhere runs on the A57."""
    board, _ = make_board("jetson-tx2")
    with board.change():
        board.apply_power_mode(board.board_type.power_modes[0])
    hold(board, 2_035_200_000, 1_866_000_000)
    assert measure(board, "denver") < 0.9 * measure(board, "a57")
    assert measure(board, "") == pytest.approx(measure(board, "a57"), rel=0.01)


def test_the_board_is_busy_from_begin_to_end() -> None:
    """Its load follows the work, and ends."""
    board, _ = make_board()
    pace = make_pace(board, "a57", 2)
    pace.begin()
    assert board.clusters["a57"].busy == 4
    pace.board_seconds(SECOND)
    assert board.clusters["a57"].busy == pytest.approx(1)
    pace.board_seconds(Work(0.0, 2.0))
    assert board.clusters["a57"].busy == pytest.approx(4)
    pace.end()
    assert board.clusters["a57"].busy == 0


def test_noise_depends_on_board_content_and_count_alone() -> None:
    """The same content for the same time on the same board has the same noise; another has another."""

    def draw(seed: int, key: str, count: int) -> tuple[float, ...]:
        board, _ = make_board(seed=seed)
        pace = make_pace(board, key=key, draw=count)
        return tuple(pace.board_seconds(SECOND) for _ in range(5))

    assert draw(0, "k", 1) == draw(0, "k", 1)
    assert len(set(draw(0, "k", 1))) == 5
    assert len({draw(0, "k", 1), draw(0, "k", 2), draw(0, "l", 1), draw(1, "k", 1)}) == 4


def test_all_of_the_boards_time_passes_before_it_is_idle(tmp_path: Path) -> None:
    """What is still owed when work ends is slept then, and no more than that over many runs."""
    board, _ = make_board()
    WorkBook(tmp_path).keep("k", Work(2e-4, 0.0))
    pace = make_pace(board, folder=tmp_path)
    started = time.monotonic()
    pace.begin()
    taken_s = sum(pace.take(lambda calls: 0.0, 1) for _ in range(70))
    pace.end()
    assert time.monotonic() - started >= 0.99 * taken_s


def test_the_governor_has_raised_the_clocks_when_the_first_run_is_timed() -> None:
    """A board that was idle is timed at the clocks that its governor gives a busy one, from the first run on."""
    board, _ = make_board()
    pace = make_pace(board)
    pace.begin()
    first = statistics.fmean(pace.board_seconds(SECOND) for _ in range(100))
    hold(board, 1_479_000_000)
    assert first == pytest.approx(measure(board), rel=0.05)


def compute(seconds: float) -> float:
    """Use the core for so long, and return it: a kernel's call."""
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass
    return seconds


def test_energy_of_a_call_is_the_power_for_as_long_as_the_call_takes() -> None:
    """A window holds as many calls as fit into the board's time."""
    board = VirtualBoard(make_board()[0].board_type, 0, OwnClock())
    hold(board, 1_479_000_000, 1_600_000_000)
    tree = VirtualTree(board, privileged=False)
    passing = LapsedTime(tree, LookBack(tree))
    plan = Plan(Sensors(tree), pace=Pace(tree, passing, "", 1, 60.0, None, "k"), time=passing, busy_s=2.0)
    plan.pace.begin()
    plan.mark("timing_start_s")
    latency_s = statistics.median(plan.pace.take(lambda calls: compute(0.001 * calls) / calls, 1) for _ in range(15))
    plan.pace.settle()
    plan.fill_window(lambda calls: compute(0.02 * calls), latency_s)
    phases = plan.marks.read()
    energy_j = board.exact_energy_j(TOTAL, phases.busy_start_s, phases.busy_end_s)
    power_w = board.exact_power_w(TOTAL)
    assert energy_j / phases.busy_calls == pytest.approx(power_w * latency_s, rel=0.02)


@pytest.mark.parametrize("kernel", [Kernel(1e7, 1e3), Kernel(1e6, 1e7), Kernel(1e6, 2e7), Kernel(1e5, 1e8)])
def test_the_governors_raise_the_clocks_for_a_gpu(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    """Work that the GPU or its memory limits takes at most a tenth longer than at the highest clocks."""
    monkeypatch.setattr(gpu_time, "take_launches", list)
    board, _ = make_board()
    pace = make_pace(board, on_gpu=True)
    pace.begin()
    times = [pace.board_seconds(Work(1e-6, 0.0, (kernel,))) for _ in range(20)]
    assert board.gpu is not None
    with board.change():
        board.gpu.clock.set_limits(921_600_000, 921_600_000)
    hold(board, 1_479_000_000, 1_600_000_000)
    fast = make_pace(board, on_gpu=True).board_seconds(Work(1e-6, 0.0, (kernel,)))
    assert times == pytest.approx([fast] * 20, rel=0.1)
