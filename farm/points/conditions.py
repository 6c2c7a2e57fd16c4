"""What a latency was taken with, for people: threads, and the clocks of that time, as `1 thread, a57=1479MHz`.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from device_agent.protocol import OperatingPoint, Outcome, format_mhz


def format_threads(threads: int) -> str:
    """`1 thread`, `4 threads`."""
    return f"{threads} thread{'' if threads == 1 else 's'}"


def format_conditions(threads: int, clocks: str, point: str) -> str:
    """Threads and clocks in a few words; where no clock could be read, what was asked for (`point`)."""
    return f"{format_threads(threads)}, {clocks or f'clocks: {point}'}"


def format_clocks(outcome: Outcome, clusters: Mapping[str, Collection[int]], *, on_gpu: bool = False) -> str:
    """The clocks of the clusters (names and cores) in a run; "" where the board does not say.

    A clock that was held is told as it was asked for, what is read of it jitters; of one that follows the load, which
    is low again once the run is over, the limit then in force: `a57 up to 1479MHz`.
    """
    seen = outcome.after or outcome.before
    if seen is None:
        return ""
    held = outcome.point or OperatingPoint()
    limits = {int(core): hz for core, hz in (seen.cpu_max_hz or seen.cpu_freq_hz).items()}
    # A machine whose cores nobody has described has one cluster.
    words = []
    for name, cores in (clusters or {"cpu": tuple(limits)}).items():
        if name in held.cpu_freq_hz:
            words.append(f"{name}={format_mhz(held.cpu_freq_hz[name])}MHz")
        elif known := [limits[core] for core in cores if core in limits]:
            words.append(f"{name} up to {format_mhz(max(known))}MHz")
    if on_gpu and held.gpu_freq_hz:
        words.append(f"gpu={format_mhz(held.gpu_freq_hz)}MHz")
    return ", ".join(words)
