"""Find a board's clocks by name on the board; its type supplies names, defaults and a check.

One class for every board: boards differ in which files exist. `clocks/controller.py` holds clocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from device_agent.board_types import GENERIC, UNKNOWN, BoardType, read_identity
from device_agent.clocks.access import ClockAccess
from device_agent.clocks.bounds import GpuClock, find_gpu
from device_agent.clocks.cpufreq import CpuCluster, Hotplug, find_policies, format_cpus, read_isolated
from device_agent.clocks.emc import MemoryClock, find_memory
from device_agent.clocks.power_mode import PowerModes, find_power_modes
from device_agent.errors import BadPointError
from device_agent.protocol.texts import format_table
from device_agent.sysfs import Tree

# The one cluster of a board without cpufreq.
_ALL_CPUS = "cpu"


@dataclasses.dataclass(frozen=True)
class Platform:
    """A board's clocks. `lacks` lists missing hardware, `notes` that and what looks wrong."""

    name: str  # the board type's, `generic-linux` without one
    tree: Tree
    hotplug: Hotplug
    clusters: tuple[CpuCluster, ...]
    gpu: GpuClock | None
    memory: MemoryClock | None
    power_modes: PowerModes | None
    lacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @staticmethod
    def discover(tree: Tree, board_type: BoardType | None, access: ClockAccess | None = None) -> Platform:
        """Find every clock. Never raises: `lacks` lists what is missing.

        `access` reads root-only files; without it the memory clock stays invisible to other users.
        """
        facts = board_type or UNKNOWN
        hotplug = Hotplug(tree)
        online = hotplug.read_online()
        policies = find_policies(tree, online)
        clusters, notes = _find_clusters(tree, facts, hotplug.cpus, policies)
        gpu = find_gpu(tree, facts.gpu.devices if facts.gpu else ())
        memory = find_memory(
            tree, access, facts.memory.driver if facts.memory else "", facts.memory.freqs_hz if facts.memory else ()
        )
        modes = find_power_modes(tree, facts.power_modes, {cluster.name: cluster.cpus for cluster in clusters})
        lacks = []
        if board_type is None:
            lacks.append(f"a board of no known type ({GENERIC}): {read_identity(tree)}")
        if not policies:
            lacks.append("no cpufreq: CPU clocks can neither be read nor held")
        if gpu is None:
            lacks.append("no GPU clock (devfreq)")
        if memory is None:
            lacks.append("no memory clock that can be set")
        elif memory.read_hz() is None:
            lacks.append("the memory clock is root's to read (debugfs), and no clock helper reads it")
        if modes is None:
            lacks.append("no power modes (nvpmodel)")
        notes += _compare(facts, clusters, gpu, memory, modes, online)
        return Platform(facts.name, tree, hotplug, clusters, gpu, memory, modes, tuple(lacks), (*lacks, *notes))

    def find_cluster(self, name: str) -> CpuCluster:
        """The cluster of this name. Raises BadPointError listing the clusters."""
        for cluster in self.clusters:
            if cluster.name == name:
                return cluster
        raise BadPointError(f"no cluster {name!r} here; there are {', '.join(c.name for c in self.clusters)}")

    def affinity(self, cluster: str = "") -> tuple[int, ...]:
        """CPUs for a worker's threads: a cluster's online cores; for "" all online cores that are not isolated.

        Raises BadPointError for an unknown cluster, or one with no core online.
        """
        online = self.hotplug.read_online()
        if cluster:
            chosen = self.find_cluster(cluster)
            cpus = chosen.online_of(online)
            if not cpus:
                raise BadPointError(f"{cluster} is offline; bring {format_cpus(chosen.cpus)} online (cores_online)")
            return cpus
        isolated = {cpu for known in self.clusters if known.isolated for cpu in known.cpus}
        isolated.update(read_isolated(self.tree))
        return tuple(cpu for cpu in online if cpu not in isolated) or online


def _find_clusters(
    tree: Tree, facts: BoardType, cpus: Collection[int], policies: dict[str, tuple[int, ...]]
) -> tuple[tuple[CpuCluster, ...], list[str]]:
    """The type's clusters, limited to the board's cores; plus one for each policy outside them."""
    isolated = set(read_isolated(tree))
    clusters: list[CpuCluster] = []
    notes: list[str] = []
    covered: set[int] = set()
    for known in facts.clusters:
        mine = tuple(cpu for cpu in known.cpus if cpu in cpus)
        groups = [group for group in policies.values() if set(group) <= set(mine)]
        if mixed := [name for name, group in policies.items() if set(group) & set(mine) and group not in groups]:
            notes.append(f"{', '.join(mixed)} does not fit cluster {known.name} of {facts.name}; policies count")
            continue
        if missing := set(known.cpus) - set(mine):
            notes.append(f"cluster {known.name} of {facts.name} has {format_cpus(missing)}, which this board lacks")
        if mine:
            if rest := sorted(set(mine) - {cpu for group in groups for cpu in group}):
                groups.append(tuple(rest))  # offline now; their policy returns with them
            is_isolated = known.isolated or set(mine) <= isolated
            clusters.append(
                CpuCluster(tree, known.name, mine, groups, is_isolated, known.freqs_hz, known.memory_floor_hz)
            )
            covered.update(mine)
    for name, group in policies.items():
        if not covered & set(group):
            mine = tuple(cpu for cpu in group if cpu in cpus)
            clusters.append(CpuCluster(tree, name, mine, (mine,), set(mine) <= isolated))
            covered.update(group)
    rest = sorted(set(cpus) - covered)
    if rest:
        name = f"cpu{rest[0]}" if clusters else _ALL_CPUS
        clusters.append(CpuCluster(tree, name, rest, (rest,), set(rest) <= isolated))
        if policies:
            notes.append(f"{format_cpus(rest)} show no clock now; what they have is seen when they are online")
    return tuple(clusters), notes


def _compare(
    facts: BoardType,
    clusters: Sequence[CpuCluster],
    gpu: GpuClock | None,
    memory: MemoryClock | None,
    modes: PowerModes | None,
    online: Collection[int],
) -> list[str]:
    """Note where the board's tables differ from its type's. The board's are used."""
    tables = {known.name: [known.freqs_hz] for known in facts.clusters}
    found = {cluster.name: cluster.read_table_hz(online) for cluster in clusters}
    if facts.gpu and gpu:
        tables["gpu"] = [facts.gpu.freqs_hz, *facts.gpu.other_freqs_hz]
        found["gpu"] = gpu.read_table_hz()
    if facts.memory and memory:
        tables["memory"] = [facts.memory.freqs_hz]
        found["memory"] = memory.read_table_hz()
    notes = []
    for name, known in tables.items():
        table = found.get(name, ())
        if table and any(known) and table not in known:
            notes.append(f"{name} offers {format_table(table)}; {facts.name} is known with {format_table(known[0])}")
    known_modes = {mode.name.lower() for mode in facts.power_modes}
    if modes and known_modes and known_modes != {name.lower() for name in modes.names}:
        names = ", ".join(mode.name for mode in facts.power_modes)
        notes.append(f"power modes are {', '.join(modes.names)}; {facts.name} is known with {names}")
    return notes
