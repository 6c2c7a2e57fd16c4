"""Shared parts of the GPU families: the estimated time of thread blocks, and the binding of loops to threads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx

from device_agent.protocol import SECTOR_BYTES, START_S, WARP, BlockWork, count_cycles, count_resident
from farm.search.families import facts as reading
from farm.search.families.family import Prediction
from farm.search.gpus import TargetGpu

# Assumed cost of a barrier.
_BARRIER_CYCLES = 40.0
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
    unit = gpu.unit
    own = math.ceil(work.blocks / gpu.processors)
    resident = min(own, count_resident(unit, work.threads, work.registers, work.shared_bytes))
    block = BlockWork(
        threads=work.threads,
        issued=warps * (work.multiplied + work.others),
        shared_turns=work.shared_turns,
        sectors=work.moved_bytes / work.blocks / SECTOR_BYTES,
        waits=work.waits,
        barrier_cycles=work.barriers * _BARRIER_CYCLES,
        held=work.held,
    )
    cycles = count_cycles(block, unit, work.blocks, resident, gpu.processors)
    far_s = work.far_bytes / gpu.memory_bytes_per_s
    seconds = max(cycles / gpu.freq_hz, far_s) + START_S
    terms = {
        "compute": cycles,
        "far": far_s * gpu.freq_hz,
        "pad": work.shared_turns * own,
        "balance": own * gpu.processors / work.blocks,
        "steps": resident * warps,
    }
    return Prediction(seconds, terms)


def writes_once(schedule: Any, name: str) -> bool:
    """Say whether a block stores one element per step of its own loops, without a reduction."""
    block = schedule.get(schedule.get_sblock(name))
    loops = len(schedule.get_loops(schedule.get_sblock(name)))
    plain = isinstance(block.body, tirx.BufferStore) and len(block.iter_vars) == loops
    return plain and not any(reading.is_sum(v) for v in block.iter_vars)


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
