"""Find a board's clocks and nvpmodel's power modes on the board; its type supplies names, defaults and a check.

One class for every board: boards differ in which files exist. `clocks/controller.py` holds clocks.
Syntax of nvpmodel: LineageOS/android_device_nvidia_quill and _galen, nvpmodel/*.conf. A mode is set by `ClockAccess`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from device_agent.board_types import GENERIC, UNKNOWN, BoardType, read_identity
from device_agent.clocks.access import ClockAccess
from device_agent.clocks.cpufreq import (
    CpuCluster,
    GpuClock,
    Hotplug,
    find_gpu,
    find_policies,
    format_cpus,
    read_isolated,
)
from device_agent.clocks.emc import MemoryClock, find_memory
from device_agent.errors import BadPointError
from device_agent.protocol import EVERY_CLUSTER
from device_agent.protocol.hardware import PowerMode
from device_agent.protocol.texts import format_table
from device_agent.sysfs import Tree, list_names, read_int, read_text

_CONFIGURATION = "/etc/nvpmodel.conf"
_FOLDER = "/etc/nvpmodel"
# The second may be missing from a user's PATH.
_TOOLS = ("nvpmodel", "/usr/sbin/nvpmodel")
_STANZA = re.compile(r"<\s*(PARAM|POWER_MODEL)\s+([^>]*?)\s*>")
_CPU = re.compile(r"/cpu(\d+)/")
# Configurations write this for "the hardware's own limit".
_UNLIMITED = 0x7FFFFFFF


@dataclasses.dataclass(frozen=True)
class Mode:
    """One power mode. Missing limits are the hardware's; `cpu_max_hz` is by CPU number.

    `gating` maps files of power-gated GPU units to their masks; changing one takes a reboot.
    """

    id: int
    name: str
    online: Mapping[int, bool] = dataclasses.field(default_factory=dict)
    cpu_max_hz: Mapping[int, int] = dataclasses.field(default_factory=dict)
    gpu_max_hz: int | None = None
    memory_max_hz: int | None = None
    gating: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def plan_online(self, online: Iterable[int], present: Iterable[int]) -> tuple[int, ...]:
        """Cores online after the mode is set; a configuration may name cores that this board lacks."""
        on = {cpu for cpu, is_on in self.online.items() if is_on}
        off = {cpu for cpu, is_on in self.online.items() if not is_on}
        return tuple(sorted(((set(online) | on) - off) & set(present)))


class PowerModes:
    """The modes of a board, read through nvpmodel."""

    def __init__(self, tree: Tree, modes: Iterable[Mode]) -> None:
        self._tree = tree
        self.modes = tuple(modes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(mode.name for mode in self.modes)

    def find(self, name: str) -> Mode | None:
        """The mode of this name, case ignored."""
        return next((mode for mode in self.modes if mode.name.lower() == name.lower()), None)

    def read_current(self) -> Mode | None:
        """The mode that nvpmodel reports; None if it does not report one."""
        text = _ask(self._tree) or ""
        if found := re.search(r"NV Power Mode:\s*(\S+)\s*(\d+)?", text):
            if found.group(2):
                return next((mode for mode in self.modes if mode.id == int(found.group(2))), None)
            return self.find(found.group(1))
        return None

    def needs_reboot(self, mode: Mode) -> bool | None:
        """Whether the mode gates other GPU units than now; None if the board does not say."""
        if all(other.gating == mode.gating for other in self.modes):
            return False
        masks = {path: read_int(self._tree, path) for path in mode.gating if path.startswith("/")}
        if masks and all(mask is not None for mask in masks.values()):
            return any(masks[path] != mask for path, mask in mode.gating.items() if path in masks)
        current = self.read_current()
        return None if current is None else current.gating != mode.gating


def find_power_modes(
    tree: Tree, defaults: Iterable[PowerMode] = (), clusters: Mapping[str, tuple[int, ...]] | None = None
) -> PowerModes | None:
    """The modes in the board's configuration, or its type's if that is unreadable and nvpmodel answers.

    `clusters` maps the type's clusters to CPUs. None: the board has no nvpmodel.
    """
    names = list_names(tree, _FOLDER, "*.conf")
    # Images for several boards hold several configurations; only nvpmodel knows which applies.
    candidates = [_CONFIGURATION, *(f"{_FOLDER}/{name}" for name in names if len(names) == 1)]
    for path in candidates:
        if modes := parse_configuration(read_text(tree, path) or ""):
            return PowerModes(tree, modes)
    known = [convert(mode, clusters or {}) for mode in defaults]
    return PowerModes(tree, known) if known and _ask(tree) is not None else None


def parse_configuration(text: str) -> tuple[Mode, ...]:
    """Parse nvpmodel's configuration; empty for any other text."""
    paths: dict[tuple[str, str], str] = {}
    modes: list[Mode] = []
    kind, section = "", {}
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if stanza := _STANZA.match(line.strip()):
            kind, section = stanza.group(1), dict(re.findall(r"(\w+)=(\S+)", stanza.group(2)))
            if kind == "POWER_MODEL" and section.get("ID", "").isdecimal() and "NAME" in section:
                modes.append(Mode(int(section["ID"]), section["NAME"], {}, {}, None, None, {}))
        elif line.lstrip().startswith("<"):
            kind = ""
        elif kind == "PARAM" and len(words) == 2:
            paths[section.get("NAME", ""), words[0]] = words[1]
        elif kind == "POWER_MODEL" and len(words) == 3 and modes:
            modes[-1] = _add(modes[-1], words[0], words[1], words[2], paths)
    return tuple(modes)


