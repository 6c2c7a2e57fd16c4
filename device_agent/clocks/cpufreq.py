"""Clocks with a lower and an upper bound (cpufreq, devfreq), held by closing the bounds; and which cores are online.

An offline core may take its cpufreq folder along, and a cluster's last one takes the policy. So files are looked up
through an online core each time. Closing the bounds works with every governor, so governors stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Sequence

from device_agent.clocks.access import ClockAccess
from device_agent.errors import AgentError, ClockError
from device_agent.protocol import DomainClocks, texts
from device_agent.protocol.texts import format_hz
from device_agent.sysfs import Tree, list_names, natural_key, read_int, read_ints, read_text

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


CPUS = "/sys/devices/system/cpu"


# The boot core: many kernels cannot take it offline, and no point requires it.
BOOT_CPU = 0


class CpuCluster:
    """Cores with one clock. `groups` are the cores of each cpufreq policy, usually one.

    `default_hz` is the board type's table, for a cluster never seen online; `floors` pairs a CPU clock with the lowest
    memory clock beside it.
    """

    def __init__(
        self,
        tree: Tree,
        name: str,
        cpus: Sequence[int],
        groups: Sequence[Sequence[int]] = (),
        isolated: bool = False,
        default_hz: Sequence[int] = (),
        floors: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.name = name
        self.cpus = tuple(cpus)
        self.isolated = isolated
        self._tree = tree
        self._groups = tuple(map(tuple, groups)) or (self.cpus,)
        self._default_hz = tuple(default_hz)
        self._floors = tuple(floors)
        self._table_hz: tuple[int, ...] = ()
        self._folders: dict[int, str] = {}  # valid while the same cores are online
        self._online: frozenset[int] = frozenset()

    def online_of(self, online: Collection[int]) -> tuple[int, ...]:
        return tuple(cpu for cpu in self.cpus if cpu in online)

    def clocks(self, online: Collection[int]) -> list[BoundedClock]:
        if self._online != frozenset(online):
            self._online = frozenset(online)
            self._folders.clear()
        first = [next((cpu for cpu in group if cpu in online), None) for group in self._groups]
        return [BoundedClock(self._tree, self._find_folder(cpu), CPUFREQ) for cpu in first if cpu is not None]

    def read(self, online: Collection[int]) -> DomainClocks:
        """Read the cluster; of several policies, the first."""
        clocks = self.clocks(online)
        clock = clocks[0] if clocks else None
        return DomainClocks(
            name=self.name,
            min_hz=clock.read_low_hz() if clock else None,
            max_hz=clock.read_high_hz() if clock else None,
            current_hz=clock.read_now_hz() if clock else None,
            governor=clock.read_governor() if clock else None,
            available_hz=self.read_table_hz(online),
            cpus=self.cpus,
            online=self.online_of(online),
            isolated=self.isolated,
        )

    def read_table_hz(self, online: Collection[int]) -> tuple[int, ...]:
        """The board's own table; cached, since it disappears with the last core. Empty if never seen."""
        if not self._table_hz and (clocks := self.clocks(online)):
            self._table_hz = clocks[0].read_table_hz()
        return self._table_hz

    def find_table_hz(self, online: Collection[int]) -> tuple[int, ...]:
        return self.read_table_hz(online) or self._default_hz

    def read_range_hz(self, online: Collection[int]) -> tuple[int, int] | None:
        """Lowest and highest clock of a driver without a table; None without cpufreq."""
        for clock in self.clocks(online):
            ends = [read_ints(self._tree, f"{clock.folder}/cpuinfo_{end}_freq") for end in ("min", "max")]
            if all(ends):
                return ends[0][0] * 1000, ends[1][0] * 1000
        return None

    def read_hz(self, online: Collection[int]) -> int | None:
        """The clock now, a measurement on some boards; None if unreadable."""
        clocks = self.clocks(online)
        return clocks[0].read_now_hz() if clocks else None

    def read_true_hz(self, access: ClockAccess, online: Collection[int]) -> int | None:
        """The lowest hardware clock over the policies; None if not reported."""
        found = []
        for clock in self.clocks(online):
            with contextlib.suppress(OSError, ValueError, AgentError):
                found.append(int(access.read(f"{clock.folder}/{TRUE_FREQ}")) * CPUFREQ.unit_hz)
        return min(found, default=None)

    def find_floor_hz(self, cpu_hz: int) -> int:
        """The lowest memory clock beside this CPU clock, as the board type says."""
        return max((floor_hz for from_hz, floor_hz in self._floors if cpu_hz >= from_hz), default=0)

    def hold(self, access: ClockAccess, hz: int, online: Collection[int]) -> int:
        """Hold every policy at `hz`; return the clock reached. Raises ClockError."""
        clocks = self.clocks(online)
        if not clocks:
            raise ClockError(f"{self.name} went offline")
        reached = {clock.hold(access, self.name, hz) for clock in clocks}
        if len(reached) > 1:
            raise ClockError(f"{self.name}: its policies hold {', '.join(map(str, sorted(reached)))} Hz")
        return reached.pop()

    def is_held_at(self, hz: int, online: Collection[int]) -> bool:
        clocks = self.clocks(online)
        return bool(clocks) and all(clock.is_held_at(hz) for clock in clocks)

    def _find_folder(self, cpu: int) -> str:
        """The folder of an online core's policy, which may return under another name."""
        if cpu not in self._folders:
            names = (name for name, cpus in find_policies(self._tree, ()).items() if cpu in cpus)
            name = next(names, None)
            self._folders[cpu] = f"{CPUS}/cpufreq/{name}" if name else f"{CPUS}/cpu{cpu}/cpufreq"
        return self._folders[cpu]


