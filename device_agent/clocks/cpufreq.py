"""CPU clocks: which cores share one, their tables and bounds, and which cores are online.

An offline core may take its cpufreq folder along, and a cluster's last one takes the policy. So files are looked up
through an online core each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from device_agent.clocks.access import ClockAccess
from device_agent.clocks.bounds import CPUFREQ, TRUE_FREQ, BoundedClock, write
from device_agent.errors import AgentError, ClockError
from device_agent.protocol import DomainClocks, texts
from device_agent.sysfs import Tree, list_names, natural_key, read_ints, read_text

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
        self.cpus = self._find_cpus()

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

    def _find_cpus(self) -> tuple[int, ...]:
        names = [name.removeprefix("cpu") for name in list_names(self._tree, CPUS, "cpu[0-9]*")]
        folders = tuple(int(name) for name in names if name.isdecimal())
        return self._read_list("present") or folders

    def _read_list(self, file: str) -> tuple[int, ...]:
        try:
            return texts.parse_cpus(read_text(self._tree, f"{CPUS}/{file}") or "")
        except ValueError:
            return ()


def format_cpus(cpus: Collection[int]) -> str:
    """Format CPU numbers, e.g. `CPUs 1, 2`."""
    return ("CPU " if len(cpus) == 1 else "CPUs ") + (", ".join(map(str, sorted(cpus))) or "none")
