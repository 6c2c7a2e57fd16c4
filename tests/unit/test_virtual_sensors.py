"""What a virtual board's INA3221s show of its power: averages over their update period, in steps."""

from __future__ import annotations

import dataclasses
import itertools
import statistics

import pytest

from farm.virtual.board import VirtualBoard
from farm.virtual.clocks import Load
from farm.virtual.tree import VirtualTree
from tests.unit.virtual_boards import Clock, board_types, make_board

_NANO = "/sys/bus/i2c/devices/6-0040/iio:device0"
# The driver's built-in set-up: 64 samples of two quantities on three channels at 1.1 ms.
_NANO_PERIOD_S = 64 * 2 * 3 * 0.0011


def silence(board: VirtualBoard) -> None:
    board.parameters = dataclasses.replace(
        board.parameters, sensor=dataclasses.replace(board.parameters.sensor, noise_lsb=0.0, supply_ohm=0.0)
    )


def find_updates(tree: VirtualTree, clock: Clock, path: str, seconds: float, step_s: float = 0.001) -> list[float]:
    moments, last = [], tree.read(path)
    for _ in range(round(seconds / step_s)):
        clock.wait(step_s)
        if (now := tree.read(path)) != last:
            moments.append(clock())
            last = now
    return moments


def test_a_nano_refreshes_its_values_every_422_ms() -> None:
    """Noise makes most values differ; they change at multiples of the update period only."""
    board, clock = make_board()
    moments = find_updates(VirtualTree(board), clock, f"{_NANO}/in_power0_input", 20)
    assert len(moments) > 20
    for moment in moments[1:]:
        periods = (moment - moments[0]) / _NANO_PERIOD_S
        assert periods == pytest.approx(round(periods), abs=0.01)


def test_a_value_is_the_average_over_the_period_before() -> None:
    """A load that came half-way through a period shows half; the next value shows all."""
    board, clock = make_board()
    silence(board)
    tree = VirtualTree(board)
    clock.wait(5)
    idle_mw = int(tree.read(f"{_NANO}/in_power2_input"))
    first = find_updates(tree, clock, f"{_NANO}/in_power2_input", 1, step_s=_NANO_PERIOD_S / 100)
    assert not first
    phase_s = tree.hardware.chips[0].phase * _NANO_PERIOD_S
    clock.now_s = phase_s + (int(clock() / _NANO_PERIOD_S) + 2.5) * _NANO_PERIOD_S
    board.set_load("work", Load(cores=4))
    busy_mw = board.exact_power_w("POM_5V_CPU") * 1000
    clock.wait(0.6 * _NANO_PERIOD_S)
    half_mw = int(tree.read(f"{_NANO}/in_power2_input"))
    clock.wait(_NANO_PERIOD_S)
    whole_mw = int(tree.read(f"{_NANO}/in_power2_input"))
    assert half_mw == pytest.approx((idle_mw + busy_mw) / 2, abs=45)
    assert whole_mw == pytest.approx(busy_mw, abs=45)


def test_values_are_multiples_of_the_converters_steps() -> None:
    """8 mA and 8 mV on a Nano; power is their product."""
    board, clock = make_board()
    tree = VirtualTree(board)
    for _ in range(20):
        clock.wait(1)
        for channel in range(3):
            volt, ampere, watt = (
                int(tree.read(f"{_NANO}/in_{quantity}{channel}_input")) for quantity in ("voltage", "current", "power")
            )
            assert volt % 8 == 0
            assert ampere % 8 == 0
            assert watt == volt * ampere // 1000


def test_the_average_of_many_values_is_the_power() -> None:
    """Noise of half a step makes averages finer than a step."""
    board, clock = make_board()
    tree = VirtualTree(board)
    board.set_load("work", Load(cores=2))
    clock.wait(1000)
    values = []
    for _ in range(1000):
        clock.wait(_NANO_PERIOD_S)
        values.append(int(tree.read(f"{_NANO}/in_power0_input")) / 1000)
    # The voltage is rounded to 8 mV, which noise does not smooth out.
    assert statistics.fmean(values) == pytest.approx(board.exact_power_w("POM_5V_IN"), rel=0.003)


