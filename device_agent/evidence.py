"""What the board can say about the conditions of a measurement: core clocks, temperatures, load.

Reads kernel files only; holding clocks and sampling power belong elsewhere. A value that cannot be read is missing.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from device_agent.protocol import Evidence


class Sensors:
    """The readable clock and temperature files under `root`, found once."""

    def __init__(self, root: Path = Path("/")) -> None:
        cpus = root / "sys/devices/system/cpu"
        self._clocks = {
            path.parent.parent.name.removeprefix("cpu"): path
            for path in sorted(cpus.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
        }
        self._zones: dict[str, Path] = {}
        for folder in sorted((root / "sys/class/thermal").glob("thermal_zone*"), key=_number):
            kind = read_text(folder / "type") or folder.name
            self._zones[kind if kind not in self._zones else f"{kind}.{_number(folder)}"] = folder / "temp"
        self._load = root / "proc/loadavg"

    @property
    def thermal_zones(self) -> tuple[str, ...]:
        """Names of the thermal zones, as they appear in `Evidence.temperature_c`."""
        return tuple(self._zones)

    def read(self) -> Evidence:
        """Read every sensor now; never raises."""
        clocks = {core: _read_number(path) for core, path in self._clocks.items()}  # kHz
        zones = {zone: _read_number(path) for zone, path in self._zones.items()}  # millidegrees
        load = (read_text(self._load) or "").split()
        return Evidence(
            cpu_freq_hz={core: khz * 1000 for core, khz in clocks.items() if khz is not None},
            temperature_c={zone: milli / 1000 for zone, milli in zones.items() if milli is not None},
            load_1min=float(load[0]) if load else None,
        )


def read_text(path: Path) -> str | None:
    """The stripped text of a kernel file, None if it cannot be read (a powered-down sensor returns an I/O error)."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return None


def _read_number(path: Path) -> int | None:
    with contextlib.suppress(ValueError):
        return int(read_text(path) or "")
    return None


def _number(folder: Path) -> int:
    found = re.search(r"\d+$", folder.name)
    return int(found.group()) if found else 0
