"""All power sensors of a board: its rails, and which of them sum to the total.

Reading over time is in `sampler.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence

from device_agent.board_types import UNKNOWN, BoardType
from device_agent.clocks.access import ClockAccess
from device_agent.errors import SensorError
from device_agent.power import ina3221
from device_agent.power.rail import Rail, check_power, open_reader, read_number
from device_agent.protocol import SensorInfo
from device_agent.sysfs import Tree, list_names, read_int, read_text

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
    chips = _with_own_names(ina3221.find_rails(tree, board_type, access))
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