def test_hwmon_chips_show_millivolt_and_milliampere_and_a_decoy() -> None:
    """An Orin Nano's labels, its product as power, and the sum of shunt voltages that is no rail."""
    board, clock = make_board("jetson-orin-nano-8gb")
    silence(board)
    tree = VirtualTree(board)
    clock.wait(1)
    (hwmon,) = tree.names("/sys/bus/i2c/devices/1-0040/hwmon")
    folder = f"/sys/class/hwmon/{hwmon}"
    labels = [tree.read(f"{folder}/in{index}_label") for index in (1, 2, 3, 7)]
    assert labels == ["VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC", "sum of shunt voltages"]
    for index, rail in enumerate(labels[:3], start=1):
        power_w = int(tree.read(f"{folder}/in{index}_input")) * int(tree.read(f"{folder}/curr{index}_input")) / 1e6
        assert power_w == pytest.approx(board.exact_power_w(rail), abs=0.021 + 0.002 * power_w)
    assert not [name for name in tree.names(folder) if name.startswith("power")]


def test_samples_set_the_update_period() -> None:
    """6.6 ms with one sample, as at power-on; root may ask for more."""
    board, clock = make_board("jetson-orin-nano-8gb")
    tree = VirtualTree(board)
    folder = f"/sys/bus/i2c/devices/1-0040/hwmon/{tree.names('/sys/bus/i2c/devices/1-0040/hwmon')[0]}"
    board.set_load("work", Load(cores=2))
    fast = find_updates(tree, clock, f"{folder}/curr1_input", 0.5, step_s=0.0005)
    assert min(b - a for a, b in itertools.pairwise(fast)) == pytest.approx(0.0066, abs=0.0006)
    tree.write(f"{folder}/samples", "60")
    assert tree.read(f"{folder}/samples") == "64"
    slow = find_updates(tree, clock, f"{folder}/curr1_input", 20)
    assert min(b - a for a, b in itertools.pairwise(slow)) == pytest.approx(0.4224, abs=0.002)


def test_a_sensors_gain_is_off_by_no_more_than_its_spread() -> None:
    """Sensors are exact by default; a spread makes boards disagree with the model by a fixed factor."""
    board_type = board_types()["jetson-nano"]
    board_type = dataclasses.replace(
        board_type, simulation=board_type.simulation | {"spread": {"sensor_gain": 0.05, "capacitance": 0.0}}
    )
    clock = Clock()
    board = VirtualBoard(board_type, 4, clock)
    silence(board)
    board.set_load("work", Load(cores=4, gpu=1.0, memory=1.0))
    clock.wait(1)
    assert board.individual.sensor_gain != 1
    shown_w = int(VirtualTree(board).read(f"{_NANO}/in_power0_input")) / 1000
    assert shown_w == pytest.approx(board.exact_power_w("POM_5V_IN") * board.individual.sensor_gain, rel=0.01)


def test_triggered_mode_converts_at_every_read() -> None:
    """A load shows at once, not an update period later."""
    board, clock = make_board()
    tree = VirtualTree(board)
    tree.write(f"{_NANO}/running_mode", "0")
    clock.wait(1)
    board.set_load("work", Load(cores=4))
    clock.wait(0.01)
    shown_w = int(tree.read(f"{_NANO}/in_power2_input")) / 1000
    assert shown_w == pytest.approx(board.exact_power_w("POM_5V_CPU"), abs=0.13)
    with pytest.raises(OSError, match="Invalid"):
        tree.write(f"{_NANO}/running_mode", "7")


def test_a_tx2_has_its_carriers_sensors_too() -> None:
    """Four chips on one bus, with the rails that the board type names."""
    board, _ = make_board("jetson-tx2")
    tree = VirtualTree(board)
    chips = [name for name in tree.names("/sys/bus/i2c/devices") if "-004" in name]
    assert chips == ["0-0040", "0-0041", "0-0042", "0-0043"]
    assert tree.read("/sys/bus/i2c/drivers/ina3221x/0-0042/iio:device2/rail_name_0") == "VDD_MUX"
    assert board.total_rails == ("VDD_IN", "VDD_MUX")
