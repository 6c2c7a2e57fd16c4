"""Clocks with a lower and an upper bound, as cpufreq and devfreq have them: read, and held by closing the bounds.

Which folder a clock has is known by `cpufreq` and `devfreq`. Closing the bounds works with every governor, so governors
are left alone.
"""

from __future__ import annotations

import dataclasses

from device_agent.clocks.access import ClockAccess
from device_agent.errors import ClockError
from device_agent.protocol.texts import format_hz
from device_agent.sysfs import Tree, read_int, read_ints, read_text


@dataclasses.dataclass(frozen=True)
class BoundFiles:
    """Names of one driver's files, and the unit they are in."""

    low: str
    high: str
    now: str
    table: str
    governor: str
    unit_hz: int


CPUFREQ = BoundFiles(
    "scaling_min_freq",
    "scaling_max_freq",
    "scaling_cur_freq",
    "scaling_available_frequencies",
    "scaling_governor",
    1000,
)
DEVFREQ = BoundFiles("min_freq", "max_freq", "cur_freq", "available_frequencies", "governor", 1)


# What the hardware says of itself, in kHz, for root alone; `scaling_cur_freq` may only repeat what was asked for.
TRUE_FREQ = "cpuinfo_cur_freq"


@dataclasses.dataclass(frozen=True)
class BoundedClock:
    """One clock's files in `folder`. What cannot be read is None or empty: a core may go offline at any moment."""

    tree: Tree
    folder: str
    files: BoundFiles

    def read_low_hz(self) -> int | None:
        return self._read(self.files.low)

    def read_high_hz(self) -> int | None:
        return self._read(self.files.high)

    def read_now_hz(self) -> int | None:
        return self._read(self.files.now)

    def read_table_hz(self) -> tuple[int, ...]:
        """What the driver offers, ascending."""
        table = read_ints(self.tree, f"{self.folder}/{self.files.table}")
        return tuple(sorted({value * self.files.unit_hz for value in table}))

    def read_governor(self) -> str | None:
        return read_text(self.tree, f"{self.folder}/{self.files.governor}")

    def is_held_at(self, hz: int) -> bool:
        """Whether both bounds are `hz`."""
        return self.read_low_hz() == self.read_high_hz() == hz

    def hold(self, access: ClockAccess, name: str, hz: int) -> int:
        """Close the bounds around `hz`; return where they are now, which differs where the driver rounds or caps.

        Raises ClockError when they do not close.
        """
        low_hz = self.read_low_hz()
        # A lower bound above the upper one is refused or clamped by the kernel: going up the upper one moves first.
        order = [self.files.high, self.files.low]
        if low_hz is not None and hz < low_hz:
            order.reverse()
        for file in order:
            write(access, f"{self.folder}/{file}", str(hz // self.files.unit_hz))
        low_hz, high_hz = self.read_low_hz(), self.read_high_hz()
        if low_hz is None or low_hz != high_hz:
            raise ClockError(
                f"{name} does not hold {format_hz(hz)}: its limits are {format_hz(low_hz)} and {format_hz(high_hz)}"
            )
        return low_hz

    def _read(self, file: str) -> int | None:
        value = read_int(self.tree, f"{self.folder}/{file}")
        return None if value is None else value * self.files.unit_hz


def write(access: ClockAccess, path: str, text: str) -> None:
    """Write one value. Raises ClockError naming the file where the kernel refuses, and as `ClockAccess.write`."""
    try:
        access.write(path, text)
    except OSError as error:
        raise ClockError(f"{path} does not take {text}: {error.strerror or error}") from error
