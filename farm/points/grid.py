"""The grid of a sweep: the operating points of a board that match a request.

Frequencies come from the board's report; how clocks depend on each other comes from the board type (`Coupling`).
`requests` parses what users type.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from device_agent.protocol import (
    EVERY_CLUSTER,
    Clocks,
    DomainClocks,
    OperatingPoint,
    format_cpus,
    format_hz,
    format_mhz,
    format_table,
)
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.points.values import DomainSetting, Grid, GridPoint, Merge

GPU = "gpu"
MEMORY = "memory"
# Above this a fit over all points takes seconds per step, and the table is too long to read.
MAX_POINTS = 20_000


@dataclasses.dataclass(frozen=True)
class GridRequest:
    """What to vary; frequencies in Hz. None: left as the board has it. An empty tuple: all that the board offers.

    `cpu_freqs_hz` maps a cluster's name, or `EVERY_CLUSTER` for those not named, to frequencies. Clusters under
    `EVERY_CLUSTER` with the same table move together, since the kernel spreads work over all of them; isolated ones
    move by themselves. `cores` are sets of CPUs to be online.
    """

    cpu_freqs_hz: Mapping[str, tuple[int, ...]] | None = None
    cores: tuple[tuple[int, ...], ...] | None = None
    gpu_freqs_hz: tuple[int, ...] | None = None
    memory_freqs_hz: tuple[int, ...] | None = None
    power_modes: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Mode:
    """A power mode's effect on clocks that are not pinned. `gating` differs where other parts have power.

    `number` is nvpmodel's.
    """

    cores_online: tuple[int, ...] | None = None
    cpu_max_hz: Mapping[str, int] = dataclasses.field(default_factory=dict)
    gpu_max_hz: int | None = None
    memory_max_hz: int | None = None
    gating: int = 0
    number: int | None = None


@dataclasses.dataclass(frozen=True)
class Coupling:
    """How clocks of a board depend on each other, as its type says.

    `memory_floor_hz` by cluster: pairs of a CPU clock and the memory clock that it requires from there on.
    Whether that floor raises a pinned memory clock, firmware decides; the point that the board reaches shows it.
    """

    memory_floor_hz: Mapping[str, tuple[tuple[int, int], ...]] = dataclasses.field(default_factory=dict)
    modes: Mapping[str, Mode] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, board_type: BoardType) -> Coupling:
        """Read it from a board type."""
        return cls(
            {cluster.name: cluster.memory_floor_hz for cluster in board_type.clusters if cluster.memory_floor_hz},
            {
                mode.name: Mode(
                    mode.cores_online, mode.cpu_max_hz, mode.gpu_max_hz, mode.memory_max_hz, mode.power_gating, mode.id
                )
                for mode in board_type.power_modes
            },
        )


NO_COUPLING = Coupling()


def plan_grid(clocks: Clocks, request: GridRequest, coupling: Coupling = NO_COUPLING) -> Grid:
    """Combine what is requested; merge points that are equal on the board, and report that.

    With nothing to vary that is one point: the board as it is. Raises UsageError for what the board lacks (listing what
    there is) and for too many points.
    """
    modes = _plan_modes(clocks, request, coupling)
    core_sets = _plan_cores(clocks, request)
    cpus = _plan_cpus(clocks, request)
    gpu = _plan_domain("the GPU", clocks.gpu, request.gpu_freqs_hz)
    memory = _plan_domain("the memory", clocks.memory, request.memory_freqs_hz)
    size = len(modes) * len(core_sets) * len(cpus) * len(gpu) * len(memory)
    if size > MAX_POINTS:
        raise UsageError(
            f"{size} operating points exceed the limit of {MAX_POINTS}",
            hint="name fewer frequencies, or sweep one clock after the other",
        )
    cpus_of = {cluster.name: cluster.cpus for cluster in clocks.clusters}
    groups: dict[tuple[object, ...], list[GridPoint]] = {}
    for mode, cores, cpu_hz, gpu_hz, memory_hz in itertools.product(modes, core_sets, cpus, gpu, memory):
        known = coupling.modes.get(mode or "")
        online = cores or (known.cores_online if known else None) or find_online(clocks)
        usable = {name: hz for name, hz in cpu_hz.items() if set(cpus_of[name]) & set(online)}
        point = OperatingPoint(mode, cores, usable, gpu_hz, memory_hz)
        # The dropped combination keeps the clocks that it asked for in its name.
        asked = dataclasses.replace(point, cpu_freq_hz=cpu_hz)
        resolved = _resolve(clocks, point, online, coupling)
        # The mode's effect beyond clocks; an unknown mode is a variant of its own.
        variant = f"gating {known.gating}" if known else mode or ""
        grid_point = GridPoint(format_point(asked), point, resolved, variant)
        groups.setdefault((resolved, variant), []).append(grid_point)
    points, merged = [], []
    for alike in groups.values():
        kept, *dropped = sorted(alike, key=_count_altered)
        kept = dataclasses.replace(kept, key=format_point(kept.point))
        points.append(kept)
        if dropped:
            reason = "; ".join(dict.fromkeys(_list_reasons(kept, dropped))) or "asked for twice"
            merged.append(Merge(kept.key, tuple(each.key for each in dropped), reason))
    return Grid(tuple(points), tuple(merged))


def leave_out(grid: Grid, key: str) -> Grid:
    """Return the grid without a point that the board refuses, and with it all points of its power mode.

    Unchanged where nothing would be left.
    """
    refused = grid.find(key)
    mode = refused.point.power_mode if refused else None
    left = tuple(p for p in grid.points if p.key != key and (mode is None or p.point.power_mode != mode))
    return Grid(left, grid.merged) if left else grid


def merge_reached(grid: Grid, key: str, reached: OperatingPoint) -> Grid:
    """Merge the point `key` into another grid point whose clocks the board reached for it."""
    point = grid.find(key)
    if point is None:
        return grid
    held = {**reached.cpu_freq_hz, GPU: reached.gpu_freq_hz, MEMORY: reached.memory_freq_hz}
    domains = tuple(
        dataclasses.replace(domain, freq_hz=held[domain.name]) if domain.held and held.get(domain.name) else domain
        for domain in point.domains
    )
    twin = next((p for p in grid.points if p.key != key and (p.domains, p.variant) == (domains, point.variant)), None)
    if twin is None:
        return grid
    merge = Merge(twin.key, (key,), "the board reached these clocks instead")
    return Grid(tuple(p for p in grid.points if p.key != key), (*grid.merged, merge))


def is_default(point: GridPoint, clocks: Clocks, coupling: Coupling) -> bool:
    """Whether a board without pinned clocks is at `point`: its current power mode alone, with that mode's limits.

    False where the board type does not know the mode: an operator may have moved a limit since.
    """
    mode = point.point.power_mode
    if mode is None or mode != clocks.power_mode or mode not in coupling.modes:
        return False
    now = {domain.name: domain for domain in (*clocks.clusters, clocks.gpu) if domain is not None}
    for domain in point.domains:
        if domain.held and domain.name != MEMORY:
            return False
        current = now.get(domain.name)
        if current is None:
            continue
        if current.online and len(current.online) != domain.units:
            return False
        if None not in (current.max_hz, domain.freq_hz) and current.max_hz != domain.freq_hz:
            return False
    return point.point.memory_freq_hz is None


def format_point(point: OperatingPoint) -> str:
    """Format a point for people and as a key, such as `cores=0,3-5 a57=1420.8MHz gpu=1300.5MHz`."""
    words = [f"mode={point.power_mode}"] if point.power_mode else []
    words += [f"cores={format_cpus(point.cores_online)}"] if point.cores_online is not None else []
    clocks = {**point.cpu_freq_hz, GPU: point.gpu_freq_hz, MEMORY: point.memory_freq_hz}
    words += [f"{name}={format_mhz(hz)}MHz" for name, hz in clocks.items() if hz is not None]
    return " ".join(words) or "default"


def require_listed(name: str, wanted_hz: Sequence[int], available_hz: Sequence[int]) -> tuple[int, ...]:
    """Return `wanted_hz` ascending, or all there is where it is empty. Raises UsageError listing what the board has."""
    if not available_hz:
        raise UsageError(
            f"{name} of this board does not say which frequencies it has, so it cannot be swept",
            hint="leave it out, or name points by power mode; a cluster lists none while its cores are offline: "
            "`sudo nvpmodel -m ID` on the board sets a power mode that has them",
        )
    if missing := sorted(set(wanted_hz) - set(available_hz)):
        raise UsageError(
            f"{name} of this board has no {format_hz(missing[0])}", hint=f"it has {format_table(available_hz)}"
        )
    return tuple(sorted(set(wanted_hz))) or tuple(sorted(available_hz))


def find_reboot_modes(clocks: Clocks, coupling: Coupling) -> tuple[str, ...]:
    """Return the power modes that need a reboot: those that gate other parts than the present one.

    As far as the board type says. None where the present mode is unknown; then the board decides.
    """
    current = coupling.modes.get(clocks.power_mode or "")
    if current is None:
        return ()
    known = [(name, coupling.modes[name]) for name in clocks.power_modes if name in coupling.modes]
    return tuple(name for name, mode in known if mode.gating != current.gating)


def _plan_modes(clocks: Clocks, request: GridRequest, coupling: Coupling) -> tuple[str | None, ...]:
    if request.power_modes is None:
        return (None,)
    if not clocks.power_modes:
        raise UsageError("this board has no power modes (nvpmodel)", hint="leave the power modes out")
    if missing := [name for name in request.power_modes if name not in clocks.power_modes]:
        raise UsageError(f"this board has no power mode {missing[0]}", hint=f"it has {', '.join(clocks.power_modes)}")
    reboot = find_reboot_modes(clocks, coupling)
    if named := [name for name in request.power_modes if name in reboot]:
        raise UsageError(
            f"power mode {named[0]} takes a reboot from {clocks.power_mode}, and a sweep never reboots a board",
            hint=f"run `sudo nvpmodel -m {coupling.modes[named[0]].number}` there, answer yes, then sweep it alone",
        )
    # Of all modes, those available now; `order` reports the others.
    return tuple(dict.fromkeys(request.power_modes)) or tuple(n for n in clocks.power_modes if n not in reboot)


def _plan_cores(clocks: Clocks, request: GridRequest) -> tuple[tuple[int, ...] | None, ...]:
    if request.cores is None:
        return (None,)
    cpus = {cpu for cluster in clocks.clusters for cpu in cluster.cpus}
    for cores in request.cores:
        if missing := sorted(set(cores) - cpus):
            raise UsageError(f"this board has no CPU {missing[0]}", hint=f"it has {format_cpus(sorted(cpus))}")
        if 0 in cpus and 0 not in cores:
            raise UsageError(f"cores {format_cpus(cores)}: CPU 0 cannot be taken offline", hint="name it too")
    return tuple(dict.fromkeys(tuple(sorted(set(cores))) for cores in request.cores)) or (None,)


def _plan_cpus(clocks: Clocks, request: GridRequest) -> tuple[dict[str, int], ...]:
    """Return every combination of the clusters' clocks."""
    if request.cpu_freqs_hz is None:
        return ({},)
    known = [cluster.name for cluster in clocks.clusters]
    if unknown := sorted(set(request.cpu_freqs_hz) - {*known, EVERY_CLUSTER}):
        raise UsageError(f"this board has no CPU cluster {unknown[0]}", hint=f"it has {', '.join(known) or 'none'}")
    if not known:
        raise UsageError("this board reports no CPU clocks that can be held", hint="leave the CPU frequencies out")
    groups: dict[object, list[str]] = {}
    tables: dict[object, tuple[int, ...]] = {}
    # A cluster that is offline has no table (TX2's Denver cores, as it boots): it is left out unless it is named.
    has_tables = any(cluster.available_hz for cluster in clocks.clusters)
    for cluster in clocks.clusters:
        named = cluster.name in request.cpu_freqs_hz
        wanted = request.cpu_freqs_hz.get(cluster.name, request.cpu_freqs_hz.get(EVERY_CLUSTER))
        if wanted is None or (not named and not cluster.available_hz and has_tables):
            continue
        alone = named or cluster.isolated
        group: object = cluster.name if alone else cluster.available_hz
        groups.setdefault(group, []).append(cluster.name)
        tables[group] = require_listed(f"the CPU cluster {cluster.name}", wanted, cluster.available_hz)
    choices = [[dict.fromkeys(names, hz) for hz in tables[group]] for group, names in groups.items()]
    return tuple({k: v for part in parts for k, v in part.items()} for parts in itertools.product(*choices))


