"""The ONNX graph that the converters of TensorFlow Lite's operators write.

Images are NHWC there and NCHW in ONNX. A value stays in the layout of its operator; a reader that needs the other
one gets a transpose, written once. `first` says that a value of rank 4 is NCHW ("channels first").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from farm.errors import UsageError
from farm.models.tflite.reading import Model, Operator, Tensor

# ONNX Runtime 1.31 breaks 8-bit models of opset 21, the first in which QuantizeLinear makes 16 bits.
_OPSET, _OPSET_OF_16_BITS, _IR_VERSION = 20, 21, 10
NCHW, NHWC = (0, 3, 1, 2), (0, 2, 3, 1)


class Graph:
    """Collects nodes and weights while operators are converted in order."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        # Values by tensor and layout, the layout in which each was made, and bytes before dequantisation.
        self._values: dict[tuple[int, bool], str] = {}
        self._first: dict[int, bool] = {}
        self._bytes: dict[int, str] = {}
        self._constants = {at: each.numbers() for at, each in enumerate(model.tensors)}
        self._label, self._taken = "", set[str]()
        self._inputs = [self._declare(number) for number in model.inputs]

    def tensor(self, number: int) -> Tensor:
        """Return a tensor of the model. Raises UsageError for one left out."""
        if number < 0:
            raise UsageError("an operand is missing")
        return self._model.tensors[number]

    def begin(self, operator: Operator) -> None:
        """Name the nodes that follow after an operator's result."""
        self._label = self.tensor(operator.outputs[0]).name

    def settled(self, number: int) -> npt.NDArray[Any]:
        """Return the value of a constant operand. Raises UsageError for one that is computed."""
        found = self._constants.get(number)
        if found is None:
            raise UsageError(f"its operand {self.tensor(number).name!r} is computed, not a constant")
        return found

    def is_quantised(self, number: int) -> bool:
        """Whether a computed tensor holds scaled integers."""
        return self._constants.get(number) is None and self.tensor(number).scale is not None

    def is_first(self, *numbers: int) -> bool:
        """Whether operators that take either layout should compute these together in NCHW."""
        ranks = [(len(self.tensor(each).shape), self._constants.get(each) is None) for each in numbers]
        fit = all(rank == 4 or (rank < 4 and not computed) for rank, computed in ranks)
        return fit and any(self._first.get(each) for each in numbers)

    def literal(self, value: Any, dtype: Any = None) -> str:
        """Write a constant."""
        name, array = self._unique(f"{self._label}/constant"), np.array(value, dtype, order="C")
        self._weights.append(numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        """Write a vector of 64-bit integers."""
        return self.literal(values, np.int64)

    def node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Write a node; return its result."""
        return self.nodes(kind, inputs, 1, **attributes)[0]

    def nodes(self, kind: str, inputs: Sequence[str], count: int, **attributes: Any) -> list[str]:
        """Write a node; return its `count` results."""
        names = [self._unique(f"{self._label}/{kind}") for _ in range(count)]
        self._nodes.append(helper.make_node(kind, list(inputs), names, name=names[0], **attributes))
        return names

    def value(self, number: int, first: bool = False) -> str:
        """Return a tensor in a layout. Constants of lower rank than 4 broadcast as images do."""
        if (number, first) not in self._values:
            about, constant = self.tensor(number), self._constants.get(number)
            if constant is not None:
                if first and constant.ndim:
                    constant = constant.reshape((1,) * (4 - constant.ndim) + constant.shape).transpose(NCHW)
                made = self.literal(constant)
            elif (number, not first) in self._values:
                other = self._values[number, not first]
                made = self.node("Transpose", [other], perm=NCHW if first else NHWC)
            else:
                raise UsageError(f"it reads {about.name!r} before any operator writes it")
            self._values[number, first] = made
        return self._values[number, first]

    def weight(self, number: int, order: Sequence[int], like: int) -> str:
        """Return a weight with its dimensions in another order, dequantised in the graph if `like` is quantised."""
        about, constant = self.tensor(number), self._constants.get(number)
        if constant is None:
            return self.node("Transpose", [self.value(number)], perm=order)
        if about.scale is None or about.data is None or about.dtype == np.int64 or not self.is_quantised(like):
            return self.literal(constant.transpose(order))
        return self._dequantise(self.literal(about.data.transpose(order)), about, list(order).index(about.axis))

    def put(self, number: int, name: str, first: bool = False) -> None:
        """Make `name` the value of a tensor, rounded to its scale if it has one."""
        about = self.tensor(number)
        if about.scale is not None:
            if about.scale.size != 1 or about.dtype not in (np.int8, np.uint8, np.int16):
                raise UsageError(f"its result {about.name!r} has scales per channel or {about.dtype} numbers")
            self._bytes[number] = self.node("QuantizeLinear", [name, *self._scaling(about)])
            name = self._dequantise(self._bytes[number], about, 0)
        self._values[number, first], self._first[number] = name, first

    def alias(self, number: int, source: int) -> None:
        """Make a tensor another one in its own type and scale."""
        about, constant = self.tensor(number), self._constants.get(source)
        if constant is not None and about.scale is None:
            self._constants[number] = constant.astype(about.dtype)
        else:
            first = self.is_first(source)
            self.put(number, self.value(source, first), first)

    def _dequantise(self, name: str, about: Tensor, axis: int) -> str:
        return self.node("DequantizeLinear", [name, *self._scaling(about)], axis=axis)

    def _scaling(self, about: Tensor) -> list[str]:
        assert about.scale is not None
        shape = about.scale.shape if about.scale.size > 1 else ()
        zero = np.broadcast_to(about.zero.astype(about.dtype), about.scale.shape)
        return [self.literal(about.scale.reshape(shape)), self.literal(zero.reshape(shape))]

    def _declare(self, number: int) -> onnx.ValueInfoProto:
        about = self.tensor(number)
        self._constants.pop(number, None)
        self._label = name = self._unique(about.name or "input")
        self._values[number, False] = name if about.scale is None else self._dequantise(name, about, 0)
        return self._describe(about, name)

    @staticmethod
    def _describe(about: Tensor, name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(about.dtype), about.shape)

    def _unique(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name

    def finish(self) -> bytes:
        """Return the model, its results named as in the file."""
        results = []
        for number in self._model.outputs:
            about, made = self.tensor(number), self._bytes.get(number)
            self._label = name = self._unique(about.name or "output")
            if made is None:
                made = self.value(number)
            elif self._first[number]:
                made = self.node("Transpose", [made], perm=NHWC)
            self._nodes.append(helper.make_node("Identity", [made], [name], name=f"{name}/result"))
            results.append(self._describe(about, name))
        has_16_bits = any(each.scale is not None and each.dtype == np.int16 for each in self._model.tensors)
        opset = helper.make_opsetid("", _OPSET_OF_16_BITS if has_16_bits else _OPSET)
        graph = helper.make_graph(self._nodes, "model", self._inputs, results, self._weights)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION, producer_name="tvm-farm")
        data: bytes = model.SerializeToString(deterministic=True)
        return data
