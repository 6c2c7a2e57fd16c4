"""Other forms of dense contractions: int8 dot products, batched products, grouped convolutions, long blocks in parts.

Of weights in parts, the rows of a kernel come one after the other, with accumulators kept in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from farm.search.cores import Core
from farm.search.families import facts as reading
from farm.search.families import loops as steps
from farm.search.families.dense import Dense
from farm.search.families.facts import Axis, Contraction
from farm.search.families.family import Plan, Prediction
from farm.search.graph import dots

# On Arm, without a dot-product instruction: stall per line from L2 as a multiple of its transfer time, 12 cycles on a
# Cortex-A57 in the estimates of emulated boards.
_WAITED = 3.0


# On x86, multiplications, additions and sign extensions compete for ports: eight of each take Zen 3 11.5 cycles, not 8.
_CROWDED = 1.4


# Temporary registers: a pixel's data in two, 16-bit products; on x86 data, absolute values and ones.
_PASSING, _PASSING_X86 = 7, 4


class Dots(Dense):
    """Family of int8 dot products."""

    name = "dots"
    inner = 1

    def read(self, schedule: Any) -> Contraction | None:
        """Read a marked contraction; its four products count as one of the accumulator's width."""
        found = super().read(schedule)
        mark = None if found is None else schedule.get(schedule.get_sblock(found.main)).annotations.get(dots.MARK)
        if found is None or mark is None:
            return None
        return dataclasses.replace(found, sums=found.sums[:-1], line=1, row=1, at_once=int(mark))

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Restrict the options of `dense` to lanes for which an instruction exists."""
        found = dict(super().options(facts, core))
        there = dots.list_lanes("aarch64" if core.lane_fma else "x86_64", facts.at_once)
        return found | {"lanes": tuple(lanes for lanes in found["lanes"] if lanes in there)}

    def _compute(self, schedule: Any, main: Any, outermost: Any, lane: Any) -> None:
        """Zero the accumulators first, then tensorize the lanes."""
        zero = schedule.decompose_reduction(main, outermost)
        schedule.vectorize(schedule.get_loops(zero)[-1])
        kinds = {str(region.source.dtype) for region in schedule.get(main).reads}
        data = "uint8" if "uint8" in kinds else "int8"
        at_once = int(schedule.get(main).annotations[dots.MARK])
        schedule.tensorize(lane, dots.register(data, int(schedule.get(lane).extent), at_once))

    def _count_held(self, facts: Contraction, plan: Plan, core: Core) -> int:
        """Count temporary registers where a dot product takes several instructions."""
        if facts.at_once == dots.STEP:
            return super()._count_held(facts, plan, core)
        return plan["vectors"] + _PASSING if core.lane_fma else _PASSING_X86

    def _reloads(self, facts: Contraction, plan: Plan, core: Core) -> float:
        """Without a dot-product instruction on Arm, a tile stalls for all of its weights."""
        waited = super()._reloads(facts, plan, core)
        if facts.at_once == dots.STEP or not core.lane_fma:
            return waited
        weights = facts.depth * plan["lanes"] * plan["vectors"] * facts.weight_element_bytes
        return waited + (_WAITED * weights if waited else 0.0)

    def _step_cycles(self, facts: Contraction, plan: Plan, core: Core) -> float:
        """Estimate a step without a dot-product instruction.

        On Arm half of the pipes multiply and half add; either prepares weights and data. On x86 half multiply.
        """
        if facts.at_once == dots.STEP:
            return super()._step_cycles(facts, plan, core)
        pixels, vectors = plan["pixels"] * plan["rows"], plan["vectors"]
        tile = pixels * vectors
        rate = core.fma_per_cycle(plan["lanes"] * facts.element_bytes * 8)
        if not core.lane_fma:
            made, issued = 4 * tile + pixels, (4 * tile + 2 * pixels + vectors) / core.issue_width
            return max(_CROWDED * made / 2 / rate, issued, (pixels + vectors) / core.load_pipes)
        made, issued = 3 * tile + 2 * pixels + 2 * vectors, (3 * tile + 4 * pixels + 3 * vectors) / core.issue_width
        return max(2 * tile / rate, made / 2 / rate, issued, 2 * pixels / core.load_pipes)


class Batched(Dense):
    """Batched products whose operands both have the batch dimensions, as in attention."""

    name = "batched"

    def read(self, schedule: Any) -> Contraction | None:
        """Read the batch loops as rows of pixels, which no tile spans."""
        found = reading.read_contraction(schedule)
        if found is None or found.pad or not found.batch or found.group or len(found.channels) != 1:
            return None
        if not found.pixels or max(axis.at for axis in found.batch) > min(axis.at for axis in found.pixels):
            return None
        ones = (1,) * len(found.batch)
        return dataclasses.replace(
            found,
            batch=(),
            pixels=(*found.batch, *found.pixels),
            stride=(*ones, *found.stride),
            reach=(*ones, *found.reach),
        )

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Extend the options of `dense`; tiles have one row."""
        return {**super().options(facts, core), "rows": (1,)}