def _plan_domain(name: str, domain: DomainClocks | None, wanted: tuple[int, ...] | None) -> tuple[int | None, ...]:
    if wanted is None:
        return (None,)
    if domain is None:
        raise UsageError(f"this board reports no clock of {name} that can be held", hint="leave it out")
    return require_listed(name, wanted, domain.available_hz)


def find_online(clocks: Clocks) -> tuple[int, ...]:
    """Return the cores that are on; all where no cluster says which."""
    online = sorted(cpu for cluster in clocks.clusters for cpu in cluster.online)
    return tuple(online or sorted(cpu for cluster in clocks.clusters for cpu in cluster.cpus))


def _resolve(
    clocks: Clocks, point: OperatingPoint, online: Sequence[int], coupling: Coupling
) -> tuple[DomainSetting, ...]:
    """Return the point that the board makes of this one."""
    mode = coupling.modes.get(point.power_mode or "", Mode())
    settings, floor_hz = [], 0
    for cluster in clocks.clusters:
        units = len(set(cluster.cpus) & set(online))
        held_hz = point.cpu_freq_hz.get(cluster.name)
        cap_hz = mode.cpu_max_hz.get(cluster.name, mode.cpu_max_hz.get(EVERY_CLUSTER))
        hz = _round_up(cap_hz, cluster) if held_hz is None else held_hz
        settings.append(DomainSetting(cluster.name, hz if units else None, units, held_hz is not None and units > 0))
        if units and hz:
            pairs = coupling.memory_floor_hz.get(cluster.name, ())
            floor_hz = max([floor_hz, *(memory_hz for from_hz, memory_hz in pairs if hz >= from_hz)])
    if clocks.gpu:
        hz = _round_up(mode.gpu_max_hz, clocks.gpu) if point.gpu_freq_hz is None else point.gpu_freq_hz
        settings.append(DomainSetting(GPU, hz, held=point.gpu_freq_hz is not None))
    if clocks.memory:
        table = clocks.memory.available_hz
        floor_hz = min((hz for hz in table if hz >= floor_hz), default=floor_hz)
        if mode.memory_max_hz:
            floor_hz = min(floor_hz, _round_up(mode.memory_max_hz, clocks.memory) or floor_hz)
        if point.memory_freq_hz is None:
            settings.append(DomainSetting(MEMORY, floor_hz or None, held=False))
        else:
            settings.append(DomainSetting(MEMORY, point.memory_freq_hz))
    return tuple(settings)