def find_policies(tree: Tree, online: Collection[int]) -> dict[str, tuple[int, ...]]:
    """CPUs that share a clock, by policy; empty without cpufreq. Offline cores may be missing."""
    found: dict[str, tuple[int, ...]] = {}
    for name in list_names(tree, f"{CPUS}/cpufreq", "policy[0-9]*"):
        if cpus := read_ints(tree, f"{CPUS}/cpufreq/{name}/related_cpus"):
            found[name] = cpus
    seen = {cpu for cpus in found.values() for cpu in cpus}
    for cpu in sorted(online):  # a captured tree may hold only the cores' own folders
        if cpu not in seen and (cpus := read_ints(tree, f"{CPUS}/cpu{cpu}/cpufreq/related_cpus")):
            found[f"policy{min(cpus)}"] = cpus
            seen.update(cpus)
    return dict(sorted(found.items(), key=lambda item: natural_key(item[0])))


def read_isolated(tree: Tree) -> tuple[int, ...]:
    """Cores excluded from the scheduler (`isolcpus=` on the kernel's command line)."""
    try:
        return texts.parse_cpus(read_text(tree, f"{CPUS}/isolated") or "")
    except ValueError:
        return ()


class Hotplug:
    """The cores of a board. Read anew each time: any root process may change it."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        names = [name.removeprefix("cpu") for name in list_names(tree, CPUS, "cpu[0-9]*")]
        self.cpus = self._read_list("present") or tuple(int(name) for name in names if name.isdecimal())

    def read_online(self) -> tuple[int, ...]:
        """Cores online now; all of them if the kernel does not say."""
        return self._read_list("online") or self.cpus

    def require_answer(self) -> None:
        """Raise ClockError if the board hangs, before a read of each file runs into its timeout."""
        try:
            self._tree.read(f"{CPUS}/online")
        except TimeoutError as error:
            raise ClockError("the board does not answer") from error
        except OSError:
            pass  # not every kernel has this file

    def can_switch(self, cpu: int) -> bool:
        return cpu != BOOT_CPU and read_text(self._tree, f"{CPUS}/cpu{cpu}/online") is not None

    def set_online(self, access: ClockAccess, wanted: Collection[int]) -> None:
        """Bring exactly these cores online. Raises ClockError if the kernel refuses; the caller reads back."""
        online = self.read_online()
        for cpu in sorted(set(wanted) - set(online)):
            write(access, f"{CPUS}/cpu{cpu}/online", "1")
        for cpu in sorted(set(online) - set(wanted), reverse=True):
            write(access, f"{CPUS}/cpu{cpu}/online", "0")

    def _read_list(self, file: str) -> tuple[int, ...]:
        try:
            return texts.parse_cpus(read_text(self._tree, f"{CPUS}/{file}") or "")
        except ValueError:
            return ()


def format_cpus(cpus: Collection[int]) -> str:
    """Format CPU numbers, e.g. `CPUs 1, 2`."""
    return ("CPU " if len(cpus) == 1 else "CPUs ") + (", ".join(map(str, sorted(cpus))) or "none")
