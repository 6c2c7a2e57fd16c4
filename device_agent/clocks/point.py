"""Whether a board has an operating point, before anything is written; what to write is `controller`'s business."""

from __future__ import annotations

import bisect
import dataclasses

from device_agent.clocks.cpufreq import BOOT_CPU, format_cpus
from device_agent.clocks.power_mode import Mode
from device_agent.errors import BadPointError
from device_agent.platforms.platform import Platform
from device_agent.protocol import EVERY_CLUSTER, OperatingPoint
from device_agent.protocol.texts import format_hz, format_table


@dataclasses.dataclass(frozen=True)
class Plan:
    """A point that this board has. `cores` are those online in the end; None: as they are, or as the mode has them."""

    mode: Mode | None
    cores: tuple[int, ...] | None
    cpu_hz: dict[str, int]  # by the cluster's own name
    gpu_hz: int | None
    memory_hz: int | None


def plan_point(platform: Platform, point: OperatingPoint, set_mode: bool = True) -> Plan:
    """Check the whole point against what the board says it has. Raises BadPointError naming what it has.

    `set_mode` false: the point's mode is in force already.
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
        gpu_hz=_plan_gpu(platform, point.gpu_freq_hz),
        memory_hz=_plan_memory(platform, point.memory_freq_hz),
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
    # Whoever holds the clocks would be gone with the reboot, and the clocks restored: an operator must set the mode.
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
    """Hz by cluster: `EVERY_CLUSTER` stands for those with a core online; those named go before it."""
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
            _require_in_range(name, hz, cluster.read_range_hz(now))
        elif set(cluster.cpus) & set(now):
            raise BadPointError(f"{name} has no cpufreq here: its clock cannot be held")
        # else: the cluster is offline and was never seen; its table is looked at once it is online
    return {name: int(hz) for name, hz in wanted.items()}


def _plan_gpu(platform: Platform, hz: int | None) -> int | None:
    if hz is None:
        return None
    if platform.gpu is None:
        raise BadPointError("this board has no GPU clock that can be held")
    require_listed("the GPU", hz, platform.gpu.read_table_hz())
    return hz


def _plan_memory(platform: Platform, hz: int | None) -> int | None:
    if hz is None:
        return None
    if platform.memory is None:
        raise BadPointError("this board has no memory clock that can be held")
    require_listed("the memory clock", hz, platform.memory.read_table_hz())
    return hz


def require_listed(name: str, hz: int, table: tuple[int, ...]) -> None:
    """Raise BadPointError for a clock that is not in the table, with what is: nothing is rounded on the way."""
    if not table:
        raise BadPointError(f"{name} does not say which frequencies it has")
    if hz in table:
        return
    at = bisect.bisect(table, hz)
    nearest = " and ".join(map(format_hz, table[max(0, at - 1) : at + 1]))
    raise BadPointError(f"{name} has no {format_hz(hz)}; nearest: {nearest}; it has {format_table(table)}")


def _require_in_range(name: str, hz: int, ends: tuple[int, int] | None) -> None:
    if ends is not None and not ends[0] <= hz <= ends[1]:
        raise BadPointError(f"{name} goes from {format_hz(ends[0])} to {format_hz(ends[1])}, not to {format_hz(hz)}")
