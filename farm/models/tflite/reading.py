"""Read a TensorFlow Lite flatbuffer into tensors and operators, with sparse weights made dense."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import tflite

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
