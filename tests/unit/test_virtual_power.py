"""Power, energy and temperature of virtual boards."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from farm.inventory.board_types import describe_watts
from farm.virtual.board import TOTAL, VirtualBoard
from farm.virtual.clocks import Load
from farm.virtual.history import interpolate_v
from farm.virtual.parameters import ClockDelay, Spread, draw_individual, read_simulation
from tests.unit.virtual_boards import SIMULATED, Clock, board_types, make_board


def hold_clocks(board: VirtualBoard, mode: int | None = None, gpu: bool = True) -> None:
    modes = {mode.id: mode for mode in board.board_type.power_modes}
    with board.change():
        if mode is not None:
            board.apply_power_mode(modes[mode])
        for cluster in board.clusters.values():
            cluster.clock.set_min(cluster.clock.max_hz)
        if board.gpu and gpu:
            board.gpu.clock.set_min(board.gpu.clock.max_hz)
            board.gpu.railgate = False
        if board.memory:
            board.memory.locked = True
            board.memory.rate_hz = board.memory.table[-1]


def settle(board: VirtualBoard, clock: Clock) -> None:
    clock.wait(20 * board.parameters.thermal.time_constant_s)
    board.advance()


def overheat(board: VirtualBoard) -> None:
    """A room so hot that the busy board passes its trip point, and the throttled one does not stay above it."""
    thermal = board.parameters.thermal
    board.parameters = dataclasses.replace(board.parameters, thermal=dataclasses.replace(thermal, ambient_c=64.0))


def test_a_nano_draws_what_was_published() -> None:
    """1.63 to 1.75 W in all and 0.37 to 0.41 W for the CPU at 1224 MHz, nothing for the gated GPU. About 5.1 W above
    idle.
    """
    board, clock = make_board("jetson-nano")
    with board.change():
        board.clusters["a57"].clock.set_limits(1_224_000_000, 1_224_000_000)
    board.set_load("the system", Load(cores=0.15))
    settle(board, clock)
    assert board.memory_hz == 1_600_000_000
    assert 1.63 <= board.exact_power_w(TOTAL) <= 1.75
    assert 0.36 <= board.exact_power_w("POM_5V_CPU") <= 0.42
    assert board.exact_power_w("POM_5V_GPU") == 0
    board, clock = make_board("jetson-nano")
    settle(board, clock)
    idle_w = board.exact_power_w(TOTAL)
    board.set_load("network", Load(gpu=1.0, memory=0.8))
    assert 4.5 <= board.exact_power_w(TOTAL) - idle_w <= 5.7


@pytest.mark.parametrize(
    ("gpu_hz", "traffic", "watts"),
    [
        (1_300_500_000, 0.53, (17.959, 9.396, 1.742, 1.212, 3.84)),
        (726_750_000, 0.39, (10.725, 3.42, 1.444, 1.216, 3.129)),
    ],
)
def test_a_tx2s_rails_draw_what_was_published(gpu_hz: int, traffic: float, watts: tuple[float, ...]) -> None:
    """VGG-19 on the GPU, one core busy (thynics/jetson_dvfs), within a tenth."""
    board, clock = make_board("jetson-tx2")
    hold_clocks(board, 0)
    with board.change():
        board.gpu.clock.set_limits(gpu_hz, gpu_hz)
        board.clusters["denver"].clock.set_limits(345_600_000, 345_600_000)
    board.set_load("network", Load("a57", cores=1, gpu=1.0, memory=traffic))
    settle(board, clock)
    rails = ("VDD_IN", "VDD_SYS_GPU", "VDD_SYS_SOC", "VDD_SYS_CPU", "VDD_SYS_DDR")
    assert [board.exact_power_w(rail) for rail in rails] == pytest.approx(watts, rel=0.1)


def test_an_idle_tx2_draws_what_was_published() -> None:
    """3.43 W with the GPU and the memory at their highest clocks, within a tenth."""
    board, clock = make_board("jetson-tx2")
    hold_clocks(board, 0)
    with board.change():
        for cluster in board.clusters.values():
            cluster.clock.set_limits(345_600_000, 345_600_000)
    settle(board, clock)
    assert board.exact_power_w("VDD_IN") == pytest.approx(3.43, rel=0.1)


@pytest.mark.parametrize("name", SIMULATED)
def test_power_grows_with_every_clock(name: str) -> None:
    """With all cores busy, each step of a cluster's or the GPU's clock costs more power."""
    board, clock = make_board(name)
    board.set_load("work", Load(cores=len(board.cpus), gpu=1.0, memory=0.5))
    clocks = [cluster.clock for cluster in board.clusters.values() if board.online_in(cluster)]
    for domain in clocks + ([board.gpu.clock] if board.gpu else []):
        drawn = []
        for hz in domain.table:
            with board.change():
                domain.set_limits(hz, hz)
            clock.wait(0.01)  # a change takes its time
            board.advance()
            drawn.append(sum(constant_w for constant_w, _ in board.history.pieces[-1].rails[-1:]))
        assert all(low < high for low, high in itertools.pairwise(drawn))


def test_below_the_knee_power_goes_with_frequency_above_it_steeper() -> None:
    """A Nano's core runs at 900 mV up to 1020 MHz: dynamic power per Hz is flat there, and grows after."""
    board, _ = make_board("jetson-nano")
    board.set_load("work", Load(cores=4))
    per_hz = {}
    for hz in (204_000_000, 614_400_000, 921_600_000, 1_224_000_000, 1_479_000_000):
        watts = []
        for cores in (0, 4):
            board.set_load("work", Load(cores=cores))
            with board.change():
                board.clusters["a57"].clock.set_limits(hz, hz)
            watts.append(board.exact_power_w("POM_5V_CPU"))
        per_hz[hz] = (watts[1] - watts[0]) / hz
    assert per_hz[204_000_000] == pytest.approx(per_hz[921_600_000], rel=1e-3)
    assert per_hz[921_600_000] < per_hz[1_224_000_000] < per_hz[1_479_000_000]


