"""Pad attention to whole vectors and better tiles where the target is predicted to gain: a graph pass.

Attention is a product, element-wise operators, a softmax over the last axis and another product. Only a number of
tokens that vectors do not divide, as 197 of a vision transformer, changes anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from farm.search import gpus
from farm.search.cores import Core, find_core
from farm.search.graph import bindings, channel_padding

# Operators between the product and the softmax. Zero in place of each operand leaves padded values finite.
_BETWEEN = frozenset(f"relax.{name}" for name in ("add", "maximum", "minimum", "multiply", "subtract", "where"))
_DIVIDE = "relax.divide"
# Most additional rows, and the fraction of the predicted cycles below which attention is padded: softmax runs over
# padded columns too, and operands are copied.
_MOST_ROWS, _GAIN = 15, 0.8


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Bindings of one attention, in order: the first product, what follows it, the softmax and the last product."""

    first: Any
    between: Sequence[Any]
    softmax: Any
    last: Any

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Rows, columns, depth of the first product, and channels of the last."""
        *_, rows, depth = bindings.static_shape(self.first.value.args[0].ty) or ()
        *_, columns, channels = bindings.static_shape(self.last.value.args[1].ty) or ()
        return rows, columns, depth, channels


def pad(target: Any) -> Any:
    """Make a module pass that pads attention for a target (TVM's); does nothing for unknown cores.

    For a GPU to sizes that its tiles divide.
    """

    def run(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
        known = dict(target.export())
        core = find_core(known)
        if core is None and not gpus.is_gpu(known):
            return {}
        others: dict[Any, Sequence[Any]] = {}
        for found in _list_attention(function):
            wide = (channel_padding.round_up(each) for each in found.sizes[:2])
            rows, columns = choose(*found.sizes, core) if core else wide
            if (rows, columns) != found.sizes[:2]:
                others |= {each.var: () for each in (found.first, *found.between, found.softmax)}
                others[found.last.var] = _pad(builder, found, rows, columns)
        return others

    return bindings.rewriting_pass(run, "PadAttention")


def choose(rows: int, columns: int, depth: int, channels: int, core: Core) -> tuple[int, int]:
    """Return the rows and columns of scores that take the fewest predicted cycles: the same or more."""

    def count(m: int, n: int) -> float:
        first, last = (channel_padding.count_cycles(each, core, 4, (1, m)) for each in (n, channels))
        return m * (first * depth + last * n)

    full = core.lanes(4)
    wide = {math.ceil(columns / lanes) * lanes for lanes in (full, max(1, full // 2))}
    own = count(rows, columns)
    many = range(rows, rows + 1 + _MOST_ROWS) if rows > 1 else (rows,)
    cycles, n, m = min((count(m, n), n, m) for n in wide for m in many)
    return (m, n) if cycles < _GAIN * own and n != columns else (rows, columns)


def _list_attention(function: Any) -> Iterator[_Attention]:
    made = {each.var: each for each in bindings.list_bindings(function)}
    uses = bindings.count_uses(function)
    for last in made.values():
        if not bindings.is_call(last.value, "relax.matmul"):
            continue
        softmax = made.get(last.value.args[0])
        if softmax is None or not bindings.is_call(softmax.value, "relax.nn.softmax") or uses[softmax.var] != 1:
            continue
        shape = bindings.static_shape(softmax.var.ty)
        if shape is None or len(shape) < 3 or str(softmax.var.ty.dtype) != "float32":
            continue
        if int(softmax.value.attrs.axis) % len(shape) != len(shape) - 1:
            continue
        between: list[Any] = []
        at = made.get(softmax.value.args[0])
        while at is not None and uses[at.var] == 1 and bindings.static_shape(at.var.ty) == shape:
            if bindings.is_call(at.value, "relax.matmul"):
                operands = (*at.value.args, last.value.args[1])
                if all(isinstance(each, relax.Var) and bindings.static_shape(each.ty) for each in operands):
                    yield _Attention(at, between[::-1], softmax, last)
                break
            if not _is_between(at.value):
                break
            between.append(at)
            at = next((made[a] for a in at.value.args if a in made and _leads_to_product(made[a], made, shape)), None)


def _is_between(value: Any) -> bool:
    name = str(getattr(getattr(value, "op", None), "name", ""))
    if name == _DIVIDE:  # by one number
        divisor = bindings.static_shape(value.args[1].ty)
        return divisor is not None and math.prod(divisor) == 1
    return name in _BETWEEN


def _leads_to_product(binding: Any, made: Mapping[Any, Any], shape: tuple[int, ...]) -> bool:
    """Say whether a value of this shape is a product, or follows from one by the operators between."""
    if bindings.static_shape(binding.var.ty) != shape or not isinstance(binding.value, relax.Call):
        return False
    if bindings.is_call(binding.value, "relax.matmul"):
        return True
    return _is_between(binding.value) and any(
        a in made and _leads_to_product(made[a], made, shape) for a in binding.value.args
    )


def _pad(builder: Any, found: _Attention, rows: int, columns: int) -> list[Any]:
    """Return the bindings that compute the attention with more rows and columns, and cut the result."""
    out: list[Any] = []
    own_rows, own_columns = found.sizes[:2]

    def emit(value: Any) -> Any:
        value = builder.normalize(value)
        out.append(bindings.bind_before(found.last, "padded", value, value.ty))
        return out[-1].var

    def widen(operand: Any, more: Mapping[int, int]) -> Any:
        """Add zeros at the ends of axes, counted from the last."""
        shape = bindings.static_shape(operand.ty) or ()
        width = [(0, more.get(axis - len(shape), 0)) for axis in range(len(shape))]
        if not any(after for _, after in width):
            return operand
        if isinstance(operand, GenericConst):
            return relax.const(np.pad(operand.value.numpy(), width), operand.ty.dtype)
        kind = str(operand.ty.dtype)
        if kind == "bool":
            operand = emit(relax.op.astype(operand, "int8"))
        padded = emit(relax.op.nn.pad(operand, [each for pair in width for each in pair]))
        return emit(relax.op.astype(padded, kind)) if kind == "bool" else padded

    def fit(operand: Any) -> Any:
        """Widen an operand of the scores where it is as large as they are."""
        shape = (1, 1, *(bindings.static_shape(operand.ty) or ()))
        more = {-1: columns - own_columns if shape[-1] == own_columns else 0}
        return widen(operand, more | {-2: rows - own_rows if shape[-2] == own_rows else 0})

    query, key = found.first.value.args
    scores = emit(relax.op.matmul(widen(query, {-2: rows - own_rows}), widen(key, {-1: columns - own_columns})))
    before = found.first.var
    for each in found.between:
        call = each.value
        operands = [scores if argument.same_as(before) else fit(argument) for argument in call.args]
        scores, before = emit(relax.Call(call.op, operands, call.attrs, call.ty_args)), each.var
    if columns > own_columns:
        hidden = np.where(np.arange(columns) < own_columns, 0, -np.inf).astype("float32")
        scores = emit(relax.op.add(scores, relax.const(hidden)))
    weights = emit(relax.op.nn.softmax(scores, axis=-1))
    wide = emit(relax.op.matmul(weights, widen(found.last.value.args[1], {-2: columns - own_columns})))
    axis = len(bindings.static_shape(wide.ty) or ()) - 2
    result = relax.op.strided_slice(wide, [axis], [0], [own_rows]) if rows > own_rows else wide
    out.append(relax.VarBinding(found.last.var, builder.normalize(result)))
    return out
