"""Softmax, layer, group, instance and root-mean-square norms on GPUs: threads of a block share a row, and do with it
all that is to be done before the block takes the next one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from device_agent.protocol import WARP
from farm.search.families import facts as reading
from farm.search.families import gpu_cost, norm
from farm.search.families.family import Plan, Prediction
from farm.search.families.gpu_cost import Blocks
from farm.search.families.norm import Norm
from farm.search.gpus import TargetGpu

# Warp instructions of an exponential, a root or a division. Assumed.
_CALL_ISSUED = 10


class GpuNorms:
    """`shares` threads share a row, a block has `beside` rows. What lies between the reductions (exponentials) is held
    in shared memory (`held`), or computed again where it is read.

    A row is all that comes to one sum, whether or not it is contiguous: neighbouring threads have neighbours in memory.
    """

    name = "gpu-norm"

    def read(self, schedule: Any) -> Norm | None:
        found = norm.read_norm(schedule)
        # A mean pool's counts are spread over channels, which nothing was summed up over: no norm.
        return found if found and found.run == _count_run(found) else None

    def options(self, facts: Norm, core: TargetGpu) -> Mapping[str, tuple[int, ...]]:
        kept = [facts.extents[at] for at in facts.kept]
        between = any(not sums for sums in facts.sums)
        # Rows side by side in `threadIdx.y` came out wrong on a virtual GPU (2 rows of 40, 16 or 64 threads to each);
        # why is not known.
        beside = (1,) if facts.rows else (1, 2, 4, 8, 16, 32)
        return {
            "beside": tuple(n for n in beside if gpu_cost.is_whole(n, kept)),
            "shares": tuple(n for n in (1, 8, 16, 32, 64, 128, 256) if n < 2 * facts.run),
            "held": (1, 0) if between else (0,),
        }

    def predict(self, facts: Norm, plan: Plan, core: TargetGpu) -> Prediction | None:
        threads = plan["beside"] * plan["shares"]
        if not WARP <= threads <= 512:
            return None
        rows = math.prod(facts.extents[at] for at in facts.kept)
        steps = math.ceil(facts.run / plan["shares"])
        summing, between = (sum((sums > 0) is wanted for sums in facts.sums) for wanted in (True, False))
        # What is computed again is so by every reduction after it, and by what writes the result.
        computed = 1 + between if plan["held"] else 1 + between * (1 + max(0, summing - 1))
        held = facts.run * between * plan["held"] + (summing if facts.rows else 0)
        shared_bytes = plan["beside"] * facts.element_bytes * held
        # A warp adds up by shuffles, several do so through shared memory.
        turns = 2 * math.log2(max(2, plan["shares"]))
        in_row = min(8, plan["shares"] if facts.rows else plan["beside"])
        passes = 1 + summing
        work = Blocks(
            blocks=math.ceil(rows / plan["beside"]),
            threads=threads,
            multiplied=steps * passes,
            others=steps * (4 * passes + _CALL_ISSUED * computed) + summing * 6 * turns,
            held=4,
            waits=passes * (1 + steps / 8),
            moved_bytes=rows * facts.run * facts.element_bytes * (passes + 1) * 8 / in_row,
            far_bytes=float(facts.moved_bytes),
            shared_bytes=shared_bytes + threads * facts.element_bytes,
            shared_turns=math.ceil(threads / WARP) * (steps * between * plan["held"] * 2 + summing * turns),
            barriers=summing * (2 + (turns if plan["shares"] > WARP else 0)) + between * plan["held"],
        )
        return gpu_cost.predict(work, core)

    def apply(self, schedule: Any, facts: Norm, plan: Plan) -> None:
        """Give rows to blocks and a row to threads, and compute everything before the result at the rows of a block."""
        if facts.folded:
            schedule.reverse_compute_inline(schedule.get_sblock(facts.folded))
        for name in facts.inlined:
            schedule.compute_inline(schedule.get_sblock(name))
        left = []
        for name, sums in zip(facts.blocks, facts.sums, strict=True):
            if sums or plan["held"]:
                left.append(name)
            else:
                schedule.compute_inline(schedule.get_sblock(name))
        # Threads that are neighbours have what lies in a row in memory.
        of_rows, of_shares = ("threadIdx.y", "threadIdx.x") if facts.rows else ("threadIdx.x", "threadIdx.y")
        own = schedule.get_loops(schedule.get_sblock(facts.last))
        kept = [own[at] for at in facts.kept]
        rest = [loop for at, loop in enumerate(own) if at not in facts.kept]
        schedule.reorder(*kept, *rest)
        at, beside = schedule.split(schedule.fuse(*kept), [None, plan["beside"]])
        _, share = schedule.split(schedule.fuse(*rest), [None, plan["shares"]])
        schedule.bind(at, "blockIdx.x")
        schedule.bind(beside, of_rows)
        schedule.bind(share, of_shares)
        summing = {name for name, sums in zip(facts.blocks, facts.sums, strict=True) if sums}
        for name in reversed(left):
            block = schedule.get_sblock(name)
            # Where `threadIdx.x` counts rows, TVM takes the thread that writes a row's sum for the one that reads it,
            # whatever `threadIdx.y` is, and leaves out the barrier. In scope "local" TVM gives every thread the sum.
            # Along rows the barrier is there, and local sums take up to four times as long (measured on an H200).
            scope = "local" if name in summing and not facts.rows else "shared"
            for index in range(len(schedule.get(block).writes)):
                schedule.set_scope(block, index, scope)
            schedule.compute_at(block, at, preserve_unit_loops=True)
            variables = schedule.get(block).iter_vars
            own = schedule.get_loops(block)[-len(variables) :]
            summed = [loop for loop, v in zip(own, variables, strict=True) if reading.is_sum(v)]
            if summed:
                rows = [loop for loop, v in zip(own, variables, strict=True) if not reading.is_sum(v)]
                schedule.reorder(*rows, *summed)
                schedule.bind(schedule.fuse(*rows), of_rows)
                _, share = schedule.split(schedule.fuse(*summed), [None, plan["shares"]])
                schedule.bind(share, of_shares)
                continue
            outer, inner = (plan["beside"], plan["shares"]) if facts.rows else (plan["shares"], plan["beside"])
            _, high, low = schedule.split(schedule.fuse(*own), [None, outer, inner])
            schedule.bind(high, "threadIdx.y")
            schedule.bind(low, "threadIdx.x")


def _count_run(facts: Norm) -> int:
    """Elements of the result that share what was summed up."""
    return math.prod(extent for at, extent in enumerate(facts.extents) if at not in facts.kept)
