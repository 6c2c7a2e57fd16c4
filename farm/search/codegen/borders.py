"""Peel the border tiles of convolutions, so that interior tiles need no bounds checks.

A convolution that reads unpadded data checks for every element whether it lies inside the image. For interior tiles the
answer is known from the tile's position. The pass peels the first and the last iteration of such a loop of tiles. It
also emits the whole loop twice: without checks for interior rows, with checks for the others. It rewrites lowered
functions and keeps their results.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir.expr import Call
from tvm.sym import Analyzer

from farm.search.families import expressions

# Limit on the corner points at which one condition is evaluated.
_MOST_CORNERS = 16


def peel_borders(function: Any) -> Any:
    """Remove the bounds checks of interior tiles from a lowered function."""
    return expressions.with_body(function, _Splitter().visit(function.body))


class _Splitter:
    """Walk over one function."""

    def __init__(self) -> None:
        self._analyzer = Analyzer()

    def visit(self, statement: Any) -> Any:
        if isinstance(statement, tirx.SeqStmt):
            parts = [self.visit(each) for each in statement.seq]
            same = all(part.same_as(each) for part, each in zip(parts, statement.seq, strict=True))
            return statement if same else tirx.SeqStmt(parts)
        if isinstance(statement, tirx.AttrStmt):
            body = self.visit(statement.body)
            if body.same_as(statement.body):
                return statement
            return tirx.AttrStmt(statement.node, statement.attr_key, statement.value, body)
        return self._visit_loop(statement) if isinstance(statement, tirx.For) else statement

    def _visit_loop(self, loop: Any) -> Any:
        if not isinstance(loop.extent, tirx.IntImm) or _is_sum(loop) or not _has_conditions(loop.body):
            return loop
        self._bind(loop.loop_var, int(loop.min), int(loop.extent))
        if any(not _is_sum(each) and _has_conditions(each.body) for each in _list_loops(loop.body)):
            body = self.visit(loop.body)
            return loop if body.same_as(loop.body) else _with_body(loop, body)
        return self._split(loop) or loop

    def _bind(self, variable: Any, first: int, extent: int) -> None:
        dtype = variable.ty.dtype
        low, count = (_integer(number, dtype) for number in (first, extent))
        self._analyzer.bind(variable, ir.Range.from_min_extent(low, count))

    def _split(self, loop: Any) -> Any | None:
        """Return the split loop, or None where its conditions cannot be analysed."""
        sums = [each for each in _list_loops(loop.body) if _is_sum(each)]
        if not all(isinstance(number, tirx.IntImm) for each in sums for number in (each.min, each.extent)):
            return None
        for each in sums:
            self._bind(each.loop_var, int(each.min), int(each.extent))
        serial, extent = int(loop.kind) == 0, int(loop.extent)
        found = list(_list_conditions(loop.body))
        inside = [c for c in found if serial and expressions.mentions(c, loop.loop_var)]
        outside = [c for c in found if not any(c.same_as(each) for each in inside)]
        needed = self._reduce(outside, sums)
        if needed is None or not (inside or needed):
            return None
        if not serial:
            return self._split_body(loop, needed, outside)
        first, cut = int(loop.min), extent > 1 and bool(inside)
        spans = [(0, 1), (1, extent - 1), (extent - 1, extent)] if cut else [(0, extent)]
        spans = [(first + start, first + end) for start, end in spans if end > start]
        try:
            quick = _join([self._copy(loop, span, outside) for span in spans])
            if not needed:
                return quick
            rest = _join([self._copy(loop, span, []) for span in spans])
        except _UnknownError:
            return None
        return tirx.IfThenElse(_join_conditions(needed), quick, rest)

    def _split_body(self, loop: Any, needed: Sequence[Any], assumed: Sequence[Any]) -> Any | None:
        """Duplicate the body of a parallel loop: one copy for steps where `assumed` holds, one for the others."""
        parts = expressions.list_statements(loop.body)
        kept = list(itertools.takewhile(lambda each: not isinstance(each, tirx.For | tirx.BufferStore), parts))
        rest = _join(parts[len(kept) :])
        values: dict[Any, Any] = {}
        for each in kept:
            if isinstance(each, tirx.Bind):
                values[each.var] = expressions.replace(each.value, values)
        try:
            quick = _Copy(self._analyzer, assumed, values).copy(rest)
        except _UnknownError:
            return None
        return _with_body(loop, _join([*kept, tirx.IfThenElse(_join_conditions(needed), quick, rest)]))

    def _copy(self, loop: Any, span: tuple[int, int], assumed: Sequence[Any]) -> Any:
        """Copy the steps in `span` with fresh variables, under the conditions `assumed`."""
        start, end = span
        variable = loop.loop_var
        copy = _Copy(self._analyzer, assumed, {})
        if end - start == 1:
            copy.names[variable] = _integer(start, variable.ty.dtype)
            return copy.copy(loop.body)
        renamed = tirx.Var(variable.name, variable.ty)
        self._bind(renamed, start, end - start)
        copy.names[variable] = renamed
        low, count = (_integer(number, loop.extent.ty.dtype) for number in (start, end - start))
        return tirx.For(renamed, low, count, loop.kind, copy.copy(loop.body), loop.thread_binding, loop.annotations)

    def _reduce(self, conditions: Sequence[Any], sums: Sequence[Any]) -> list[Any] | None:
        """Return the conditions that imply all of `conditions` at every reduction step; None where that is unknown.

        Each condition is monotonic in the reduction variables, so the ends of their ranges suffice.
        """
        found: list[Any] = []
        for condition in conditions:
            own = [each for each in sums if expressions.mentions(condition, each.loop_var)]
            if 2 ** len(own) > _MOST_CORNERS or not all(_is_linear(condition, each.loop_var) for each in own):
                return None
            for corner in itertools.product((0, 1), repeat=len(own)):
                places = {
                    each.loop_var: _integer(int(each.min) + at * (int(each.extent) - 1), each.loop_var.ty.dtype)
                    for each, at in zip(own, corner, strict=True)
                }
                found.append(self._analyzer.simplify(expressions.replace(condition, places)))
        kept: list[Any] = []
        for at, each in enumerate(found):
            others = [*kept, *found[at + 1 :]]
            if not self._follows(each, others):
                kept.append(each)
        return kept

    def _follows(self, condition: Any, others: Sequence[Any]) -> bool:
        """Say whether a condition always holds, or follows from one of the others."""
        if self._analyzer.can_prove(condition):
            return True
        for other in others:
            with self._analyzer.constraint_scope(other):
                if self._analyzer.can_prove(condition):
                    return True
        return False


class _UnknownError(Exception):
    """A statement that the copy does not support."""


class _Copy:
    """Copies statements with fresh variables and resolves the choices whose outcome is known."""

    def __init__(self, analyzer: Any, assumed: Sequence[Any], values: Mapping[Any, Any]) -> None:
        """`assumed` are conditions that hold, names expanded; `values` are the values of names bound outside."""
        self._analyzer, self._assumed = analyzer, assumed
        self.names: dict[Any, Any] = {}
        # Values of names in the original and in the copy.
        self._before: dict[Any, Any] = dict(values)
        self._after: dict[Any, Any] = dict(values)

    def copy(self, statement: Any) -> Any:
        """Copy the statement. Raises _UnknownError for an unsupported one."""
        if isinstance(statement, tirx.SeqStmt):
            return tirx.SeqStmt([self.copy(each) for each in statement.seq])
        if isinstance(statement, tirx.Bind):
            value = self._write(statement.value)
            name = tirx.Var(statement.var.name, statement.var.ty)
            self._before[statement.var] = expressions.replace(statement.value, self._before)
            self._after[name] = expressions.replace(value, self._after)
            self.names[statement.var] = name
            return tirx.Bind(name, value)
        if isinstance(statement, tirx.For):
            name = tirx.Var(statement.loop_var.name, statement.loop_var.ty)
            first, extent = self._write(statement.min), self._write(statement.extent)
            self._analyzer.bind(name, ir.Range.from_min_extent(first, extent))
            self.names[statement.loop_var] = name
            body = self.copy(statement.body)
            kind = statement.kind
            return tirx.For(name, first, extent, kind, body, statement.thread_binding, statement.annotations)
        if isinstance(statement, tirx.BufferStore):
            indices = [self._write(each) for each in statement.indices]
            return tirx.BufferStore(statement.buffer, self._write(statement.value), indices)
        if isinstance(statement, tirx.Evaluate):
            return tirx.Evaluate(self._write(statement.value))
        raise _UnknownError(type(statement).__name__)

    def _write(self, expression: Any) -> Any:
        def settle(call: Any) -> Any:
            if not _is_choice(call):
                return call
            left = []
            for part in _list_parts(call.args[0]):
                verdict = self._settle(part)
                if verdict is False:
                    return call.args[2]
                if verdict is None:
                    left.append(part)
            if not left:
                return call.args[1]
            return tirx.if_then_else(_join_conditions(left), *call.args[1:])

        settled = tvm_ffi.structural_map(expression, [(Call, settle)])
        return expressions.replace(settled, self.names)

    def _settle(self, condition: Any) -> bool | None:
        """Say whether a condition of the original holds in the copy; None where that is unknown."""
        if not _is_comparison(condition):
            return None
        spelt = expressions.replace(condition, self._before)
        if any(tvm_ffi.structural_equal(spelt, each) for each in self._assumed):
            return True
        placed = expressions.replace(expressions.replace(condition, self.names), self._after)
        if self._analyzer.can_prove(placed):
            return True
        return False if self._analyzer.can_prove(tirx.Not(placed)) else None


def _list_conditions(body: Any) -> Iterator[Any]:
    """Yield all comparisons that the choices in a statement depend on, with names expanded."""
    names: dict[Any, Any] = {}
    for each in expressions.walk(body):
        if isinstance(each, tirx.Bind):
            names[each.var] = expressions.replace(each.value, names)
        for choice in _list_choices(each):
            for part in _list_parts(choice.args[0]):
                if _is_comparison(part):
                    yield expressions.replace(part, names)


def _has_conditions(body: Any) -> bool:
    return any(True for _ in _list_conditions(body))


def _list_choices(statement: Any) -> list[Any]:
    """List the choices in a statement's own expressions."""
    value = getattr(statement, "value", None)
    return [] if value is None else [part for part in expressions.list_inside(value) if _is_choice(part)]


