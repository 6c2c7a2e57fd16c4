"""What a latency was taken with, for people: threads, and the clocks that were read then, as `1 thread, a57=1479MHz`.

Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping

from device_agent.protocol import OperatingPoint, Outcome
from farm.points.grid import format_point


def format_threads(threads: int) -> str:
    """`1 thread`, `4 threads`."""
    return f"{threads} thread{'' if threads == 1 else 's'}"


def format_conditions(threads: int, clocks: str, point: str) -> str:
    """Threads and clocks in a few words; where no clock could be read, what was asked for (`point`)."""
    return f"{format_threads(threads)}, {clocks or f'clocks: {point}'}"


def format_clocks(outcome: Outcome, clusters: Mapping[str, Collection[int]], *, on_gpu: bool = False) -> str:
    """The clocks of the clusters (names and cores) at the end of a run, the slowest core's of each; "" where unknown.

    A clock that was held is told as it was asked for: what is read of it jitters.
    """
    seen = outcome.after or outcome.before
    if seen is None:
        return ""
    held = outcome.point or OperatingPoint()
    hz = {int(core): value for core, value in seen.cpu_freq_hz.items()}
    found: dict[str, int] = {}
    for name, cores in clusters.items():
        if known := [hz[core] for core in cores if core in hz]:
            found[name] = held.cpu_freq_hz.get(name, min(known))
    if not clusters and hz:  # a machine whose cores nobody has described
        found["cpu"] = int(statistics.median(hz.values()))
    gpu_hz = (held.gpu_freq_hz or seen.gpu_freq_hz) if on_gpu else None
    return format_point(OperatingPoint(cpu_freq_hz=found, gpu_freq_hz=gpu_hz)) if found or gpu_hz else ""
