"""How long a board's GPU takes for what was launched: work of its processors and of the memory, by clock. A model.

What a launch does is counted in its source (`gpu_source.py`); the stand-in for the driver says what was launched.
Latencies and widths are of the architecture; what is assumed of them is said at each.
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

from device_agent import gpu
from device_agent.protocol.processors import WARP, Processor, count_resident, find_processor
from device_agent.virtual import gpu_source
from device_agent.virtual.gpu_source import SECTOR_BYTES, Counts

# Work that nobody could count is taken for so many cycles.
_UNKNOWN_CYCLES = 1e4
# Assumed, as microbenchmarks of these architectures have them (Jia et al. 2018, arXiv 1804.06826): memory answers after
# some 350 cycles, a barrier costs some 30 with its stragglers; a start on the device 3 us, and this machine's processor
# 2 us to ask for one.
_MEMORY_CYCLES, _BARRIER_CYCLES = 350.0, 30.0
_START_S, ASKING_S = 3e-6, 2e-6
# Of the memory's peak that a kernel can have, and what the second cache gives a processor in a cycle. Assumed.
_REACHED, _CACHE_SECTORS = 0.8, 2.0
# Independent multiply-adds of one thread that its results allow at most.
_MOST_PARALLEL = 6


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel's start: grid and block as x, y, z, and how large what its arguments point into is."""

    source: str = dataclasses.field(repr=False)
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a kernel costs in one run of a program: GPU cycles and bytes of memory of one launch; `times` it starts."""

    cycles: float
    moved_bytes: float
    times: int = 1


def take_launches() -> list[Launch]:
    """What this process's virtual GPU ran since this was asked last."""
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
    """What one of so many equal calls costs on the GPU of `facts` (`tree.py`), a kernel a line."""
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
    cycles = count_cycles(counts, unit, math.prod(launch.block), blocks, resident, processors)
    return Kernel(cycles, count_bytes(counts, blocks, launch.sizes, unit.cache_bytes))


def count_cycles(counts: Counts, unit: Processor, threads: int, blocks: int, resident: int, processors: int) -> float:
    """GPU cycles until all blocks are done, had the memory no end of bandwidth."""
    if not counts.issued:
        return _UNKNOWN_CYCLES
    width = unit.lanes / WARP
    warps = math.ceil(threads / WARP)
    own = math.ceil(blocks / processors)  # of the busiest processor
    at_once = min(resident, own)
    # Instructions of other warps, and independent ones of the same, fill the time until a result is there.
    parallel = min(_MOST_PARALLEL, max(1, counts.held))
    filled = min(1.0, at_once * warps * parallel / (unit.fma_cycles * width))
    busy = max(
        counts.issued / width / filled,
        counts.shared,
        sum(counts.sectors.values()) / _CACHE_SECTORS,
    )
    waited = counts.waits * _MEMORY_CYCLES + counts.barriers * _BARRIER_CYCLES + counts.issued / warps
    return max(own * busy, own / at_once * waited)


def count_bytes(counts: Counts, blocks: int, sizes: Sequence[int], cache_bytes: int) -> float:
    """Bytes that come from and go to memory: each of an argument once, and again what the cache no longer has."""
    moved = 0.0
    for argument, sectors in counts.sectors.items():
        asked = sectors * SECTOR_BYTES * blocks
        size = sizes[argument] if argument < len(sizes) and sizes[argument] else asked
        once = min(asked, float(size))
        moved += once + (asked - once) * max(0.0, 1 - cache_bytes / max(size, 1))
    return moved


def compute_seconds(
    kernels: Sequence[Kernel], facts: Mapping[str, Any], gpu_hz: float, memory_share: float
) -> tuple[float, float, float]:
    """How long the GPU takes at a clock, the memory at a share of its highest; for which share of that the GPU's
    processors are busy, and the memory.
    """
    bandwidth = _REACHED * max(float(facts["memory_bytes_per_s"]), 1e9) * memory_share
    total = computing = moving = 0.0
    for kernel in kernels:
        compute_s, move_s = kernel.cycles / max(gpu_hz, 1.0), kernel.moved_bytes / bandwidth
        total += kernel.times * (max(compute_s, move_s) + _START_S)
        computing += kernel.times * compute_s
        moving += kernel.times * move_s
    return total * float(facts["stretch"]), computing / max(total, 1e-12), moving / max(total, 1e-12)
