"""Walks over an ONNX graph and the graphs inside its nodes."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

# TVM looks converters up by operator name alone, so an operator of any other domain would become its namesake.
STANDARD_DOMAINS = ("", "ai.onnx")


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


def node_name(node: onnx.NodeProto) -> str:
    """What people find a node by: its name, or its first output's."""
    return node.name or (node.output[0] if node.output else "?")
