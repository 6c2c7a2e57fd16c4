"""Clocks of a virtual board as state: limits, governors, load and the resulting frequency. Files: `files_*.py`."""

from __future__ import annotations

import bisect
import dataclasses
import errno
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from device_agent.protocol.hardware import Cluster
from farm.virtual.parameters import Domain

# Headroom of schedutil and the GPU's governor (Linux, kernel/sched/cpufreq_schedutil.c).
_HEADROOM = 1.25


def refuse(code: int, what: str = "") -> OSError:
    """Make a kernel driver's error."""
    return OSError(code, os.strerror(code), what or None)


class LimitedClock:
    """A clock with a table, two limits and a governor: a CPU cluster's or the GPU's. In Hz.

    `strict`: a limit beyond the other is refused, as before Linux 5.x; otherwise requests are remembered and the lower
    limit yields. `rounds`: a limit between two entries becomes the upper one, as on Tegra.
    """

    def __init__(
        self, table: Sequence[int], governors: Sequence[str], governor: str, strict: bool = False, rounds: bool = False
    ) -> None:
        self.table = tuple(sorted(table))
        self.governors = tuple(governors)
        self.governor = governor
        self.speed_hz = self.table[0]
        self.stuck_hz: int | None = None
        self.cap_hz = math.inf  # firmware's; unknown to the kernel
        self._strict = strict
        self._rounds = rounds
        self._min_hz, self._max_hz = self.table[0], self.table[-1]

    @property
    def max_hz(self) -> int:
        return self._max_hz

    @property
    def min_hz(self) -> int:
        return min(self._min_hz, self._max_hz)

    def reset_limits(self) -> None:
        """Restore the hardware's limits."""
        self._min_hz, self._max_hz = self.table[0], self.table[-1]

    def set_min(self, hz: int) -> None:
        """Raise OSError (EINVAL) if the driver refuses."""
        hz = self._fit(hz)
        if self._strict and hz > self._max_hz:
            raise refuse(errno.EINVAL)
        self._min_hz = hz

    def set_max(self, hz: int) -> None:
        """Raise OSError (EINVAL) if the driver refuses."""
        hz = self._fit(hz)
        if self._strict and hz < self._min_hz:
            raise refuse(errno.EINVAL)
        self._max_hz = hz

    def set_limits(self, min_hz: int, max_hz: int) -> None:
        """Set both at once, as nvpmodel does."""
        self._max_hz = self._fit(max_hz)
        self._min_hz = min(self._fit(min_hz), self._max_hz)

    def set_governor(self, name: str) -> None:
        """Raise OSError (EINVAL) for a governor that is not built in."""
        if name not in self.governors:
            raise refuse(errno.EINVAL)
        if name == "userspace" != self.governor:
            self.speed_hz = self.max_hz
        self.governor = name

    def decide(self, utilisation: float, ceiling_hz: float) -> int:
        """Choose the clock for this load, up to the throttling limit `ceiling_hz`."""
        if self.stuck_hz is not None:
            return self.stuck_hz
        if self.governor == "performance":
            wanted: float = self.max_hz
        elif self.governor == "powersave":
            wanted = self.min_hz
        elif self.governor == "userspace":
            wanted = self.speed_hz
        else:
            wanted = _HEADROOM * utilisation * self.table[-1]
        wanted = max(self.min_hz, min(wanted, self.max_hz))
        highest = bisect.bisect_right(self.table, min(self.max_hz, ceiling_hz)) - 1
        return self.table[max(0, min(bisect.bisect_left(self.table, wanted), highest))]

    def _fit(self, hz: int) -> int:
        hz = max(self.table[0], min(hz, self.table[-1]))
        return self.table[bisect.bisect_left(self.table, hz)] if self._rounds else hz


