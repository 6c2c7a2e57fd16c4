"""Model a board GPU's time for kernel launches, by clock: the work of its processors and of the memory.

`gpu_source.py` counts a launch's work; the stand-in driver lists the launches. Latencies and widths belong to the
architecture; assumptions are marked.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from device_agent.platforms import gpu
from device_agent.protocol.processors import (
    REACHED,
    SECTOR_BYTES,
    START_S,
    BlockWork,
    count_cycles,
    count_fetched,
    count_resident,
    find_processor,
)
from device_agent.virtual import gpu_source
from device_agent.virtual.gpu_source import Counts

# The cost of a launch that cannot be counted.
_UNKNOWN_CYCLES = 1e4
# Assumed: a barrier costs 30 cycles with its stragglers; the CPU takes 2 us to submit a launch.
_BARRIER_CYCLES, ASKING_S = 30.0, 2e-6


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel launch: grid and block as x, y, z, and the sizes of its pointer arguments."""

    source: str = dataclasses.field(repr=False)
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel's cost in one run of a program: GPU cycles and memory bytes per launch, launched `times` times."""

    cycles: float
    moved_bytes: float
    times: int = 1


def take_launches() -> list[Launch]:
    """Take what this process's virtual GPU has run since the last call."""
    if (library := _find_driver()) is None:
        return []
    library.farm_gpu_launches.restype = library.farm_gpu_source.restype = ctypes.c_char_p
    library.farm_gpu_source.argtypes = [ctypes.c_size_t]
    found, sources = [], dict[int, str]()
    for line in library.farm_gpu_launches().decode().splitlines():
        number, name, *values = line.split()
        if (at := int(number)) not in sources:
            sources[at] = library.farm_gpu_source(at).decode()
        numbers = tuple(map(int, values))
        found.append(Launch(sources[at], name, numbers[:3], numbers[3:6], numbers[6], numbers[7:]))
    return found


def _find_driver() -> Any | None:
    path = os.environ.get(gpu.DRIVER_VARIABLE)
    with contextlib.suppress(OSError):
        return ctypes.CDLL(path, os.RTLD_NOLOAD) if path else None
    return None


def sum_up(launches: Iterable[Launch], facts: Mapping[str, Any], calls: int) -> tuple[Kernel, ...]:
    """The cost of one of `calls` equal calls on the GPU of `facts` (`tree.py`), per kernel."""
    counted = collections.Counter(launches)
    return tuple(
        dataclasses.replace(_weigh(launch, str(facts["arch"]), int(facts["processors"])), times=times // calls)
        for launch, times in counted.items()
        if times >= calls
    )


@functools.lru_cache(maxsize=1024)
def _weigh(launch: Launch, arch: str, processors: int) -> Kernel:
    counts = gpu_source.count(launch.source, launch.kernel, launch.grid, launch.block)
    registers, shared = gpu_source.read_usages(launch.source).get(launch.kernel, (32, 0))
    unit = find_processor(arch)
    blocks = math.prod(launch.grid)
    resident = count_resident(unit, math.prod(launch.block), registers, shared + launch.shared_bytes)
    if not counts.issued:
        return Kernel(_UNKNOWN_CYCLES, count_bytes(counts, blocks, launch.sizes, unit.cache_bytes))
    work = BlockWork(
        threads=math.prod(launch.block),
        issued=counts.issued,
        shared_turns=counts.shared,
        sectors=sum(counts.sectors.values()),
        waits=counts.waits,
        barrier_cycles=counts.barriers * _BARRIER_CYCLES,
        held=counts.held,
    )
    cycles = count_cycles(work, unit, blocks, resident, processors)
    return Kernel(cycles, count_bytes(counts, blocks, launch.sizes, unit.cache_bytes))


def count_bytes(counts: Counts, blocks: int, sizes: Sequence[int], cache_bytes: int) -> float:
    """Memory traffic in bytes: each argument once, and again what the cache has evicted."""
    moved = 0.0
    for argument, sectors in counts.sectors.items():
        asked = sectors * SECTOR_BYTES * blocks
        size = sizes[argument] if argument < len(sizes) and sizes[argument] else asked
        moved += count_fetched(asked, size, cache_bytes)
    return moved


def compute_seconds(
    kernels: Sequence[Kernel], facts: Mapping[str, Any], gpu_hz: float, memory_share: float
) -> tuple[float, float, float]:
    """The GPU's time at a clock and a share of the memory's highest clock, and the busy shares of its processors and
    of the memory.
    """
    bandwidth = REACHED * max(float(facts["memory_bytes_per_s"]), 1e9) * memory_share
    total = computing = moving = 0.0
    for kernel in kernels:
        compute_s, move_s = kernel.cycles / max(gpu_hz, 1.0), kernel.moved_bytes / bandwidth
        total += kernel.times * (max(compute_s, move_s) + START_S)
        computing += kernel.times * compute_s
        moving += kernel.times * move_s
    return total * float(facts["stretch"]), computing / max(total, 1e-12), moving / max(total, 1e-12)
