"""Convert a TensorFlow Lite model by a table from each operator to the function that writes it in ONNX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
import tflite
from onnx import helper

from farm.errors import UsageError
from farm.models.tflite import images
from farm.models.tflite.graph import NCHW, Graph, Operator, read

Converter = Callable[[Graph, Operator], None]
_HINT = "Convert the model that it was made from to ONNX (tf2onnx, torch.onnx.export), or replace the operator."
# Operators on elements that ONNX has under another name or the same.
_ELEMENTS = {
    "ABS": "Abs", "ADD": "Add", "CEIL": "Ceil", "COS": "Cos", "DIV": "Div", "ELU": "Elu", "EQUAL": "Equal",
    "EXP": "Exp", "FLOOR": "Floor", "GREATER": "Greater", "GREATER_EQUAL": "GreaterOrEqual", "HARD_SWISH": "HardSwish",
    "LESS": "Less", "LESS_EQUAL": "LessOrEqual", "LOG": "Log", "LOGICAL_AND": "And", "LOGICAL_NOT": "Not",
    "LOGICAL_OR": "Or", "LOGISTIC": "Sigmoid", "MAXIMUM": "Max", "MINIMUM": "Min", "MUL": "Mul", "NEG": "Neg",
    "POW": "Pow", "PRELU": "PRelu", "ROUND": "Round", "SELECT": "Where", "SELECT_V2": "Where", "SIN": "Sin",
    "SQRT": "Sqrt", "SUB": "Sub", "TANH": "Tanh",
}  # fmt: skip


def convert(data: bytes) -> bytes:
    """Return a model as ONNX. Raises UsageError that names an operator that cannot be converted, and its result."""
    try:
        model = read(data)
    except UsageError:
        raise
    except Exception as error:  # a damaged flatbuffer raises errors of any type
        raise UsageError(f"it is truncated or damaged ({type(error).__name__}: {error})") from error
    names = [model.tensors[each.outputs[0]].name if each.outputs else "" for each in model.operators]
    labels = [f"operator {each.kind} (node {name!r})" for each, name in zip(model.operators, names, strict=True)]
    unknown = {each.kind: label for each, label in zip(model.operators, labels, strict=True) if each.kind not in _TABLE}
    if unknown:
        raise UsageError(f"there is no converter for its {', '.join(unknown.values())}", _HINT)
    graph = Graph(model)
    for operator, label in zip(model.operators, labels, strict=True):
        try:
            graph.begin(operator)
            _TABLE[operator.kind](graph, operator)
        except UsageError as error:
            raise UsageError(f"its {label} is not supported: {error.message}", _HINT) from error
        except Exception as error:  # as above
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UsageError(f"its {label} is damaged or has an unknown form ({what})", _HINT) from error
    return graph.finish()


def _apply(graph: Graph, operator: Operator, write: Callable[[Graph, Operator, list[str]], str]) -> None:
    """Convert an operator that computes element by element, with broadcasting, in either layout."""
    first = graph.is_first(*operator.inputs)
    made = write(graph, operator, [graph.value(each, first) for each in operator.inputs])
    images.put(graph, operator, made, first)


def _write_square(graph: Graph, _: Operator, x: list[str]) -> str:
    root = graph.node("Sub", x) if len(x) == 2 else x[0]
    return graph.node("Mul", [root, root])


def _write_floored_quotient(graph: Graph, operator: Operator, x: list[str]) -> str:
    if graph.tensor(operator.inputs[0]).dtype.kind != "f":
        raise UsageError("it divides integers, rounding down, which ONNX does not")
    return graph.node("Floor", [graph.node("Div", x)])


def _write_cast(graph: Graph, operator: Operator, x: list[str]) -> str:
    return graph.node("Cast", x, to=helper.np_dtype_to_tensor_dtype(graph.tensor(operator.outputs[0]).dtype))


def _axis(axis: int, rank: int, first: bool) -> int:
    return NCHW.index(axis % rank) if first else axis % rank


def _normalise(graph: Graph, operator: Operator, kind: str) -> None:
    """An operator over the last dimension."""
    first = graph.is_first(operator.inputs[0])
    made = graph.value(operator.inputs[0], first)
    if (beta := operator.option("Beta", 1.0)) != 1.0:
        made = graph.node("Mul", [made, graph.literal(beta, np.float32)])
    images.put(graph, operator, graph.node(kind, [made], axis=1 if first else -1), first)


def _dense(graph: Graph, operator: Operator) -> None:
    """FULLY_CONNECTED: weights [out, in]."""
    data, weight, *bias = operator.inputs
    if operator.option("WeightsFormat", 0) != tflite.FullyConnectedOptionsWeightsFormat.DEFAULT:
        raise UsageError("its weights are shuffled for one kind of processor")
    value = graph.value(data)
    if len(graph.tensor(data).shape) != 2 and not operator.option("KeepNumDims", False):
        value = graph.node("Reshape", [value, graph.ints(-1, graph.tensor(weight).shape[1])])
    made = graph.node("MatMul", [value, graph.weight(weight, (1, 0), data)])
    for each in bias:
        made = graph.node("Add", [made, graph.weight(each, (0,), data)]) if each >= 0 else made
    images.put(graph, operator, made)


def _multiply_matrices(graph: Graph, operator: Operator) -> None:
    """BATCH_MATMUL, either operand of which may be transposed."""
    names = [graph.value(each) for each in operator.inputs]
    for at, option in enumerate(("AdjX", "AdjY")):
        if operator.option(option, False):
            *order, rows, columns = range(len(graph.tensor(operator.inputs[at]).shape))
            names[at] = graph.node("Transpose", [names[at]], perm=[*order, columns, rows])
    images.put(graph, operator, graph.node("MatMul", names))


def _concatenate(graph: Graph, operator: Operator) -> None:
    first = graph.is_first(*operator.inputs)
    axis = _axis(operator.option("Axis"), len(graph.tensor(operator.outputs[0]).shape), first)
    made = graph.node("Concat", [graph.value(each, first) for each in operator.inputs], axis=axis)
    images.put(graph, operator, made, first)


def _reduce(graph: Graph, operator: Operator, kind: str) -> None:
    data, kept = operator.inputs[0], bool(operator.option("KeepDims", False))
    rank = len(graph.tensor(data).shape)
    axes = {int(axis) % rank for axis in graph.settled(operator.inputs[1]).reshape(-1)}
    # Without their dimensions, what is left must be in the same order in both layouts.
    left = [axis for axis in NCHW if axis not in axes]
    first = graph.is_first(data) and (kept or left == sorted(left))
    numbers = graph.ints(*sorted(_axis(axis, rank, first) for axis in axes))
    made = graph.node(kind, [graph.value(data, first), numbers], keepdims=int(kept))
    images.put(graph, operator, made, first and kept)


def _find_extreme(graph: Graph, operator: Operator, kind: str) -> None:
    axis = int(graph.settled(operator.inputs[1]).reshape(-1)[0])
    made = graph.node(kind, [graph.value(operator.inputs[0])], axis=axis, keepdims=0)
    images.put(graph, operator, _write_cast(graph, operator, [made]))


def _reshape(graph: Graph, operator: Operator) -> None:
    """RESHAPE, SQUEEZE and EXPAND_DIMS; the first dimension stays open where it does not change."""
    before, after = (graph.tensor(each[0]).shape for each in (operator.inputs, operator.outputs))
    shape = (0, *after[1:]) if before[:1] == after[:1] else after
    images.put(graph, operator, graph.node("Reshape", [graph.value(operator.inputs[0]), graph.ints(*shape)]))


def _shape(graph: Graph, operator: Operator) -> None:
    images.put(graph, operator, _write_cast(graph, operator, [graph.node("Shape", [graph.value(operator.inputs[0])])]))


def _transpose(graph: Graph, operator: Operator) -> None:
    order = graph.settled(operator.inputs[1]).tolist()
    images.put(graph, operator, graph.node("Transpose", [graph.value(operator.inputs[0])], perm=order))


def _slice(graph: Graph, operator: Operator) -> None:
    """SLICE, by begins and sizes, and STRIDED_SLICE, with masks of bounds to ignore and dimensions to drop."""
    if operator.option("EllipsisMask", 0) or operator.option("NewAxisMask", 0):
        raise UsageError("its masks for ellipsis and new axes are not supported")
    begins, ends, *more = (graph.settled(each).tolist() for each in operator.inputs[1:])
    shape, least, most = graph.tensor(operator.inputs[0]).shape, -(2**31), 2**31 - 1
    strides, dropped = (more or [[1] * len(begins)])[0], []
    for at, stride in enumerate(strides):
        if not more:
            ends[at] = most if ends[at] < 0 else begins[at] + ends[at]
        if operator.option("BeginMask", 0) >> at & 1:
            begins[at] = 0 if stride > 0 else most
        if operator.option("EndMask", 0) >> at & 1:
            ends[at] = most if stride > 0 else least
        if operator.option("ShrinkAxisMask", 0) >> at & 1:
            begins[at] %= shape[at]
            ends[at] = begins[at] + 1
            dropped.append(at)
    first = graph.is_first(operator.inputs[0]) and not dropped
    axes = [_axis(axis, len(shape), first) for axis in range(len(begins))]
    bounds = [graph.ints(*each) for each in (begins, ends, axes, strides)]
    made = graph.node("Slice", [graph.value(operator.inputs[0], first), *bounds])
    images.put(graph, operator, graph.node("Squeeze", [made, graph.ints(*dropped)]) if dropped else made, first)


def _split(graph: Graph, operator: Operator) -> None:
    """SPLIT, its axis before the data, SPLIT_V, its sizes and axis behind, and UNPACK, which drops the axis."""
    unpack, count = operator.kind == "UNPACK", len(operator.outputs)
    data, *numbers = operator.inputs[::-1] if operator.kind == "SPLIT" else operator.inputs
    shape = graph.tensor(data).shape
    axis = int(operator.option("Axis", 0) if unpack else graph.settled(numbers[-1]).item()) % len(shape)
    sizes = graph.settled(numbers[0]).tolist() if operator.kind == "SPLIT_V" else [shape[axis] // count] * count
    sizes = [shape[axis] - sum(sizes) - 1 if size < 0 else size for size in sizes]
    first = graph.is_first(data) and not unpack
    inputs = [graph.value(data, first), graph.ints(*sizes)]
    parts = graph.nodes("Split", inputs, count, axis=_axis(axis, len(shape), first))
    for number, part in zip(operator.outputs, parts, strict=True):
        graph.put(number, graph.node("Squeeze", [part, graph.ints(axis)]) if unpack else part, first)


def _pack(graph: Graph, operator: Operator) -> None:
    axis = operator.option("Axis", 0)
    parts = [graph.node("Unsqueeze", [graph.value(each), graph.ints(axis)]) for each in operator.inputs]
    images.put(graph, operator, graph.node("Concat", parts, axis=axis))


def _gather(graph: Graph, operator: Operator) -> None:
    """GATHER, and EMBEDDING_LOOKUP with its indices first."""
    if operator.option("BatchDims", 0):
        raise UsageError("its option BatchDims is not supported")
    data, indices = operator.inputs if operator.kind == "GATHER" else operator.inputs[::-1]
    inputs = [graph.value(data), graph.value(indices)]
    images.put(graph, operator, graph.node("Gather", inputs, axis=operator.option("Axis", 0)))


def _repeat(graph: Graph, operator: Operator, kind: str) -> None:
    numbers = graph.ints(*graph.settled(operator.inputs[1]).tolist())
    images.put(graph, operator, graph.node(kind, [graph.value(operator.inputs[0]), numbers]))


_COMPOSED: Mapping[str, Callable[[Graph, Operator, list[str]], str]] = {
    "CAST": _write_cast,
    "FLOOR_DIV": _write_floored_quotient,
    "GELU": lambda g, o, x: g.node("Gelu", x, approximate="tanh" if o.option("Approximate", False) else "none"),
    "LEAKY_RELU": lambda g, o, x: g.node("LeakyRelu", x, alpha=o.option("Alpha")),
    "NOT_EQUAL": lambda g, _, x: g.node("Not", [g.node("Equal", x)]),
    "RELU": lambda g, _, x: images.clip(g, x[0], 0.0, np.inf),
    "RELU6": lambda g, _, x: images.clip(g, x[0], 0.0, 6.0),
    "RELU_0_TO_1": lambda g, _, x: images.clip(g, x[0], 0.0, 1.0),
    "RELU_N1_TO_1": lambda g, _, x: images.clip(g, x[0], -1.0, 1.0),
    "RSQRT": lambda g, _, x: g.node("Reciprocal", [g.node("Sqrt", x)]),
    "SQUARE": _write_square,
    "SQUARED_DIFFERENCE": _write_square,
}


def _alias(graph: Graph, operator: Operator) -> None:
    graph.alias(operator.outputs[0], operator.inputs[0])


def _element(kind: str) -> Callable[[Graph, Operator, list[str]], str]:
    return lambda graph, _, x: graph.node(kind, x)


# Those of more than one TensorFlow Lite operator, by ONNX's name.
_KINDS: Mapping[str, tuple[Callable[..., None], str]] = {
    "ARG_MAX": (_find_extreme, "ArgMax"), "ARG_MIN": (_find_extreme, "ArgMin"), "BROADCAST_TO": (_repeat, "Expand"),
    "L2_NORMALIZATION": (_normalise, "LpNormalization"), "LOG_SOFTMAX": (_normalise, "LogSoftmax"),
    "MEAN": (_reduce, "ReduceMean"), "REDUCE_MAX": (_reduce, "ReduceMax"), "REDUCE_MIN": (_reduce, "ReduceMin"),
    "REDUCE_PROD": (_reduce, "ReduceProd"), "SOFTMAX": (_normalise, "Softmax"), "SUM": (_reduce, "ReduceSum"),
    "TILE": (_repeat, "Tile"),
}  # fmt: skip
_TABLE: Mapping[str, Converter] = {
    "AVERAGE_POOL_2D": images.pool, "BATCH_MATMUL": _multiply_matrices, "CONCATENATION": _concatenate,
    "CONV_2D": images.convolve, "DENSIFY": _alias, "DEPTHWISE_CONV_2D": images.convolve,
    "DEPTH_TO_SPACE": images.move_blocks, "DEQUANTIZE": _alias, "EMBEDDING_LOOKUP": _gather, "EXPAND_DIMS": _reshape,
    "FULLY_CONNECTED": _dense, "GATHER": _gather, "MAX_POOL_2D": images.pool, "MIRROR_PAD": images.pad, "PACK": _pack,
    "PAD": images.pad, "PADV2": images.pad, "QUANTIZE": _alias, "RESHAPE": _reshape, "RESIZE_BILINEAR": images.resize,
    "RESIZE_NEAREST_NEIGHBOR": images.resize, "SHAPE": _shape, "SLICE": _slice, "SPACE_TO_DEPTH": images.move_blocks,
    "SPLIT": _split, "SPLIT_V": _split, "SQUEEZE": _reshape, "STRIDED_SLICE": _slice, "TRANSPOSE": _transpose,
    "TRANSPOSE_CONV": images.convolve_transposed, "UNPACK": _split,
    "Convolution2DTransposeBias": images.convolve_transposed, "Landmarks2TransformMatrix": images.make_matrix,
    "TransformLandmarks": images.transform_landmarks, "TransformTensorBilinear": images.sample,
    **{name: functools.partial(convert, kind=kind) for name, (convert, kind) in _KINDS.items()},
    **{name: functools.partial(_apply, write=_element(kind)) for name, kind in _ELEMENTS.items()},
    **{name: functools.partial(_apply, write=write) for name, write in _COMPOSED.items()},
}  # fmt: skip
