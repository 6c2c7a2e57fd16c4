"""Write TensorFlow Lite models tensor by tensor, with the schema that LiteRT's package holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flatbuffers
import flatbuffers.flexbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

# Operators whose options are not named after them, in the schema's spelling.
OPTIONS = {
    "AVERAGE_POOL_2D": "Pool2D", "MAX_POOL_2D": "Pool2D", "PADV2": "PadV2", "SUM": "Reducer", "REDUCE_MAX": "Reducer",
    "MEAN": "Reducer", "RELU": "", "RELU6": "", "LOGISTIC": "", "PRELU": "", "ELU": "", "TANH": "", "SQRT": "",
    "RSQRT": "", "SPACE_TO_BATCH_ND": "SpaceToBatchND", "BATCH_TO_SPACE_ND": "BatchToSpaceND", "CONV_2D": "Conv2D",
    "DEPTHWISE_CONV_2D": "DepthwiseConv2D", "SPLIT_V": "SplitV", "L2_NORMALIZATION": "L2Norm",
    "BATCH_MATMUL": "BatchMatMul", "RELU_N1_TO_1": "", "CUSTOM": "",
    "MAXIMUM": "MaximumMinimum", "MINIMUM": "MaximumMinimum",
    "SIN": "", "ROUND": "", "FLOOR": "", "CEIL": "", "RESIZE_NEAREST_NEIGHBOR": "ResizeNearestNeighbor",
}  # fmt: skip
Value = int


class Writer:
    """Collects tensors and operators; buffer 0 is empty, as the format wants."""

    def __init__(self) -> None:
        self._model = schema.ModelT()
        self._model.version, self._model.operatorCodes, self._model.buffers = 3, [], [schema.BufferT()]
        self._graph = schema.SubGraphT()
        self._graph.tensors, self._graph.operators, self._graph.inputs, self._graph.outputs = [], [], [], []
        self._model.subgraphs = [self._graph]

    def tensor(
        self, shape: Sequence[int], dtype: str = "float32", scale: Any = None, zero: int = 0, axis: int = 0
    ) -> Value:
        """A computed tensor; `scale` is a number, or one for each place along `axis`."""
        made = schema.TensorT()
        made.shape, made.type = list(shape), getattr(schema.TensorType, dtype.upper())
        made.name, made.buffer = f"t{len(self._graph.tensors)}", 0
        if scale is not None:
            scales = np.atleast_1d(np.asarray(scale, np.float32))
            made.quantization = schema.QuantizationParametersT()
            made.quantization.scale, made.quantization.zeroPoint = scales, np.full(scales.size, zero, np.int64)
            made.quantization.quantizedDimension = axis
        self._graph.tensors.append(made)
        return len(self._graph.tensors) - 1

    def constant(self, values: Any, scale: Any = None, zero: int = 0, axis: int = 0) -> Value:
        """A weight."""
        array = np.asarray(values)
        made = self.tensor(array.shape, str(array.dtype), scale, zero, axis)
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(array.tobytes(), np.uint8)
        self._graph.tensors[made].buffer = len(self._model.buffers)
        self._model.buffers.append(buffer)
        return made

    def input(self, *shape: int, dtype: str = "float32", scale: Any = None, zero: int = 0) -> Value:
        """An input of the model."""
        made = self.tensor(shape, dtype, scale, zero)
        self._graph.inputs.append(made)
        return made

    def add(self, kind: str, inputs: Sequence[Value], *outputs: Value, custom: str = "", **options: Any) -> None:
        """An operator with its options; `custom` names one that the format does not know."""
        code = schema.OperatorCodeT()
        code.builtinCode = number = getattr(schema.BuiltinOperator, kind)
        code.deprecatedBuiltinCode, code.version = min(number, 127), 1
        code.customCode = custom.encode() or None
        operator = schema.OperatorT()
        operator.opcodeIndex, operator.inputs, operator.outputs = len(self._model.operatorCodes), inputs, outputs
        if custom:
            operator.customOptions = list(flatbuffers.flexbuffers.Dumps(options))
        name = OPTIONS.get(kind, kind.title().replace("_", ""))
        if name:
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, f"{name}Options")
            operator.builtinOptions = getattr(schema, f"{name}OptionsT")()
            for option, value in options.items():
                assert hasattr(operator.builtinOptions, option), option
                setattr(operator.builtinOptions, option, value)
        self._model.operatorCodes.append(code)
        self._graph.operators.append(operator)

    def finish(self, *outputs: Value) -> bytes:
        """The file."""
        self._graph.outputs = list(outputs)
        builder = flatbuffers.Builder(1024)
        builder.Finish(self._model.Pack(builder), b"TFL3")
        return bytes(builder.Output())
