"""Convert TensorFlow Lite's operators on images: convolutions, pools, padding, resizing, blocks of pixels.

MediaPipe's custom operators (second versions) crop images around landmarks. A transform is a matrix [1, 4, 4] whose
first two rows turn, scale and move points of the plane.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import tflite
from flatbuffers import flexbuffers

from farm.errors import UsageError
from farm.models.tflite.graph import NCHW, Graph, Operator, Tensor

_BOUNDS = {
    tflite.ActivationFunctionType.RELU: (0.0, np.inf),
    tflite.ActivationFunctionType.RELU_N1_TO_1: (-1.0, 1.0),
    tflite.ActivationFunctionType.RELU6: (0.0, 6.0),
}
# Weights are [out, height, width, in].
_OIHW, _IOHW, _TURNED = (0, 3, 1, 2), (3, 0, 1, 2), (0, 2, 1)
# `TfLiteTransposeConvParams` of TensorFlow Lite's C interface: padding, stride by width and height.
_TRANSPOSE_PARAMETERS, _SAME_IN_C = struct.Struct("<iii"), 1


def clip(graph: Graph, name: str, low: float, high: float) -> str:
    """Bound a value."""
    if (low, high) == (0.0, np.inf):
        return graph.node("Relu", [name])
    return graph.node("Clip", [name, graph.literal(low, np.float32), graph.literal(high, np.float32)])


def _saturates(about: Tensor, low: float, high: float) -> bool:
    """Say whether the integers of a result bound it as its activation does, within half a step."""
    if about.scale is None:
        return False
    limits, step = np.iinfo(about.dtype), float(about.scale[0])
    least, most = ((each - int(about.zero[0])) * step for each in (limits.min, limits.max))
    return least >= low - step / 2 and most <= high + step / 2


def put(graph: Graph, operator: Operator, name: str, first: bool = False) -> None:
    """Make `name` the operator's result after the activation that is fused with it."""
    kind = operator.option("FusedActivationFunction", tflite.ActivationFunctionType.NONE)
    if kind in _BOUNDS and not _saturates(graph.tensor(operator.outputs[0]), *_BOUNDS[kind]):
        name = clip(graph, name, *_BOUNDS[kind])
    elif kind not in (*_BOUNDS, tflite.ActivationFunctionType.NONE):
        raise UsageError(f"its fused activation has the number {kind}, which no kernel of TensorFlow Lite computes")
    graph.put(operator.outputs[0], name, first)


def _strides(operator: Operator) -> list[int]:
    return [operator.option("StrideH"), operator.option("StrideW")]


