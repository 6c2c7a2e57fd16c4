"""All power sensors of a board: its rails, and which of them sum to the total.

Drivers: Texas Instruments' INA3221 under NVIDIA's IIO driver of R32 (mW) and mainline's hwmon driver (mV, mA), whose
steps are of TI's data sheet (shunt 40 uV, bus 8 mV); RAPL. Chips and rails are read from the board; board types name
rails that are unreadable. Reading over time is in `sampler.py`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import time
from collections.abc import Callable, Container, Sequence

from device_agent.board_types import UNKNOWN, BoardType
from device_agent.clocks.access import ClockAccess
from device_agent.errors import AgentError, SensorError
from device_agent.power.rail import Rail, check_power, open_reader, read_number
from device_agent.protocol import SensorInfo
from device_agent.protocol.hardware import PowerChip
from device_agent.sysfs import Tree, list_names, read_int, read_text

IIO, HWMON = "ina3221-iio", "ina3221-hwmon"
SHUNT_STEP_V, BUS_STEP_V = 40e-6, 8e-3
# The slowest setting built into a known driver: 64 averages of 1.1 ms + 1.1 ms on three channels
# (150balbes/Jetson-Nano, nvidia/drivers/staging/iio/meter/ina3221.c).
LONGEST_PERIOD_S = 0.422
# The longest conversion: 8.244 ms for both quantities of three channels, without averaging (TI INA3221 data sheet).
_LONGEST_UNAVERAGED_S = 3 * 2 * 8.244e-3
_DEVICES = "/sys/bus/i2c/devices"
_CHANNELS = 3
_BY_PLACE = "its name may not be read: named by its place on the chip, as the board type says"
_NAMELESS = "its name may not be read, and the board type does not say what is there"


def find_ina3221_rails(tree: Tree, board_type: BoardType, access: ClockAccess | None = None) -> list[Rail]:
    """Every connected channel of every INA3221, in the order of the chips' addresses."""
    rails: list[Rail] = []
    for device in list_names(tree, _DEVICES, "*-*"):
        if not (read_text(tree, f"{_DEVICES}/{device}/name") or "").startswith("ina3221"):
            continue
        folder = f"{_DEVICES}/{device}"
        chip = _find_chip(board_type, device)
        # R28 calls the folder `iio_device`; later releases number it.
        for child in (list_names(tree, folder, "iio:device*") or list_names(tree, folder, "iio_device"))[:1]:
            rails += _find_iio(tree, f"{folder}/{child}", device, chip, access)
        for child in list_names(tree, f"{folder}/hwmon", "hwmon*")[:1]:
            rails += _find_hwmon(tree, f"{folder}/hwmon/{child}", device, chip)
    return rails


def _find_chip(board_type: BoardType, device: str) -> PowerChip | None:
    """The board type's entry for a chip such as `6-0040`; bus numbers change between releases, addresses do not."""
    chips = board_type.power.chips
    for chip in chips:
        if fnmatch.fnmatch(device, chip.address):
            return chip
    alike = [chip for chip in chips if chip.address.partition("-")[2] == device.partition("-")[2]]
    return alike[0] if len(alike) == 1 else None


def _name(read: str, device: str, chip: PowerChip | None, channel: int) -> tuple[str, str]:
    """A rail's name ("": nothing connected) and a note on it, from the name read ("": none) or its place."""
    if read:
        return ("", "") if "NC" in read.split() or read.startswith("NC") else (read, "")
    if chip is None:
        return f"ina3221-{device}-{channel}", _NAMELESS
    return (chip.rails[channel], _BY_PLACE) if channel < len(chip.rails) else ("", "")


def _find_iio(tree: Tree, folder: str, device: str, chip: PowerChip | None, access: ClockAccess | None) -> list[Rail]:
    rails: list[Rail] = []
    for channel in range(_CHANNELS):
        if not tree.exists(f"{folder}/in_power{channel}_input"):
            continue
        path = f"{folder}/rail_name_{channel}"
        read = read_text(tree, path) or ""
        if not read and access is not None:  # names are root-only
            with contextlib.suppress(OSError, AgentError):
                read = access.read(path).strip()
        name, note = _name(read, device, chip, channel)
        if name:
            rails.append(_IioRail(tree, folder, channel, name, device, note, chip.shunt_ohm if chip else None))
    return rails


def _find_hwmon(tree: Tree, folder: str, device: str, chip: PowerChip | None) -> list[Rail]:
    rails: list[Rail] = []
    # Inputs beyond the third are shunt voltages and their sum.
    for channel in range(1, _CHANNELS + 1):
        connected = tree.exists(f"{folder}/in{channel}_input") and tree.exists(f"{folder}/curr{channel}_input")
        if not connected or read_int(tree, f"{folder}/in{channel}_enable") == 0:
            continue
        label = read_text(tree, f"{folder}/in{channel}_label") or ""
        name, note = _name(label, device, chip, channel - 1)
        if name and "sum of shunt" not in name:
            shunt_uohm = read_int(tree, f"{folder}/shunt{channel}_resistor")
            shunt_ohm = shunt_uohm / 1e6 if shunt_uohm else chip.shunt_ohm if chip else None
            rails.append(_HwmonRail(tree, folder, channel, name, device, note, shunt_ohm))
    return rails


