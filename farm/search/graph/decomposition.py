"""Operators written in ones that TVM can lay out and fuse, before it does: part of a graph pipeline.

What the importer does for every pipeline is in `farm.search.graph.converters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax

from farm.search.graph import bindings

_CONVOLUTIONS = {"relax.nn.conv1d": "NCW", "relax.nn.conv2d": "NCHW", "relax.nn.conv3d": "NCDHW"}


def respell() -> Any:
    """A module pass: clips and leaky ReLUs as maxima and minima, zeros around a convolution's data as its padding."""
    return bindings.rewriting_pass(_respell, "Respell")


def _respell(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    values = {binding.var: binding.value for binding in bindings.list_bindings(function)}
    others: dict[Any, Sequence[Any]] = {}
    for binding in bindings.list_bindings(function):
        value = binding.value
        if bindings.is_call(value, "relax.nn.leakyrelu"):
            slope = float(value.attrs.alpha)
            other = relax.op.multiply(value.args[0], relax.const(slope, value.args[0].ty.dtype))
            product = bindings.bind_before(binding, "slope", builder.normalize(other), binding.var.ty)
            choose = relax.op.maximum if slope <= 1 else relax.op.minimum
            others[binding.var] = [product, relax.VarBinding(binding.var, choose(value.args[0], product.var))]
        elif bindings.is_call(value, "relax.clip"):
            data, low, high = value.args
            bounds = [relax.const(_number(bound), data.ty.dtype) for bound in (low, high)]
            least = bindings.bind_before(binding, "least", relax.op.maximum(data, bounds[0]), binding.var.ty)
            others[binding.var] = [least, relax.VarBinding(binding.var, relax.op.minimum(least.var, bounds[1]))]
        elif (padded := _take_padding(value, values)) is not None:
            padded = builder.normalize(padded)
            if bindings.static_shape(padded.ty) == bindings.static_shape(binding.var.ty):
                others[binding.var] = [relax.VarBinding(binding.var, padded)]
    return others


def _number(bound: Any) -> float:
    """The value of a number in a Relax call."""
    return float(getattr(getattr(bound, "value", bound), "value", getattr(bound, "value", bound)))


def _take_padding(value: Any, values: Mapping[Any, Any]) -> Any | None:
    """A convolution that pads what an operator before it did."""
    layout = next((layout for name, layout in _CONVOLUTIONS.items() if bindings.is_call(value, name)), None)
    if layout is None or value.attrs.data_layout != layout:
        return None
    before = values.get(value.args[0])
    if before is None or not bindings.is_call(before, "relax.nn.pad") or before.attrs.pad_mode != "constant":
        return None
    width = [int(w) for w in before.attrs.pad_width]
    if float(before.attrs.pad_value) != 0 or any(width[:4]) or min(width) < 0:
        return None
    old = value.attrs
    padding = [int(own) + more for own, more in zip(old.padding, [*width[4::2], *width[5::2]], strict=True)]
    operator = getattr(relax.op.nn, value.op.name.removeprefix("relax.nn."))
    return operator(
        before.args[0],
        value.args[1],
        list(old.strides),
        padding,
        list(old.dilation),
        int(old.groups),
        old.data_layout,
        old.kernel_layout,
        old.out_layout,
    )
