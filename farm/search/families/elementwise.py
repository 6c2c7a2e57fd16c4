"""Functions without a reduction: element-wise, broadcast, concatenation, transpose, slice, pad, gather.

Everything is computed where it is written. LLVM vectorises a contiguous innermost loop of any length. The choices left
are the innermost loop, where it is cut, and whether threads pay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tvm import sym, tirx
from tvm.ir import Range

from farm.search.cores import Core
from farm.search.families import expressions, loops
from farm.search.families import facts as reading
from farm.search.families.facts import Axis
from farm.search.families.family import Plan, Prediction

# More cuts of one loop make too much code.
_MOST_CUTS = 8


@dataclasses.dataclass(frozen=True)
class ElementwiseFacts:
    """A function that writes each result from a few elements of its arguments.

    `folded` is a final block that only reshapes; the one before writes its result. `inlined` blocks are computed at
    their readers, `last` ones write results. `extents` are the loops of the final block; its innermost `flat` loops are
    contiguous in all that is read and written. `across` is a loop contiguous in a load through which the innermost loop
    strides, or None. `cuts` are the steps of the innermost loop where another argument begins. Sizes are in bytes.
    """

    folded: str | None
    inlined: tuple[str, ...]
    last: tuple[str, ...]
    extents: tuple[int, ...]
    flat: int
    across: int | None
    cuts: tuple[int, ...]
    element_bytes: int
    moved_bytes: int


class Elementwise:
    """Functions that write each result once."""

    name = "elementwise"

    def read(self, schedule: Any) -> ElementwiseFacts | None:
        return read_stream(schedule)

    def options(self, facts: ElementwiseFacts, core: Core) -> Mapping[str, tuple[int, ...]]:
        write: tuple[int, ...] = (1,)
        read: tuple[int, ...] = (1,)
        if facts.across is not None:
            # Tiles of one vector by half as many are shuffled in registers; larger ones are not.
            write = tuple(loops.divisors(facts.extents[-1], core.lanes(facts.element_bytes))[-2:])
            read = tuple(loops.divisors(facts.extents[facts.across], core.lanes(facts.element_bytes))[-2:])
        return {
            "pieces": loops.pieces(_outside(facts), _flat(facts) if facts.across is None else (), core.threads),
            "cut": (1, 0) if facts.cuts else (0,),
            "write": write,
            "read": read,
        }

    def predict(self, facts: ElementwiseFacts, plan: Plan, core: Core) -> Prediction | None:
        elements = math.prod(facts.extents)
        lanes = core.lanes(facts.element_bytes)
        if facts.across is not None:
            tile = plan["read"] * plan["write"]
            compute = elements * (0.3 + 8.0 / tile + 0.1 * max(0, tile * 2 - lanes * lanes) / lanes)
        elif facts.cuts and not plan["cut"]:
            compute = elements * 2.0
        else:
            run = math.prod(_flat(facts))
            compute = elements / lanes * 2.0 + elements / run * 4.0 * max(1, plan["pieces"] // _outside(facts))
        far = loops.moving_cycles(facts.moved_bytes, core)
        return loops.predict_shares(plan["pieces"], compute, far, core)

    def apply(self, schedule: Any, facts: ElementwiseFacts, plan: Plan) -> None:
        loops.inline_blocks(schedule, facts.inlined, facts.folded)
        for name in facts.last[:-1]:
            outer = schedule.get_loops(schedule.get_sblock(name))[:-1]
            if plan["pieces"] and outer:
                schedule.parallel(schedule.fuse(*outer))
        own = schedule.get_loops(schedule.get_sblock(facts.last[-1]))
        if not own:
            return
        outer, inner = _order(schedule, own, facts, plan)
        if plan["pieces"]:
            if facts.across is None:
                piece, inner = schedule.split(inner, [plan["pieces"] // _outside(facts), None])
                outer = [*outer, piece]
            if outer:
                schedule.parallel(schedule.fuse(*outer))
        if plan["cut"]:
            steps = [b - a for a, b in zip((0, *facts.cuts), facts.cuts, strict=False)]
            schedule.loop_partition(inner, [*steps, None])


def _order(schedule: Any, own: list[Any], facts: ElementwiseFacts, plan: Plan) -> tuple[list[Any], Any]:
    """Order the loops; return the outer ones and the innermost loop that is not a tile's."""
    if facts.across is None:
        at = len(own) - facts.flat
        return own[:at], schedule.fuse(*own[at:])
    wrote, write = schedule.split(own[-1], [None, plan["write"]])
    was_read, read = schedule.split(own[facts.across], [None, plan["read"]])
    rest = [loop for at, loop in enumerate(own[:-1]) if at != facts.across]
    schedule.reorder(*rest, was_read, wrote, write, read)
    schedule.unroll(write)
    schedule.vectorize(read)
    return [*rest, was_read], wrote


