"""Queries on TVM's expressions and statements, substitution of variables, and functions with a rewritten body."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import Call, TensorLoad


def parts(expression: Any) -> list[Any]:
    """List the direct operands of an expression."""
    names = ("a", "b", "value", "condition", "true_value", "false_value", "base")
    found = [getattr(expression, name, None) for name in names]
    found += [*(getattr(expression, "args", None) or ()), *(getattr(expression, "indices", None) or ())]
    return [part for part in found if part is not None and hasattr(part, "same_as")]


def mentions(expression: Any, variable: Any) -> bool:
    """Say whether a variable occurs in an expression."""
    return bool(expression.same_as(variable)) or any(mentions(part, variable) for part in parts(expression))


def holds(expression: Any, *kinds: type) -> bool:
    """Say whether an expression contains one of these kinds."""
    return isinstance(expression, kinds) or any(holds(part, *kinds) for part in parts(expression))


def read_value(value: Any) -> tuple[list[Any], list[Any]]:
    """Return all buffer loads in an expression, and all comparisons, including those in indices."""
    inside = list(list_inside(value))
    loads = [each for each in inside if isinstance(each, TensorLoad)]
    return loads, [each for each in inside if isinstance(each, (tirx.LT, tirx.LE, tirx.GT, tirx.GE))]


def list_calls(value: Any) -> set[str]:
    """Return the names of the functions that an expression calls, including those in indices; choices are calls."""
    return {each.op.name for each in list_inside(value) if isinstance(each, Call)}


def list_inside(value: Any) -> Iterator[Any]:
    """Yield an expression and all parts of it."""
    left = [value]
    while left:
        part = left.pop()
        yield part
        left += parts(part)


def slope(index: Any, variable: Any) -> int:
    """Return the increment of an index at the first step of a variable, all others being zero."""
    return evaluate(index, variable) - evaluate(index, None)


def evaluate(expression: Any, variable: Any, step: int = 1, names: Sequence[tuple[Any, Any]] = ()) -> int:
    """Evaluate an index with `variable` at `step` and all others at 0; anything but plain arithmetic counts as 0.

    `names` are bound variables with their expressions.
    """
    if isinstance(expression, tirx.IntImm):
        return int(expression)
    if expression.same_as(variable):
        return step
    if isinstance(expression, tirx.Var):
        value = next((value for name, value in names if name.same_as(expression)), None)
        return 0 if value is None else evaluate(value, variable, step, names)
    if isinstance(expression, tirx.Cast):
        return evaluate(expression.value, variable, step, names)
    for kind, combine in (
        (tirx.Add, operator.add),
        (tirx.Sub, operator.sub),
        (tirx.Mul, operator.mul),
        (tirx.FloorDiv, operator.floordiv),
        (tirx.FloorMod, operator.mod),
        (tirx.Min, min),
        (tirx.Max, max),
    ):
        if isinstance(expression, kind):
            return int(combine(*(evaluate(each, variable, step, names) for each in (expression.a, expression.b))))
    return 0


def compare(comparison: Any, variable: Any, step: int) -> bool:
    """Evaluate a comparison of indices with `variable` at `step` and all others at 0."""
    left, right = evaluate(comparison.a, variable, step), evaluate(comparison.b, variable, step)
    if isinstance(comparison, tirx.LT):
        return left < right
    if isinstance(comparison, tirx.LE):
        return left <= right
    return left > right if isinstance(comparison, tirx.GT) else left >= right


def walk(statement: Any) -> Iterator[Any]:
    """Yield a statement and all statements inside it, in order."""
    yield statement
    bodies = [getattr(statement, name, None) for name in ("body", "then_case", "else_case")]
    for each in [*(getattr(statement, "seq", None) or ()), *bodies]:
        if each is not None:
            yield from walk(each)


def list_statements(body: Any) -> list[Any]:
    """List the statements of a sequence, or the single one of a body."""
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def replace(expression: Any, names: Mapping[Any, Any]) -> Any:
    """Substitute variables in an expression."""
    if not names:
        return expression
    return tvm_ffi.structural_map(expression, [(tirx.Var, lambda variable: names.get(variable, variable))])


def rewrite(function: Any, *visits: tuple[type, Callable[[Any], Any]]) -> Any:
    """Map the nodes of a TIR function's body by their kind."""
    return with_body(function, tvm_ffi.structural_map(function.body, list(visits)))


def with_body(function: Any, body: Any, params: Sequence[Any] | None = None) -> Any:
    """Return a TIR function with another body, and with other parameters where given."""
    return tirx.PrimFunc(function.params if params is None else params, body, function.ret_type, function.attrs)


def find_whole(buffer: Any, shared: Mapping[Any, Any]) -> Any:
    """Return the buffer whose memory contains `buffer`, or itself: TVM lets several tiles reuse one allocation.

    `shared` are the aliases of a lowered function (`list_shared`).
    """
    whole = next(iter(getattr(shared.get(buffer), "args", None) or ()), None)
    return find_whole(whole, shared) if hasattr(whole, "shape") else buffer


def list_shared(body: Any) -> dict[Any, Any]:
    """Return the data of each alias of another buffer in a lowered function's body."""
    return {each.buffer: each.data for each in walk(body) if isinstance(each, tirx.DeclBuffer)}