def _is_choice(part: Any) -> bool:
    return isinstance(part, Call) and str(getattr(part.op, "name", "")).endswith(".if_then_else")


def _list_parts(condition: Any) -> list[Any]:
    """Split a conjunction into its terms."""
    if isinstance(condition, tirx.And):
        return [*_list_parts(condition.a), *_list_parts(condition.b)]
    return [condition]


def _is_comparison(part: Any) -> bool:
    """Say whether `part` compares integers without reading memory."""
    if not isinstance(part, tirx.LT | tirx.LE | tirx.GT | tirx.GE):
        return False
    return "int" in str(part.a.ty.dtype) and not expressions.read_value(part)[0]


def _is_linear(expression: Any, variable: Any) -> bool:
    """Say whether `variable` occurs in sums and products only."""
    if not expressions.mentions(expression, variable) or expression.same_as(variable):
        return True
    known = (tirx.Add, tirx.Sub, tirx.Mul, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
    return isinstance(expression, known) and all(_is_linear(each, variable) for each in expressions.parts(expression))


def _is_sum(loop: Any) -> bool:
    """Say whether a loop is a reduction: it stores to the same places at every step."""
    names: list[Any] = [loop.loop_var]
    for each in expressions.walk(loop.body):
        if isinstance(each, tirx.Bind) and any(expressions.mentions(each.value, name) for name in names):
            names.append(each.var)
        if not isinstance(each, tirx.BufferStore):
            continue
        if any(expressions.mentions(index, name) for index in each.indices for name in names):
            return False
    return True


def _list_loops(statement: Any) -> list[Any]:
    return [each for each in expressions.walk(statement) if isinstance(each, tirx.For)]


def _join_conditions(conditions: Sequence[Any]) -> Any:
    return functools.reduce(tirx.And, conditions)


def _with_body(loop: Any, body: Any) -> Any:
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)


def _join(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tirx.SeqStmt(list(parts))


def _integer(number: int, dtype: Any) -> Any:
    return tirx.IntImm(dtype, number)