def _pads(graph: Graph, operator: Operator, kernel: Sequence[int], dilations: Sequence[int] = (1, 1)) -> list[int]:
    """Return ONNX's pads; SAME puts the odd row and column at the end."""
    if operator.option("Padding") == tflite.Padding.VALID:
        return [0, 0, 0, 0]
    sizes = graph.tensor(operator.inputs[0]).shape[1:3]
    each = zip(sizes, kernel, _strides(operator), dilations, strict=True)
    totals = [max((-(-size // by) - 1) * by + (k - 1) * step + 1 - size, 0) for size, k, by, step in each]
    return [*(total // 2 for total in totals), *(total - total // 2 for total in totals)]


def _operands(graph: Graph, data: int, weight: int, order: Sequence[int], bias: Sequence[int]) -> list[str]:
    biases = [graph.weight(each, (0,), data) for each in bias if each >= 0]
    return [graph.value(data, first=True), graph.weight(weight, order, data), *biases]


def convolve(graph: Graph, operator: Operator) -> None:
    """CONV_2D and DEPTHWISE_CONV_2D; weights of the latter are [1, height, width, out]."""
    data, weight, *bias = operator.inputs
    shape, channels = graph.tensor(weight).shape, graph.tensor(data).shape[3]
    depthwise = operator.kind == "DEPTHWISE_CONV_2D"
    dilations = [operator.option("DilationHFactor", 1), operator.option("DilationWFactor", 1)]
    made = graph.node(
        "Conv",
        _operands(graph, data, weight, _IOHW if depthwise else _OIHW, bias),
        strides=_strides(operator),
        dilations=dilations,
        pads=_pads(graph, operator, shape[1:3], dilations),
        group=channels if depthwise else channels // shape[3],
    )
    put(graph, operator, made, first=True)


def convolve_transposed(graph: Graph, operator: Operator) -> None:
    """TRANSPOSE_CONV, its first operand the result's shape, and MediaPipe's, whose options are a structure of C."""
    if operator.kind == "TRANSPOSE_CONV":
        _, weight, data, *bias = operator.inputs
        strides, same = _strides(operator), operator.option("Padding") == tflite.Padding.SAME
    else:
        data, weight, *bias = operator.inputs
        padding, *strides = _TRANSPOSE_PARAMETERS.unpack_from(operator.custom)
        strides, same = strides[::-1], padding == _SAME_IN_C
    sizes = (graph.tensor(each).shape[1:3] for each in (data, weight, operator.outputs[0]))
    # What the result lacks of all that the kernel reaches; where it is negative, rows and columns of zeros follow.
    missing = [(n - 1) * by + k - out for by, n, k, out in zip(strides, *sizes, strict=True)]
    before = [max(each, 0) // 2 if same else 0 for each in missing]
    made = graph.node(
        "ConvTranspose",
        _operands(graph, data, weight, _IOHW, bias),
        strides=strides,
        pads=[*before, *(max(each, 0) - start for each, start in zip(missing, before, strict=True))],
        output_padding=[max(-each, 0) for each in missing],
    )
    put(graph, operator, made, first=True)


def pool(graph: Graph, operator: Operator) -> None:
    """AVERAGE_POOL_2D, which leaves padding out of its means, and MAX_POOL_2D."""
    kernel = (operator.option("FilterHeight"), operator.option("FilterWidth"))
    pads, inputs = _pads(graph, operator, kernel), [graph.value(operator.inputs[0], first=True)]
    kind = "MaxPool" if operator.kind == "MAX_POOL_2D" else "AveragePool"
    if kernel == graph.tensor(operator.inputs[0]).shape[1:3] and not any(pads):
        made = graph.node(f"Global{kind}", inputs)
    else:
        made = graph.node(kind, inputs, kernel_shape=kernel, strides=_strides(operator), pads=pads)
    put(graph, operator, made, first=True)


def resize(graph: Graph, operator: Operator) -> None:
    """RESIZE_BILINEAR and RESIZE_NEAREST_NEIGHBOR."""
    wanted, sizes = graph.settled(operator.inputs[1]).tolist(), graph.tensor(operator.inputs[0]).shape[1:3]
    half = "half_pixel" if operator.option("HalfPixelCenters", False) else "asymmetric"
    mode = "align_corners" if operator.option("AlignCorners", False) else half
    scales = graph.literal(np.array(wanted) / np.array(sizes), np.float32)
    whole = all(out % size == 0 for out, size in zip(wanted, sizes, strict=True))
    made = graph.node(
        "Resize",
        [graph.value(operator.inputs[0], first=True), "", *([scales] if whole else ["", graph.ints(*wanted)])],
        axes=[2, 3],
        mode="linear" if operator.kind == "RESIZE_BILINEAR" else "nearest",
        coordinate_transformation_mode=mode,
        nearest_mode="floor" if mode == "asymmetric" else "round_prefer_ceil",
    )
    put(graph, operator, made, first=True)


def pad(graph: Graph, operator: Operator) -> None:
    """PAD, PADV2 and MIRROR_PAD."""
    data, amounts, *value = operator.inputs
    mirrored = operator.kind == "MIRROR_PAD"
    if mirrored and operator.option("Mode") != tflite.MirrorPadMode.REFLECT:
        raise UsageError("its mode SYMMETRIC has no counterpart in ONNX")
    pairs = graph.settled(amounts).astype(np.int64)
    # Rows and columns are padded beside the convolution or pool that reads them.
    first = len(pairs) == 4 and (graph.is_first(data) or not pairs[[0, 3]].any())
    amount = graph.literal((pairs[list(NCHW)] if first else pairs).T.reshape(-1))
    inputs = [graph.value(data, first), amount, *map(graph.value, value)]
    put(graph, operator, graph.node("Pad", inputs, mode="reflect" if mirrored else "constant"), first)


def move_blocks(graph: Graph, operator: Operator) -> None:
    """DEPTH_TO_SPACE and SPACE_TO_DEPTH."""
    kind = "DepthToSpace" if operator.kind == "DEPTH_TO_SPACE" else "SpaceToDepth"
    inputs = [graph.value(operator.inputs[0], first=True)]
    put(graph, operator, graph.node(kind, inputs, blocksize=operator.option("BlockSize")), first=True)


def _options(operator: Operator, *names: str) -> Any:
    found = flexbuffers.Loads(operator.custom)
    if missing := [name for name in names if name not in found]:
        raise UsageError(f"it is of another version, without the option {missing[0]}")
    return [found[name] for name in names]


def _constant(graph: Graph, values: Any, shape: tuple[int, ...] = (1, 1, -1)) -> str:
    return graph.literal(np.array(values).reshape(shape), np.float32)


def _cut(graph: Graph, name: str, axis: int, begin: int, end: int) -> str:
    return graph.node("Slice", [name, graph.ints(begin), graph.ints(end), graph.ints(axis)])


def _transform(graph: Graph, points: str, matrix: str) -> str:
    """Transform points [1, n, 2]."""
    rows = graph.node("Transpose", [_cut(graph, matrix, 1, 0, 2)], perm=_TURNED)
    turned = graph.node("MatMul", [points, _cut(graph, rows, 1, 0, 2)])
    return graph.node("Add", [turned, _cut(graph, rows, 1, 3, 4)])


def make_matrix(graph: Graph, operator: Operator) -> None:
    """Landmarks2TransformMatrix: from pixels of a crop to an image.

    The crop holds a subset of the landmarks, and is turned so that two of them lie at the wanted angle.
    """
    names = ("target_rotation_radians", "left_rotation_idx", "right_rotation_idx", "subset_idxs")
    angle, left, right, subset = _options(operator, *names)
    size = np.array(_options(operator, "output_width", "output_height"), np.float64)
    scale = np.array(_options(operator, "scale_x", "scale_y"), np.float64)
    flat = _cut(graph, graph.value(operator.inputs[0]), 2, 0, 2)
    pair = graph.node("Gather", [flat, graph.ints(left, right)], axis=1)
    way = graph.node("MatMul", [_constant(graph, [-1.0, 1.0]), pair])
    length = graph.node("ReduceL2", [way, graph.ints(2)])
    same = graph.node("Equal", [length, _constant(graph, 0.0)])
    # The cosine and the sine of the angle at which the two lie; 0 where they are one point.
    unit = graph.node("Where", [same, _constant(graph, [1.0, 0.0]), graph.node("Div", [way, length])])
    cosine, sine = np.cos(angle), np.sin(angle)
    turns = _constant(graph, [cosine, sine, -sine, cosine, sine, -cosine, cosine, sine], (1, 2, 4))
    back = graph.node("Reshape", [graph.node("MatMul", [unit, turns]), graph.ints(1, 2, 2)])
    chosen = graph.node("Gather", [flat, graph.ints(*np.array(subset, np.int64).reshape(-1).tolist())], axis=1)
    turned = graph.node("MatMul", [chosen, back])
    least, most = (graph.node(kind, [turned, graph.ints(1)]) for kind in ("ReduceMin", "ReduceMax"))
    middle = graph.node("Mul", [graph.node("Add", [least, most]), _constant(graph, 0.5)])
    extent = graph.node("Mul", [graph.node("Sub", [most, least]), _constant(graph, scale / size)])
    linear = graph.node("Mul", [back, extent])
    centre = graph.node("MatMul", [back, graph.node("Transpose", [middle], perm=_TURNED)])
    shift = graph.node("MatMul", [linear, _constant(graph, -size / 2, (1, 2, 1))])
    column = graph.node("Add", [centre, shift])
    rows = graph.node("Concat", [linear, _constant(graph, [0.0, 0.0], (1, 2, 1)), column], axis=2)
    rest = _constant(graph, np.eye(4)[2:], (1, 2, 4))
    graph.put(operator.outputs[0], graph.node("Concat", [rows, rest], axis=1))


def transform_landmarks(graph: Graph, operator: Operator) -> None:
    """TransformLandmarks: move the first two coordinates by a matrix."""
    data, matrix = operator.inputs
    if len(shape := graph.tensor(data).shape) != 3 or shape[2] not in (2, 3):
        raise UsageError("its landmarks are not of the shape [1, landmarks, 2 or 3]")
    points = graph.value(data)
    made = _transform(graph, _cut(graph, points, 2, 0, 2), graph.value(matrix))
    if shape[2] == 3:
        made = graph.node("Concat", [made, _cut(graph, points, 2, 2, 3)], axis=2)
    graph.put(operator.outputs[0], made)


def sample(graph: Graph, operator: Operator) -> None:
    """TransformTensorBilinear: a crop by a matrix, with zeros outside of the image."""
    data, matrix = operator.inputs
    last = np.array(graph.tensor(data).shape[2:0:-1]) - 1.0
    rows, columns = _options(operator, "output_height", "output_width")
    pixels = _constant(graph, np.mgrid[:rows, :columns][::-1].reshape(2, -1).T + 0.5, (1, -1, 2))
    places = graph.node("Sub", [_transform(graph, pixels, graph.value(matrix)), _constant(graph, 0.5)])
    inside = graph.node("Equal", [places, graph.node("Min", [graph.node("Max", [places, _constant(graph, 0.0)]),
                                                             _constant(graph, last)])])  # fmt: skip
    share = graph.node("ReduceMin", [graph.node("Cast", [inside], to=1), graph.ints(2)])
    scaled = graph.node("Sub", [graph.node("Mul", [places, _constant(graph, 2 / last)]), _constant(graph, 1.0)])
    grid = graph.node("Reshape", [scaled, graph.ints(1, rows, columns, 2)])
    crop = graph.node("GridSample", [graph.value(data, first=True), grid], align_corners=1, padding_mode="border")
    share = graph.node("Reshape", [share, graph.ints(1, 1, rows, columns)])
    graph.put(operator.outputs[0], graph.node("Mul", [crop, share]), first=True)
