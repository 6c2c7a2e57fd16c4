"""The memory clock of Tegra boards, in debugfs: drivers `override` (T210) and `bpmp` (T186 and later), and the cap.

File sequences: rbonghi/jetson_stats, jtop/core/memory.py. Firmware drops an unknown rate without an error: read back
every rate that is held.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence

from device_agent.clocks.access import ClockAccess
from device_agent.clocks.cpufreq import write
from device_agent.errors import AgentError, ClockError, HelperUnavailableError, RefusedError
from device_agent.protocol import DomainClocks
from device_agent.protocol.texts import format_hz
from device_agent.sysfs import Tree, read_int

_DEBUG = "/sys/kernel/debug"
# Written by nvpmodel, in Hz, 0 for none; the second name is R36's.
_CAPS = ("/sys/kernel/nvpmodel_emc_cap/emc_iso_cap", "/sys/kernel/nvpmodel_clk_cap/emc")
LOCKED = "locked"


_OVERRIDE, _BPMP = f"{_DEBUG}/clk/override.emc", f"{_DEBUG}/bpmp/debug/clk/emc"


@dataclasses.dataclass(frozen=True)
class _Driver:
    """Files of one driver. `hold` lists the writes in order: a path and its value, None for the rate."""

    name: str
    lock: str
    now: tuple[str, ...]  # the first that can be read
    low: str
    high: str
    table: str  # in kHz; "" where there is none
    hold: tuple[tuple[str, str | None], ...]


_DRIVERS = (
    _Driver(
        name="override",
        lock=f"{_OVERRIDE}/clk_state",
        now=(f"{_DEBUG}/tegra_bwmgr/emc_rate", f"{_DEBUG}/clk/emc/clk_rate", f"{_OVERRIDE}/clk_rate"),
        low=f"{_DEBUG}/tegra_bwmgr/emc_min_rate",
        high=f"{_DEBUG}/tegra_bwmgr/emc_max_rate",
        table="",
        hold=((f"{_OVERRIDE}/clk_update_rate", None), (f"{_OVERRIDE}/clk_state", "1")),
    ),
    _Driver(
        name="bpmp",
        lock=f"{_BPMP}/mrq_rate_locked",
        now=(f"{_BPMP}/rate", f"{_DEBUG}/clk/emc/clk_rate"),
        low=f"{_BPMP}/min_rate",
        high=f"{_BPMP}/max_rate",
        table=f"{_DEBUG}/bpmp/debug/emc/possible_rates",
        hold=((f"{_BPMP}/mrq_rate_locked", "1"), (f"{_BPMP}/rate", None), (f"{_BPMP}/state", "1")),
    ),
)


class MemoryClock:
    """The memory clock. debugfs is root's: files closed to `tree` are read through `access`.

    `default_hz` is the board type's table, used within the board's bounds if the board has none.
    """

    def __init__(
        self, tree: Tree, driver: _Driver, access: ClockAccess | None = None, default_hz: Sequence[int] = ()
    ) -> None:
        self.driver = driver.name
        self._tree = tree
        self._files = driver
        self._access = access
        self._default_hz = tuple(default_hz)
        self._table_hz: tuple[int, ...] = ()

    def read(self) -> DomainClocks:
        """Read the clock; its governor is `locked` while it is held."""
        return DomainClocks(
            name="memory",
            min_hz=self._read(self._files.low),
            max_hz=self.read_high_hz(),
            current_hz=self.read_hz(),
            governor=LOCKED if self.is_locked() else None,
            available_hz=self.read_table_hz(),
        )

    def read_hz(self) -> int | None:
        return next((hz for hz in map(self._read, self._files.now) if hz is not None), None)

    def read_high_hz(self) -> int | None:
        return self._read(self._files.high)

    def is_locked(self) -> bool:
        return bool(self._read(self._files.lock))

    def read_table_hz(self) -> tuple[int, ...]:
        """The board's table; without one, the board type's from the lowest clock up."""
        if not self._table_hz:
            text = read_privileged(self._tree, self._access, self._files.table) if self._files.table else None
            table_hz = sorted({int(word) * 1000 for word in (text or "").split() if word.isdecimal()})
            if not table_hz:
                low_hz = self._read(self._files.low)
                table_hz = [hz for hz in self._default_hz if hz >= (low_hz or 0)]
                if low_hz is None:  # no access to it yet
                    return tuple(table_hz)
            self._table_hz = tuple(table_hz)
        return self._table_hz

    def hold(self, access: ClockAccess, hz: int) -> tuple[str, ...]:
        """Raise a lower cap, hold the rate, return notes; the caller reads back. Raises ClockError."""
        notes = []
        for cap in _CAPS:
            cap_hz = read_int(self._tree, cap)
            if cap_hz and cap_hz < hz:
                write(access, cap, str(hz))
                notes.append(f"raised the memory clock's cap from {format_hz(cap_hz)}")
        for path, text in self._files.hold:
            write(access, path, str(hz) if text is None else text)
        if not self.is_locked():
            raise ClockError(f"the memory clock does not lock: {self._files.lock} does not hold 1")
        return tuple(notes)

    def release(self, access: ClockAccess) -> None:
        """Let the clock follow the load again. Raises ClockError."""
        write(access, self._files.lock, "0")

    def _read(self, path: str) -> int | None:
        found = re.match(r"\s*(\d+)\b", read_privileged(self._tree, self._access, path) or "")
        return int(found.group(1)) if found else None


def read_privileged(tree: Tree, access: ClockAccess | None, path: str) -> str | None:
    """Read a root-only file, through `access` if necessary; None if unreadable."""
    try:
        return tree.read(path)
    except PermissionError:
        if access is None:
            return None
    except OSError:
        return None
    try:
        return access.read(path)
    except (OSError, AgentError):
        return None


def find_memory(
    tree: Tree, access: ClockAccess | None = None, driver: str = "", default_hz: Sequence[int] = ()
) -> MemoryClock | None:
    """Find the memory clock by its files; if all are inaccessible, the one of the type's `driver`."""
    expected = sorted(_DRIVERS, key=lambda known: known.name != driver)
    for known in expected:
        if read_privileged(tree, access, known.lock) is not None:
            return MemoryClock(tree, known, access, default_hz)
    hidden = expected[0].name == driver and _is_hidden(tree, access, expected[0].lock)
    return MemoryClock(tree, expected[0], access, default_hz) if hidden else None


def _is_hidden(tree: Tree, access: ClockAccess | None, path: str) -> bool:
    """Whether the file is inaccessible for now; the clock helper may start later."""
    try:
        tree.read(path)
    except PermissionError:
        if access is None:
            return True
        with contextlib.suppress(OSError, RefusedError):
            try:
                access.read(path)
            except HelperUnavailableError:
                return True
    except OSError:
        pass
    return False
