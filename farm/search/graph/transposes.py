"""Sink transposes towards the end of a model, so that they meet and cancel: a pass of a graph pipeline.

Layout conversion leaves a transpose before and after each operator for which TVM has no layout rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from farm.search.graph import bindings

Axes = tuple[int, ...]

# Operators that are element-wise, up to broadcasting.
_ELEMENTWISE = frozenset(
    f"relax.{name}"
    for name in (
        "abs", "add", "astype", "ceil", "clip", "divide", "erf", "exp", "floor", "log", "maximum", "minimum",
        "multiply", "negative", "power", "round", "rsqrt", "sigmoid", "sign", "sqrt", "square", "subtract", "tanh",
        "where", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.selu", "nn.silu", "nn.softplus",
    )
)  # fmt: skip
_REDUCING = frozenset(f"relax.{name}" for name in ("max", "mean", "min", "prod", "std", "sum", "variance"))
_POOLS = frozenset({"relax.nn.avg_pool2d", "relax.nn.max_pool2d"})
_LAST = {"NCHW": ((0, 3, 1, 2), "NHWC")}


@dataclasses.dataclass(frozen=True)
class _Moved:
    """A variable as another one, transposed."""

    source: Any
    axes: Axes


def sink() -> Any:
    """Make a module pass that sinks transposes below their readers and cancels those that meet."""
    return bindings.rewriting_pass(lambda builder, function: _Sinking(builder).plan(function), "SinkTransposes")


class _Sinking:
    """Rewrites the bindings of one function in order; a transpose is emitted only where its result is read."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._moved: dict[Any, _Moved] = {}
        self._written: set[Any] = set()
        # Emitted transposes, by variable and axes.
        self._known: dict[tuple[Any, Axes], Any] = {}
        # Variables before they were reshaped.
        self._reshaped: dict[Any, Any] = {}
        self._readers: dict[Any, list[Any]] = {}

    def plan(self, function: Any) -> Mapping[Any, Sequence[Any]]:
        """Return the replacements of each binding."""
        for binding in bindings.list_bindings(function):
            for variable in bindings.list_variables(binding.value):
                self._readers.setdefault(variable, []).append(binding)
        others = {}
        for binding in bindings.list_bindings(function):
            out: list[Any] = []
            self._follow(binding, out)
            if binding.var in self._moved and not isinstance(binding.var, relax.DataflowVar):
                self._write(binding.var, binding, out)
            others[binding.var] = out
        return others

    def _follow(self, binding: Any, out: list[Any]) -> None:
        value = binding.value
        if bindings.is_call(value, "relax.permute_dims") and isinstance(value.args[0], relax.Var):
            self._put_off(binding, value.args[0], _axes(value))
            return
        if bindings.is_call(value, "relax.reshape") and isinstance(value.args[0], relax.Var):
            source = self._reshaped.get(value.args[0], value.args[0])
            moved = self._moved.get(source)
            if moved is not None and _keeps_order(bindings.static_shape(moved.source.ty) or (), moved.axes):
                source = self._reshaped.get(moved.source, moved.source)
            if source not in self._moved:
                self._reshaped[binding.var] = source
                out.append(relax.VarBinding(binding.var, relax.op.reshape(source, value.args[1])))
                return
        if isinstance(value, relax.Call):
            ways = {self._moved[o].axes for o in _operands(value) if isinstance(o, relax.Var) and o in self._moved}
            for axes in sorted(ways):
                if self._move_behind(binding, value, axes, out):
                    return
        for variable in bindings.list_variables(value):
            self._write(variable, binding, out)
        out.append(binding)

    def _put_off(self, binding: Any, operand: Any, axes: Axes) -> None:
        before = self._moved.get(operand)
        if before is not None:
            operand, axes = before.source, tuple(before.axes[a] for a in axes)
        self._moved[binding.var] = _Moved(operand, axes)

    def _write(self, variable: Any, at: Any, out: list[Any]) -> None:
        """Emit a transpose, since its result is read."""
        if variable not in self._moved or variable in self._written:
            return
        moved = self._moved[variable]
        self._written.add(variable)
        out.append(relax.VarBinding(variable, self._transposed(moved.source, moved.axes, at, out)))

    def _transposed(self, operand: Any, axes: Axes, at: Any, out: list[Any]) -> Any:
        """Emit a transposed variable, or a reshape where only dimensions of one element move."""
        shape = bindings.static_shape(operand.ty)
        if axes == tuple(range(len(axes))):
            return operand
        if (operand, axes) not in self._known:
            if shape is not None and [a for a in axes if shape[a] != 1] == [
                a for a in range(len(axes)) if shape[a] != 1
            ]:
                call = relax.op.reshape(operand, [shape[a] for a in axes])
            else:
                call = relax.op.permute_dims(operand, list(axes))
            self._known[operand, axes] = self._emit(call, at, out)
        return self._known[operand, axes]

    def _emit(self, call: Any, at: Any, out: list[Any]) -> Any:
        call = self._builder.normalize(call)
        binding = bindings.bind_before(at, "moved", call, call.ty)
        out.append(binding)
        return binding.var

    def _move_behind(self, binding: Any, call: Any, axes: Axes, out: list[Any]) -> bool:
        """Make an operator read untransposed operands, and transpose its result instead."""
        known = _MAKERS.get(getattr(call.op, "name", ""))
        make = known(call, axes) if known else None
        if make is None:
            return False
        operands = self._bring_back(_operands(call), axes, binding, out)
        if operands is None:
            return False
        variable = self._emit(self._builder.normalize(make(*operands)), binding, out)
        self._moved[binding.var] = _Moved(variable, axes)
        return True

    def _bring_back(self, operands: list[Any], axes: Axes, at: Any, out: list[Any]) -> list[Any] | None:
        """Return the untransposed operands; None where that takes more transposes than it saves."""
        inverse = tuple(int(a) for a in np.argsort(axes))
        plans: list[Callable[[], Any]] = []
        saved = 0
        for operand in operands:
            shape = bindings.static_shape(getattr(operand, "ty", None))
            moved = self._moved.get(operand) if isinstance(operand, relax.Var) else None
            if moved is not None and moved.axes == axes:
                saved += 1
                plans.append(lambda moved=moved: moved.source)  # type: ignore[misc]
            elif isinstance(operand, GenericConst):
                plans.append(lambda operand=operand: _constant(operand, inverse))  # type: ignore[misc]
            elif not isinstance(getattr(operand, "ty", None), relax.TensorType):
                plans.append(lambda operand=operand: operand)  # type: ignore[misc]
            elif shape is None or len(shape) != len(axes) or moved is not None or not isinstance(operand, relax.Var):
                return None
            else:
                saved -= (operand, inverse) not in self._known
                plans.append(
                    lambda operand=operand: self._transposed(operand, inverse, at, out)  # type: ignore[misc]
                )
        pays = saved > 0 or (saved == 0 and self._meets(at.var, inverse))
        return [plan() for plan in plans] if pays else None

    def _meets(self, variable: Any, axes: Axes) -> bool:
        """Say whether a value derived from a variable is transposed by these axes later."""
        left, seen = [variable], {variable}
        while left:
            for reader in self._readers.get(left.pop(), ()):
                if bindings.is_call(reader.value, "relax.permute_dims") and _axes(reader.value) == axes:
                    return True
                name = getattr(getattr(reader.value, "op", None), "name", "")
                if isinstance(reader.value, relax.Call) and reader.var not in seen and name in _MAKERS:
                    left.append(reader.var)
                    seen.add(reader.var)
        return False


