"""Convert MediaPipe's custom operators, which crop images around landmarks (second versions).

A transform is a matrix [1, 4, 4] whose first two rows turn, scale and move points of the plane.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flatbuffers import flexbuffers

from farm.errors import UsageError
from farm.models.tflite.graph import Graph
from farm.models.tflite.reading import Operator

_TURNED = (0, 2, 1)


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