class _IioRail:
    """A channel of the IIO driver, which multiplies voltage and current."""

    driver = IIO

    def __init__(
        self, tree: Tree, folder: str, channel: int, name: str, chip: str, note: str, shunt_ohm: float | None
    ) -> None:
        self.name, self.chip, self.note = name, chip, note
        self._tree = tree
        self._power = open_reader(tree, f"{folder}/in_power{channel}_input")
        self._voltage = f"{folder}/in_voltage{channel}_input"
        self._current = f"{folder}/in_current{channel}_input"
        self._step_a = SHUNT_STEP_V / shunt_ohm if shunt_ohm else None
        self._highest_w = 0.0

    def start(self) -> None:
        self._highest_w = 0.0

    def read(self) -> float:
        power_w = check_power(read_number(self._power, self.name) / 1000, self.name)
        if power_w > self._highest_w:
            self._highest_w = power_w
        return power_w

    def read_current_a(self) -> float | None:
        current_ma = read_int(self._tree, self._current)
        return None if current_ma is None else current_ma / 1000

    def resolution_w(self) -> float | None:
        voltage_mv = read_int(self._tree, self._voltage)
        if self._step_a is None or not voltage_mv or voltage_mv < 0:
            return None
        voltage_v = voltage_mv / 1000
        return self._step_a * voltage_v + BUS_STEP_V * self._highest_w / voltage_v

    def longest_period_s(self) -> float:
        return LONGEST_PERIOD_S


class _HwmonRail:
    """A channel of the hwmon driver: voltage and current are multiplied here."""

    driver = HWMON

    def __init__(
        self, tree: Tree, folder: str, channel: int, name: str, chip: str, note: str, shunt_ohm: float | None
    ) -> None:
        self.name, self.chip, self.note = name, chip, note
        self._tree, self._interval, self._samples = tree, f"{folder}/update_interval", f"{folder}/samples"
        self._millivolts = open_reader(tree, f"{folder}/in{channel}_input")
        self._milliamps = open_reader(tree, f"{folder}/curr{channel}_input")
        self._step_a = SHUNT_STEP_V / shunt_ohm if shunt_ohm else None
        self.start()

    def start(self) -> None:
        self._voltage_v = self._current_a = self._highest_a = 0.0

    def read(self) -> float:
        self._current_a = read_number(self._milliamps, self.name) / 1000
        self._voltage_v = read_number(self._millivolts, self.name) / 1000
        power_w = check_power(self._voltage_v * self._current_a, self.name)
        if self._current_a > self._highest_a:
            self._highest_a = self._current_a
        return power_w

    def read_current_a(self) -> float | None:
        return self._current_a

    def resolution_w(self) -> float | None:
        if self._step_a is None or self._voltage_v <= 0:
            return None
        return self._step_a * self._voltage_v + BUS_STEP_V * self._highest_a

    def longest_period_s(self) -> float:
        # Some kernels leave averaging out of the interval (6.1): take the longer.
        interval_s = (read_int(self._tree, self._interval) or 0) / 1000
        if interval_s <= 0:
            return LONGEST_PERIOD_S
        samples = read_int(self._tree, self._samples) or 1
        return interval_s * max(1, samples) if interval_s <= _LONGEST_UNAVERAGED_S else interval_s


DRIVER = "rapl"
# Prefix of the domains with a whole processor's energy; `psys` would count it twice.
PACKAGE = "package"
_FOLDER = "/sys/class/powercap"
# Counters advance once per millisecond; power needs at least ten of these.
_INTERVAL_S = 0.01
# After a longer pause the value would be the pause's mean.
_PAUSE_S = 1.0
# Default unit (Intel SDM volume 3, section "RAPL interfaces").
_COUNT_J = 61e-6
# A rail of these parts alone may be off while the board runs (tegrastats of an idle AGX Xavier: GPU 0, CV 0).
_GATED = frozenset({"VDD", "GPU", "CV"})
DEAD = "0 W throughout, while the board runs"


def find_rails(tree: Tree, clock: Callable[[], float] = time.monotonic) -> list[Rail]:
    """Every readable domain. A second processor's package has its number in its name."""
    rails: list[Rail] = []
    for domain in list_names(tree, _FOLDER, "intel-rapl:*"):
        folder = f"{_FOLDER}/{domain}"
        if read_int(tree, f"{folder}/energy_uj") is None:
            continue
        name = read_text(tree, f"{folder}/name") or domain
        if any(rail.name == name for rail in rails):  # `core` of the second package
            name = f"{name}.{domain.partition(':')[2]}"
        rails.append(RaplRail(tree, folder, name, domain, clock))
    return rails


