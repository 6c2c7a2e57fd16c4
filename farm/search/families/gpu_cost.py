"""What predictions for GPUs share: how long blocks of threads take, and how loops are given to threads."""

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

# Assumed: what a barrier costs.
_BARRIER_CYCLES = 40.0
# Registers that addresses and loop counters take beside a thread's values.
OTHER_REGISTERS = 22


@dataclasses.dataclass(frozen=True)
class Blocks:
    """`blocks` blocks of `threads`; of one thread: multiply-adds, other instructions, values that it holds, rounds in
    which it waits for memory, barriers. `shared_turns` are a block's accesses to shared memory by a warp each,
    `moved_bytes` what all blocks read and write, `far_bytes` what of it comes from memory.
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
        """Of one thread, as `ptxas` will about give it."""
        return self.held + OTHER_REGISTERS


def predict(work: Blocks, gpu: TargetGpu) -> Prediction | None:
    """How long it takes; None for what a block may not have."""
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
    """Whether a block stores one element for each step of its own loops, and sums nothing up."""
    block = schedule.get(schedule.get_sblock(name))
    loops = len(schedule.get_loops(schedule.get_sblock(name)))
    plain = isinstance(block.body, tirx.BufferStore) and len(block.iter_vars) == loops
    return plain and not any(reading.is_sum(v) for v in block.iter_vars)


def is_whole(threads: int, extents: Sequence[int]) -> bool:
    """Whether so many steps in a row of nested loops are some inner loops and a whole part of the next one: TVM moves a
    sum to a thread where it sees that alone.
    """
    for extent in reversed(extents):
        if extent % threads == 0:
            return True
        if threads % extent:
            return False
        threads //= extent
    return threads == 1


def give_to_threads(schedule: Any, block: Any, threads: int, vector: int) -> None:
    """Have a block that copies into shared memory do so with all threads, `vector` elements each at a time.

    It was put inside a loop of the block that reads it; its own loops are the innermost ones.
    """
    loops = schedule.get_loops(block)
    depth = len(schedule.get(block).iter_vars)
    fused = schedule.fuse(*loops[-depth:])
    _, thread, lane = schedule.split(fused, [None, threads, vector])
    schedule.bind(thread, "threadIdx.x")
    if vector > 1:
        schedule.vectorize(lane)