class Grouped(Dense):
    """Convolutions in groups of several channels."""

    name = "grouped"

    def read(self, schedule: Any) -> Contraction | None:
        """Read the channels of all groups as one loop."""
        found = reading.read_contraction(schedule)
        if found is None or found.group < 2 or found.channels or len(found.batch) != 1 or not found.pixels:
            return None
        return dataclasses.replace(found, channels=found.batch, batch=())

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Offer the options of `dense` for the channels of one group."""
        one = dataclasses.replace(facts, channels=(Axis(facts.channels[0].at, facts.group),))
        return super().options(one, core)

    def predict(self, facts: Contraction, plan: Plan, core: Core) -> Prediction | None:
        """Reject a tile that spans two groups."""
        if facts.group % (plan["lanes"] * plan["vectors"]):
            return None
        return super().predict(facts, plan, core)


# Accesses of one accumulator per part: read it, read the part's own, write it.
_MOVED = 3


def list_parts(facts: Contraction, core: Core) -> dict[str, tuple[int, ...]]:
    """Return the knob `parts` where a block of two channel vectors is too long to prefetch and a part of it is not."""
    places = [axis.at for axis in (*facts.pixels, *facts.channels, *facts.sums)]
    if facts.group or len(facts.sums) < 2 or places != list(range(len(places))):
        return {}
    pair = 2 * core.lanes(facts.element_bytes) * facts.depth * facts.weight_element_bytes
    rows = facts.sums[0].extent
    fits = 0 < core.prefetched_bytes < pair <= rows * core.prefetched_bytes
    return {"parts": (1, rows)} if rows > 1 and fits else {}


def count_moved(plan: Plan) -> int:
    """Count the extra accesses per accumulator when the reduction is split into parts."""
    parts = plan.get("parts", 1)
    return _MOVED * parts if parts > 1 else 0


def apply(schedule: Any, facts: Contraction, plan: Plan, split_tile: Any) -> None:
    """Schedule a contraction whose reduction is split into parts; only a pad may precede the block of the result.

    `split_tile` splits the loops of pixels and channels into outer loops and a list of the tile's own.
    """
    main = schedule.get_sblock(facts.main)
    part_sums = schedule.rfactor(schedule.get_loops(main)[facts.sums[0].at], 0)
    last = steps.write_apart(schedule, facts)
    *pixels, channel = schedule.get_loops(last)
    block, channel = schedule.split(channel, [None, plan["lanes"] * plan["vectors"]])
    schedule.reorder(block, *pixels, channel)
    vector, lane = schedule.split(channel, [None, plan["lanes"]])
    schedule.unroll(vector)
    schedule.vectorize(lane)
    schedule.parallel(block)
    schedule.compute_at(main, block, preserve_unit_loops=True)
    schedule.set_scope(main, 0, "global")
    _, part, *own = schedule.get_loops(main)
    *outer, tile = split_tile(schedule, own, plan)
    schedule.reorder(part, *outer, *tile)
    schedule.compute_at(part_sums, outer[-1], preserve_unit_loops=True)
    count = len(facts.pixels)
    own = schedule.get_loops(part_sums)[-(count + 1 + len(facts.sums)) :]
    pixels, channel, sums = own[1 : count + 1], own[count + 1], own[count + 2 :]
    vector, lane = schedule.split(channel, [None, plan["lanes"]])
    schedule.reorder(*sums, *pixels, vector, lane)
    for each in (*pixels, vector, *tile[:-1]):
        schedule.unroll(each)
    for each in (lane, tile[-1]):
        schedule.vectorize(each)
    schedule.decompose_reduction(part_sums, sums[0])
    schedule.decompose_reduction(main, part)
    if facts.pad:
        steps.pad_first(schedule, schedule.get_sblock(facts.pad), plan["lanes"], apart=False)
