"""Walks over an ONNX graph and the graphs inside its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

# TVM looks converters up by operator name alone, so an operator of any other domain would become its namesake.
STANDARD_DOMAINS = ("", "ai.onnx")
# Inputs that TVM wants as numbers, by operator.
NUMBERS: Mapping[str, tuple[int, ...]] = {
    "AffineGrid": (1,), "CenterCropPad": (1,), "ConstantOfShape": (0,), "CumSum": (1,), "Expand": (1,), "OneHot": (1,),
    "Pad": (1, 3), "Range": (0, 1, 2), "Reshape": (1,), "Resize": (1, 2, 3), "Slice": (1, 2, 3, 4), "Split": (1,),
    "Squeeze": (1,), "Tile": (1,), "TopK": (1,), "Trilu": (1,), "Unsqueeze": (1,), "Upsample": (1,),
}  # fmt: skip
# Operators whose results are of one size or another by what they are given. TVM gives NonMaxSuppression's the greatest
# size that it can have.
SIZED_BY_VALUES = frozenset({"Compress", "If", "NonZero", "Unique"})


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs inside a node: branches of If, bodies of Loop and Scan."""
    return [*(a.g for a in node.attribute if a.HasField("g")), *(g for a in node.attribute for g in a.graphs)]


def list_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, those of inner graphs included."""
    for node in graph.node:
        yield node
        for body in bodies(node):
            yield from list_nodes(body)


def names_read(graph: onnx.GraphProto) -> set[str]:
    """What the graph's nodes read; inner graphs read the values around them, and their outputs may be such values."""
    names = {name for node in list_nodes(graph) for name in node.input}
    return names | {value.name for node in list_nodes(graph) for body in bodies(node) for value in body.output}


def node_label(node: onnx.NodeProto) -> str:
    """What is only its own: names of nodes may stand twice."""
    return next((name for name in node.output if name), "")


def node_name(node: onnx.NodeProto) -> str:
    """What people find a node by: its name, or its first output's."""
    return node.name or (node.output[0] if node.output else "?")


def names_read_by(node: onnx.NodeProto) -> set[str]:
    """What a node reads of the values around it, in its inner graphs too."""
    read = {name for name in node.input if name}
    for body in bodies(node):
        inner = names_read(body) | {value.name for value in body.output}
        own = {each.name for each in (*body.input, *body.initializer)}
        read |= inner - own - {name for each in list_nodes(body) for name in each.output} - {""}
    return read


def renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy that reads other names, in its inner graphs too."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    _rename(copy, names)
    return copy


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    for position, name in enumerate(node.input):
        node.input[position] = names.get(name, name)
    for body in bodies(node):
        for inner in body.node:
            _rename(inner, names)
        for value in body.output:
            value.name = names.get(value.name, value.name)
