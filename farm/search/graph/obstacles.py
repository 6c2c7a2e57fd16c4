"""Nodes of an ONNX graph that TVM cannot import, or would import wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable

import onnx

from farm.errors import UsageError
from farm.search.graph import converters, recurrent
from farm.search.graph.folding import STANDARD_DOMAINS, list_nodes, names_read, node_label, node_name

# Operators whose converter is ONNX Runtime's (TVM 0.27, onnx_frontend.py).
_MICROSOFT_OPERATORS = frozenset(
    {
        "Attention", "BiasGelu", recurrent.DYNAMIC, "EmbedLayerNormalization", "FastGelu", "Gelu", "MatMulInteger16",
        "MatMulNBits", "SkipLayerNormalization",
    }
)  # fmt: skip
# Names in both domains with different meanings, which TVM reads as ONNX Runtime's.
_ONLY_MICROSOFT = frozenset({"Attention"})
# Handled by the importer without a converter.
_BUILT_IN = frozenset({"Constant", "If"})

HINT = "Replace the operator in the model (onnx-simplifier or a newer export often does), or remove that part."
_CUT = "`onnx.utils.extract_model` cuts a model before that node; compute the rest in your program."
_EVALUATE = "Export the model for inference: `model.eval()`, or `training=TrainingMode.EVAL`."
_CLASSICAL = "Cut the model there (`onnx.utils.extract_model`); ONNX Runtime runs trees and scalers beside it."
_RANDOM = "Make random numbers an input of the model."
_SIZED = "has a result whose size depends on computed values"
# What to do, by operator.
_HINTS = {
    "Bernoulli": _RANDOM,
    "BatchNormalization": _EVALUATE,
    "Compress": _CUT,
    "Dropout": _EVALUATE,
    "GRU": "Give each sequence alone, without sequence_lens, or give all one length.",
    "ImageDecoder": "Decode images before the model, and give it pixels.",
    "Loop": "Export one step of the loop as the model, and repeat it in your program.",
    "Multinomial": _RANDOM,
    "NonMaxSuppression": f"Export the detector without it (Ultralytics: `nms=False`). {_CUT}",
    "NonZero": f"Where it selects by a mask, `Where` with zeros keeps sizes constant. {_CUT}",
    "RandomNormal": _RANDOM,
    "RandomNormalLike": _RANDOM,
    "RandomUniform": _RANDOM,
    "RandomUniformLike": _RANDOM,
    "Scan": "Export for a fixed number of steps with opset 9 or later.",
    "StringNormalizer": "Prepare text before the model, and give it numbers.",
    "TfIdfVectorizer": "Compute the features of texts before the model, and give it those.",
    "Unique": _CUT,
}
_HINTS |= {"LSTM": _HINTS["GRU"], "RNN": _HINTS["GRU"]}
_DOMAIN_HINTS = {
    "com.microsoft": "Give the model as it was before ONNX Runtime optimised or quantised it.",
    "ai.onnx.ml": _CLASSICAL,
}


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """A node that cannot be imported: its operator (with the domain where it matters), name, inputs and reason.

    `reason` continues a sentence about the operator: "has no converter". `hint` says what to do.
    """

    operator: str
    node: str
    inputs: tuple[str, ...]
    reason: str
    hint: str


def find_obstacles(graph: onnx.GraphProto, sized_by_values: Container[str]) -> list[Obstacle]:
    """List every node that cannot be imported, including those of inner graphs, in the graph's order.

    `sized_by_values` are nodes, by first output, whose result sizes do not follow from shapes.
    """
    known = converters.known_operators() | _BUILT_IN
    read = names_read(graph) | {value.name for value in graph.output}
    found = []
    for node in list_nodes(graph):
        operator, reason = _judge(node, known, read)
        if not reason and node_label(node) in sized_by_values:
            reason = _SIZED
        if reason:
            hint = _HINTS.get(operator, _CUT) if reason == _SIZED else find_hint(node, reason)
            found.append(Obstacle(operator, node_name(node), tuple(filter(None, node.input)), reason, hint))
    return found


def refuse(graph: onnx.GraphProto, sized_by_values: Container[str]) -> None:
    """Raise UsageError where the graph has text or an obstacle; name the first node of each kind."""
    text = onnx.TensorProto.STRING
    named = [v.name for v in graph.input if v.type.tensor_type.elem_type == text]
    named += [i.name for i in graph.initializer if i.data_type == text and i.name in names_read(graph)]
    if named:
        raise UsageError(
            f"TVM cannot import text: {', '.join(map(repr, named))}",
            "Remove the part that handles strings from the model.",
        )
    if found := find_obstacles(graph, sized_by_values):
        raise UsageError(describe(found), " ".join(dict.fromkeys(each.hint for each in found)))


def find_hint(node: onnx.NodeProto, reason: str = "") -> str:
    """Return what to do about an operator that cannot be imported."""
    if node.op_type in recurrent.OPERATORS and "sequence_lens" not in reason:
        return HINT
    if node.domain in STANDARD_DOMAINS:
        return _HINTS.get(node.op_type, HINT)
    return _DOMAIN_HINTS.get(node.domain, HINT)


def describe(found: Iterable[Obstacle]) -> str:
    """Describe operators, the first node of each, and the reason, in one sentence."""
    firsts: dict[tuple[str, str], Obstacle] = {}
    for each in found:
        firsts.setdefault((each.reason, each.operator), each)
    reasons: dict[str, list[str]] = {}
    for each in firsts.values():
        reasons.setdefault(each.reason, []).append(f"{each.operator} (node {each.node!r})")
    listed = "; ".join(f"{', '.join(names)}: it {reason}" for reason, names in reasons.items())
    return f"TVM cannot import the operator {listed}"


def _judge(node: onnx.NodeProto, known: frozenset[str], read: set[str]) -> tuple[str, str]:
    """Return the operator's name and why it cannot be imported, or ""."""
    standard = node.domain in STANDARD_DOMAINS
    if node.domain == "com.microsoft":
        strange = node.op_type not in _MICROSOFT_OPERATORS
    else:
        strange = not standard or node.op_type in _ONLY_MICROSOFT
    if strange:
        return f"{node.domain or 'ai.onnx'}::{node.op_type}", "has no converter for that domain"
    if standard and node.op_type == "Loop":  # those that follow from shapes were unrolled before
        return node.op_type, "has a number of rounds that depends on computed values, or exceeds 4,096"
    if node.op_type not in known:
        return node.op_type, "has no converter"
    wrong = _find_misread(node, read) if standard or node.op_type == recurrent.DYNAMIC else ""
    return node.op_type, f"does not support {wrong}" if wrong else ""


def _find_misread(node: onnx.NodeProto, read: set[str]) -> str:
    """Return what TVM 0.27 imports silently and computes wrongly."""
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type in (*recurrent.OPERATORS, recurrent.DYNAMIC):
        return recurrent.find_unsupported(node.op_type, attributes, node.input)
    is_adaptive = attributes.get("mode") == b"max" and attributes.get("sampling_ratio", 0) <= 0
    return {
        "BatchNormalization": "training mode" if attributes.get("training_mode") else "",
        # Only those in training, or possibly so, are left.
        "Dropout": "training mode",
        "LayerNormalization": "a second output" if read.intersection(node.output[1:]) else "",
        # The size of a region decides how many samples it has.
        "RoiAlign": "mode max without sampling_ratio" if is_adaptive else "",
    }.get(node.op_type, "")
