"""Softmax, variance, and layer, group and root-mean-square norms: several reductions over the same loops.

One row, or a vector of neighbouring rows, is computed completely while it is in L1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from farm.search.cores import Core
from farm.search.families import expressions, loops
from farm.search.families import facts as reading
from farm.search.families.family import Plan, Prediction
from farm.search.graph import winograd

# Calls that only select between two values.
_CHOICES = {"tirx.if_then_else", "tirx.likely"}


@dataclasses.dataclass(frozen=True)
class Norm:
    """A function of two or more reductions, or of one whose result is spread over its inputs.

    `folded` is a final block that only reshapes; the one before writes its result. `inlined` blocks are computed at
    their readers, `blocks` at a loop of `last`, in order. `sums` is the number of reduction loops per block, 0 for
    none. `kept` are the loops of the last block that the reductions keep, of `extents`; all where nothing is spread, as
    in a variance. `rows`: the reduced elements are contiguous. `run` is their number per result, 1 where reductions
    differ. Sizes are in bytes.
    """

    folded: str | None
    inlined: tuple[str, ...]
    blocks: tuple[str, ...]
    sums: tuple[int, ...]
    last: str
    extents: tuple[int, ...]
    kept: tuple[int, ...]
    rows: bool
    run: int
    element_bytes: int
    moved_bytes: int


class Norms:
    """Family of several reductions over the same loops."""

    name = "norm"

    def read(self, schedule: Any) -> Norm | None:
        return read_norm(schedule)

    def options(self, facts: Norm, core: Core) -> Mapping[str, tuple[int, ...]]:
        lanes = core.lanes(facts.element_bytes)
        outside = math.prod(facts.extents[at] for at in facts.kept)
        if facts.rows:
            lengths = loops.row_lengths(facts.run, lanes, 4)
        else:
            lengths = loops.vector_lengths(facts.extents[-1], lanes)
            outside //= lengths[0]
        return {"pieces": loops.pieces(outside, (), core.threads), "lanes": lengths}

    def predict(self, facts: Norm, plan: Plan, core: Core) -> Prediction | None:
        lanes = plan["lanes"]
        rows = math.prod(facts.extents[at] for at in facts.kept)
        elements = rows * facts.run if facts.run > 1 else math.prod(facts.extents)
        far = loops.moving_cycles(facts.moved_bytes, core)
        latency = core.fma_latency
        if facts.rows:
            full = core.lanes(facts.element_bytes)
            reduced = loops.row_cycles(facts.run, lanes, core, facts.element_bytes)
            spread = facts.run / (lanes if lanes > 1 else full) * max(latency, math.ceil(lanes / full))
            compute = float(rows) * sum(reduced if sums else spread for sums in facts.sums)
        else:
            compute = elements / lanes * latency * len(facts.blocks)
        return loops.predict_shares(plan["pieces"], compute, far, core)

    def apply(self, schedule: Any, facts: Norm, plan: Plan) -> None:
        loops.inline_blocks(schedule, facts.inlined, facts.folded)
        lanes = plan["lanes"]
        partials = {}
        for name, sums in zip(facts.blocks, facts.sums, strict=True):
            if facts.rows and sums and lanes > 1:
                partials[name] = loops.split_sums(schedule, name, sums, lanes)
        own = schedule.get_loops(schedule.get_sblock(facts.last))
        kept = [own[at] for at in facts.kept]
        rest = [loop for at, loop in enumerate(own) if at not in facts.kept]
        lane = None
        if not facts.rows:
            block, lane = schedule.split(kept.pop(), [None, lanes])
            kept.append(block)
        schedule.reorder(*kept, *rest, *([lane] if lane is not None else []))
        at = schedule.fuse(*kept)
        if plan["pieces"]:
            schedule.parallel(at)
        for name, sums in reversed(list(zip(facts.blocks, facts.sums, strict=True))):
            schedule.compute_at(schedule.get_sblock(name), at, preserve_unit_loops=True)
            if name in partials:
                loops.vectorise_partial(schedule, partials[name], at)
            elif facts.rows and sums > 1:
                schedule.fuse(*schedule.get_loops(schedule.get_sblock(name))[-sums:])
            elif lane is not None:
                _vectorise_beside(schedule, name, lanes)
        if lane is not None:
            schedule.vectorize(lane)


def _vectorise_beside(schedule: Any, name: str, lanes: int) -> None:
    """Vectorise the neighbouring rows that a block computes at a loop."""
    block = schedule.get_sblock(name)
    spatial, sums = loops.own_loops(schedule, block)
    lane = next((loop for loop in reversed(spatial) if int(schedule.get(loop).extent) == lanes), None)
    if lane is None:
        return
    spatial = [loop for loop in spatial if not loop.same_as(lane)]
    schedule.reorder(*sums, *spatial, lane)
    schedule.vectorize(lane)
    if sums:
        schedule.decompose_reduction(block, sums[0])


def read_norm(schedule: Any) -> Norm | None:
    """Read the function as reductions whose results are spread over their inputs, or return None."""
    names = reading.list_blocks(schedule)
    if len(set(names)) < len(names) or len(names) < 2 or not reading.is_plain(schedule, names[-1]):
        return None
    trial = schedule.copy()
    folded = names[-1] if loops.fold(trial, names[-1]) else None
    if folded:
        names = names[:-1]
    blocks = {name: trial.get(trial.get_sblock(name)) for name in names}
    summing = [name for name in names if reading.has_sums(blocks[name])]
    # Winograd's tiles overlap in what they read: no row stands alone, and all at once is slow.
    if not summing or winograd.is_marked(blocks.values()):
        return None
    # Recomputing cheap element-wise inputs of a reduction is free, unless they call functions.
    cheap = [name for name in names[:-1] if name not in summing and not _calls(blocks[name])]
    inlined = loops.inline(trial, cheap)
    left = [name for name in names[:-1] if name not in inlined]
    final = trial.get(trial.get_sblock(names[-1]))
    variables = [v.var for v in final.iter_vars]
    extents = tuple(int(v.dom.extent) for v in final.iter_vars)
    # Find the loops by which the last block reads reduced values.
    written = {write.source for name in left for write in trial.get(trial.get_sblock(name)).writes}
    wide = {at for at, extent in enumerate(extents) if extent > 1}
    kept: set[int] = set()
    spread = False
    for load in expressions.read_value(final.body.value)[0]:
        followed = {at for at in wide if any(expressions.mentions(i, variables[at]) for i in load.indices)}
        if load.source in written and followed != wide:
            kept, spread = kept | followed, True
    if not spread and len(summing) > 1:
        kept = set(range(len(extents)))
    kept |= {at for at in range(max(kept, default=0)) if extents[at] == 1}
    if not kept and extents[0] == 1:
        kept = {0}
    if not kept or (wide <= kept and (spread or len(summing) == 1)):
        return None
    rows = len(variables) - 1 not in kept if spread else _sums_neighbours(trial.get(trial.get_sblock(summing[-1])))
    runs = {math.prod(int(v.dom.extent) for v in blocks[name].iter_vars if reading.is_sum(v)) for name in summing}
    return Norm(
        folded=folded,
        inlined=inlined,
        blocks=tuple(left),
        sums=tuple(sum(reading.is_sum(v) for v in blocks[name].iter_vars) for name in left),
        last=names[-1],
        extents=extents,
        kept=tuple(sorted(kept)),
        rows=rows,
        run=runs.pop() if len(runs) == 1 else 1,
        element_bytes=reading.bytes_of(final.body.buffer.dtype),
        moved_bytes=reading.size_of(final.body.buffer) * 2,
    )


def _sums_neighbours(block: Any) -> bool:
    """Say whether the reduced elements are contiguous."""
    sums = [v.var for v in block.iter_vars if reading.is_sum(v)]
    # Several are stored where a block finds an index beside its value, or sums with sums of squares.
    loads = [
        load for store in expressions.list_statements(block.body) for load in expressions.read_value(store.value)[0]
    ]
    ends = [load.indices[-1] for load in loads if len(load.indices)]
    return any(expressions.mentions(end, v) for end in ends for v in sums)


def _calls(block: Any) -> bool:
    """Say whether a block computes more than arithmetic, such as exponentials and roots."""
    value = getattr(block.body, "value", None)
    return value is not None and bool(expressions.list_calls(value) - _CHOICES)
