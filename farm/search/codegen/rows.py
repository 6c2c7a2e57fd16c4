"""Vectorise rows of any length: sums and extremes by lane, and element-wise exponentials and similar functions.

Schedules sum by lane where the vector length divides the row (`loops.split_sums`); TVM's `rfactor` drops the condition
of a partial last vector. LLVM keeps the order of floating-point additions, so rows of 65, 197 or 1001 elements became
serial chains. The new order rounds no worse. LLVM computes exponentials in half-length vectors and the rest one by one;
here the last vector overlaps the one before and recomputes some elements. The pass rewrites lowered functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import sym, tirx

from farm.search.families import expressions, loops

_TYPE = "float32"
# Calls that have a vector form. Others, conditions above all, would be scalarised.
_CALLS = frozenset(f"tirx.{name}" for name in ("reinterpret", "floor", "sqrt", "fabs", "shift_left", "shift_right"))


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
