"""Long blocks of weights in parts: the rows of a kernel one after the other, with accumulators kept in between."""

from __future__ import annotations

from typing import Any

from farm.search.cores import Core
from farm.search.families import loops as steps
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan

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
