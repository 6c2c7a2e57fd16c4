"""A TensorFlow Lite flatbuffer as tensors and operators, sparse weights made dense; the ONNX graph that is written.

Images are NHWC there and NCHW in ONNX. A value stays in the layout of its operator; a reader that needs the other
one gets a transpose, written once. `first` says that a value of rank 4 is NCHW ("channels first").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import tflite
from onnx import helper, numpy_helper

from farm.errors import UsageError

_NUMBERS = ("FLOAT16", "FLOAT32", "FLOAT64", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
_TYPES = {tflite.TensorType.BOOL: np.dtype(bool)} | {
    getattr(tflite.TensorType, name): np.dtype(name.lower()) for name in _NUMBERS
}


def _names(enum: type) -> dict[int, str]:
    return {code: name for name, code in vars(enum).items() if isinstance(code, int)}


_TYPE_NAMES, _OPERATORS = _names(tflite.TensorType), _names(tflite.BuiltinOperator)
_OPTIONS, _INDICES = _names(tflite.BuiltinOptions), _names(tflite.SparseIndexVector)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor; `data` is that of a constant. Quantised, it stands for (data - zero) * scale along `axis`."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    data: npt.NDArray[Any] | None
    scale: npt.NDArray[np.float32] | None
    zero: npt.NDArray[np.int64]
    axis: int

    def numbers(self) -> npt.NDArray[Any] | None:
        """Return a constant's values, dequantised."""
        if self.data is None or self.scale is None:
            return self.data
        spread = [-1 if at == self.axis and self.scale.size > 1 else 1 for at in range(self.data.ndim)]
        zero = np.broadcast_to(self.zero, self.scale.shape).reshape(spread)
        return (self.data.astype(np.int64) - zero).astype(np.float32) * self.scale.reshape(spread)


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator, `kind` in TensorFlow Lite's own spelling; tensors by number, -1 for one left out."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    custom: bytes
    options: Any

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option; raise UsageError where it is missing and has no default."""
        found = getattr(self.options, name, None)
        if found is None and default is None:
            raise UsageError(f"its option {name} is missing")
        return default if found is None else found()


@dataclasses.dataclass(frozen=True)
class Model:
    """The main graph of a model."""

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def read(data: bytes) -> Model:
    """Parse a model. Raises UsageError, and errors of any type for a damaged one."""
    root = tflite.Model.GetRootAs(data, 0)
    graph = root.Subgraphs(0)
    tensors = tuple(_read_tensor(root, graph.Tensors(at), data) for at in range(graph.TensorsLength()))
    operators = tuple(_read_operator(root, graph.Operators(at)) for at in range(graph.OperatorsLength()))
    inputs, outputs = _vector(graph, "Inputs"), _vector(graph, "Outputs")
    named = (*inputs, *outputs, *(number for each in operators for number in (*each.inputs, *each.outputs)))
    if not operators or not outputs or min(named) < -1 or max(named) >= len(tensors):
        raise UsageError("it holds no operator or no output, or names tensors that it does not hold")
    return Model(tensors, operators, inputs, outputs)


def _vector(owner: Any, field: str) -> tuple[int, ...]:
    """Return a vector of integers; flatbuffers give 0 for one that is missing."""
    found = getattr(owner, f"{field}AsNumpy")()
    return () if isinstance(found, int) else tuple(found.tolist())


def _table(names: dict[int, str], kind: int, table: Any) -> Any:
    found = getattr(tflite, names[kind])()
    found.Init(table.Bytes, table.Pos)
    return found


def _read_operator(root: Any, operator: Any) -> Operator:
    code = root.OperatorCodes(operator.OpcodeIndex())
    # Codes above 126 came later, in a wider field.
    number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
    kind = _OPERATORS.get(number, f"number {number}")
    if kind == "CUSTOM":
        kind = (code.CustomCode() or b"").decode("utf-8", "replace")
    table = operator.BuiltinOptions()
    options = None if table is None else _table(_OPTIONS, operator.BuiltinOptionsType(), table)
    custom = bytes(_vector(operator, "CustomOptions"))
    return Operator(kind, _vector(operator, "Inputs"), _vector(operator, "Outputs"), custom, options)


def _read_tensor(root: Any, tensor: Any, data: bytes) -> Tensor:
    name, shape = (tensor.Name() or b"").decode("utf-8", "replace"), _vector(tensor, "Shape")
    dtype = _TYPES.get(tensor.Type())
    if dtype is None:
        kind = _TYPE_NAMES.get(tensor.Type(), "unknown")
        raise UsageError(f"its tensor {name!r} has the type {kind}, which is not supported")
    scale, zero, axis = None, np.zeros(1, np.int64), 0
    if (quantisation := tensor.Quantization()) is not None and quantisation.ScaleLength():
        # Some converters give a bias the axis of its weights; the interpreter ignores it.
        axis = quantisation.QuantizedDimension() if len(shape) != 1 else 0
        scale = np.asarray(quantisation.ScaleAsNumpy(), np.float32)
        if quantisation.ZeroPointLength():
            zero = np.asarray(quantisation.ZeroPointAsNumpy(), np.int64)
    buffer, values = root.Buffers(tensor.Buffer()), None
    if buffer.DataLength() or buffer.Size():
        # Large models keep weights behind the flatbuffer.
        behind = data[buffer.Offset() : buffer.Offset() + buffer.Size()]
        raw = buffer.DataAsNumpy().tobytes() if buffer.DataLength() else behind
        values, sparsity = np.frombuffer(raw, dtype), tensor.Sparsity()
        values = values.reshape(shape) if sparsity is None else _densify(sparsity, values, shape)
    return Tensor(name, shape, dtype, values, scale, zero, axis)


def _densify(sparsity: Any, values: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a sparse tensor as a dense one.

    Its values are the leaves of a tree with a level for each dimension in traversal order, the parts of blocks last.
    """
    blocks, count = _vector(sparsity, "BlockMap"), 1
    index: dict[int, npt.NDArray[np.int64]] = {}
    for level, dimension in enumerate(_vector(sparsity, "TraversalOrder")):
        about = sparsity.DimMetadata(level)
        size = about.DenseSize()
        if about.Format() == tflite.DimensionType.DENSE:
            own, parents = np.tile(np.arange(size), count), np.repeat(np.arange(count), size)
        else:
            segments = _vector(_table(_INDICES, about.ArraySegmentsType(), about.ArraySegments()), "Values")
            own = np.array(_vector(_table(_INDICES, about.ArrayIndicesType(), about.ArrayIndices()), "Values"))
            parents = np.repeat(np.arange(count), np.diff(segments))
        count = len(own)
        index = {key: each[parents] for key, each in index.items()}
        # The place inside a block follows that of the block.
        whole = dimension if dimension < len(shape) else blocks[dimension - len(shape)]
        index[whole] = own if dimension < len(shape) else index[whole] * size + own
    dense = np.zeros(shape, values.dtype)
    dense[tuple(index[axis] for axis in range(len(shape)))] = values[:count]
    return dense


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