class MemoryClock:
    """The memory clock: follows the CPU's floor and the traffic, unless locked; at most its cap."""

    def __init__(self, table: Sequence[int]) -> None:
        self.table = tuple(sorted(table))
        self.locked = False
        self.enabled = True  # the value last written; the memory clock never stops
        self.rate_hz = self.table[-1]  # the locked rate
        self.cap_hz = 0  # 0: none
        self.stuck_hz: int | None = None

    @property
    def highest_hz(self) -> int:
        """The highest clock under the cap; a cap between two entries counts as the upper one."""
        if not self.cap_hz:
            return self.table[-1]
        return self.table[min(bisect.bisect_left(self.table, self.cap_hz), len(self.table) - 1)]

    def set_rate(self, hz: int) -> None:
        """Set the rate; firmware silently drops an unknown one."""
        if hz in self.table:
            self.rate_hz = hz

    def decide(self, floor_hz: int, traffic: float) -> int:
        """Choose the clock for the CPU's `floor_hz` and `traffic`, a share of the bandwidth."""
        if self.stuck_hz is not None:
            return self.stuck_hz
        if self.locked:
            return min(self.rate_hz, self.highest_hz)
        wanted = max(float(floor_hz), _HEADROOM * traffic * self.table[-1])
        index = min(bisect.bisect_left(self.table, wanted), len(self.table) - 1)
        return min(self.table[index], self.highest_hz)


class CpuCluster:
    """One cluster, its clock, and the current frequency."""

    def __init__(self, cluster: Cluster, domain: Domain, clock: LimitedClock) -> None:
        self.name = cluster.name
        self.cpus = cluster.cpus
        self.isolated = cluster.isolated
        self.core = cluster.core
        self.measured_clock = cluster.measured_clock
        self.floors = cluster.memory_floor_hz
        self.domain = domain
        self.clock = clock
        self.hz = clock.min_hz
        self.busy = 0.0

    @property
    def true_hz(self) -> int:
        """The hardware's clock; `hz` is the kernel's belief."""
        return int(min(self.hz, self.clock.cap_hz))

    def floor_hz(self) -> int:
        """The lowest memory clock beside this CPU clock."""
        return max((floor for from_hz, floor in self.floors if self.hz >= from_hz), default=0)


class Gpu:
    """The GPU: its clock, and whether it may be power-gated while idle."""

    def __init__(self, clock: LimitedClock) -> None:
        self.clock = clock
        self.hz = clock.min_hz
        self.busy = 0.0
        self.railgate = True
        self.power_control = "auto"

    @property
    def gated(self) -> bool:
        return self.railgate and self.power_control == "auto" and not self.busy


class Lag:
    """The clocks that the hardware runs at: those of the kernel, some time later."""

    def __init__(self) -> None:
        self._changes: dict[str, tuple[int, int, float]] = {}  # by name: Hz before, Hz after, when (s)

    def follow(self, name: str, hz: int, at_s: float, delay_s: float) -> int:
        """Return the hardware's clock at `at_s`, where the kernel's is `hz`."""
        before, after, due_s = self._changes.get(name, (hz, hz, at_s))
        before = after if at_s >= due_s else before
        if hz != after:
            after, due_s = hz, at_s + delay_s
        self._changes[name] = before, after, due_s
        return after if at_s >= due_s else before

    def list_due_s(self, at_s: float) -> list[float]:
        """When clocks will change after `at_s`."""
        return [due_s for _, _, due_s in self._changes.values() if due_s > at_s]


@dataclasses.dataclass(frozen=True)
class Load:
    """A user's load: busy `cores` of a cluster ("": of those open to the scheduler), shares of memory and GPU.

    `wanted` are those shares at the highest clocks, (memory, GPU): governors follow them. None: the shares themselves.
    """

    cluster: str = ""
    cores: float = 0.0
    memory: float = 0.0
    gpu: float = 0.0
    wanted: tuple[float, float] | None = None
    expires_s: float = math.inf


def share_out(
    loads: Iterable[Load], clusters: Mapping[str, CpuCluster], online_in: Callable[[CpuCluster], Sequence[int]]
) -> tuple[float, float, float, float]:
    """Set the busy cores of each cluster, at most all; return the shares of memory and GPU, and the wanted ones."""
    for cluster in clusters.values():
        cluster.busy = 0.0
    totals = [0.0] * 4
    open_clusters = [cluster for cluster in clusters.values() if not cluster.isolated]
    for load in loads:
        chosen = [clusters[load.cluster]] if load.cluster in clusters else open_clusters
        cores = sum(len(online_in(cluster)) for cluster in chosen)
        for cluster in chosen:
            cluster.busy += load.cores * len(online_in(cluster)) / max(cores, 1)
        shares = (load.memory, load.gpu)
        totals = [total + share for total, share in zip(totals, (*shares, *(load.wanted or shares)), strict=True)]
    memory, gpu, wanted_memory, wanted_gpu = (min(total, 1.0) for total in totals)
    return memory, gpu, wanted_memory, wanted_gpu
