"""Rows of any length by whole vectors: sums and extremes, partial ones by lane, and exponentials and their like.

A schedule can ask for sums by lane where a vector's length divides a row (`loops.split_sums`); TVM's `rfactor` forgets
the condition of a last vector that is not full. Rows of 65, 197 or 1001 elements were summed up one by one, each waiting
for the one before, since LLVM must not change the order of additions by itself; the order becomes another one, and
rounds no worse. Exponentials LLVM computes by vectors, of half the length that Intel's cores have, and those of the last
elements one by one: here a last vector begins so much earlier, and computes some elements again. Reads lowered functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from farm.search.families import expressions, loops
from tvm import sym
from tvm import tirx
import tvm
import tvm_ffi

_TYPE = "float32"
# What vectors compute as they stand. Anything else, conditions above all, would go lane by lane.
_CALLS = frozenset(f"tirx.{name}" for name in ("reinterpret", "floor", "sqrt", "fabs", "shift_left", "shift_right"))


def use_vectors(function: Any, lanes: int) -> Any:
    """A lowered function whose innermost loops over rows go by vectors of so many elements."""

    shared = {each.buffer: each.data for each in expressions.walk(function.body) if isinstance(each, tirx.DeclBuffer)}
    changed = []

    def change(loop: Any) -> Any:
        row = _read(loop, shared)
        if row is None or row.elements < lanes:
            return loop
        changed.append(loop)
        return _compute(row, lanes) if row.kind is None else _reduce(row, row.kind, lanes)

    body = tvm_ffi.structural_map(function.body, [(tirx.For, change)])
    if not changed:
        return function
    done = tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)
    return tirx.transform.VectorizeLoop(True)(tvm.IRModule({"main": done}))["main"]


@dataclasses.dataclass(frozen=True)
class _Row:
    """A loop that takes values into an element of a buffer by a `kind` of operation, or writes one after the other.

    `kind` is then None. No name is left in `value`.
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
    """A loop as a row; None for any other, and for one that writes what is sooner done by LLVM.

    `shared` says where buffers lie that are a part of another.
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
    whole = _find_whole(store.buffer, shared)
    if any(_find_whole(each.source, shared).same_as(whole) or str(each.ty.dtype) != _TYPE for each in loads):
        return None
    if not calls <= _CALLS or not {1} <= _list_moves(loads, loop.loop_var) <= {0, 1}:
        return None
    return _Row(loop, store.buffer, list(place.indices), kind, value)


def _find_whole(buffer: Any, shared: Mapping[Any, Any]) -> Any:
    """The buffer in whose memory one lies, or itself."""
    whole = next(iter(getattr(shared.get(buffer), "args", None) or ()), None)
    return _find_whole(whole, shared) if hasattr(whole, "shape") else buffer


def _list_moves(loads: list[Any], variable: Any) -> set[int | None]:
    """By how many elements loads move from one step of a loop to the next; None where that is not one number."""

    analyzer = sym.Analyzer()
    moves: set[int | None] = set()
    for load in loads:
        first = load.indices[0]
        step = analyzer.simplify(expressions.replace(first, {variable: variable + 1}) - first)
        moves.add(int(step) if len(load.indices) == 1 and isinstance(step, tirx.IntImm) else None)
    return moves


def _compute(row: _Row, lanes: int) -> Any:
    """The row by vectors, of which the last ends where the row does, and computes some elements again."""

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
    """The row by vectors, some beside each other, what is left by single ones, and their lanes put together.

    The last vector ends where the row does; what it has in common with the one before counts once.
    """

    length = lanes * loops.row_vectors(row.elements, lanes)
    neutral = {tirx.Max: tirx.min_value, tirx.Min: tirx.max_value}.get(kind, lambda dtype: tirx.FloatImm(dtype, 0.0))(_TYPE)
    parts: list[Any] = []

    def begin(size: int) -> Any:
        buffer = tirx.decl_buffer([size], _TYPE, "partial")
        start = _make_vector(row.loop, size, lambda lane: tirx.BufferStore(buffer, neutral, [lane]))
        parts.extend((tirx.AllocBuffer(buffer), start))
        return buffer

    def take(first: Any, buffer: Any, again: int = 0) -> Any:
        """A vector of the row into a vector of partial results, but for the elements that come again."""

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
