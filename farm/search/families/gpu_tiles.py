"""Contractions on a GPU: tiles of pixels by channels in shared memory, and their predicted time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from device_agent.protocol import START_S, WARP, count_fetched, count_resident
from farm.search.families import facts as reading
from farm.search.families import gpu_cost, loops
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan, Prediction
from farm.search.gpus import TargetGpu

# Threads of a block along one side, and in all; steps of the reduction that are unrolled.
_MOST_SIDE, _MOST_THREADS, _UNROLLED = 32, 512, 8
# Instructions to stage an element: with its address, or with a check for the border too.
_MOVED, _CHECKED = 6, 8
# Fitted to the estimates of 260 plans of convolutions on a Nano (`device_agent/virtual/gpu/play.cc`): the cycles until
# a stage's operands are there, its other instructions, cycles of a turn, what warps of parts of rows cost, the rest.
_STAGE_CYCLES, _STAGE_ISSUED, _TURN, _CROOKED, _SLOWER = 1000.0, 60.0, 0.8, 1.5, 1.5
# Below this, threads that share reductions are faster (`GpuSums`).
_FEWEST_PIXELS = 4


class GpuTiles:
    """Dense convolutions and matrix products, also batched, as products of `pixels` by `channels` in shared memory.

    The graph pipeline makes pixels one loop (`channel_padding.join`). A block has `far` threads along pixels by
    `wide` along channels; each thread has `columns` x `channels` results. `steps` of the innermost reduction loop are
    staged at a time. Tiles divide what there is: a guard inside the sum would cost several times the sum.
    """

    name = "gpu-tiles"

    def read(self, schedule: Any) -> Contraction | None:
        found = reading.read_contraction(schedule)
        if found is None or found.group or len(found.channels) != 1 or len(found.pixels) != 1 or not found.sums:
            return None
        if found.pixels[0].extent < _FEWEST_PIXELS or found.element_bytes not in (2, 4):
            return None
        after = [name for name in (*found.between, found.last) if name != found.main]
        return found if all(gpu_cost.writes_once(schedule, name) for name in after) else None

    def options(self, facts: Contraction, core: TargetGpu) -> Mapping[str, tuple[int, ...]]:
        area, line = facts.pixels[0].extent, facts.sums[-1].extent
        return {
            "wide": tuple(n for n in loops.divisors(facts.channel) if n <= _MOST_SIDE),
            "channels": tuple(n for n in (1, 2, 4, 8) if facts.channel % n == 0),
            "far": tuple(n for n in loops.divisors(area) if n <= _MOST_SIDE),
            "columns": tuple(n for n in (1, 2, 4, 7, 8) if area % n == 0),
            "steps": tuple(n for n in (4, 8, 16, 32) if line % n == 0) or (line,),
        }

    def predict(self, facts: Contraction, plan: Plan, core: TargetGpu) -> Prediction | None:
        area = facts.pixels[0].extent
        threads, pixels, channels = (
            plan["wide"] * plan["far"],
            plan["far"] * plan["columns"],
            plan["wide"] * plan["channels"],
        )
        if not WARP <= threads <= _MOST_THREADS or area % pixels or facts.channel % channels:
            return None
        blocks = math.prod(axis.extent for axis in facts.batch) * (area // pixels) * (facts.channel // channels)
        own, steps = plan["columns"] * plan["channels"], plan["steps"]
        warps = math.ceil(threads / WARP)
        registers = min(255, max(WARP, own + 4 * plan["columns"] + plan["channels"] + gpu_cost.OTHER_REGISTERS))
        shared_bytes = (pixels + channels) * steps * 4
        limits = core.plan.limits
        if shared_bytes > limits.shared_bytes or registers * warps * WARP > limits.registers:
            return None
        resident = min(math.ceil(blocks / core.processors), count_resident(core.unit, threads, registers, shared_bytes))
        issued, turns = self._count_stage(facts, plan, warps)
        schedulers = core.unit.lanes / WARP
        work = max(issued / schedulers, turns * _TURN)
        # Other blocks work while one waits for its operands.
        stage = max(resident * work, work + _STAGE_CYCLES) * (facts.depth // steps) / resident
        cycles = _SLOWER * stage * math.ceil(blocks / core.processors / resident) * resident
        data_asked, weights_asked = (blocks * facts.depth * side * 4.0 for side in (pixels, channels))
        far_bytes = (
            count_fetched(data_asked, facts.data_bytes, core.unit.cache_bytes)
            + count_fetched(weights_asked, facts.weight_bytes, core.unit.cache_bytes)
            + facts.result_bytes
        )
        far_s = far_bytes / core.memory_bytes_per_s
        terms = {
            "compute": cycles,
            "far": far_s * core.freq_hz,
            "pad": turns * _TURN * blocks * (facts.depth // steps),
            "balance": math.ceil(blocks / core.processors) * core.processors / blocks,
            "steps": float(resident * warps),
        }
        return Prediction(max(cycles / core.freq_hz, far_s) + START_S, terms)

    @staticmethod
    def _count_stage(facts: Contraction, plan: Plan, warps: int) -> tuple[float, float]:
        """Count a block's warp instructions for one stage of `steps`, and its turns at shared memory.

        Both operands are read as vectors, pixels along the reduction, channels along themselves, in turns of one word
        of each thread; more turns where threads of a warp read one bank.
        """
        wide, steps, columns, channels = min(WARP, plan["wide"]), plan["steps"], plan["columns"], plan["channels"]
        threads = plan["wide"] * plan["far"]
        pixels = plan["far"] * columns
        lanes = 4 if steps % 4 == 0 else 1
        groups = max(1, min(WARP // wide, plan["far"]))
        turns = columns * max(1.0, groups / lanes) + channels * max(1.0, wide * (2 if channels > 4 else 1) / WARP)
        if WARP % plan["wide"] and plan["wide"] % WARP:
            turns *= _CROOKED
        fetched = pixels * steps * (_CHECKED if facts.pad else _MOVED / lanes) / threads
        fetched += plan["wide"] * channels * steps * _MOVED / 4 / threads
        step = columns * channels + columns / lanes + channels / min(4, channels)
        return warps * (steps * step + fetched + _STAGE_ISSUED), warps * steps * turns

    def apply(self, schedule: Any, facts: Contraction, plan: Plan) -> None:
        """Tile the block of the result, compute the contraction inside, stage its operands."""
        main = schedule.get_sblock(facts.main)
        for name in facts.between:
            schedule.compute_inline(schedule.get_sblock(name))
        # Indexed by the block's own loops, so that a tile stages its own elements. A pad is checked while staging.
        held = schedule.reindex(main, ("read", facts.data_at))
        schedule.set_scope(held, 0, "shared")
        if facts.pad:
            schedule.compute_inline(schedule.get_sblock(facts.pad))
        last = schedule.cache_write(main, 0, "local") if facts.last == facts.main else schedule.get_sblock(facts.last)
        if facts.last != facts.main:
            schedule.set_scope(main, 0, "local")
        *before, pixel, channel = schedule.get_loops(last)
        pixel_block, far, column = schedule.split(pixel, [None, plan["far"], plan["columns"]])
        channel_block, wide, vector = schedule.split(channel, [None, plan["wide"], plan["channels"]])
        schedule.reorder(*before, pixel_block, channel_block, far, wide, column, vector)
        schedule.bind(schedule.fuse(*before, pixel_block, channel_block), "blockIdx.x")
        inside = schedule.fuse(far, wide)
        schedule.bind(inside, "threadIdx.x")
        if plan["channels"] > 1:
            schedule.vectorize(schedule.split(vector, [None, min(4, plan["channels"])])[-1])
        schedule.compute_at(main, inside, preserve_unit_loops=True)
        mine = schedule.get_loops(main)[-len(schedule.get(main).iter_vars) :]
        sums = [mine[axis.at] for axis in facts.sums]
        results = [loop for at, loop in enumerate(mine) if at not in {axis.at for axis in facts.sums}]
        if plan["steps"] > facts.sums[-1].extent:
            sums = [*sums[:-2], schedule.fuse(*sums[-2:])]
        stage, step = schedule.split(sums[-1], [None, plan["steps"]])
        # Unrolled steps let the compiler read a pixel's next elements at once.
        few = max(n for n in loops.divisors(plan["steps"]) if n <= _UNROLLED)
        step, unrolled = schedule.split(step, [None, few])
        schedule.reorder(*sums[:-1], stage, step, unrolled, *results)
        schedule.unroll(unrolled)
        stage = schedule.fuse(*sums[:-1], stage)
        threads = plan["wide"] * plan["far"]
        if facts.element_bytes == 2 and few % 2 == 0:
            # The compiler joins a pixel's loads of float32 itself.
            near = schedule.cache_read(main, facts.data_at, "local")
            schedule.compute_at(near, step, preserve_unit_loops=True)
            schedule.vectorize(schedule.get_loops(near)[-1])
        for at in range(len(schedule.get(main).reads)):
            is_data = at == facts.data_at
            copy = held if is_data else schedule.cache_read(main, at, "shared")
            schedule.compute_at(copy, stage, preserve_unit_loops=True)
            side = plan["far"] * plan["columns"] if is_data else plan["wide"] * plan["channels"]
            run = plan["steps"] if is_data else side
            gpu_cost.give_to_threads(schedule, copy, threads, _count_lanes(side * plan["steps"], threads, run))
            schedule.annotate(copy, "tirx.manifest_shared_memory_local_stage", 1)
        # While one stage is computed, the next is loaded into registers, then stored to the other half of the memory.
        schedule.annotate(stage, "software_pipeline_stage", [0, 0, 0, 0, 1])
        schedule.annotate(stage, "software_pipeline_order", [0, 3, 1, 4, 2])
        schedule.decompose_reduction(main, stage)


def _count_lanes(count: int, threads: int, run: int) -> int:
    """Return the elements that a thread stages at a time: most that leave no thread without, in runs of `run`."""
    lanes = [n for n in (4, 2, 1) if run % n == 0]
    return next((n for n in lanes if count % (n * threads) == 0), lanes[0])
