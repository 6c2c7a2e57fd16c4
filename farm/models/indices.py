"""Which inputs of a model are indices, and the number of rows of the tables that they index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

# Operators that look values up: the place of the data and that of the indices among their inputs.
_LOOKUPS = {
    "Gather": (0, 1),
    "GatherElements": (0, 1),
    "GatherND": (0, 1),
    "Scatter": (0, 1),
    "ScatterElements": (0, 1),
    "ScatterND": (0, 1),
}
_BY_TUPLES = ("GatherND", "ScatterND")
# Operators that pass on their first input's values.
_PASSING = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)


def find_rows(model: onnx.ModelProto) -> dict[str, int]:
    """The rows of the smallest table that each input indexes, by the input's name; only inputs that are indices.

    An index is valid from 0 to rows - 1. Tables whose shape is unknown count for nothing.
    """
    nodes = list(_list_nodes(model.graph))
    if not any(node.op_type in _LOOKUPS for node in nodes):
        return {}
    sources = {out: node.input[0] for node in nodes if node.op_type in _PASSING and node.input for out in node.output}
    shapes = _read_shapes(model.graph, nodes)
    fed = {value.name for value in model.graph.input}
    rows: dict[str, int] = {}
    for node in nodes:
        at_data, at_indices = _LOOKUPS.get(node.op_type, (0, 0))
        if not at_indices or len(node.input) <= at_indices:
            continue
        name = _follow(node.input[at_indices], sources)
        if name not in fed:
            continue
        size = _count_rows(node, shapes.get(node.input[at_data], ()))
        if size > 0:
            rows[name] = min(size, rows.get(name, size))
    return rows


def _list_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _list_nodes(inner)


def _follow(name: str, sources: Mapping[str, str]) -> str:
    # A damaged graph may go in circles.
    for _ in range(len(sources)):
        if name not in sources:
            break
        name = sources[name]
    return name


def _read_shapes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> dict[str, tuple[int, ...]]:
    """Known shapes by name; an open dimension is 0."""
    shapes = {
        value.name: tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.input)
    }
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in nodes:
        held = next((each.t for each in node.attribute if each.name == "value"), None)
        if node.op_type == "Constant" and held is not None:
            shapes[node.output[0]] = tuple(held.dims)
        # A table that is stored in 8 or 16 bits has as many rows.
        elif node.op_type in ("Cast", "DequantizeLinear", "Identity") and node.input and node.input[0] in shapes:
            shapes.setdefault(node.output[0], shapes[node.input[0]])
    return shapes


def _count_rows(node: onnx.NodeProto, shape: tuple[int, ...]) -> int:
    if not shape:
        return 0
    if node.op_type in _BY_TUPLES:
        return min(shape)
    axis = next((int(each.i) for each in node.attribute if each.name == "axis"), 0)
    return shape[axis] if -len(shape) <= axis < len(shape) else 0
