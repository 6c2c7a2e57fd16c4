"""Fuse convolutions with their producers and consumers: copies before, and max pools or depthwise convolutions after.

TVM fuses neither, so a result of megabytes goes through memory. A consumer is fused only where
`farm.search.families.strips` predicts a gain. Not on Arm: in the estimates for a Cortex-A57, mobilenet_v2 took 1.06
(one core) and 1.08 (four) of the time, since depthwise convolutions with bounds checks cost more than the memory saved.
The convolution computes the rows that a window reads beyond an edge: copies of the nearest row for a maximum, zeros for
a sum. So no strip needs bounds checks on rows, and all read equally many.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir import Range
from tvm.ir.expr import Call, TensorLoad

from farm.search.cores import Core, find_core
from farm.search.families import expressions, facts, rule
from farm.search.families.strips import Pooled, Separable, StripFamily, Strips
from farm.search.graph import bindings, canonical, in_place_concat
from farm.search.graph.canonical import repeat


def gather() -> Any:
    """Make a module pass that fuses copies into the convolution that reads them."""
    return bindings.rewriting_pass(_gather, "GatherCopies")


def _gather(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    return bindings.join_pairs(builder, function, _gather_pair)


def _gather_pair(copying: Any, called: Any) -> Any | None:
    if in_place_concat.is_join(copying) or not _only_copies(copying) or not _gains(called):
        return None
    return _merge(copying, called)


def _only_copies(function: Any) -> bool:
    """Say whether a function moves elements without computing; a plain reshape is free and does not count."""
    if relax.analysis.has_reshape_pattern(function):
        return False
    schedule = bindings.schedule(function)
    blocks = [schedule.get(schedule.get_sblock(name)) for name in facts.list_blocks(schedule)]
    return bool(blocks) and all(_moves(getattr(block.body, "value", None)) for block in blocks)


def _moves(value: Any) -> bool:
    if isinstance(value, Call) and getattr(value.op, "name", "").endswith(".if_then_else"):
        return all(isinstance(side, TensorLoad | tirx.FloatImm | tirx.IntImm) for side in value.args[1:])
    return isinstance(value, TensorLoad)


def _gains(function: Any) -> bool:
    """Say whether a function is a convolution that gains from a fused copy.

    A 1x1 convolution does not: its pixels are uniform as long as it reads them in place.
    """
    found = facts.read_contraction(bindings.schedule(canonical.canonicalise(function)))
    if found is None or len(found.pixels) < 2:
        return False
    return found.pad is not None or any(r != 1 for r in found.reach) or any(s != 1 for s in found.stride)


def _merge(copying: Any, function: Any) -> Any | None:
    """Fuse a copy and the function that reads it; None where no family reads the result."""
    schedule = bindings.schedule(bindings.chain(copying, function))
    names = facts.list_blocks(schedule)
    if len(set(names)) < len(names):
        return None
    copies = len(facts.list_blocks(bindings.schedule(copying)))
    found = facts.read_contraction(bindings.schedule(function))
    try:
        for name in names[: copies if found is not None and found.pad is not None else copies - 1]:
            schedule.compute_inline(schedule.get_sblock(name))
    except tvm.s_tir.ScheduleError:
        return None
    result = schedule.mod["main"]
    if facts.read_contraction(schedule) is None:
        return None
    for key, value in (function.attrs or {}).items():
        result = result.with_attr(key, value)
    return result.with_attr("op_pattern", bindings.OPAQUE)


# Most additional rows of a result, for a number with better divisors.
_MOST_MORE = 3


def join(target: Any) -> Any:
    """Make a module pass for a target (TVM's) that fuses consumers; does nothing for Arm and unknown cores."""

    def run(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
        core = find_core(dict(target.export()))
        if core is None or core.lane_fma:
            return {}
        return bindings.join_pairs(builder, function, lambda first, second: _join_large(first, second, core))

    return bindings.rewriting_pass(run, "JoinStrips")


def _join_large(convolution: Any, step: Any, core: Core) -> Any | None:
    """Call `join_functions` where the intermediate does not fit in L2.

    On an Intel server (1 MiB of L2), 4.8 MB of mobilenet_v2 took 0.66 of the time fused, 1.8 MB 0.7 to 0.9, 600 KB 1.0,
    and 300 KB 1.15.
    """
    near = facts.size_of(convolution.params[-1]) <= core.l2_bytes
    return None if near else join_functions(convolution, step, core)


def join_functions(convolution: Any, step: Any, core: Core) -> Any | None:
    """Fuse two functions; None where they are of other kinds or separately predicted to be faster."""
    own = None if in_place_concat.is_join(convolution) else _read_step(step)
    if own is None:
        return None
    convolution = canonical.inline_empty_pads(convolution)
    joined = _chain(convolution, own, own.rows)
    found = None if joined is None else own.family.read(bindings.schedule(joined))
    if joined is None or found is None:
        return None
    seconds, rows = _predict(own, found, core)
    functions = [canonical.canonicalise(each) for each in (convolution, step)]
    apart = [rule.read_outlook(bindings.schedule(each).mod, core) for each in functions]
    if None in apart or seconds >= sum(each.plans()[0][0].seconds for each in apart if each is not None):
        return None
    return joined if rows == own.rows else _chain(convolution, own, rows)


@dataclasses.dataclass(frozen=True)
class _Step:
    """The consumer of a convolution's result: its function, the family of the fused function, its `pad` if any, and its
    reduction block `main`, which reads data at `indices`.

    Its `rows` read rows of data from `first` on, `stride` apart and `reach` each.
    """

    function: Any
    family: StripFamily
    pad: Any | None
    main: Any
    indices: tuple[Any, ...]
    rows: int
    first: int
    stride: int
    reach: int


def _predict(step: _Step, found: Strips, core: Core) -> tuple[float, int]:
    """Predict the seconds of the best plan, and return the rows of the result that its data must cover."""
    more = dataclasses.replace(found, most_rows=step.rows + _MOST_MORE)
    plans = rule.Outlook(step.family, more, core, step.family.options(more, core)).plans()
    needed = ((seconds.seconds, plan["strip"] * found.count_strips(plan["strip"])) for seconds, plan in plans)
    return min(((seconds, max(rows, step.rows)) for seconds, rows in needed), default=(math.inf, step.rows))


def _read_step(function: Any) -> _Step | None:
    if not isinstance(function.body.block.body, tirx.SeqStmt | tirx.For):
        return None
    schedule = bindings.schedule(function)
    blocks = [schedule.get(schedule.get_sblock(name)) for name in facts.list_blocks(schedule)]
    mains = [at for at, block in enumerate(blocks) if any(map(facts.is_sum, block.iter_vars))]
    if len(mains) != 1 or mains[0] > 1:
        return None
    main, pad = blocks[mains[0]], blocks[0] if mains[0] else None
    kinds = [facts.is_sum(v) for v in main.iter_vars]
    value = getattr(main.body, "value", None)
    family: StripFamily
    if isinstance(value, tirx.Max) and len(blocks) == mains[0] + 1:
        family = Pooled()
    elif isinstance(value, tirx.Add) and kinds[:6] == [False] * 4 + [True] * 2:
        family = Separable()
    else:
        return None
    data = function.params[0] if pad is None else pad.writes[0].source
    loads = [each for each in expressions.read_value(value)[0] if each.source.same_as(data)]
    if len(loads) != 1 or len(loads[0].indices) != 4 or len(kinds) < 6:
        return None
    indices = list(loads[0].indices)
    if pad is not None:
        reads = expressions.read_value(pad.body.value)[0]
        if len(reads) != 1 or not reads[0].source.same_as(function.params[0]):
            return None
        places = {v.var: index for v, index in zip(pad.iter_vars, indices, strict=True)}
        indices = [expressions.replace(index, places) for index in reads[0].indices]
    if not expressions.mentions(indices[3], main.iter_vars[3].var):
        return None
    row, down = main.iter_vars[1], main.iter_vars[4]
    return _Step(
        function=function,
        family=family,
        pad=pad,
        main=main,
        indices=tuple(indices),
        rows=int(row.dom.extent),
        first=expressions.evaluate(indices[1], None),
        stride=expressions.slope(indices[1], row.var),
        reach=1 + expressions.slope(indices[1], down.var) * (int(down.dom.extent) - 1),
    )


def _chain(convolution: Any, step: _Step, rows: int) -> Any | None:
    """Fuse both, with the data rows that `rows` rows of the consumer read; None where TVM refuses."""
    pooled = isinstance(step.family, Pooled)
    read = (rows - 1) * step.stride + step.reach
    if step.pad is not None and not pooled:
        read = max(read, int(step.pad.iter_vars[1].dom.extent))
    try:
        longer = _lengthen(convolution, step.first, read, zero=not pooled)
    except tvm.s_tir.ScheduleError:
        return None
    if longer is None:
        return None
    joined = bindings.chain(longer, (_drop_pad if pooled else _pad_columns)(step, longer.params[-1]))
    # Arguments with a free layout: the convolution's, then the consumer's.
    free = [int(at) for at in (longer.attrs or {}).get("layout_free_buffers") or ()]
    before = len(longer.params) - 2
    free += [int(at) + before for at in (step.function.attrs or {}).get("layout_free_buffers") or () if int(at)]
    for key, value in (longer.attrs or {}).items():
        joined = joined.with_attr(key, value)
    return joined.with_attr("layout_free_buffers", free).with_attr("op_pattern", bindings.OPAQUE)


def _lengthen(convolution: Any, first: int, rows: int, *, zero: bool) -> Any | None:
    """Extend a convolution to `rows` rows, starting at row `first` of its own; None for another function.

    Rows beyond its own are `zero`, or copies of the nearest one.
    """
    schedule = bindings.schedule(convolution)
    found = facts.read_contraction(schedule)
    if found is None or [axis.at for axis in found.pixels] != [0, 1, 2] or found.group or found.batch:
        return None
    own = found.pixels[1].extent
    if first == 0 and rows <= own:
        return convolution
    for name in found.between:
        schedule.compute_inline(schedule.get_sblock(name))
    if found.last == found.main:
        schedule.cache_write(schedule.get_sblock(found.main), 0, "global")
    convolution = schedule.mod["main"]
    names = (found.main, facts.list_blocks(schedule)[-1])
    wider = {}
    for name in names:
        old = schedule.get(schedule.get_sblock(name)).writes[0].source
        shape = [int(d) for d in old.shape]
        if len(shape) != 4 or shape[1] != own:
            return None
        wider[old] = tirx.decl_buffer([shape[0], rows, *shape[2:]], old.dtype, old.name)

    def move(row: Any) -> Any:
        return row + tirx.IntImm(row.ty.dtype, first) if first else row

    def place(row: Any) -> Any:
        return _keep(move(row), own, first, first + rows - 1)

    def outside(row: Any) -> Any:
        moved = move(row)
        return tirx.any(moved < tirx.IntImm(row.ty.dtype, 0), moved >= tirx.IntImm(row.ty.dtype, own))

    *others, result = convolution.params
    body = repeat(schedule, names, 1, rows, place, wider, (result, outside) if zero else None)
    new = next(new for old, new in wider.items() if old.same_as(result))
    return tirx.PrimFunc([*others, new], body, convolution.ret_type, convolution.attrs)


def _drop_pad(step: _Step, data: Any) -> Any:
    """Make a pool's windows stay inside `data`, which begins at the first of them.

    Beyond an edge, a window reads the nearest element, which it contains anyway.
    """
    function = step.function
    one, row, column, channel = step.indices
    row = row - tirx.IntImm(row.ty.dtype, step.first) if step.first else row
    extents = {v.var: int(v.dom.extent) for v in step.main.iter_vars}
    first = expressions.evaluate(column, None)
    last = first + sum((extent - 1) * expressions.slope(column, v) for v, extent in extents.items())
    indices = [one, row, _keep(column, int(data.shape[2]), first, last), channel]
    root = function.body.block
    nest = root.body.seq[-1] if isinstance(root.body, tirx.SeqStmt) else root.body
    read = function.params[0] if step.pad is None else step.pad.writes[0].source
    body = bindings.replace_buffer(nest, read, data, lambda _: indices)
    body = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", body))
    return tirx.PrimFunc([data, *function.params[1:]], body, function.ret_type, function.attrs)


def _pad_columns(step: _Step, data: Any) -> Any:
    """Make a depthwise convolution's pad check columns only, since `data` has all rows."""
    function = step.function
    if step.pad is None:
        body = bindings.replace_buffer(function.body, function.params[0], data)
        return tirx.PrimFunc([data, *function.params[1:]], body, function.ret_type, function.attrs)
    pad = step.pad
    one, row, _, channel = (v.var for v in pad.iter_vars)
    [load] = expressions.read_value(pad.body.value)[0]
    at, width = load.indices[2], int(data.shape[2])
    first = expressions.evaluate(at, None)
    last = first + int(pad.iter_vars[2].dom.extent) - 1
    indices = [one, row, _keep(at, width, first, last), channel]
    value = tirx.BufferLoad(data, indices)
    inside = tirx.all(at >= tirx.IntImm(at.ty.dtype, 0), at < tirx.IntImm(at.ty.dtype, width))
    value = tirx.if_then_else(inside, value, tirx.FloatImm(str(data.dtype), 0.0))

    def rewrite(block: Any) -> Any:
        if block.name_hint != pad.name_hint or not block.iter_vars:
            return block
        read = tirx.BufferRegion(data, [Range.from_min_extent(i, tirx.IntImm(i.ty.dtype, 1)) for i in indices])
        body = tirx.BufferStore(block.body.buffer, value, list(block.body.indices))
        return s_tir.SBlock(block.iter_vars, [read], block.writes, block.name_hint, body)

    body = tvm_ffi.structural_map(function.body, [(s_tir.SBlock, rewrite)])
    return tirx.PrimFunc([data, *function.params[1:]], body, function.ret_type, function.attrs)


def _keep(index: Any, size: int, first: int, last: int) -> Any:
    """Clamp an index with the range `first` to `last` to 0 and `size`."""
    if last >= size:
        index = tirx.min(index, tirx.IntImm(index.ty.dtype, size - 1))
    return tirx.max(index, tirx.IntImm(index.ty.dtype, 0)) if first < 0 else index