def _operands(call: Any) -> list[Any]:
    """List an operator's operands, those of a concatenation one by one."""
    first = call.args[0] if call.args else None
    fields = getattr(first, "fields", None)
    return list(fields if bindings.is_call(call, "relax.concat") and fields is not None else call.args)


def _keeps_order(shape: Sequence[int], axes: Axes) -> bool:
    """Say whether a transpose only moves dimensions of one element; False for an unknown shape."""
    if len(shape) < len(axes):
        return False
    moved = [axis for axis in axes if shape[axis] != 1]
    return moved == sorted(moved)


def _axes(call: Any) -> Axes:
    rank = len(call.args[0].ty.shape.values)
    axes = call.attrs.axes
    return tuple(reversed(range(rank))) if axes is None else tuple(int(a) % rank for a in axes)


def _constant(constant: Any, axes: Axes) -> Any:
    """Transpose a constant that is broadcast."""
    array = constant.value.numpy()
    if array.size == 1 or array.ndim > len(axes):
        return constant
    array = array.reshape((1,) * (len(axes) - array.ndim) + array.shape)
    return relax.const(np.ascontiguousarray(np.transpose(array, axes)), constant.ty.dtype)


def _same(call: Any, _: Axes) -> Callable[..., Any]:
    return lambda *operands: relax.Call(call.op, list(operands), call.attrs, call.ty_args)


def _join(call: Any, axes: Axes) -> Callable[..., Any] | None:
    axis = call.attrs.axis
    if axis is None or not hasattr(call.args[0], "fields"):
        return None
    return lambda *operands: relax.op.concat(list(operands), axes[int(axis) % len(axes)])


def _reduce(call: Any, axes: Axes) -> Callable[..., Any] | None:
    if not call.attrs.keepdims or call.attrs.axis is None:
        return None
    over = [axes[int(a) % len(axes)] for a in call.attrs.axis]
    operator = getattr(relax.op, call.op.name.removeprefix("relax."))
    return lambda operand: operator(operand, over, keepdims=True)


def _pool(call: Any, axes: Axes) -> Callable[..., Any] | None:
    old = call.attrs
    if old.layout not in _LAST or old.out_layout != old.layout or _LAST[old.layout][0] != axes:
        return None
    operator = getattr(relax.op.nn, call.op.name.removeprefix("relax.nn."))
    return lambda operand: operator(
        operand,
        list(old.pool_size),
        list(old.strides),
        list(old.padding),
        list(old.dilation),
        old.ceil_mode,
        old.count_include_pad,
        _LAST[old.layout][1],
    )


def _pad(call: Any, axes: Axes) -> Callable[..., Any] | None:
    old = [int(w) for w in call.attrs.pad_width]
    width = [0] * len(old)
    for at, axis in enumerate(axes):
        width[2 * axis : 2 * axis + 2] = old[2 * at : 2 * at + 2]
    return lambda operand: relax.op.nn.pad(operand, width, call.attrs.pad_mode, call.attrs.pad_value)


_MAKERS: dict[str, Callable[[Any, Axes], Callable[..., Any] | None]] = {
    **dict.fromkeys(_ELEMENTWISE, _same),
    **dict.fromkeys(_REDUCING, _reduce),
    **dict.fromkeys(_POOLS, _pool),
    "relax.concat": _join,
    "relax.nn.pad": _pad,
}