def test_voltage_is_linear_between_entries_and_flat_outside() -> None:
    """And 1 V without a table."""
    table = ((1000, 0.8), (2000, 1.0))
    assert [interpolate_v(table, hz) for hz in (0, 1000, 1500, 2000, 9000)] == pytest.approx([0.8, 0.8, 0.9, 1.0, 1.0])
    assert interpolate_v((), 5) == 1.0


def test_temperature_follows_the_closed_form() -> None:
    """T(t) = Tf + (T0 - Tf) exp(-t / tau), with the leakage's feedback in Tf and tau."""
    board, clock = make_board("jetson-nano")
    settle(board, clock)
    start_c = board.temperature_c
    hold_clocks(board)
    board.set_load("work", Load(cores=4, gpu=1.0, memory=1.0))
    thermal = board.parameters.thermal
    constant_w, per_c = board.history.pieces[-1].rails[-1]
    damping = 1 - thermal.resistance_c_per_w * per_c
    final_c = (thermal.ambient_c + thermal.resistance_c_per_w * constant_w) / damping
    for passed_s in (10, 50, 200):
        clock.now_s = board.history.pieces[-1].start_s + passed_s
        board.advance()
        expected_c = final_c + (start_c - final_c) * math.exp(-passed_s * damping / thermal.time_constant_s)
        assert board.temperature_c == pytest.approx(expected_c, abs=1e-9)


@pytest.mark.parametrize("name", SIMULATED)
def test_exact_energy_is_the_integral_of_power(name: str) -> None:
    """Over changes of clock, load, cores and temperature; compared with a fine trapezoid."""
    board, clock = make_board(name, seed=3, typical=False)
    board.parameters = dataclasses.replace(board.parameters, clock_delay_s=ClockDelay())  # changes between two steps
    rails = (*board.rail_names, TOTAL)
    start_s, step_s = board.advance(), 0.01
    sums = dict.fromkeys(rails, 0.0)
    for step in range(2000):
        if step == 300:
            hold_clocks(board)
        if step == 700:
            board.set_load("work", Load(cores=3, memory=0.5, gpu=0.7))
        if step == 1300:
            with board.change():
                board.set_online(board.cpus[-1], False)
        before = {rail: board.exact_power_w(rail) for rail in rails}
        clock.wait(step_s)
        for rail in rails:
            sums[rail] += step_s * (before[rail] + board.exact_power_w(rail)) / 2
    for rail in rails:
        assert board.exact_energy_j(rail, start_s, clock()) == pytest.approx(sums[rail], rel=1e-6, abs=1e-9)
        assert board.exact_energy_j(rail, start_s + 3.21, start_s + 14.2) < sums[rail] or not sums[rail]