class RaplRail:
    """An energy counter as power: the mean since the last value."""

    driver = DRIVER
    note = ""

    def __init__(self, tree: Tree, folder: str, name: str, domain: str, clock: Callable[[], float]) -> None:
        self.name, self.chip = name, domain
        self._energy = open_reader(tree, f"{folder}/energy_uj")
        self._range_uj = read_int(tree, f"{folder}/max_energy_range_uj")
        self._clock = clock
        self.start()

    def start(self) -> None:
        self._count_uj = -1
        self._counted_s = 0.0
        self._power_w: float | None = None

    def read(self) -> float | None:
        count_uj, now_s = read_number(self._energy, self.name), self._clock()
        passed_s = now_s - self._counted_s
        if self._count_uj < 0 or passed_s > _PAUSE_S:
            self._count_uj, self._counted_s, self._power_w = count_uj, now_s, None
        elif passed_s >= _INTERVAL_S and count_uj != self._count_uj:
            used_uj = count_uj - self._count_uj
            self._count_uj, self._counted_s, self._power_w = count_uj, now_s, None
            if used_uj < 0:
                if not self._range_uj:
                    raise SensorError(f"{self.name} went backwards, and does not say where it wraps around")
                used_uj += self._range_uj
            self._power_w = check_power(used_uj / 1e6 / passed_s, self.name)
        return self._power_w

    def read_current_a(self) -> float | None:
        return None

    def resolution_w(self) -> float | None:
        return _COUNT_J / _INTERVAL_S

    def longest_period_s(self) -> float:
        return _INTERVAL_S


class PowerSensors:
    """A board's rails. `total_rails` sum to `total_scope`; both are empty without a total.

    `inputs` are rails that feed a whole module: never at 0 W on a running board. `infos` describe each sensor;
    `calibrate.measure_sensors` completes them.
    """

    def __init__(
        self,
        rails: Sequence[Rail] = (),
        total_rails: tuple[str, ...] = (),
        total_scope: str = "",
        note: str = "",
        inputs: tuple[str, ...] = (),
    ) -> None:
        self._rails = {rail.name: rail for rail in rails}
        self.total_rails, self.total_scope = total_rails, total_scope
        self.inputs = inputs
        self.note = note
        self.infos = tuple(SensorInfo(rail.name, rail.driver, note=rail.note) for rail in self._rails.values())

    @property
    def rails(self) -> tuple[str, ...]:
        return tuple(self._rails)

    def leave_out(self, names: Container[str]) -> None:
        """Drop rails that cannot be read; a total with one of them is unknown."""
        if lost := [name for name in self.total_rails if name in names]:
            self.total_rails, self.total_scope, self.note = (), "", f"no energy: {', '.join(lost)} cannot be read"
        self._rails = {name: rail for name, rail in self._rails.items() if name not in names}

    def is_always_on(self, name: str) -> bool:
        """Whether a rail of the total cannot be at 0 W for long."""
        return name in self.total_rails and not _GATED.issuperset(name.split("_"))

    def rail(self, name: str) -> Rail:
        return self._rails[name]

    def read(self, name: str) -> float | None:
        """The latest value of a rail in W; None for a counter that has just started. Raises SensorError."""
        power_w = self._rails[name].read()
        if power_w is not None and power_w <= 0 and name in self.inputs:
            raise SensorError(f"{name} cannot be {power_w:g} W while the board runs")
        return power_w


def find_sensors(
    tree: Tree,
    board_type: BoardType | None,
    access: ClockAccess | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> PowerSensors:
    """Find every sensor of the board. `access` reads root-only rail names. Never raises."""
    board_type = board_type or UNKNOWN
    chips = _with_own_names(find_ina3221_rails(tree, board_type, access))
    counters = find_rails(tree, clock)
    rails = [*chips, *counters]
    names = {rail.name for rail in rails}
    power = board_type.power
    if power.total:
        missing = [name for name in power.total if name not in names]
        if missing:
            note = f"no total: the board lacks {', '.join(missing)}" if rails else "no power sensor"
            return PowerSensors(rails, note=note)
        inputs = power.total if len(power.total) == 1 else ()
        if power.board_total and names.issuperset(power.board_total):
            return PowerSensors(rails, power.total + power.board_total, "board", inputs=inputs)
        return PowerSensors(rails, power.total, power.total_scope, inputs=inputs)
    packages = tuple(rail.name for rail in counters if rail.name.startswith(PACKAGE))
    if packages:
        return PowerSensors(rails, packages, "processor" if len(packages) == 1 else f"{len(packages)} processors")
    note = "no total: the board type does not say which rails make it" if rails else "no power sensor"
    return PowerSensors(rails, note=note)


def _with_own_names(rails: list[Rail]) -> list[Rail]:
    """Make rail names unique by their chips."""
    seen: set[str] = set()
    for rail in rails:
        if rail.name in seen:
            rail.name = f"{rail.name}.{rail.chip}"
        seen.add(rail.name)
    return rails
