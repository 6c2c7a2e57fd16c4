"""RAPL, the energy counters of x86 processors, through the kernel's powercap files.

Counters become power here, to be sampled like other sensors. Since Linux 5.10 they are root-only; unreadable ones count
as absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from device_agent.errors import SensorError
from device_agent.power.rail import Rail, check_power, open_reader, read_number
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
