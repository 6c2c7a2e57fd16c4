"""Rewrite operators as others that TVM can lay out and fuse: passes of a graph pipeline.

Rewrites for every pipeline are in `farm.search.graph.converters`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
import tvm_ffi
from tvm import ir, relax, te, tirx, topi
from tvm.ir import GenericConst

from farm.search.families import expressions
from farm.search.graph import bindings, recurrent_code

_TO_NHWC, _TO_NCHW = [0, 2, 3, 1], [0, 3, 1, 2]
_CONVOLUTIONS = {"relax.nn.conv1d": "NCW", "relax.nn.conv2d": "NCHW", "relax.nn.conv3d": "NCDHW"}
# Operators that add many numbers, or have no code for float16.
_WIDE = frozenset(
    {
        "relax.erf", "relax.cumsum", "relax.mean", "relax.nn.avg_pool1d", "relax.nn.avg_pool2d", "relax.nn.avg_pool3d",
        "relax.nn.adaptive_avg_pool1d", "relax.nn.adaptive_avg_pool2d", "relax.nn.adaptive_avg_pool3d", "relax.nn.gelu",
        "relax.nn.gelu_tanh", "relax.nn.group_norm", "relax.nn.instance_norm", "relax.nn.layer_norm",
        "relax.nn.log_softmax", "relax.nn.rms_norm", "relax.nn.softmax", "relax.std", "relax.sum", "relax.variance",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Side:
    """One dimension of a transposed convolution of `size` data, with `before` results cut off at the start.

    Before cutting, result o is the sum of data i times weight k over o = i * stride + k. With o = q * stride + r it is
    the sum over t of data q - t times weight r + t * stride.
    """

    size: int
    kernel: int
    stride: int
    before: int
    results: int

    @property
    def taps(self) -> int:
        """Weights of a phase, including zeros."""
        return -(-self.kernel // self.stride)

    @property
    def first(self) -> int:
        """The least q that is computed."""
        return min(self.before // self.stride, self.taps - 1)

    @property
    def padding(self) -> tuple[int, int]:
        """Zeros before and after the data."""
        end = -(-(self.before + self.results) // self.stride)
        return self.taps - 1 - self.first, max(0, end - self.size)

    @property
    def cut(self) -> int:
        """Results to cut off at the start once the phases are interleaved."""
        return self.before - self.first * self.stride


def split_phases(weights: npt.NDArray[Any], strides: tuple[int, int]) -> npt.NDArray[Any]:
    """Turn weights [in, out, h, w] into a convolution's, [taps, taps, in, s * s * out], with phases before channels."""
    taps = [-(-size // stride) for size, stride in zip(weights.shape[2:], strides, strict=True)]
    missing = [t * s - size for t, s, size in zip(taps, strides, weights.shape[2:], strict=True)]
    filled = np.pad(weights, [(0, 0), (0, 0), *((0, zeros) for zeros in missing)])
    depth, channels = weights.shape[:2]
    apart = filled.reshape(depth, channels, taps[0], strides[0], taps[1], strides[1])[:, :, ::-1, :, ::-1]
    kernel = apart.transpose(2, 4, 0, 3, 5, 1).reshape(*taps, depth, strides[0] * strides[1] * channels)
    return np.ascontiguousarray(kernel)


@bindings.rewriting("ConvolveTransposed")
def convolve(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    """Turn transposed convolutions (NCHW, constant weights, no groups, no dilation) into others."""
    others: dict[Any, Sequence[Any]] = {}
    for binding in bindings.list_bindings(function):
        value = binding.value
        if not bindings.is_call(value, "relax.nn.conv2d_transpose") or not isinstance(value.args[1], GenericConst):
            continue
        data, result = (bindings.static_shape(part.ty) for part in (value.args[0], binding.var))
        old, weight = value.attrs, value.args[1]
        if data is None or result is None or old.data_layout != "NCHW" or old.kernel_layout != "IOHW":
            continue
        if int(old.groups) != 1 or any(int(d) != 1 for d in old.dilation) or str(weight.ty.dtype) != "float32":
            continue
        weights = weight.value.numpy()
        sides = [
            Side(data[at], weights.shape[at], int(old.strides[at - 2]), int(old.padding[at - 2]), result[at])
            for at in (2, 3)
        ]
        others[binding.var] = _write(builder, binding, sides, weights)
    return others


def _write(builder: Any, binding: Any, sides: Sequence[Side], weights: npt.NDArray[Any]) -> Sequence[Any]:
    """Return the bindings that replace a transposed convolution."""
    made: list[Any] = []

    def bind(name: str, call: Any) -> Any:
        call = builder.normalize(call)
        made.append(bindings.bind_before(binding, name, call, call.ty))
        return made[-1].var

    (top, bottom), (left, right) = (side.padding for side in sides)
    strides = (sides[0].stride, sides[1].stride)
    channels = weights.shape[1]
    data = bind("pixels_first", relax.op.permute_dims(binding.value.args[0], _TO_NHWC))
    kernel = relax.const(split_phases(weights, strides))
    convolved = bind(
        "phases",
        relax.op.nn.conv2d(data, kernel, padding=[top, left, bottom, right], data_layout="NHWC", kernel_layout="HWIO"),
    )
    batch, height, width, _ = bindings.static_shape(convolved.ty) or ()
    apart = bind("apart", relax.op.reshape(convolved, (batch, height, width, *strides, channels)))
    woven = bind("woven", relax.op.permute_dims(apart, [0, 1, 3, 2, 4, 5]))
    whole = bind("whole", relax.op.reshape(woven, (batch, height * strides[0], width * strides[1], channels)))
    ends = [side.cut + side.results for side in sides]
    if any(side.cut for side in sides) or ends != [height * strides[0], width * strides[1]]:
        whole = bind("cut", relax.op.strided_slice(whole, [1, 2], [side.cut for side in sides], ends))
    return [*made, relax.VarBinding(binding.var, relax.op.permute_dims(whole, _TO_NCHW))]


def legalise() -> Any:
    """Make a pass like TVM's LegalizeOps, with polynomials for exponentials and similar functions."""
    divide_each, multiply_each = (ir.Op.get(f"relax.{name}").get_attr("FLegalize") for name in ("divide", "multiply"))

    def unary(fast: Any, plain: Any, name: str) -> Any:
        def compute(x: Any) -> Any:
            return (fast if x.dtype == "float32" else plain)(x)

        return lambda builder, call: builder.call_te(compute, call.args[0], primfunc_name_hint=name)

    def exp(x: Any) -> Any:  # the polynomial is infinite from 88.4 on, where the greatest float32 is at 88.7
        root = topi.fast_exp(topi.multiply(x, 0.5))
        return topi.multiply(root, root)

    def sigmoid(x: Any) -> Any:
        return topi.divide(1.0, topi.add(1.0, topi.fast_exp(topi.negative(x))))

    def softmax(builder: Any, call: Any) -> Any:
        def compute(x: Any) -> Any:
            if x.dtype != "float32":
                return topi.nn.softmax(x, call.attrs.axis)
            powers = topi.fast_exp(topi.subtract(x, topi.max(x, call.attrs.axis, keepdims=True)))
            return topi.multiply(powers, topi.divide(1.0, topi.sum(powers, call.attrs.axis, keepdims=True)))

        return builder.call_te(compute, call.args[0], primfunc_name_hint="softmax")

    def divide(builder: Any, call: Any) -> Any:
        def compute(numbers: Any, divisors: Any) -> Any:
            return topi.multiply(numbers, topi.divide(1.0, divisors))

        factors = _invert(call.args[1])
        if factors is not None:
            return multiply_each(builder, builder.normalize(relax.op.multiply(call.args[0], factors)))
        if _is_one_for_all(*call.args):
            return builder.call_te(compute, *call.args, primfunc_name_hint="divide")
        return divide_each(builder, call)

    def gelu(x: Any) -> Any:
        return topi.multiply(topi.multiply(x, 0.5), topi.add(1.0, topi.fast_erf(topi.multiply(x, 0.5**0.5))))

    def plain_gelu(x: Any) -> Any:
        return topi.multiply(topi.multiply(x, 0.5), topi.add(1.0, topi.erf(topi.multiply(x, 0.5**0.5))))

    legalised = relax.transform.LegalizeOps(
        {
            "relax.divide": divide,
            "relax.exp": unary(exp, topi.exp, "tir_exp"),
            "relax.tanh": unary(topi.fast_tanh, topi.tanh, "tir_tanh"),
            "relax.erf": unary(topi.fast_erf, topi.erf, "erf"),
            "relax.sigmoid": unary(sigmoid, topi.sigmoid, "tir_sigmoid"),
            "relax.nn.silu": unary(
                lambda x: topi.multiply(x, sigmoid(x)), lambda x: topi.multiply(x, topi.sigmoid(x)), "silu"
            ),
            "relax.nn.gelu": unary(gelu, plain_gelu, "gelu"),
            "relax.nn.softmax": softmax,
        }
    )
    return tvm.transform.Sequential([legalised, _approximate_loops()])


def _approximate_loops() -> Any:
    """Make a pass that gives recurrent loops these polynomials, for which LLVM would call the C library."""

    def constant(number: float) -> Any:
        return tirx.FloatImm("float32", number)

    def polynomial(value: Any, function: Any) -> Any:
        number = tirx.Var("number", "float32")
        shown = function(te.placeholder((1,), "float32", "number")).op.body[0]
        shown = tvm_ffi.structural_map(shown, [(ir.Call, lambda c: number if c.op.name == "te.tensor_load" else c)])
        return tirx.Let(number, value, shown)

    def replace(call: Any) -> Any:
        name = str(getattr(call.op, "name", ""))
        if name == "tirx.tanh":  # TVM clips in a stage before
            return polynomial(tirx.max(tirx.min(call.args[0], constant(9)), constant(-9)), topi.fast_tanh)
        if name == "tirx.sigmoid":
            return constant(1) / (polynomial(call.args[0] * constant(-1), topi.fast_exp) + constant(1))
        return call

    def change(function: Any) -> Any:
        is_loop = function.attrs and recurrent_code.MARK in function.attrs
        return expressions.rewrite(function, (ir.Call, replace)) if is_loop else function

    return bindings.mapping_pass(change, "ApproximateLoops")


def _invert(divisors: Any) -> Any | None:
    """Return the reciprocals of a constant; None for anything else, or where one exceeds float32."""
    if not isinstance(divisors, GenericConst) or divisors.ty.dtype != "float32":
        return None
    with np.errstate(divide="ignore", over="ignore"):
        factors = np.float32(1) / divisors.value.numpy()
    return relax.const(factors, "float32") if np.isfinite(factors).all() else None


def _is_one_for_all(numbers: Any, divisors: Any) -> bool:
    """Say whether neighbouring numbers have the same divisor."""
    shape, other = (bindings.static_shape(each.ty) for each in (numbers, divisors))
    return bool(shape) and other is not None and other[-1:] in ((), (1,)) and numbers.ty.dtype == "float32"


@bindings.rewriting("Respell")
def respell(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    """Turn clips and leaky ReLUs into maxima and minima, and zero pads into convolution padding.

    Also count the axes of squeezes from the front.
    """
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
        elif bindings.is_call(value, "relax.squeeze") and any(int(axis) < 0 for axis in value.attrs.axis or ()):
            # TVM's layout conversion indexes with them as they are.
            data, rank = value.args[0], len(value.args[0].ty.shape)
            squeezed = relax.op.squeeze(data, [int(axis) % rank for axis in value.attrs.axis])
            others[binding.var] = [relax.VarBinding(binding.var, builder.normalize(squeezed))]
        elif (padded := _take_padding(value, values)) is not None:
            padded = builder.normalize(padded)
            if bindings.static_shape(padded.ty) == bindings.static_shape(binding.var.ty):
                others[binding.var] = [relax.VarBinding(binding.var, padded)]
    return others


@bindings.rewriting("WidenSums")
def widen_sums(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    """Compute sums of float16 in float32, as ONNX Runtime does: 65,504 is soon exceeded."""
    others: dict[Any, Sequence[Any]] = {}
    for binding in bindings.list_bindings(function):
        value, variable = binding.value, binding.var
        product = bindings.is_call(value, "relax.matmul")
        if not (product or getattr(getattr(value, "op", None), "name", "") in _WIDE) or not _is_half(variable):
            continue
        made, arguments = [], []
        for argument in value.args:
            if _is_half(argument) and not product:
                wide = builder.normalize(relax.op.astype(argument, "float32"))
                made.append(bindings.bind_before(binding, "wide", wide, wide.ty))
                argument = made[-1].var
            arguments.append(argument)
        total = relax.Call(value.op, arguments, value.attrs, value.ty_args)
        result = builder.normalize(relax.op.matmul(*arguments, out_dtype="float32") if product else total)
        made.append(bindings.bind_before(binding, "sum", result, result.ty))
        narrow = builder.normalize(relax.op.astype(made[-1].var, "float16"))
        others[variable] = [*made, relax.VarBinding(variable, narrow)]
    return others


def _is_half(value: Any) -> bool:
    return isinstance(value.ty, relax.TensorType) and str(value.ty.dtype.dtype) == "float16"


def _number(bound: Any) -> float:
    """Return the value of a number in a Relax call."""
    return float(getattr(getattr(bound, "value", bound), "value", getattr(bound, "value", bound)))


def _take_padding(value: Any, values: Mapping[Any, Any]) -> Any | None:
    """Merge a zero pad into the convolution that reads it; None where that is not possible."""
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