def _flat(facts: ElementwiseFacts) -> tuple[int, ...]:
    return facts.extents[len(facts.extents) - facts.flat :]


def _outside(facts: ElementwiseFacts) -> int:
    if facts.across is None:
        return math.prod(facts.extents[: len(facts.extents) - facts.flat])
    return math.prod(facts.extents[:-1])


def read_stream(schedule: Any) -> ElementwiseFacts | None:
    """Read the function as a stream; None where a block reduces or is more than one store."""
    names = reading.list_blocks(schedule)
    if not names or len(set(names)) < len(names) or not all(reading.is_plain(schedule, name) for name in names):
        return None
    found = _read_blocks(schedule.copy(), names, None)
    if found.across is None and found.flat <= 1 < len(names):
        # A reshape after a transpose hides the transpose from the final block.
        trial = schedule.copy()
        if loops.fold(trial, names[-1]) and (other := _read_blocks(trial, names[:-1], names[-1])).across is not None:
            return other
    return found


def _read_blocks(trial: Any, names: list[str], folded: str | None) -> ElementwiseFacts:
    inlined = loops.inline(trial, names[:-1])
    final = trial.get(trial.get_sblock(names[-1]))
    axes = {v.var: Axis(at, int(v.dom.extent)) for at, v in enumerate(final.iter_vars)}
    extents = tuple(axis.extent for axis in axes.values())
    loads, conditions = expressions.read_value(final.body.value)
    element_bytes = reading.bytes_of(final.body.buffer.dtype)
    moved = math.prod(extents) * element_bytes + sum(
        {load.source: reading.size_of(load.source) for load in loads}.values()
    )
    variables = list(axes)
    flat = across = None
    cuts: tuple[int, ...] = ()
    if variables:
        across = _find_across(loads, variables)
        flat = _count_flat(loads, conditions, variables, axes)
        cuts = _find_cuts(conditions, variables[-1], extents[-1]) if across is None else ()
    return ElementwiseFacts(
        folded=folded,
        inlined=inlined,
        last=tuple(name for name in names if name not in inlined),
        extents=extents,
        flat=flat or 0,
        across=across,
        cuts=cuts,
        element_bytes=element_bytes,
        moved_bytes=moved,
    )


def _find_across(loads: list[Any], variables: list[Any]) -> int | None:
    """Find the loop along which a load is contiguous although the innermost loop strides through it."""
    found = None
    for load in loads:
        indices = list(load.indices)
        if not indices or not any(expressions.mentions(index, variables[-1]) for index in indices):
            continue
        ends = [at for at, v in enumerate(variables) if expressions.mentions(indices[-1], v)]
        if len(variables) - 1 in ends or len(ends) != 1 or not indices[-1].same_as(variables[ends[0]]):
            return None
        found = ends[0]
    return found


def _count_flat(loads: list[Any], conditions: list[Any], variables: list[Any], axes: dict[Any, Axis]) -> int:
    """Count the innermost loops that are one contiguous run in every load; at least one."""

    def fits(load: Any, count: int) -> bool:
        run = variables[-count:]
        moves = any(expressions.mentions(index, v) for index in load.indices for v in run)
        return not moves or _is_run(load, run, axes)

    count = 1
    while count < len(variables):
        more = count + 1
        if any(expressions.mentions(c, v) for c in conditions for v in variables[-more:]):
            break
        if not all(fits(load, more) for load in loads):
            break
        count = more
    return count


def _is_run(load: Any, run: list[Any], axes: dict[Any, Axis]) -> bool:
    """Say whether the loops `run` read contiguous elements, also through a reshape."""
    analyzer, place, step = sym.Analyzer(), 0, 0
    for variable, axis in axes.items():
        analyzer.bind(variable, Range(0, axis.extent))
    for index, extent in zip(load.indices, load.source.shape, strict=True):
        place = place * extent + index
    for variable in run:
        step = step * axes[variable].extent + variable

    first = expressions.replace(place, {each: tirx.IntImm(each.ty.dtype, 0) for each in run})
    return bool(analyzer.can_prove_equal(place - first, step))


def _find_cuts(conditions: list[Any], variable: Any, extent: int) -> tuple[int, ...]:
    """Find the steps of a loop at which conditions on its variable alone change."""
    cuts = set()
    for condition in conditions:
        if not expressions.mentions(condition, variable):
            continue
        answers = [expressions.compare(condition, variable, step) for step in (0, extent - 1)]
        if answers[0] == answers[1]:
            continue
        low, high = 0, extent - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if expressions.compare(condition, variable, middle) == answers[0] else (low, middle)
            )
        cuts.add(high)
    return tuple(sorted(cuts)) if len(cuts) <= _MOST_CUTS else ()
