"""What of an ONNX graph TVM cannot import, or would import and compute wrongly: all of it, with where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable

import onnx

from farm.errors import UsageError
from farm.search.graph import converters, recurrent
from farm.search.graph.folding import STANDARD_DOMAINS, list_nodes, names_read, node_label, node_name

# Those whose converter says it is ONNX Runtime's (TVM 0.27, onnx_frontend.py).
_MICROSOFT_OPERATORS = frozenset(
    {
        "Attention",
        "BiasGelu",
        "EmbedLayerNormalization",
        "FastGelu",
        "Gelu",
        "MatMulInteger16",
        "SkipLayerNormalization",
    }
)
# Names that both domains have, with different meanings, and that TVM reads as ONNX Runtime's.
_ONLY_MICROSOFT = frozenset({"Attention"})
# Handled by the importer itself, without a converter.
_BUILT_IN = frozenset({"Constant", "If"})

HINT = "Replace the operator in the model (onnx-simplifier or a newer export often does), or leave that part out."


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """A node that cannot be imported: its operator (with the domain where that is the point), name and inputs, and why.

    `reason` reads after "TVM": "has no converter for it".
    """

    operator: str
    node: str
    inputs: tuple[str, ...]
    reason: str


def find_obstacles(graph: onnx.GraphProto, sized_by_values: Container[str]) -> list[Obstacle]:
    """Every node in the way, those of inner graphs included, in the graph's order.

    `sized_by_values` are nodes, by their first outputs, whose results have no size that follows from shapes.
    """
    known = converters.known_operators() | _BUILT_IN
    read = names_read(graph) | {value.name for value in graph.output}
    found = []
    for node in list_nodes(graph):
        operator, reason = _judge(node, known, read)
        if not reason and node_label(node) in sized_by_values:
            reason = "needs to know the size of what it gives, which depends on computed values"
        if reason:
            found.append(Obstacle(operator, node_name(node), tuple(filter(None, node.input)), reason))
    return found


def refuse(graph: onnx.GraphProto, sized_by_values: Container[str]) -> None:
    """Raise UsageError where the graph holds text or an obstacle: each kind of operator with the first of its nodes."""
    text = onnx.TensorProto.STRING
    named = [v.name for v in graph.input if v.type.tensor_type.elem_type == text]
    named += [i.name for i in graph.initializer if i.data_type == text]
    if named:
        raise UsageError(
            f"TVM cannot import text: {', '.join(map(repr, named))}",
            "Leave the part that handles strings out of the model.",
        )
    if found := find_obstacles(graph, sized_by_values):
        raise UsageError(describe(found), HINT)


def describe(found: Iterable[Obstacle]) -> str:
    """One sentence: operators, the first node of each, and why."""
    firsts: dict[tuple[str, str], Obstacle] = {}
    for each in found:
        firsts.setdefault((each.reason, each.operator), each)
    reasons: dict[str, list[str]] = {}
    for each in firsts.values():
        reasons.setdefault(each.reason, []).append(f"{each.operator} (node {each.node!r})")
    listed = "; ".join(f"{', '.join(names)}: it {reason}" for reason, names in reasons.items())
    return f"TVM cannot import the operator {listed}"


def _judge(node: onnx.NodeProto, known: frozenset[str], read: set[str]) -> tuple[str, str]:
    """The operator's name and why it cannot be imported, "" where it can."""
    standard = node.domain in STANDARD_DOMAINS
    if node.domain == "com.microsoft":
        strange = node.op_type not in _MICROSOFT_OPERATORS
    else:
        strange = not standard or node.op_type in _ONLY_MICROSOFT
    if strange:
        return f"{node.domain or 'ai.onnx'}::{node.op_type}", "has no converter for that domain"
    if standard and node.op_type == "Loop":  # what follows from shapes was written out before
        return node.op_type, "needs to know its number of rounds (at most 4,096), which depends on computed values"
    if node.op_type not in known:
        return node.op_type, "has no converter"
    wrong = _find_misread(node, read) if standard else ""
    return node.op_type, f"does not do {wrong}" if wrong else ""


def _find_misread(node: onnx.NodeProto, read: set[str]) -> str:
    """What TVM 0.27 imports without a word and computes wrongly."""
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type in recurrent.OPERATORS:
        return recurrent.find_unsupported(node.op_type, attributes, node.input)
    return {
        "BatchNormalization": "training mode" if attributes.get("training_mode") else "",
        # The importer has left those alone that are, or may be, in training.
        "Dropout": "training mode",
        "ConvTranspose": "the attribute output_shape" if "output_shape" in attributes else "",
        "LayerNormalization": "a second output" if read.intersection(node.output[1:]) else "",
        "RoiAlign": "mode max" if attributes.get("mode") == b"max" else "",
        "SpaceToDepth": "mode CRD" if attributes.get("mode") == b"CRD" else "",
    }.get(node.op_type, "")
