"""Dense contractions whose reduction is computed in parts, rows of the kernel one after the other.

A block of weights of 512 channels by a kernel of 3x3 is 590 KiB for two vectors: too long to be fetched while the one
before it is used (`farm.search.build.fetching`). A row of the kernel is a third of that. Each tile's sums of a part
are in registers, as `dense` has them, and are added to those of the parts before in a buffer of a block's own.
"""

from __future__ import annotations

from typing import Any

from farm.search.cores import Core
from farm.search.families import loops
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan

# Transfers of a sum for each part: it is read, the part's own is read, and it is written.
_MOVED = 3


def list_parts(facts: Contraction, core: Core) -> dict[str, tuple[int, ...]]:
    """The knob `parts`, where a block of two vectors of channels is too long to be fetched ahead and a part is not."""
    places = [axis.at for axis in (*facts.pixels, *facts.channels, *facts.sums)]
    if facts.group or len(facts.sums) < 2 or places != list(range(len(places))):
        return {}
    pair = 2 * core.lanes(facts.element_bytes) * facts.depth * facts.weight_element_bytes
    rows = facts.sums[0].extent
    fits = 0 < core.fetched_bytes < pair <= rows * core.fetched_bytes
    return {"parts": (1, rows)} if rows > 1 and fits else {}


def count_moved(plan: Plan) -> int:
    """How often a sum is read or written beside what a single part does."""
    parts = plan.get("parts", 1)
    return _MOVED * parts if parts > 1 else 0


def apply(schedule: Any, facts: Contraction, plan: Plan, split_tile: Any) -> None:
    """Schedule a contraction with nothing between it and the block that writes the result, but for its pad.

    `split_tile` splits loops of pixels and channels into outer ones and a list of a tile's own.
    """
    main = schedule.get_sblock(facts.main)
    part_sums = schedule.rfactor(schedule.get_loops(main)[facts.sums[0].at], 0)
    last = loops.write_apart(schedule, facts)
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
        loops.pad_first(schedule, schedule.get_sblock(facts.pad), plan["lanes"], apart=False)
