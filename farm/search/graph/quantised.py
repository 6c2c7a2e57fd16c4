"""Lower 8-bit models to integer arithmetic between DequantizeLinear and QuantizeLinear: a pass of a graph pipeline.

Convolutions and matrix products of 8-bit data by constant 8-bit weights accumulate integers exactly; scales and offsets
become element-wise operators fused with them. Everything else is computed in float32, as in the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import relax
from tvm.ir import GenericConst

from farm.search.graph import bindings

_BYTES = ("uint8", "int8")
# Longest reduction that cannot overflow 32 bits.
_MOST_DEPTH = (2**31 - 1) // (255 * 128)
# Operators that only select or move elements, so they commute with quantisation.
_MOVES = ("relax.nn.max_pool2d", "relax.reshape", "relax.permute_dims", "relax.squeeze", "relax.expand_dims")


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """A quantised tensor that stands for (data - zero) * scale. `data` is an expression, or an array for a weight."""

    data: Any
    scale: npt.NDArray[np.float32]
    zero: npt.NDArray[np.int64]
    axis: int
    dtype: str

    @property
    def is_plain(self) -> bool:
        """Whether there is one scale and one zero point."""
        return self.scale.size == self.zero.size == 1

    def values(self) -> npt.NDArray[np.float32]:
        """Return the dequantised values of a weight."""
        scale, zero = _along(self, self.data.ndim)
        return np.ascontiguousarray((self.data.astype(np.int64) - zero).astype(np.float32) * scale)


@dataclasses.dataclass(frozen=True)
class _Product:
    """Integer accumulators made by some steps, which stand for sums * scale + offset, both broadcastable."""

    made: list[Any]
    scale: npt.NDArray[np.float64]
    offset: npt.NDArray[np.float64]

    def steps(self) -> list[Any]:
        """Return functions of the previous result, up to the number in float32."""
        steps = [
            *self.made,
            lambda x: relax.op.astype(x, "float32"),
            lambda x: relax.op.multiply(x, _number(self.scale)),
        ]
        return [*steps, lambda x: relax.op.add(x, _number(self.offset))] if self.offset.any() else steps


def lower(dtype: str) -> Any:
    """Make a module pass that computes with integers where possible, and writes other scalings as float32 arithmetic.

    `dtype` is the byte type of data in the target's products; bytes of the other type are shifted by 128.
    """
    return bindings.rewriting_pass(
        lambda builder, function: _Lowering(builder, function, dtype).plan(), "LowerQuantised"
    )


class _Lowering:
    """Rewrites the bindings of one function in order."""

    def __init__(self, builder: Any, function: Any, dtype: str) -> None:
        self._builder = builder
        self._dtype = dtype
        self._bindings = bindings.list_bindings(function)
        self._values = {binding.var: binding.value for binding in self._bindings}
        self._uses = bindings.count_uses(function)
        # Dequantisations repeated at their readers, so that they fuse with the product that they are added to.
        self._late: dict[Any, list[Any]] = {}
        # Replacements of variables with the other byte type.
        self._moved: dict[Any, Any] = {}

    def plan(self) -> Mapping[Any, Sequence[Any]]:
        """Return the replacements of bindings."""
        others: dict[Any, Sequence[Any]] = {}
        for binding in self._bindings:
            value = binding.value
            if self._can_move(binding) and (steps := self._quantise(value, self._dtype)) is not None:
                others[binding.var], self._moved[binding.var] = self._bind_new(binding, steps)
                continue
            steps = self._rewrite(value)
            if steps is None:
                if before := self._scale_operands(binding):
                    others[binding.var] = before
                continue
            others[binding.var] = self._bind(binding, steps)
            if bindings.is_call(value, "relax.dequantize") and len(steps) > 1:
                self._late[binding.var] = steps
        return others

    def _rewrite(self, value: Any) -> list[Any] | None:
        """Return functions of the previous result, the first without one; None to keep a value."""
        if bindings.is_call(value, "relax.dequantize"):
            return self._dequantise(value)
        if bindings.is_call(value, "relax.quantize"):
            return self._quantise(value, str(value.ty.dtype))
        product = self._product(value)
        return None if product is None else product.steps()

    def _bind(self, binding: Any, steps: Sequence[Any]) -> list[Any]:
        """Bind each step, the last to the old variable."""
        *before, last = steps
        out, result = self._bind_new(binding, before)
        return [*out, relax.VarBinding(binding.var, self._builder.normalize(last(result)))]

    def _bind_new(self, binding: Any, steps: Sequence[Any]) -> tuple[list[Any], Any]:
        """Bind each step to a new variable; return the bindings and the last variable."""
        out: list[Any] = []
        result = None
        for step in steps:
            value = self._builder.normalize(step(result))
            out.append(bindings.bind_before(binding, "scaled", value, value.ty))
            result = out[-1].var
        return out, result

    def _scale_operands(self, binding: Any) -> list[Any]:
        """Return the binding preceded by its own dequantised operands; empty where it has none."""
        out: list[Any] = []

        def fresh(argument: Any) -> Any:
            if isinstance(argument, relax.Tuple):
                return relax.Tuple([fresh(field) for field in argument.fields])
            if not isinstance(argument, relax.Var) or argument not in self._late:
                return argument
            made, result = self._bind_new(binding, self._late[argument])
            out.extend(made)
            return result

        value = binding.value
        if not isinstance(value, relax.Call):
            return []
        arguments = [fresh(argument) for argument in value.args]
        if not out:
            return []
        return [*out, relax.VarBinding(binding.var, relax.Call(value.op, arguments, value.attrs, value.ty_args))]

    def _constant(self, expression: Any) -> npt.NDArray[Any] | None:
        value = self._values.get(expression, expression)
        return value.value.numpy() if isinstance(value, GenericConst) else None

    def _read(self, expression: Any) -> _Scaled | None:
        """Read a dequantisation, also through a transpose of a weight."""
        value = self._values.get(expression, expression)
        if bindings.is_call(value, "relax.permute_dims"):
            inner = self._read(value.args[0])
            if inner is None or not isinstance(inner.data, np.ndarray):
                return None
            order = value.attrs.axes
            axes = [int(a) for a in order] if order is not None else list(range(inner.data.ndim))[::-1]
            return dataclasses.replace(inner, data=inner.data.transpose(axes), axis=axes.index(inner.axis))
        if not bindings.is_call(value, "relax.dequantize") or str(value.ty.dtype) != "float32":
            return None
        data, scale, zero = value.args
        scales, zeros = self._constant(scale), self._constant(zero)
        dtype = str(data.ty.dtype)
        if scales is None or zeros is None or scales.dtype != np.float32 or np.dtype(dtype).kind not in "iu":
            return None
        zeros = zeros.astype(np.int64)
        if data in self._moved:
            data = self._moved[data]
            zeros, dtype = zeros + _distance(dtype, str(data.ty.dtype)), str(data.ty.dtype)
        array = self._constant(data)
        rank = len(bindings.static_shape(data.ty) or ())
        axis = int(value.attrs.axis) % max(rank, 1)
        return _Scaled(data if array is None else array, scales, zeros, axis, dtype)

    def _dequantise(self, value: Any) -> list[Any] | None:
        found = self._read(value)
        if found is None:
            return None
        if isinstance(found.data, np.ndarray):
            return [lambda _: relax.const(found.values(), "float32")]
        scale, zero = _along(found, len(bindings.static_shape(value.ty) or ()))
        steps: list[Any] = [lambda _: relax.op.astype(found.data, "float32")]
        if zero.any():
            steps.append(lambda x: relax.op.subtract(x, _number(zero.astype(np.float32))))
        return [*steps, lambda x: relax.op.multiply(x, _number(scale))]

    def _can_move(self, binding: Any) -> bool:
        """Say whether a variable holds bytes of the other type that only dequantisations read."""
        value = binding.value
        if not bindings.is_call(value, "relax.quantize") or str(value.ty.dtype) not in _BYTES:
            return False
        if str(value.ty.dtype) == self._dtype:
            return False
        readers = [each for each in self._values.values() if bindings.is_call(each, "relax.dequantize")]
        readers = [each for each in readers if each.args[0].same_as(binding.var) and self._read(each) is not None]
        return len(readers) == self._uses[binding.var]

    def _quantise(self, value: Any, dtype: str) -> list[Any] | None:
        """Quantise to bytes of `dtype`, shifted where the model has the other type."""
        data, scale, zero = value.args
        scales, zeros, own = self._constant(scale), self._constant(zero), str(value.ty.dtype)
        if scales is None or zeros is None or own not in _BYTES or str(data.ty.dtype) != "float32":
            return None
        if scales.size != 1 or zeros.size != 1:
            return None
        zeros = zeros.astype(np.int64) + _distance(own, dtype)
        moved = self._move(data, scales, zeros, dtype)
        if moved is not None:
            return moved
        # Behind a product, round by adding a half and truncating non-negative values; only exact halves differ from
        # round-to-even.
        low = 0.0 if dtype == "uint8" else -128.0
        factor, offset = 1.0 / float(scales.flat[0]), float(zeros.flat[0]) - low + 0.5
        linear = self._linear(data)
        if linear is not None:
            steps = dataclasses.replace(
                linear, scale=linear.scale * factor, offset=linear.offset * factor + offset
            ).steps()
        else:
            # As tensors: scalars would become part of the function, and equal layers different workloads.
            ones = [1] * len(bindings.static_shape(data.ty) or ())
            steps = [
                lambda _: relax.op.multiply(data, _number(np.full(ones, factor))),
                relax.op.round,
                lambda x: relax.op.add(x, _number(np.full(ones, offset - 0.5))),
            ]
        steps += [
            lambda x: relax.op.maximum(x, relax.const(0.0, "float32")),
            lambda x: relax.op.minimum(x, relax.const(255.0, "float32")),
        ]
        if dtype == "uint8":
            return [*steps, lambda x: relax.op.astype(x, "uint8")]
        return [
            *steps,
            lambda x: relax.op.astype(x, "int32"),
            lambda x: relax.op.subtract(x, relax.const(128, "int32")),
            lambda x: relax.op.astype(x, "int8"),
        ]

    def _move(self, data: Any, scales: Any, zeros: Any, dtype: str) -> list[Any] | None:
        """Keep bytes where only moves stand between a dequantisation and its inverse."""
        value = self._values.get(data)
        if not isinstance(value, relax.Call) or not any(bindings.is_call(value, name) for name in _MOVES):
            return None
        found = self._read(value.args[0])
        if found is None or isinstance(found.data, np.ndarray) or not found.is_plain or found.dtype != dtype:
            return None
        if found.scale.flat[0] != scales.flat[0] or found.zero.flat[0] != zeros.flat[0]:
            return None
        return [lambda _: relax.Call(value.op, [found.data, *value.args[1:]], value.attrs, value.ty_args)]

    def _linear(self, data: Any) -> _Product | None:
        """Return the product behind a tensor, plus an optional constant, if they have no other readers."""
        if not isinstance(data, relax.Var) or self._uses[data] != 1:
            return None
        value: Any = self._values.get(data)
        found = self._product(value)
        if found is not None or not bindings.is_call(value, "relax.add"):
            return found
        inner, added = value.args
        number = self._constant_number(added)
        if number is None or not isinstance(inner, relax.Var) or self._uses[inner] != 1:
            return None
        found = self._product(self._values.get(inner))
        if found is None or number.ndim > len(bindings.static_shape(value.ty) or ()):
            return None
        return dataclasses.replace(found, offset=found.offset + number)

    def _constant_number(self, expression: Any) -> npt.NDArray[Any] | None:
        """Return the value of a constant, dequantised and reshaped like a bias."""
        value = self._values.get(expression, expression)
        if bindings.is_call(value, "relax.reshape") or bindings.is_call(value, "relax.expand_dims"):
            inner, shape = self._constant_number(value.args[0]), bindings.static_shape(value.ty)
            return None if inner is None or shape is None else inner.reshape(shape)
        if (scaled := self._read(value)) is not None:
            return scaled.values() if isinstance(scaled.data, np.ndarray) else None
        return self._constant(value)

    def _product(self, call: Any) -> _Product | None:
        """Return a call as an integer product, or None."""
        if bindings.is_call(call, "relax.nn.conv2d"):
            return self._convolve(call)
        return self._multiply(call) if bindings.is_call(call, "relax.matmul") else None

    def _convolve(self, call: Any) -> _Product | None:
        data, kernel = self._read(call.args[0]), self._read(call.args[1])
        attributes = call.attrs
        if not self._suit(data, kernel) or int(attributes.groups) != 1:
            return None
        if str(attributes.data_layout) != "NCHW" or str(attributes.kernel_layout) != "OIHW":
            return None
        assert data is not None
        assert kernel is not None
        if (kernel.scale.size > 1 and kernel.axis != 0) or kernel.data[0].size > _MOST_DEPTH:
            return None
        padding = [int(p) for p in attributes.padding]
        strides, dilation = [int(s) for s in attributes.strides], [int(d) for d in attributes.dilation]
        weight = relax.const(np.ascontiguousarray(kernel.data), kernel.dtype)
        steps: list[Any] = [lambda _: data.data]
        zero = int(data.zero.flat[0])
        if zero and any(padding):
            top, left, bottom, right = padding
            steps = [lambda _: relax.op.nn.pad(data.data, [0, 0, 0, 0, top, bottom, left, right], "constant", zero)]
            padding = [0, 0, 0, 0]
        steps.append(
            lambda x: relax.op.nn.conv2d(x, weight, strides, padding, dilation, 1, "NCHW", "OIHW", "NCHW", "int32")
        )
        return self._scale_back(steps, data, kernel, kernel.data.astype(np.int64).sum(axis=(1, 2, 3)), (1, -1, 1, 1))

    def _multiply(self, call: Any) -> _Product | None:
        data, kernel = self._read(call.args[0]), self._read(call.args[1])
        if not self._suit(data, kernel):
            return None
        assert data is not None
        assert kernel is not None
        if kernel.data.ndim != 2 or (kernel.scale.size > 1 and kernel.axis != 1) or len(kernel.data) > _MOST_DEPTH:
            return None
        weight = relax.const(np.ascontiguousarray(kernel.data), kernel.dtype)
        steps: list[Any] = [lambda _: data.data, lambda x: relax.op.matmul(x, weight, "int32")]
        shape = [1] * (len(bindings.static_shape(call.ty) or (1,)) - 1)
        return self._scale_back(steps, data, kernel, kernel.data.astype(np.int64).sum(axis=0), (*shape, -1))

    @staticmethod
    def _suit(data: _Scaled | None, kernel: _Scaled | None) -> bool:
        """Say whether operands are bytes with one scale, and a constant signed weight with zero point 0."""
        if data is None or kernel is None or isinstance(data.data, np.ndarray):
            return False
        if not isinstance(kernel.data, np.ndarray) or kernel.dtype != "int8" or kernel.zero.any():
            return False
        return data.is_plain and data.dtype in _BYTES

    @staticmethod
    def _scale_back(
        steps: list[Any], data: _Scaled, kernel: _Scaled, sums: npt.NDArray[np.int64], shape: tuple[int, ...]
    ) -> _Product:
        """Return the product whose offset removes the contribution of the data's zero point."""
        scale = np.broadcast_to(data.scale.reshape(-1).astype(np.float64) * kernel.scale.reshape(-1), sums.shape)
        offset = -int(data.zero.flat[0]) * sums * scale
        return _Product(steps, scale.reshape(shape), offset.reshape(shape))


def _distance(own: str, other: str) -> int:
    """Return the shift from one byte type to the other."""
    return 0 if own == other else 128 if other == "uint8" else -128


def _along(found: _Scaled, rank: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return scale and zero point in a shape that broadcasts to the data."""
    shape = [1] * rank
    if not found.is_plain:
        shape[found.axis] = -1
    elif rank == 0:
        return found.scale.reshape(()), found.zero.reshape(())

    def spread(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array.reshape(shape) if array.size > 1 else array.reshape([1] * rank)

    return spread(found.scale), spread(found.zero)


def _number(array: npt.NDArray[Any]) -> Any:
    """Make a float32 constant."""
    return relax.const(np.ascontiguousarray(array, np.float32), "float32")
