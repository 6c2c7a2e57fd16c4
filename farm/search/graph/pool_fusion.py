"""Pools of maxima made a part of the convolution whose result only they read: part of a graph pipeline.

TVM never fuses the two, and a result of some megabytes goes to memory and comes back. Only where the target's cores are
predicted to gain by `farm.search.families.pooled`. What a window reads beyond the edge does not count for a maximum, so
it reads the nearest element there is, and nothing has to be compared: rows above and below are computed twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from farm.errors import UsageError
from farm.search import tvm_env
from farm.search.cores import Core, core_of
from farm.search.families import expressions, facts, rule
from farm.search.families.pooled import Pooled, PooledContraction
from farm.search.graph import bindings, in_place_concat
from farm.search.graph.repeated_steps import repeat

# Most rows of a pool on top, for a number that is divided evenly.
_MOST_MORE = 3


def join(target: Any) -> Any:
    """A module pass for a target (TVM's) and canonical functions; does nothing for one whose cores are not known."""

    def run(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
        try:
            core = core_of(dict(target.export()))
        except UsageError:
            return {}
        return _join(builder, function, core)

    return bindings.rewriting_pass(run, "JoinPools")


def _join(builder: Any, function: Any, core: Core) -> Mapping[Any, Sequence[Any]]:
    from tvm import relax

    module = builder.get()
    uses = bindings.count_uses(function)
    made = {binding.var: binding for binding in bindings.list_bindings(function)}
    others: dict[Any, list[Any]] = {}
    for binding in bindings.list_bindings(function):
        pool = bindings.called_function(module, binding.value)
        arguments = list(binding.value.args[1].fields) if pool is not None else []
        if len(arguments) != 1 or not isinstance(arguments[0], relax.Var) or uses[arguments[0]] != 1:
            continue
        source = made.get(arguments[0])
        convolution = bindings.called_function(module, source.value) if source is not None else None
        if source is None or convolution is None:
            continue
        joined = join_functions(convolution, pool, core)
        if joined is None:
            continue
        words = [call.args[0].name_hint.removeprefix("fused_") for call in (source.value, binding.value)]
        call = relax.call_tir(
            builder.add_func(joined, "_".join(["fused", *words])), source.value.args[1], binding.var.ty
        )
        others[source.var] = []
        others[binding.var] = [relax.VarBinding(binding.var, call)]
    return others


def join_functions(convolution: Any, pool: Any, core: Core) -> Any | None:
    """One function of both; None where they are none such, or are predicted to be sooner done apart."""
    own = _read_pool(pool)
    if own is None or in_place_concat.is_join(convolution):
        return None
    joined = _chain(convolution, own, own.rows)
    found = None if joined is None else Pooled().read(bindings.schedule(joined))
    if joined is None or found is None:
        return None
    seconds, rows = min((_predict(found, rows, core), rows) for rows in range(own.rows, own.rows + 1 + _MOST_MORE))
    apart = [rule.read_outlook(bindings.schedule(each).mod, core) for each in (convolution, pool)]
    if None in apart or seconds >= sum(each.plans()[0][0].seconds for each in apart if each is not None):
        return None
    return joined if rows == own.rows else _chain(convolution, own, rows)


def _predict(found: PooledContraction, rows: int, core: Core) -> float:
    """Seconds of the best plan with the rows that so many rows of the pool would read."""
    family, more = Pooled(), dataclasses.replace(found, most_rows=rows)
    plans = rule.Outlook(family, more, core, family.options(more, core)).plans()
    return plans[0][0].seconds if plans else math.inf


@dataclasses.dataclass(frozen=True)
class _Pool:
    """A pool of maxima: its function, its block, which reads the first parameter at `indices`, and what the row's come
    to: the first, `stride` from one row to the next, `reach` in a window."""

    function: Any
    block: Any
    indices: tuple[Any, ...]
    rows: int
    first: int
    stride: int
    reach: int


def _read_pool(function: Any) -> _Pool | None:
    from tvm import tirx

    schedule = bindings.schedule(function)
    names = facts.list_blocks(schedule)
    if len(names) not in (1, 2):
        return None
    block = schedule.get(schedule.get_sblock(names[-1]))
    kinds = [facts.is_sum(v) for v in block.iter_vars]
    if kinds != [False] * 4 + [True] * 2 or not isinstance(getattr(block.body, "value", None), tirx.Max):
        return None
    loads = [each for each in expressions.read_value(block.body.value)[0] if not each.source.same_as(block.body.buffer)]
    if len(loads) != 1:
        return None
    indices = list(loads[0].indices)
    if len(names) == 2:
        pad = schedule.get(schedule.get_sblock(names[0]))
        reads = expressions.read_value(pad.body.value)[0]
        if len(reads) != 1 or not reads[0].source.same_as(function.params[0]):
            return None
        places = {v.var: index for v, index in zip(pad.iter_vars, indices, strict=True)}
        indices = [expressions.replace(index, places) for index in reads[0].indices]
    elif not loads[0].source.same_as(function.params[0]):
        return None
    row, down = block.iter_vars[1], block.iter_vars[4]
    index = indices[1]
    return _Pool(
        function=function,
        block=block,
        indices=tuple(indices),
        rows=int(row.dom.extent),
        first=expressions.evaluate(index, None),
        stride=expressions.slope(index, row.var),
        reach=1 + expressions.slope(index, down.var) * (int(down.dom.extent) - 1),
    )


def _chain(convolution: Any, pool: _Pool, rows: int) -> Any | None:
    """Both, with the rows that so many rows of the pool would read; None where TVM refuses."""
    tvm = tvm_env.load()
    try:
        convolution = _lengthen(convolution, pool.first, (rows - 1) * pool.stride + pool.reach)
    except tvm.s_tir.ScheduleError:
        return None
    if convolution is None:
        return None
    joined = bindings.chain(convolution, _drop_pad(pool, convolution.params[-1]))
    for key, value in (convolution.attrs or {}).items():
        joined = joined.with_attr(key, value)
    return joined.with_attr("op_pattern", bindings.OPAQUE)


def _lengthen(convolution: Any, first: int, rows: int) -> Any | None:
    """A convolution with so many rows, of which the one at `first` is its own first; None where it is none."""
    from tvm import tirx

    schedule = bindings.schedule(convolution)
    found = facts.read_contraction(schedule)
    if found is None or len(found.pixels) != 3 or [axis.at for axis in found.pixels] != [0, 1, 2]:
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

    def place(step: Any) -> Any:
        step = step + tirx.IntImm(step.ty.dtype, first) if first else step
        if first + rows > own:
            step = tirx.min(step, tirx.IntImm(step.ty.dtype, own - 1))
        return tirx.max(step, tirx.IntImm(step.ty.dtype, 0)) if first < 0 else step

    body = repeat(schedule, names, 1, rows, place, wider)
    *others, result = convolution.params
    new = next(new for old, new in wider.items() if old.same_as(result))
    return tirx.PrimFunc([*others, new], body, convolution.ret_type, convolution.attrs)


def _drop_pad(pool: _Pool, data: Any) -> Any:
    """The pool with its windows inside of `data`, which begins where the first of them does.

    What a window read beyond an edge is the nearest element, which it reads anyway.
    """
    from tvm import s_tir, tirx

    function = pool.function
    extents = {v.var: int(v.dom.extent) for v in pool.block.iter_vars}
    one, row, column, channel = pool.indices
    row = row - tirx.IntImm(row.ty.dtype, pool.first) if pool.first else row
    indices = [one, row, _clamp(column, int(data.shape[2]), extents), channel]
    root = function.body.block
    nest = root.body.seq[-1] if isinstance(root.body, tirx.SeqStmt) else root.body
    read = next(region.source for region in pool.block.reads)
    body = bindings.replace_buffer(nest, read, data, lambda _: indices)
    body = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", body))
    return tirx.PrimFunc([data, *function.params[1:]], body, function.ret_type, function.attrs)


def _clamp(index: Any, size: int, extents: Mapping[Any, int]) -> Any:
    """An index that grows with each of its variables, kept from 0 to `size`."""
    from tvm import tirx

    first = expressions.evaluate(index, None)
    last = first + sum((extent - 1) * expressions.slope(index, v) for v, extent in extents.items())
    if last >= size:
        index = tirx.min(index, tirx.IntImm(index.ty.dtype, size - 1))
    return tirx.max(index, tirx.IntImm(index.ty.dtype, 0)) if first < 0 else index