def _round_up(cap_hz: int | None, domain: DomainClocks) -> int | None:
    """Return the clock for a cap: the next entry of the table, as seen on Tegra; the highest without a cap."""
    table = domain.available_hz
    if not table:
        return cap_hz or domain.max_hz
    return min((hz for hz in table if cap_hz and hz >= cap_hz), default=max(table))


def _count_altered(point: GridPoint) -> int:
    """Count the requested clocks that the board would change."""
    asked = {**point.point.cpu_freq_hz, GPU: point.point.gpu_freq_hz, MEMORY: point.point.memory_freq_hz}
    changed = sum(d.held and asked.get(d.name) != d.freq_hz for d in point.domains)
    return int(changed) + int(format_point(point.point) != point.key)


def _list_reasons(kept: GridPoint, dropped: Sequence[GridPoint]) -> Iterator[str]:
    for domain in kept.domains:
        if domain.units == 0 and any(f" {domain.name}=" in f" {each.key}" for each in dropped):
            yield f"all cores of {domain.name} are offline, so its clock does not matter"
    modes = list(dict.fromkeys(each.point.power_mode for each in (kept, *dropped) if each.point.power_mode))
    if len(modes) > 1:
        caps = [domain for domain in kept.domains if not domain.held and domain.freq_hz and domain.name != MEMORY]
        rounded = "".join(f"; caps are rounded to {format_hz(domain.freq_hz)} ({domain.name})" for domain in caps)
        yield f"power modes {', '.join(modes)} differ in nothing that these clocks leave open{rounded}"
