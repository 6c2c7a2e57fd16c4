"""Write ONNX graphs layer by layer with seeded random weights; `zoo.py` composes the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from farm.errors import InternalError

OPSET = 17
# The IR version of opset 17; onnx would write its newest, which older ONNX Runtimes refuse.
IR_VERSION = 8
# Weights drawn at a time.
_PIECE = 2**20


class GraphBuilder:
    """Collects nodes and weights; tensors are named by what made them. One builder makes one model.

    Weights are He-scaled normals, so that activations neither vanish nor explode with depth, and biases and
    batch-norm statistics vary per channel: a permuted, dropped or repeated channel changes the output.
    Without a seed the weights have shapes and no values: enough to count and to infer with, not to run.
    """

    def __init__(self, seed: int | None) -> None:
        # RandomState, since NumPy guarantees only its stream, and the bytes of a zoo model are its identity.
        self._random = None if seed is None else np.random.RandomState(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._channels: dict[str, int] = {}
        self.parameters = 0

    def input(self, name: str, shape: Sequence[int]) -> str:
        """Declare the model's input; its second dimension counts the channels (or features)."""
        self._input = helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))
        self._channels[name] = shape[1]
        return name

    def channels(self, tensor: str) -> int:
        """Channels (or features) of a tensor made here."""
        return self._channels[tensor]

    def conv(
        self,
        x: str,
        out_channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        pad: int | tuple[int, int] = 0,
        pad_end: int | None = None,
        groups: int = 1,
        bias: bool = True,
        gain: float = 2.0,
    ) -> str:
        """A 2-D convolution; `kernel` and `pad` are (rows, columns) or one number for both.

        `pad_end` is the padding after the last row and column, where it differs.
        `gain` is the variance kept per layer: 2 before a ReLU, 1 before none.
        """
        rows, columns = _pair(kernel)
        fan_in = self.channels(x) // groups * rows * columns
        shape = (out_channels, self.channels(x) // groups, rows, columns)
        inputs = [x, self.weight(shape, math.sqrt(gain / fan_in))]
        if bias:
            inputs.append(self.weight((out_channels,), 0.1))
        return self._node(
            "Conv",
            inputs,
            out_channels,
            kernel_shape=[rows, columns],
            strides=[stride, stride],
            pads=[*_pair(pad), *_pair(pad if pad_end is None else pad_end)],
            group=groups,
        )

    def batch_norm(self, x: str, *, scale: float = 1.0, epsilon: float = 1e-5) -> str:
        """Batch normalisation with plausible statistics per channel, none of them 0 or 1."""
        n = self.channels(x)
        inputs = [x, self._uniform((n,), scale, 0.8, 1.2), self.weight((n,), 0.1)]
        inputs += [self.weight((n,), 0.1, trained=False), self._uniform((n,), 1.0, 0.5, 1.5, trained=False)]
        return self._node("BatchNormalization", inputs, n, epsilon=epsilon)

    def layer_norm(self, x: str, *, epsilon: float) -> str:
        """Normalisation over the features, the last dimension."""
        n = self.channels(x)
        inputs = [x, self._uniform((n,), 1.0, 0.8, 1.2), self.weight((n,), 0.1)]
        return self._node("LayerNormalization", inputs, n, axis=-1, epsilon=epsilon)

    def dense(self, x: str, out_features: int, *, gain: float = 1.0) -> str:
        """A fully connected layer with bias, on a 2-D tensor."""
        n = self.channels(x)
        weight = self.weight((out_features, n), math.sqrt(gain / n))
        bias = self.weight((out_features,), 0.1)
        return self._node("Gemm", [x, weight, bias], out_features, transB=1)

    def linear(self, x: str, out_features: int, *, gain: float = 1.0) -> str:
        """A fully connected layer with bias on the last dimension of any tensor, as exporters write it."""
        n = self.channels(x)
        product = self.matmul(x, self.weight((n, out_features), math.sqrt(gain / n)), out_features)
        return self._node("Add", [product, self.weight((out_features,), 0.1)], out_features)

    def matmul(self, a: str, b: str, features: int) -> str:
        """A product of matrices with so many columns."""
        return self._node("MatMul", [a, b], features)

    def row(self, x: str, number: int, features: int) -> str:
        """One of the rows that follow the batch."""
        return self._node("Gather", [x, self._constant(np.array(number, np.int64))], features, axis=1)

    def relu(self, x: str) -> str:
        """max(x, 0)."""
        return self._node("Relu", [x], self.channels(x))

    def unary(self, operator: str, x: str, **attributes: Any) -> str:
        """An operator that changes neither shape nor number of channels, such as Tanh or Softmax."""
        return self._node(operator, [x], self.channels(x), **attributes)

    def gelu(self, x: str) -> str:
        """`x` times its normal distribution, by the error function."""
        error = self.unary("Erf", self.scale(x, 1 / math.sqrt(2)))
        one = self._constant(np.array(1.0, np.float32))
        return self.scale(
            self._node("Mul", [x, self._node("Add", [error, one], self.channels(x))], self.channels(x)), 0.5
        )

    def scale(self, x: str, factor: float) -> str:
        """A tensor times a number."""
        return self._node("Mul", [x, self._constant(np.array(factor, np.float32))], self.channels(x))

    def leaky_relu(self, x: str, slope: float) -> str:
        """`x` where it is positive, else `slope` times `x`."""
        return self._node("LeakyRelu", [x], self.channels(x), alpha=slope)

    def relu6(self, x: str) -> str:
        """min(max(x, 0), 6)."""
        bounds = [self._constant(np.array(value, np.float32)) for value in (0.0, 6.0)]
        return self._node("Clip", [x, *bounds], self.channels(x))

    def max_pool(self, x: str, kernel: int, *, stride: int, pad: int = 0, ceil: bool = False) -> str:
        """Square 2-D max pooling; `ceil` lets the last window hang over the edge."""
        attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "ceil_mode": int(ceil)}
        return self._node("MaxPool", [x], self.channels(x), **attributes)

    def average_pool(self, x: str, kernel: int, *, stride: int, pad: int = 0) -> str:
        """Square 2-D mean over the window, the zeros around the image counted."""
        attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        return self._node("AveragePool", [x], self.channels(x), count_include_pad=1, **attributes)

    def global_average(self, x: str) -> str:
        """Mean over height and width, flattened to (batch, channels)."""
        pooled = self._node("GlobalAveragePool", [x], self.channels(x))
        return self._node("Flatten", [pooled], self.channels(x), axis=1)

    def flatten(self, x: str, features: int) -> str:
        """All but the batch in one dimension, which has so many elements."""
        return self._node("Flatten", [x], features, axis=1)

    def reshape(self, x: str, shape: Sequence[int], features: int) -> str:
        """The same elements in another shape; 0 keeps the dimension at that place."""
        return self._node("Reshape", [x, self._constant(np.array(shape, np.int64))], features)

    def transpose(self, x: str, order: Sequence[int], features: int) -> str:
        """The dimensions in another order."""
        return self._node("Transpose", [x], features, perm=list(order))

    def pad(self, x: str, before: Sequence[int], after: Sequence[int]) -> str:
        """Zeros around a tensor, none along its channels."""
        return self._node("Pad", [x, self._constant(np.array([*before, *after], np.int64))], self.channels(x))

    def add(self, a: str, b: str) -> str:
        """Elementwise sum of two tensors of one shape, or with a weight that is repeated."""
        return self._node("Add", [a, b], self.channels(a))

    def concat(self, *tensors: str) -> str:
        """Join along channels."""
        return self._node("Concat", tensors, sum(map(self.channels, tensors)), axis=1)

    def take_channels(self, x: str, begin: int, end: int) -> str:
        """Channels `begin` to `end`, the last left out."""
        bounds = [self._constant(np.array([value], np.int64)) for value in (begin, end, 1)]
        return self._node("Slice", [x, *bounds], end - begin)

    def upsample(self, x: str, factor: int) -> str:
        """Each pixel repeated `factor` times along height and width."""
        scales = self._constant(np.array([1, 1, factor, factor], np.float32))
        attributes = {"coordinate_transformation_mode": "asymmetric", "mode": "nearest", "nearest_mode": "floor"}
        return self._node("Resize", [x, "", scales], self.channels(x), **attributes)

    def finish(self, name: str, outputs: Mapping[str, tuple[str, Sequence[int] | None]]) -> bytes:
        """The model, the same bytes for the same calls and seed. `outputs` maps a name to a tensor and its shape.

        A shape may be None, to be inferred by the reader.
        Raises InternalError for a tensor that other nodes read: it could not be renamed.
        """
        names = {tensor: output for output, (tensor, _) in outputs.items()}
        if read := names.keys() & {tensor for node in self._nodes for tensor in node.input}:
            raise InternalError(f"{name}: {', '.join(sorted(read))} is no end of the graph")
        for node in self._nodes:
            node.output[0] = names.get(node.output[0], node.output[0])
        results = [
            helper.make_tensor_value_info(output, TensorProto.FLOAT, shape) for output, (_, shape) in outputs.items()
        ]
        graph = helper.make_graph(self._nodes, name, [self._input], results, self._weights)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="tvm-farm",
            # Not the farm's version: a release must not change a zoo model.
            producer_version="zoo/1",
        )
        data: bytes = model.SerializeToString(deterministic=True)
        return data

    def weight(self, shape: tuple[int, ...], std: float, *, trained: bool = True) -> str:
        """A tensor of normal values, which layers without a method here may read. Untrained: not a parameter."""
        return self._fill(shape, lambda random, count: random.standard_normal(count) * std, trained)

    def _uniform(self, shape: tuple[int, ...], scale: float, low: float, high: float, *, trained: bool = True) -> str:
        return self._fill(shape, lambda random, count: scale * random.uniform(low, high, count), trained)

    def _fill(
        self,
        shape: tuple[int, ...],
        draw: Callable[[np.random.RandomState, int], npt.NDArray[np.float64]],
        trained: bool,
    ) -> str:
        size = math.prod(shape)
        self.parameters += size if trained else 0
        if self._random is None:
            name = f"w{len(self._weights)}"
            # Marked as external, though never loaded: ONNX forbids a tensor with a shape and no data.
            self._weights.append(
                TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
            )
            self._channels[name] = shape[-1]
            return name
        values = np.empty(size, np.float32)
        # In pieces: a large layer twice in float64 would take more memory than the model.
        for begin in range(0, size, _PIECE):
            end = min(size, begin + _PIECE)
            values[begin:end] = draw(self._random, end - begin)
        name = self._constant(values.reshape(shape))
        self._channels[name] = shape[-1]
        return name

    def _constant(self, array: npt.NDArray[Any]) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(array, name))
        return name

    def _node(self, operator: str, inputs: Sequence[str], channels: int, **attributes: Any) -> str:
        output = f"{operator.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, list(inputs), [output], name=output, **attributes))
        self._channels[output] = channels
        return output


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value
