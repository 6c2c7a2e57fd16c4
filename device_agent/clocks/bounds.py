"""Clocks with a lower and an upper bound (cpufreq, devfreq): read them, and hold one by closing its bounds.

Closing the bounds works with every governor, so governors stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from device_agent.clocks.access import ClockAccess
from device_agent.errors import ClockError
from device_agent.protocol import DomainClocks
from device_agent.protocol.texts import format_hz
from device_agent.sysfs import Tree, list_names, read_int, read_ints, read_text

# The hardware's own reading in kHz, root only; `scaling_cur_freq` may just repeat the request.
TRUE_FREQ = "cpuinfo_cur_freq"
_CLASS = "/sys/class/devfreq"
# Names of Tegra GPUs in the device tree (rbonghi/jetson_stats, jtop/core/gpu.py; gm20b: T210's chip).
_NODES = ("gpu", "gm20b", "gp10b", "gv11b", "ga10b")


@dataclasses.dataclass(frozen=True)
class BoundFiles:
    """File names of one driver, and their unit."""

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


@dataclasses.dataclass(frozen=True)
class BoundedClock:
    """One clock's files in `folder`. Unreadable values are None or empty: a core may go offline at any moment."""

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
        table = read_ints(self.tree, f"{self.folder}/{self.files.table}")
        return tuple(sorted({value * self.files.unit_hz for value in table}))

    def read_governor(self) -> str | None:
        return read_text(self.tree, f"{self.folder}/{self.files.governor}")

    def is_held_at(self, hz: int) -> bool:
        return self.read_low_hz() == self.read_high_hz() == hz

    def hold(self, access: ClockAccess, name: str, hz: int) -> int:
        """Close the bounds around `hz`; return their value now, which differs if the driver rounds or caps.

        Raises ClockError when they do not close.
        """
        low_hz = self.read_low_hz()
        # The kernel refuses or clamps a lower bound above the upper one: going up, the upper one moves first.
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
    """Write one value. Raises ClockError naming the file if the kernel refuses, and as `ClockAccess.write`."""
    try:
        access.write(path, text)
    except OSError as error:
        raise ClockError(f"{path} does not take {text}: {error.strerror or error}") from error


class GpuClock:
    """A GPU's devfreq folder and its device's."""

    def __init__(self, tree: Tree, device: str) -> None:
        self.device = device
        self._tree = tree
        self._clock = BoundedClock(tree, f"{_CLASS}/{device}", DEVFREQ)
        self._table_hz: tuple[int, ...] = ()
        self._gating: tuple[str, str] | None = None  # the file that keeps power on, and its previous value

    def read(self) -> DomainClocks:
        """Read the clock. While the GPU is power-gated, its current clock may be stale."""
        clock = self._clock
        low_hz, high_hz, now_hz = clock.read_low_hz(), clock.read_high_hz(), clock.read_now_hz()
        return DomainClocks("gpu", low_hz, high_hz, now_hz, clock.read_governor(), self.read_table_hz())

    def read_hz(self) -> int | None:
        return self._clock.read_now_hz()

    def read_load(self) -> float | None:
        """The share of time that the GPU was busy lately, by its driver; None if not reported."""
        permille = read_int(self._tree, f"{self._clock.folder}/device/load")
        return None if permille is None else permille / 1000

    def read_table_hz(self) -> tuple[int, ...]:
        self._table_hz = self._table_hz or self._clock.read_table_hz()
        return self._table_hz

    def hold(self, access: ClockAccess, hz: int) -> int:
        """Keep the GPU powered and hold its clock; return the clock reached. Raises ClockError."""
        self.keep_power(access)
        return self._clock.hold(access, "gpu", hz)

    def keep_power(self, access: ClockAccess) -> None:
        """Keep the GPU powered. Raises ClockError.

        A gated GPU's first kernel would pay for power-up, and its clock could not be read back.
        """
        device = f"{self._clock.folder}/device"
        for file, on in (("railgate_enable", "0"), ("power/control", "on")):
            state = read_text(self._tree, f"{device}/{file}")
            if state is not None:
                if state != on:
                    write(access, f"{device}/{file}", on)
                    self._gating = f"{device}/{file}", state
                break

    def release(self, access: ClockAccess) -> None:
        """Allow power gating again; the limits belong to nvpmodel. Raises ClockError."""
        if self._gating is not None:
            write(access, *self._gating)
            self._gating = None

    def forget(self) -> None:
        """Drop the saved state: the transaction has restored the files."""
        self._gating = None

    def is_held_at(self, hz: int) -> bool:
        return self._clock.is_held_at(hz)


def find_gpu(tree: Tree, devices: Collection[str] = ()) -> GpuClock | None:
    """Find the GPU's devfreq device: one of `devices`, else by its own or its device-tree node's name."""
    names = list_names(tree, _CLASS)
    for name in names:
        if name in devices:
            return GpuClock(tree, name)
    for name in names:
        node = read_text(tree, f"{_CLASS}/{name}/device/of_node/name")
        if name.rpartition(".")[2] in _NODES or node in _NODES:
            return GpuClock(tree, name)
    return None