def test_energy_of_a_time_that_is_not_known_is_refused() -> None:
    """Neither before the model began nor in the future."""
    board, clock = make_board()
    clock.wait(1)
    with pytest.raises(ValueError, match="known from"):
        board.exact_energy_j(TOTAL, clock() - 2, clock())
    with pytest.raises(ValueError, match="known from"):
        board.exact_energy_j(TOTAL, clock(), clock() + 1)


def test_a_hot_board_throttles_and_recovers_with_hysteresis() -> None:
    """It slows down at its trip point, and is let go only some degrees below it; the limits stay put throughout."""
    board, clock = make_board("jetson-nano")
    overheat(board)
    hold_clocks(board)
    board.set_load("work", Load(cores=4, gpu=1.0, memory=1.0))
    thermal = board.parameters.thermal
    changes = []
    throttled = False
    for _ in range(20_000):
        clock.wait(0.05)
        board.advance()
        if board.throttled != throttled:
            throttled = board.throttled
            changes.append((throttled, board.temperature_c))
        cpu = board.clusters["a57"]
        assert cpu.clock.max_hz == 1_479_000_000
        assert (cpu.hz < cpu.clock.max_hz / 1.9) == throttled
    assert len(changes) >= 4
    for now, temperature_c in changes:
        assert temperature_c == pytest.approx(thermal.trip_c if now else thermal.trip_c - thermal.hysteresis_c, abs=0.1)


def test_throttling_that_nobody_watched_is_the_same() -> None:
    """The model looks into every crossing itself: one long step gives what many short ones give."""
    boards = []
    for steps in (1, 5000):
        board, clock = make_board("jetson-nano")
        overheat(board)
        hold_clocks(board)
        board.set_load("work", Load(cores=4, gpu=1.0, memory=1.0))
        start_s = board.advance()
        for step in range(steps):
            clock.now_s = start_s + 1000 * (step + 1) / steps
            board.advance()
        boards.append((board.exact_energy_j(TOTAL, start_s, start_s + 1000), board.temperature_c))
    assert boards[0] == pytest.approx(boards[1], rel=1e-6)


def test_the_fan_cools_and_draws_power() -> None:
    """Full speed takes temperature away and adds its own power to the input."""
    board, clock = make_board("jetson-nano")
    hold_clocks(board)
    settle(board, clock)
    before = board.temperature_c, board.exact_power_w(TOTAL)
    with board.change():
        board.fan_pwm = 255
    settle(board, clock)
    assert board.temperature_c < before[0] - 2
    assert board.exact_power_w(TOTAL) > before[1] + 0.5


def test_seeds_vary_boards_within_the_stated_spread() -> None:
    """No factor leaves its range, both halves of it are used, and a seed is always the same board."""
    spread = Spread(capacitance=0.05, leakage=0.2, resistance=0.1, latency=0.03, sensor_gain=0.0)
    boards = [draw_individual(spread, seed) for seed in range(200)]
    for field in dataclasses.fields(Spread):
        limit = getattr(spread, field.name)
        factors = [getattr(board, field.name) for board in boards]
        assert 1 - limit <= min(factors) <= 1 - 0.8 * limit
        assert 1 + 0.8 * limit <= max(factors) <= 1 + limit
    assert draw_individual(spread, 7) == boards[7]


@pytest.mark.parametrize("name", SIMULATED)
def test_every_simulation_section_can_be_read(name: str) -> None:
    """Every domain, rail and cluster is there, and a busy board at room temperature does not throttle."""
    read_simulation(board_types()[name])
    board, clock = make_board(name)
    hold_clocks(board)
    board.set_load("work", Load(cores=len(board.cpus), memory=0.5))
    settle(board, clock)
    assert not board.throttled


def test_how_well_watts_are_known_is_said() -> None:
    """By the worst of the total's rails; a rail that nothing was fitted to is assumed."""
    assert describe_watts("jetson-tx2") == "watts fitted, 3%"
    assert describe_watts("jetson-tx2", ["VDD_MUX"]) == describe_watts("jetson-xavier-nx") == "watts assumed"
    assert describe_watts("a type of another farm") == "watts assumed"
