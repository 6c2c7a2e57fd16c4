"""The GPU's clock: found among the devfreq devices by name, held like a CPU's, with its power gating off meanwhile."""

from __future__ import annotations

from collections.abc import Collection

from device_agent.clocks.access import ClockAccess
from device_agent.clocks.bounds import DEVFREQ, BoundedClock, write
from device_agent.protocol import DomainClocks
from device_agent.sysfs import Tree, list_names, read_int, read_text

_CLASS = "/sys/class/devfreq"
# Names of Tegra GPUs in the device tree (rbonghi/jetson_stats, jtop/core/gpu.py; gm20b: T210's chip).
_NODES = ("gpu", "gm20b", "gp10b", "gv11b", "ga10b")


class GpuClock:
    """A GPU's devfreq folder and its device's."""

    def __init__(self, tree: Tree, device: str) -> None:
        self.device = device
        self._tree = tree
        self._clock = BoundedClock(tree, f"{_CLASS}/{device}", DEVFREQ)
        self._table_hz: tuple[int, ...] = ()
        self._gating: tuple[str, str] | None = None  # the file that kept power on, and what it held before

    def read(self) -> DomainClocks:
        """The clock as it is now. While the GPU is cut off from power its current clock may be an old one."""
        clock = self._clock
        low_hz, high_hz, now_hz = clock.read_low_hz(), clock.read_high_hz(), clock.read_now_hz()
        return DomainClocks("gpu", low_hz, high_hz, now_hz, clock.read_governor(), self.read_table_hz())

    def read_hz(self) -> int | None:
        """The clock now; None if it cannot be read."""
        return self._clock.read_now_hz()

    def read_load(self) -> float | None:
        """The share of the time that it was busy of late, as its driver says; None where it does not."""
        permille = read_int(self._tree, f"{self._clock.folder}/device/load")
        return None if permille is None else permille / 1000

    def read_table_hz(self) -> tuple[int, ...]:
        """What the driver offers."""
        self._table_hz = self._table_hz or self._clock.read_table_hz()
        return self._table_hz

    def hold(self, access: ClockAccess, hz: int) -> int:
        """Keep the GPU powered, hold its clock; return what the driver made of it. Raises ClockError."""
        self.keep_power(access)
        return self._clock.hold(access, "gpu", hz)

    def keep_power(self, access: ClockAccess) -> None:
        """Keep the GPU powered. Raises ClockError.

        A gated GPU's first kernel would pay for power coming back, and its clock could not be read back.
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
        """Let the GPU lose its power again when it is idle; its limits are nvpmodel's to set. Raises ClockError."""
        if self._gating is not None:
            write(access, *self._gating)
            self._gating = None

    def forget(self) -> None:
        """Everything was put back by who keeps what was before: there is nothing to release."""
        self._gating = None

    def is_held_at(self, hz: int) -> bool:
        """Whether both bounds are `hz`."""
        return self._clock.is_held_at(hz)


def find_gpu(tree: Tree, devices: Collection[str] = ()) -> GpuClock | None:
    """The devfreq device that is a GPU: one of `devices`, else by its own or its device-tree node's name."""
    names = list_names(tree, _CLASS)
    for name in names:
        if name in devices:
            return GpuClock(tree, name)
    for name in names:
        node = read_text(tree, f"{_CLASS}/{name}/device/of_node/name")
        if name.rpartition(".")[2] in _NODES or node in _NODES:
            return GpuClock(tree, name)
    return None
