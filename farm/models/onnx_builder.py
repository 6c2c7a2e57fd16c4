"""Write ONNX graphs layer by layer, with seeded random weights. Which layers make which network is in `networks.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from farm.errors import InternalError

OPSET = 17
# The IR version that belongs to opset 17; onnx would write its newest, which older ONNX Runtimes refuse.
IR_VERSION = 8


class GraphBuilder:
    """Collects nodes and weights; tensors are named by what made them. One builder makes one model.

    Weights are He-scaled normals, so that activations neither vanish nor explode with depth, and biases and
    batch-norm statistics vary per channel: a permuted, dropped or repeated channel changes the output.
    """

    def __init__(self, seed: int) -> None:
        # RandomState and not Generator: only its stream is promised to stay the same in every NumPy, and the bytes
        # of a zoo model are its identity.
        self._random = np.random.RandomState(seed)
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
        groups: int = 1,
        bias: bool = True,
        gain: float = 2.0,
    ) -> str:
        """A 2-D convolution; `kernel` and `pad` are (rows, columns) or one number for both.

        `gain` is the variance kept per layer: 2 before a ReLU, 1 before none.
        """
        rows, columns = _pair(kernel)
        fan_in = self.channels(x) // groups * rows * columns
        shape = (out_channels, self.channels(x) // groups, rows, columns)
        inputs = [x, self._weight(self._normal(shape, math.sqrt(gain / fan_in)))]
        if bias:
            inputs.append(self._weight(self._normal((out_channels,), 0.1)))
        return self._node(
            "Conv",
            inputs,
            out_channels,
            kernel_shape=[rows, columns],
            strides=[stride, stride],
            pads=[*_pair(pad)] * 2,
            group=groups,
        )

    def batch_norm(self, x: str, *, scale: float = 1.0, epsilon: float = 1e-5) -> str:
        """Batch normalisation with statistics as training might leave them: per channel, none of them 0 or 1.

        `scale` is the mean of gamma; below 1 it keeps the sum of a residual block from growing with depth.
        """
        n = self.channels(x)
        gamma = scale * self._random.uniform(0.8, 1.2, n)
        beta = self._normal((n,), 0.1)
        inputs = [x, self._weight(gamma), self._weight(beta)]
        mean, variance = self._normal((n,), 0.1), self._random.uniform(0.5, 1.5, n)
        inputs += [self._weight(mean, trained=False), self._weight(variance, trained=False)]
        return self._node("BatchNormalization", inputs, n, epsilon=epsilon)

    def dense(self, x: str, out_features: int, *, gain: float = 1.0) -> str:
        """A fully connected layer with bias, on a 2-D tensor."""
        n = self.channels(x)
        weight = self._weight(self._normal((out_features, n), math.sqrt(gain / n)))
        bias = self._weight(self._normal((out_features,), 0.1))
        return self._node("Gemm", [x, weight, bias], out_features, transB=1)

    def relu(self, x: str) -> str:
        """max(x, 0)."""
        return self._node("Relu", [x], self.channels(x))

    def leaky_relu(self, x: str, slope: float) -> str:
        """`x` where it is positive, else `slope` times `x`."""
        return self._node("LeakyRelu", [x], self.channels(x), alpha=slope)

    def relu6(self, x: str) -> str:
        """min(max(x, 0), 6)."""
        bounds = [self._weight(np.float32(value), trained=False) for value in (0.0, 6.0)]
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

    def add(self, a: str, b: str) -> str:
        """Elementwise sum of two tensors of one shape."""
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

        A shape may be None: whoever reads the model infers it.
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
            # Not the farm's version: a release must not change what a zoo model is.
            producer_version="zoo/1",
        )
        data: bytes = model.SerializeToString(deterministic=True)
        return data

    def _normal(self, shape: tuple[int, ...], std: float) -> npt.NDArray[np.float64]:
        return self._random.standard_normal(shape) * std

    def _weight(self, values: npt.ArrayLike, *, trained: bool = True) -> str:
        array = np.asarray(values, dtype=np.float32)
        self.parameters += array.size if trained else 0
        return self._constant(array)

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
