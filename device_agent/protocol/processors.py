"""What one streaming multiprocessor of a Jetson's GPU has, by architecture, how many blocks it takes at a time, and how
long for them. Predictions of schedules and virtual boards both go by this; counting what a block does is theirs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

# Of a cache, on all cores.
_LINE_BYTES = 64

# Of emulated code: cycles and lines from memory of the longest lane, cycles and lines of all lanes.
Segment = tuple[float, int, float, int]


def count_seconds(
    segments: Sequence[Segment], core: Mapping[str, Any], hz: float, cores: int, memory_s: float = 1.0
) -> tuple[float, float]:
    """How long segments take at a clock, and what all cores compute together, both in s.

    No segment takes less than its longest lane's cycles, than its lines from memory one core, or than those of all
    lanes the memory, which takes `memory_s` times as long as at its highest clock. More threads than cores take turns.
    """
    one_line_s = _LINE_BYTES / core["core_bytes_per_s"] * memory_s
    all_lines_s = _LINE_BYTES / core["memory_bytes_per_s"] * memory_s
    base_s = busy_s = 0.0
    for cycles, lines, all_cycles, all_lines in segments:
        is_region = (all_cycles, all_lines) != (cycles, lines)
        beside = core["region_cycles"] if is_region else core["call_cycles"]
        longest = max(cycles, all_cycles / max(1, cores)) + beside
        base_s += max(longest / hz, lines * one_line_s, all_lines * all_lines_s)
        busy_s += (all_cycles + beside) / hz
    return base_s, busy_s


WARP = 32
# The least of global memory that is moved.
SECTOR_BYTES = 32
# Assumed, as microbenchmarks of these architectures have it (Jia et al. 2018, arXiv 1804.06826): memory answers after
# some 350 cycles; a kernel's start on the device takes 3 us.
_MEMORY_CYCLES, START_S = 350.0, 3e-6
# Of the memory's peak that a kernel can have, and sectors that the second cache gives a processor in a cycle. Assumed.
REACHED, _CACHE_SECTORS = 0.8, 2.0
# Independent multiply-adds of one thread that its results allow at most.
_MOST_PARALLEL = 6


@dataclasses.dataclass(frozen=True)
class Processor:
    """Lanes for float32, cycles until a multiply-add's result is there, and what blocks share; registers of 32 bits.

    `cache_bytes` is the GPU's second cache, which its processors share.
    """

    lanes: int
    fma_cycles: float
    registers: int
    shared_bytes: int
    threads: int
    blocks: int
    cache_bytes: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Latencies: Jia et al. 2018 (arXiv
# 1804.06826). Second caches of Nano and TX2: deviceQuery; those of Xavier and Orin are unconfirmed.
_PROCESSORS = {
    "sm_53": Processor(128, 6.0, 65536, 64 << 10, 2048, 32, 256 << 10),
    "sm_62": Processor(128, 6.0, 65536, 64 << 10, 2048, 32, 512 << 10),
    "sm_72": Processor(64, 4.0, 65536, 96 << 10, 2048, 32, 512 << 10),
    "sm_87": Processor(128, 4.0, 65536, 164 << 10, 1536, 16, 4 << 20),
}


def find_processor(arch: str) -> Processor:
    """That of an architecture such as sm_53; the plainest for one that is not known."""
    return _PROCESSORS.get(arch, _PROCESSORS["sm_53"])


def count_resident(unit: Processor, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that one processor has at a time. Registers go by 256 to a warp, shared memory by 256 bytes."""
    warps = math.ceil(threads / WARP)
    held = warps * math.ceil(max(registers, 16) * WARP / 256) * 256
    shared = math.ceil(shared_bytes / 256) * 256
    by_shared = unit.shared_bytes // shared if shared else unit.blocks
    return max(1, min(unit.blocks, unit.threads // (warps * WARP), unit.registers // held, by_shared))


@dataclasses.dataclass(frozen=True)
class BlockWork:
    """What one block of `threads` does: warp instructions issued, turns of shared memory, sectors of global memory,
    phases in which it waits for memory, cycles that its barriers cost; each thread has `held` values in work at once.
    """

    threads: int
    issued: float
    shared_turns: float
    sectors: float
    waits: float
    barrier_cycles: float
    held: int


def count_cycles(work: BlockWork, unit: Processor, blocks: int, resident: int, processors: int) -> float:
    """GPU cycles until so many blocks are done, `resident` of them at a time on a processor, had the memory no end of
    bandwidth.
    """
    width = unit.lanes / WARP
    warps = math.ceil(work.threads / WARP)
    own = math.ceil(blocks / processors)  # of the busiest processor
    at_once = min(resident, own)
    # Instructions of other warps, and independent ones of the same, fill the time until a result is there.
    parallel = min(_MOST_PARALLEL, max(1, work.held))
    filled = min(1.0, at_once * warps * parallel / (unit.fma_cycles * width))
    busy = max(work.issued / width / filled, work.shared_turns, work.sectors / _CACHE_SECTORS)
    waited = work.waits * _MEMORY_CYCLES + work.barrier_cycles + work.issued / warps
    return max(own * busy, own / at_once * waited)


def count_fetched(asked_bytes: float, size_bytes: float, cache_bytes: int) -> float:
    """Bytes of an argument that come from memory where so many are asked for: it once, and again what no cache has."""
    once = min(asked_bytes, size_bytes)
    return once + (asked_bytes - once) * max(0.0, 1 - cache_bytes / max(size_bytes, 1.0))