def _add(mode: Mode, group: str, parameter: str, text: str, paths: Mapping[tuple[str, str], str]) -> Mode:
    """Add one line of a stanza to the mode."""
    try:
        value = int(text, 0)
    except ValueError:
        return mode
    path = paths.get((group, parameter), "")
    cpu = _CPU.search(path)
    limited = parameter == "MAX_FREQ" and 0 < value < _UNLIMITED
    if parameter.endswith("_PG_MASK"):
        return dataclasses.replace(mode, gating={**mode.gating, path or f"{group}.{parameter}": value})
    if group == "CPU_ONLINE" and (cpu or parameter.removeprefix("CORE_").isdecimal()):
        number = int(cpu.group(1) if cpu else parameter.removeprefix("CORE_"))
        return dataclasses.replace(mode, online={**mode.online, number: value != 0})
    if limited and cpu:
        return dataclasses.replace(mode, cpu_max_hz={**mode.cpu_max_hz, int(cpu.group(1)): value * 1000})
    if limited and group == "GPU":
        return dataclasses.replace(mode, gpu_max_hz=value)
    if parameter == "MAX_FREQ" and value > 0 and group == "EMC":
        return dataclasses.replace(mode, memory_max_hz=value)
    return mode


def convert(mode: PowerMode, clusters: Mapping[str, tuple[int, ...]]) -> Mode:
    """Express a board type's mode as the board's own configuration would."""
    everything = sorted(cpu for cpus in clusters.values() for cpu in cpus)
    caps = {name: mode.cpu_max_hz.get(name, mode.cpu_max_hz.get(EVERY_CLUSTER)) for name in clusters}
    return Mode(
        mode.id,
        mode.name,
        {} if mode.cores_online is None else {cpu: cpu in mode.cores_online for cpu in everything},
        {clusters[name][0]: int(cap) for name, cap in caps.items() if cap is not None},
        mode.gpu_max_hz,
        mode.memory_max_hz,
        {"power_gating": mode.power_gating},
    )


def _ask(tree: Tree) -> str | None:
    for tool in _TOOLS:
        try:
            return tree.run([tool, "-q"])
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


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
