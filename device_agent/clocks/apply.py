"""Plan an operating point for a board, write it in the order that kernels accept, and read it back.

Runs within a transaction that `controller` has begun.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Any

from device_agent.clocks.access import ClockAccess
from device_agent.clocks.cpufreq import BOOT_CPU, TRUE_FREQ, format_cpus
from device_agent.clocks.platform import Mode, Platform
from device_agent.errors import BadPointError, ClockError
from device_agent.protocol import EVERY_CLUSTER, OperatingPoint
from device_agent.protocol.texts import format_hz, format_table

# The TX2's measured clock jitters by about one percent. Orin and Xavier NX have closer neighbours at the top; the
# limits, compared exactly, distinguish those.
TOLERANCE = 0.02
# Between two reads of a clock that has not settled.
_LOOK_AGAIN_S = 0.002
# An idle core's measured clock reads 0 (TX2), and a capped clock rests lower: unchanged for this long is settled.
_REST_S = 0.05


@dataclasses.dataclass(frozen=True)
class Plan:
    """A point that this board has. `cores` are those online at the end; None: unchanged, or as the mode sets them."""

    mode: Mode | None
    cores: tuple[int, ...] | None
    cpu_hz: dict[str, int]  # by the cluster's own name
    gpu_hz: int | None
    memory_hz: int | None


def plan_point(platform: Platform, point: OperatingPoint, set_mode: bool = True) -> Plan:
    """Check the whole point against the board. Raises BadPointError listing what it has.

    `set_mode` false: the point's mode is already in force.
    """
    online = platform.hotplug.read_online()
    mode = _find_mode(platform, point) if point.power_mode is not None and set_mode else None
    if mode is not None:
        online = mode.plan_online(online, platform.hotplug.cpus)
    if point.cores_online is not None:
        online = tuple(sorted(set(point.cores_online)))
        _require_cores(platform, online)
    return Plan(
        mode=mode,
        cores=online if point.cores_online is not None else None,
        cpu_hz=_plan_cpu(platform, point, online),
        gpu_hz=_require_domain(platform.gpu, point.gpu_freq_hz, "GPU"),
        memory_hz=_require_domain(platform.memory, point.memory_freq_hz, "memory"),
    )


def _find_mode(platform: Platform, point: OperatingPoint) -> Mode:
    modes = platform.power_modes
    if modes is None:
        raise BadPointError("this board has no power modes (nvpmodel)")
    mode = modes.find(point.power_mode or "")
    if mode is None:
        raise BadPointError(f"no power mode {point.power_mode!r} here; there are {', '.join(modes.names)}")
    reboot = modes.needs_reboot(mode)
    if reboot is False:
        return mode
    reason = (
        f"power mode {mode.name} gates other parts of the GPU than now, which takes a reboot"
        if reboot
        else f"power mode {mode.name} may need a reboot: nvpmodel does not say which mode is set now"
    )
    if not point.allow_reboot:
        raise BadPointError(f"{reason}; refused")
    # A reboot would end the holder and restore the clocks: an operator must set the mode.
    raise BadPointError(
        f"{reason}, and the agent never reboots a board: run `sudo nvpmodel -m {mode.id}` there, answer yes, "
        "and pin again when the board is back"
    )


def _require_cores(platform: Platform, wanted: tuple[int, ...]) -> None:
    hotplug = platform.hotplug
    if unknown := set(wanted) - set(hotplug.cpus):
        raise BadPointError(f"no {format_cpus(unknown)} here; there are {format_cpus(hotplug.cpus)}")
    if BOOT_CPU in hotplug.cpus and BOOT_CPU not in wanted:
        raise BadPointError(f"{format_cpus([BOOT_CPU])} cannot be taken offline; cores_online must name it")
    now = set(hotplug.read_online())
    if fixed := [cpu for cpu in sorted(now ^ set(wanted)) if not hotplug.can_switch(cpu)]:
        raise BadPointError(f"{format_cpus(fixed)} cannot be taken offline or online on this board")


def _plan_cpu(platform: Platform, point: OperatingPoint, online: tuple[int, ...]) -> dict[str, int]:
    """Hz by cluster; `EVERY_CLUSTER` means those with a core online, and a named cluster overrides it."""
    wanted = dict(point.cpu_freq_hz)
    everywhere = wanted.pop(EVERY_CLUSTER, None)
    for name in wanted:
        cluster = platform.find_cluster(name)
        if not cluster.online_of(online):
            cores = format_cpus(cluster.cpus)
            raise BadPointError(f"all cores of {name} are offline at this point; bring {cores} online (cores_online)")
    if everywhere is not None:
        wanted = {c.name: everywhere for c in platform.clusters if c.online_of(online)} | wanted
    now = platform.hotplug.read_online()
    for name, hz in wanted.items():
        cluster = platform.find_cluster(name)
        table = cluster.find_table_hz(now)
        if table:
            require_listed(name, hz, table)
        elif cluster.clocks(now):
            low, high = cluster.read_range_hz(now) or (hz, hz)
            if not low <= hz <= high:
                raise BadPointError(f"{name} goes from {format_hz(low)} to {format_hz(high)}, not to {format_hz(hz)}")
        elif set(cluster.cpus) & set(now):
            raise BadPointError(f"{name} has no cpufreq here: its clock cannot be held")
        # else: an offline cluster never seen; its table is read once it is online
    return {name: int(hz) for name, hz in wanted.items()}


def _require_domain(domain: Any, hz: int | None, name: str) -> int | None:
    if hz is not None:
        if domain is None:
            raise BadPointError(f"this board has no {name} clock that can be held")
        require_listed(f"the {name} clock", hz, domain.read_table_hz())
    return hz


def require_listed(name: str, hz: int, table: tuple[int, ...]) -> None:
    """Raise BadPointError for a clock that is not in the table; nothing is rounded."""
    if not table:
        raise BadPointError(f"{name} does not say which frequencies it has")
    if hz in table:
        return
    at = bisect.bisect(table, hz)
    nearest = " and ".join(map(format_hz, table[max(0, at - 1) : at + 1]))
    raise BadPointError(f"{name} has no {format_hz(hz)}; nearest: {nearest}; it has {format_table(table)}")


@dataclasses.dataclass(frozen=True)
class _Target:
    """A clock that must reach `hz`. `explain` says why it may rest elsewhere; "" makes that a failure."""

    name: str
    hz: int
    read_hz: Callable[[], int | None]
    explain: Callable[[int], str] = lambda now_hz: ""


def apply(platform: Platform, access: ClockAccess, plan: Plan, deadline_s: float) -> tuple[OperatingPoint, list[str]]:
    """Set everything in `plan`; return the point reached, and notes on what was rounded, capped or raised.

    `deadline_s` is monotonic time. Raises ClockError for a value that did not take, BadPointError for a limit found
    only now, and as `ClockAccess`.
    """
    notes: list[str] = []
    if plan.mode is not None:
        notes += _set_mode(platform, access, plan.mode, deadline_s)
    if plan.cores is not None:
        platform.hotplug.set_online(access, plan.cores)
        _await_online(platform, plan.cores, deadline_s)
    online = platform.hotplug.read_online()
    memory = platform.memory
    memory_before_hz = memory.read_hz() if memory else None
    if memory and plan.memory_hz is not None:
        notes += memory.hold(access, plan.memory_hz)
    cpu_hz, gpu_hz = {}, None
    for name, hz in plan.cpu_hz.items():
        cluster = platform.find_cluster(name)
        if table := cluster.read_table_hz(online):
            require_listed(name, hz, table)
        cpu_hz[name] = cluster.hold(access, hz, online)
        notes += _explain_rounding(name, hz, cpu_hz[name])
    if platform.gpu and plan.gpu_hz is not None:
        gpu_hz = platform.gpu.hold(access, plan.gpu_hz)
        notes += _explain_rounding("gpu", plan.gpu_hz, gpu_hz)
    rests = _settle(_list_targets(platform, plan, cpu_hz, gpu_hz, online), deadline_s, notes)
    _require_true(platform, access, cpu_hz, online)
    memory_hz = rests.get("memory", plan.memory_hz)
    if memory and memory_hz is None:
        notes += _explain_drag(memory_before_hz, memory.read_hz())
    return OperatingPoint(
        power_mode=plan.mode.name if plan.mode else None,
        cores_online=None if plan.cores is None else online,
        cpu_freq_hz=cpu_hz,
        gpu_freq_hz=gpu_hz,
        memory_freq_hz=memory_hz,
    ), notes


def _set_mode(platform: Platform, access: ClockAccess, mode: Mode, deadline_s: float) -> list[str]:
    """Have nvpmodel set the mode; return notes on limits that drivers rounded."""
    wanted = mode.plan_online(platform.hotplug.read_online(), platform.hotplug.cpus)
    try:
        access.set_power_mode(mode.id)
    except OSError as error:
        if "reboot" in str(error).lower():
            raise BadPointError(f"power mode {mode.name} needs a reboot, which the agent never does") from error
        raise ClockError(f"nvpmodel did not set {mode.name}: {error.strerror or error}") from error
    _await_online(platform, wanted, deadline_s)
    current = platform.power_modes.read_current() if platform.power_modes else None
    if current is not None and current.id != mode.id:
        raise ClockError(f"nvpmodel did not set {mode.name}: it says {current.name}")
    notes = [] if current else [f"power mode {mode.name}: nvpmodel does not tell this user which mode is set"]
    limits = [
        (cluster.name, cap_hz, clock.read_high_hz())
        for cpu, cap_hz in mode.cpu_max_hz.items()
        for cluster in platform.clusters
        if cpu in cluster.cpus
        for clock in cluster.clocks(wanted)[:1]
    ]
    if platform.gpu and mode.gpu_max_hz:
        limits.append(("gpu", mode.gpu_max_hz, platform.gpu.read().max_hz))
    return notes + [
        f"power mode {mode.name} limits {name} to {format_hz(cap_hz)}; the driver has made it {format_hz(high_hz)}"
        for name, cap_hz, high_hz in limits
        if high_hz is not None and high_hz != cap_hz
    ]


def _await_online(platform: Platform, wanted: Collection[int], deadline_s: float) -> None:
    while set(online := platform.hotplug.read_online()) != set(wanted):
        if time.monotonic() > deadline_s:
            raise ClockError(f"asked for {format_cpus(wanted)} online, but there are {format_cpus(online)}")
        time.sleep(_LOOK_AGAIN_S)


def _list_targets(
    platform: Platform, plan: Plan, cpu_hz: dict[str, int], gpu_hz: int | None, online: Collection[int]
) -> list[_Target]:
    targets = []
    for name, hz in cpu_hz.items():
        cluster = platform.find_cluster(name)
        # A driver without a table (intel_pstate) leaves the clock to the hardware: only limits can be checked.
        if cluster.read_table_hz(online):
            targets.append(_Target(name, hz, lambda cluster=cluster: cluster.read_hz(online)))  # type: ignore[misc]
    if platform.gpu and gpu_hz is not None:
        targets.append(_Target("gpu", gpu_hz, platform.gpu.read_hz))
    memory = platform.memory
    if memory and plan.memory_hz is not None:
        wanted_hz = plan.memory_hz
        floor_hz = max((platform.find_cluster(name).find_floor_hz(hz) for name, hz in cpu_hz.items()), default=0)

        def explain(now_hz: int) -> str:
            high_hz = memory.read_high_hz()
            if high_hz is not None and high_hz < wanted_hz and is_close(now_hz, high_hz):
                return f"the board caps the memory clock at {format_hz(high_hz)}"
            if wanted_hz < floor_hz <= now_hz * (1 + TOLERANCE):
                return f"the CPU's clock raises the memory clock to {format_hz(now_hz)}"
            return ""

        targets.append(_Target("memory", wanted_hz, memory.read_hz, explain))
    return targets


def _settle(targets: list[_Target], deadline_s: float, notes: list[str]) -> dict[str, int]:
    """Wait until every clock is where it must be; return those that rest elsewhere with a reason. Raises ClockError."""
    started_s = time.monotonic()
    rests: dict[str, int] = {}
    pending = list(targets)
    only_zeros = {target.name for target in targets}
    while True:
        late: list[tuple[_Target, int]] = []
        rested = time.monotonic() - started_s > _REST_S
        for target in pending:
            now_hz = target.read_hz()
            if now_hz:
                only_zeros.discard(target.name)
            if now_hz is None or (now_hz == 0 and rested and target.name in only_zeros):
                reads = "cannot be read" if now_hz is None else "reads 0 while idle"
                notes.append(f"{target.name}: its clock {reads}; its limits were verified")
            elif is_close(now_hz, target.hz):
                continue
            elif rested and now_hz and (reason := target.explain(now_hz)):
                notes.append(reason)
                rests[target.name] = now_hz
            else:
                late.append((target, now_hz))
        if not late:
            return rests
        if time.monotonic() > deadline_s:
            stuck = (f"{t.name} stays at {format_hz(hz)} instead of {format_hz(t.hz)}" for t, hz in late)
            raise ClockError("; ".join(stuck))
        pending = [target for target, _ in late]
        time.sleep(_LOOK_AGAIN_S)


def _require_true(platform: Platform, access: ClockAccess, cpu_hz: dict[str, int], online: Collection[int]) -> None:
    """Raise ClockError if a CPU's hardware runs below what cpufreq reports: firmware clamps it.

    An idle core's measured clock jumps: one matching read is enough.
    """
    started_s = time.monotonic()
    pending = {name: hz for name, hz in cpu_hz.items() if platform.find_cluster(name).read_table_hz(online)}
    while True:
        low: dict[str, int] = {}
        for name, hz in pending.items():
            true_hz = platform.find_cluster(name).read_true_hz(access, online)
            if true_hz and true_hz < (1 - TOLERANCE) * hz:
                low[name] = true_hz
        if not low:
            return
        if time.monotonic() - started_s > _REST_S:
            said = (
                f"{name} is set to {format_hz(cpu_hz[name])}, and its hardware runs at {format_hz(hz)} "
                f"({TRUE_FREQ}): firmware or a limit that the kernel does not know of clamps it"
                for name, hz in low.items()
            )
            raise ClockError("; ".join(said))
        pending = {name: cpu_hz[name] for name in low}
        time.sleep(_LOOK_AGAIN_S)


def is_close(now_hz: int, wanted_hz: int) -> bool:
    """Whether the clock read matches the clock wanted, within TOLERANCE."""
    return abs(now_hz - wanted_hz) <= TOLERANCE * wanted_hz


def _explain_rounding(name: str, asked_hz: int, reached_hz: int) -> list[str]:
    if asked_hz == reached_hz:
        return []
    return [f"{name}: asked for {format_hz(asked_hz)}, the driver holds {format_hz(reached_hz)}"]


def _explain_drag(before_hz: int | None, after_hz: int | None) -> list[str]:
    if before_hz is None or after_hz is None or is_close(after_hz, before_hz):
        return []
    return [
        f"the memory clock went from {format_hz(before_hz)} to {format_hz(after_hz)} with the CPU's clock; "
        "name a memory frequency to hold it"
    ]
