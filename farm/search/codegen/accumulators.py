"""Passes on accumulators and rows: begin with the bias, unroll reductions, vectorise rows of any length.

Starting from the bias instead of zero saves one addition per vector of a tile; the registers are initialised anyway.
Schedules sum by lane where the vector length divides the row (`loops.split_sums`); TVM's `rfactor` drops the condition
of a partial last vector. LLVM keeps the order of floating-point additions, so rows of 65, 197 or 1001 elements became
serial chains. LLVM computes exponentials in half-length vectors and the rest one by one; here the last vector overlaps
the one before and recomputes some elements. New orders of additions round no worse. All rewrite lowered functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.ir.expr import TensorLoad

from farm.search.families import expressions, loops
from farm.search.families.expressions import (
    find_whole,
    list_shared,
    list_statements,
    read_value,
    replace,
    rewrite,
    walk,
)
from farm.search.families.facts import is_small

# Unroll factors in order of preference, and the most FMAs in an unrolled body.
_STEPS, _MOST = (4, 3, 2), 128
# LLVM unrolls shorter loops itself.
_LEAST_STEPS, _LEAST_SUMS = 16, 4
_TYPE = "float32"
# Calls that have a vector form. Others, conditions above all, would be scalarised.
_CALLS = frozenset(f"tirx.{name}" for name in ("reinterpret", "floor", "sqrt", "fabs", "shift_left", "shift_right"))


def unroll_reductions(function: Any, tile_bytes: int) -> Any:
    """Unroll the innermost reduction loops of a lowered function.

    Accumulators are in local buffers of up to `tile_bytes`.
    """
    statements, shared = list(walk(function.body)), list_shared(function.body)
    own = {
        each.buffer for each in statements if isinstance(each, tirx.AllocBuffer) and is_small(each.buffer, tile_bytes)
    }
    own |= {alias for alias in shared if find_whole(alias, shared) in own}

    def unroll(loop: Any) -> Any:
        body = list_statements(loop.body)
        stores = [each for each in body if isinstance(each, tirx.BufferStore)]
        steps = next((s for s in _STEPS if int(loop.extent) % s == 0 and s * len(stores) <= _MOST), 1)
        plain = all(isinstance(each, tirx.BufferStore | tirx.Bind) for each in body)
        if int(loop.kind) != 0 or not plain or steps == 1 or len(stores) < _LEAST_SUMS:
            return loop
        if int(loop.extent) < _LEAST_STEPS or not all(_adds_up(store, own) for store in stores):
            return loop
        return tirx.For(
            loop.loop_var, loop.min, tirx.IntImm(loop.extent.ty.dtype, int(loop.extent) // steps), loop.kind,
            tirx.SeqStmt([new for step in range(steps) for new in _take(body, loop.loop_var, steps, step)]),
            loop.thread_binding, loop.annotations,
        )  # fmt: skip

    return rewrite(function, (tirx.For, unroll))


def _adds_up(store: Any, own: set[Any]) -> bool:
    """Say whether a statement adds to an accumulator."""
    if not isinstance(store.value, tirx.Add) or store.buffer not in own:
        return False
    return any(
        isinstance(side, TensorLoad) and side.source.same_as(store.buffer) for side in (store.value.a, store.value.b)
    )


def _take(body: list[Any], loop_var: Any, steps: int, step: int) -> list[Any]:
    """Return one step of the unrolled body, with fresh names."""
    names = {loop_var: loop_var * steps + step}
    taken = []
    for each in body:
        if isinstance(each, tirx.Bind):
            value = replace(each.value, names)
            names[each.var] = tirx.Var(each.var.name, each.var.ty)
            taken.append(tirx.Bind(names[each.var], value))
        else:
            taken.append(replace(each, names))
    return taken


def init_with_bias(function: Any) -> Any:
    """Initialise accumulators with the bias in a lowered function."""
    statements, shared = list(walk(function.body)), list_shared(function.body)
    written = {each.buffer for each in statements if isinstance(each, tirx.BufferStore)}
    own = {each.buffer for each in statements if isinstance(each, tirx.AllocBuffer)}
    own -= {find_whole(alias, shared) for alias in shared}
    return rewrite(function, (tirx.SeqStmt, lambda sequence: _change(sequence, own, written)))


@dataclasses.dataclass
class _Sum:
    """One accumulator vector: the statement that zeroes it, the last one that reads it, and the addition there.

    `added` is the addend, valid where the tile begins.
    """

    begin: int
    end: int = -1
    addition: Any = None
    added: Any = None
    fits: bool = True


def _change(sequence: Any, own: set[Any], written: set[Any]) -> Any:
    """Change the statements of a tile whose accumulators are zeroed, summed up, and read once to be added to."""
    parts = list(sequence.seq)
    found: dict[tuple[Any, int], _Sum] = {}
    for at, part in enumerate(parts):
        if isinstance(part, tirx.BufferStore) and part.buffer in own and _is_zero(part.value):
            place = _place(part.buffer, part.indices)
            if place is not None:
                found.setdefault(place, _Sum(at))
    if not found:
        return sequence
    buffers = {buffer for buffer, _ in found}
    names: dict[Any, Any] = {}
    for at, part in enumerate(parts):
        for each in walk(part):
            if isinstance(each, tirx.Bind):
                names[each.var] = replace(each.value, names)
            if isinstance(each, tirx.BufferStore) and not _follow(each, at, each is part, found, buffers, names):
                return sequence
    changed = False
    for each in found.values():
        if not each.fits or each.added is None or each.added.source in written:
            continue
        begin, end, added = parts[each.begin], parts[each.end], each.added
        parts[each.begin] = tirx.BufferStore(begin.buffer, added, begin.indices)
        parts[each.end] = tirx.BufferStore(end.buffer, _leave_out(end.value, each.addition), end.indices)
        changed = True
    return tirx.SeqStmt(parts) if changed else sequence


def _follow(
    store: Any, at: int, outermost: bool, found: dict[Any, _Sum], buffers: set[Any], names: dict[Any, Any]
) -> bool:
    """Note what a statement does to accumulators; return False where one is used in an unsupported way."""
    target = _place(store.buffer, store.indices)
    if target is None and store.buffer in buffers:
        return False
    own = found.get(target)
    sums_up = False
    for load in read_value(store.value)[0]:
        if load.source not in buffers:
            continue
        place = _place(load.source, load.indices)
        if place is None:
            return False
        each = found.get(place)
        if each is None:
            continue
        if each is own and _adds(store.value, load):
            sums_up = True
        elif outermost and each.end < 0 and each is not own and at > each.begin:
            each.end, each.addition = at, _find_addition(store.value, load)
            each.added = None if each.addition is None else _spell(each.addition.b, names)
            each.fits &= each.added is not None
        else:
            each.fits = False
    if own is not None and not sums_up and at != own.begin:
        own.fits = False
    # A sum that continues after the read is another accumulator.
    if own is not None and own.end >= 0:
        own.fits = False
    return True


def _place(buffer: Any, indices: Any) -> tuple[Any, int] | None:
    """Return the buffer and a constant index, or None."""
    if len(indices) != 1 or not isinstance(indices[0], tirx.IntImm):
        return None
    return buffer, int(indices[0])


def _is_zero(value: Any) -> bool:
    if isinstance(value, tirx.Broadcast):
        value = value.value
    return isinstance(value, tirx.FloatImm) and float(value) == 0.0 and str(value.ty.dtype) == _TYPE


def _adds(value: Any, load: Any) -> bool:
    """Say whether a value is the accumulator itself plus a term."""
    return isinstance(value, tirx.Add) and value.a.same_as(load)


def _find_addition(value: Any, load: Any) -> Any | None:
    """Find the addition of `load` and another load in an expression; None where there is none."""
    if _adds(value, load):
        return value if isinstance(value.b, TensorLoad) else None
    parts = (getattr(value, name, None) for name in ("a", "b", "value"))
    found = [_find_addition(part, load) for part in parts if part is not None]
    return next((each for each in found if each is not None), None)


def _spell(load: Any, names: dict[Any, Any]) -> Any:
    return tirx.BufferLoad(load.source, [replace(index, names) for index in load.indices])


def _leave_out(value: Any, addition: Any) -> Any:
    """Remove the addition from an expression."""
    return tvm_ffi.structural_map(value, [(tirx.Add, lambda node: node.a if node.same_as(addition) else node)])


def use_vectors(function: Any, lanes: int) -> Any:
    """Vectorise the innermost loops over rows of a lowered function by `lanes` elements."""
    shared = expressions.list_shared(function.body)

    def change(loop: Any) -> Any:
        row = _read(loop, shared)
        if row is None or row.elements < lanes:
            return loop
        return _compute(row, lanes) if row.kind is None else _reduce(row, row.kind, lanes)

    done = expressions.rewrite(function, (tirx.For, change))
    if done.body.same_as(function.body):
        return function
    return tirx.transform.VectorizeLoop(True)(tvm.IRModule({"main": done}))["main"]


@dataclasses.dataclass(frozen=True)
class _Row:
    """A loop that reduces values into one element by `kind`, or writes element-wise where `kind` is None.

    `value` has its names expanded.
    """

    loop: Any
    buffer: Any
    indices: list[Any]
    kind: Callable[..., Any] | None
    value: Any

    @property
    def elements(self) -> int:
        return int(self.loop.extent)


def _read(loop: Any, shared: Mapping[Any, Any]) -> _Row | None:
    """Read a loop as a row; None for another loop, or one that LLVM vectorises itself.

    `shared` maps an alias to the data of the buffer that it lies in.
    """
    *names, store = expressions.list_statements(loop.body)
    if int(loop.kind) != 0 or not isinstance(loop.extent, tirx.IntImm) or not isinstance(store, tirx.BufferStore):
        return None
    if str(store.value.ty.dtype) != _TYPE or not all(isinstance(each, tirx.Bind) for each in names):
        return None
    values: dict[Any, Any] = {}
    for each in names:
        values[each.var] = expressions.replace(each.value, values)
    place = tirx.BufferLoad(store.buffer, [expressions.replace(each, values) for each in store.indices])
    value, kind = expressions.replace(store.value, values), None
    moves = _list_moves([place], loop.loop_var)
    if moves == {0}:
        kind = next((each for each in (tirx.Add, tirx.Max, tirx.Min) if isinstance(value, each)), None)
        others = [each for each in (value.a, value.b) if not tvm_ffi.structural_equal(each, place)] if kind else []
        if len(others) != 1:
            return None
        (value,) = others
    loads, calls = expressions.read_value(value)[0], expressions.list_calls(value)
    if kind is None and (moves != {1} or not calls):
        return None
    whole = expressions.find_whole(store.buffer, shared)
    if any(expressions.find_whole(each.source, shared).same_as(whole) or str(each.ty.dtype) != _TYPE for each in loads):
        return None
    if not calls <= _CALLS or not {1} <= _list_moves(loads, loop.loop_var) <= {0, 1}:
        return None
    return _Row(loop, store.buffer, list(place.indices), kind, value)


def _list_moves(loads: list[Any], variable: Any) -> set[int | None]:
    """List the index strides of loads over a loop; None stands for a stride that is not constant."""
    analyzer = sym.Analyzer()
    moves: set[int | None] = set()
    for load in loads:
        first = load.indices[0]
        step = analyzer.simplify(expressions.replace(first, {variable: variable + 1}) - first)
        moves.add(int(step) if len(load.indices) == 1 and isinstance(step, tirx.IntImm) else None)
    return moves


def _compute(row: _Row, lanes: int) -> Any:
    """Compute the row by vectors; the last one overlaps and ends where the row does."""

    def vector(first: Any) -> Any:
        def one(lane: Any) -> Any:
            names = {row.loop.loop_var: first + lane}
            indices = [expressions.replace(each, names) for each in row.indices]
            return tirx.BufferStore(row.buffer, expressions.replace(row.value, names), indices)

        return _make_vector(row.loop, lanes, one)

    kind = row.loop.loop_var.ty.dtype
    step = tirx.Var("step", kind)
    whole = _make_loop(row.loop, step, row.elements // lanes, vector(step * lanes))
    if row.elements % lanes == 0:
        return whole
    return tirx.SeqStmt([whole, vector(tirx.IntImm(kind, row.elements - lanes))])


def _reduce(row: _Row, kind: Callable[..., Any], lanes: int) -> Any:
    """Reduce the row with several vector accumulators, then the rest with one, then across lanes.

    The last vector overlaps the one before; common elements count once.
    """
    length = lanes * loops.row_vectors(row.elements, lanes)
    neutral = {tirx.Max: tirx.min_value, tirx.Min: tirx.max_value}.get(kind, lambda dtype: tirx.FloatImm(dtype, 0.0))(
        _TYPE
    )
    parts: list[Any] = []

    def begin(size: int) -> Any:
        buffer = tirx.decl_buffer([size], _TYPE, "partial")
        start = _make_vector(row.loop, size, lambda lane: tirx.BufferStore(buffer, neutral, [lane]))
        parts.extend((tirx.AllocBuffer(buffer), start))
        return buffer

    def take(first: Any, buffer: Any, again: int = 0) -> Any:
        """Reduce one vector of the row into a partial result, without its first `again` elements."""

        def one(lane: Any) -> Any:
            value = expressions.replace(row.value, {row.loop.loop_var: first + lane})
            value = tirx.Select(lane >= again, value, neutral) if again else value
            return tirx.BufferStore(buffer, kind(tirx.BufferLoad(buffer, [lane]), value), [lane])

        return _make_vector(row.loop, int(buffer.shape[0]), one)

    def load(buffer: Any) -> Any:
        return tirx.BufferLoad(buffer, [tirx.Ramp(0, 1, int(buffer.shape[0]))])

    partial, step = begin(length), tirx.Var("step", row.loop.loop_var.ty.dtype)
    parts.append(_make_loop(row.loop, step, row.elements // length, take(step * length, partial)))
    rest, left = None, row.elements % length
    if left:
        rest = begin(lanes)
        parts += [take(row.elements - left + at, rest) for at in range(0, left - lanes + 1, lanes)]
        if left % lanes:
            parts.append(take(row.elements - lanes, rest, lanes - left % lanes))
    value = load(partial)
    while length > 1:
        if rest is not None and length == lanes:
            value = kind(value, load(rest))
        name = tirx.Var("lanes", value.ty)
        parts.append(tirx.Bind(name, value))
        length //= 2
        value = kind(*(tirx.Shuffle([name], list(range(at, at + length))) for at in (0, length)))
    result = kind(tirx.BufferLoad(row.buffer, row.indices), value)
    return tirx.SeqStmt([*parts, tirx.BufferStore(row.buffer, result, row.indices)])


def _make_loop(like: Any, variable: Any, extent: int, body: Any, *, vector: bool = False) -> Any:
    first, extent = (tirx.IntImm(like.loop_var.ty.dtype, number) for number in (0, extent))
    return tirx.For(variable, first, extent, tirx.ForKind.VECTORIZED if vector else tirx.ForKind.SERIAL, body)


def _make_vector(like: Any, lanes: int, make: Callable[[Any], Any]) -> Any:
    lane = tirx.Var("lane", like.loop_var.ty.dtype)
    return _make_loop(like, lane, lanes, make(lane), vector=True)
