"""Convert TensorFlow Lite's operators on images: convolutions, pools, padding, resizing, blocks of pixels."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import tflite

from farm.errors import UsageError
from farm.models.tflite.graph import NCHW, Graph
from farm.models.tflite.reading import Operator, Tensor

_BOUNDS = {
    tflite.ActivationFunctionType.RELU: (0.0, np.inf),
    tflite.ActivationFunctionType.RELU_N1_TO_1: (-1.0, 1.0),
    tflite.ActivationFunctionType.RELU6: (0.0, 6.0),
}
# Weights are [out, height, width, in].
_OIHW, _IOHW = (0, 3, 1, 2), (3, 0, 1, 2)
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
