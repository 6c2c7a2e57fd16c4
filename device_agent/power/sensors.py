"""All power sensors of a board: its rails, and which of them sum to the total.

Reading over time is in `sampler.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from device_agent.clocks.access import ClockAccess
from device_agent.errors import SensorError
from device_agent.platforms.board_types import UNKNOWN, BoardType
from device_agent.power import ina3221, rapl
from device_agent.power.rail import Rail
from device_agent.protocol import SensorInfo
from device_agent.sysfs import Tree


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
        self._inputs = inputs
        self.note = note
        self.infos = tuple(SensorInfo(rail.name, rail.driver, note=rail.note) for rail in self._rails.values())

    @property
    def rails(self) -> tuple[str, ...]:
        return tuple(self._rails)

    def rail(self, name: str) -> Rail:
        return self._rails[name]

    def read(self, name: str) -> float | None:
        """The latest value of a rail in W; None for a counter that has just started. Raises SensorError."""
        power_w = self._rails[name].read()
        if power_w is not None and power_w <= 0 and name in self._inputs:
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
    counters = rapl.find_rails(tree, clock)
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
    packages = tuple(rail.name for rail in counters if rail.name.startswith(rapl.PACKAGE))
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
