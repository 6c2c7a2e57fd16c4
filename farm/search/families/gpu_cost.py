"""Shared parts of the GPU families: the estimated time of thread blocks, and the binding of loops to threads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from device_agent.protocol import START_S, WARP, Processor
from farm.search.families.family import Prediction
from farm.search.gpus import TargetGpu

# Assumed: the cost of a barrier; memory latency (Jia et al. 2018, arXiv 1804.06826); most independent FMAs of a thread.
_BARRIER_CYCLES, _MEMORY_CYCLES, _MOST_PARALLEL = 40.0, 350.0, 6
# Bytes that a processor exchanges with L2 in a cycle (`farm/virtual/gpu/play.cc`).
PORT_BYTES = 16.0
# Registers for addresses and loop counters beside a thread's values.
OTHER_REGISTERS = 22


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A grid of `blocks` blocks of `threads`.

    Per thread: FMAs `multiplied`, `others` instructions, values `held` in registers, rounds of memory `waits`, and
    `barriers`. `shared_turns` are a block's warp accesses to shared memory. `moved_bytes` is all traffic, `far_bytes`
    the part from DRAM.
    """

    blocks: int
    threads: int
    multiplied: float
    others: float
    held: int
    waits: float
    moved_bytes: float
    far_bytes: float
    shared_bytes: int = 0
    shared_turns: float = 0.0
    barriers: float = 0.0

    @property
    def registers(self) -> int:
        """Registers of one thread, about as `ptxas` allocates them."""
        return self.held + OTHER_REGISTERS


def predict(work: Blocks, gpu: TargetGpu) -> Prediction | None:
    """Predict the time; None where a block exceeds the GPU's limits."""
    limits = gpu.plan.limits
    warps = math.ceil(work.threads / WARP)
    too_much = work.threads > limits.threads or work.shared_bytes > limits.shared_bytes
    if too_much or work.registers > 240 or work.registers * warps * WARP > limits.registers:
        return None
    unit, width = gpu.unit, gpu.unit.lanes / WARP
    own = math.ceil(work.blocks / gpu.processors)  # of the busiest processor
    resident = min(own, count_resident(unit, work.threads, work.registers, work.shared_bytes))
    issued = warps * (work.multiplied + work.others)
    # Other warps, and independent instructions of the same one, hide latency.
    parallel = min(_MOST_PARALLEL, max(1, work.held))
    filled = min(1.0, resident * warps * parallel / (unit.fma_cycles * width))
    near = work.moved_bytes / work.blocks / PORT_BYTES
    busy = max(issued / width / filled, work.shared_turns, near)
    waited = work.waits * _MEMORY_CYCLES + work.barriers * _BARRIER_CYCLES + issued / warps
    cycles = max(own * busy, own / resident * waited)
    far_s = work.far_bytes / gpu.memory_bytes_per_s
    seconds = max(cycles / gpu.freq_hz, far_s) + START_S
    terms = {
        "compute": cycles,
        "far": far_s * gpu.freq_hz,
        "pad": work.shared_turns * own,
        "balance": own * gpu.processors / work.blocks,
        "steps": resident * warps,
        "near": cycles if cycles == own * near else 0.0,
    }
    return Prediction(seconds, terms)


def count_resident(unit: Processor, threads: int, registers: int, shared_bytes: int) -> int:
    """Count the resident blocks of a processor; registers go by 256 to a warp, shared memory by 256 bytes."""
    warps = math.ceil(threads / WARP)
    held = warps * math.ceil(max(registers, 16) * WARP / 256) * 256
    shared = math.ceil(shared_bytes / 256) * 256
    by_shared = unit.shared_bytes // shared if shared else unit.blocks
    return max(1, min(unit.blocks, unit.threads // (warps * WARP), unit.registers // held, by_shared))


def count_fetched(asked_bytes: float, size_bytes: float, cache_bytes: int) -> float:
    """Count the bytes of an argument that come from memory: once, and again for what the cache has evicted."""
    once = min(asked_bytes, size_bytes)
    return once + (asked_bytes - once) * max(0.0, 1 - cache_bytes / max(size_bytes, 1.0))


def is_whole(threads: int, extents: Sequence[int]) -> bool:
    """Say whether `threads` covers some inner loops and divides the next one.

    Only then can TVM compute a reduction inside a thread.
    """
    for extent in reversed(extents):
        if extent % threads == 0:
            return True
        if threads % extent:
            return False
        threads //= extent
    return threads == 1


def give_to_threads(schedule: Any, block: Any, threads: int, vector: int) -> None:
    """Make a block that copies into shared memory use all threads, `vector` elements each at a time.

    It has been moved inside a loop of its reader; its own loops are the innermost ones.
    """
    loops = schedule.get_loops(block)
    depth = len(schedule.get(block).iter_vars)
    fused = schedule.fuse(*loops[-depth:])
    _, thread, lane = schedule.split(fused, [None, threads, vector])
    schedule.bind(thread, "threadIdx.x")
    if vector > 1:
        schedule.vectorize(lane)
