"""ONNX to Relax: preparation for TVM's importer, nodes that it cannot import, and its errors in plain words.

`farm.models` finds and checks model files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.inliner
import tvm

from farm.errors import UsageError
from farm.search.graph import bindings, converters, folding, half_precision, recurrent
from farm.search.graph.folding import STANDARD_DOMAINS, list_nodes, names_read, node_label, node_name
from farm.search.tvm_errors import find_reason

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
_DOMAIN_HINTS = {
    "com.microsoft": "Give the model as it was before ONNX Runtime optimised or quantised it.",
    "ai.onnx.ml": _CLASSICAL,
}


def import_onnx(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Import an ONNX graph as a `tvm.IRModule` with constant weights and static `shapes` (input name -> shape).

    In the scope of a target without arithmetic on float16, float16 models are computed in float32. Does not change the
    model or print. Raises UsageError that names the operator and node without a converter, or whose converter failed,
    and inputs of text.
    """
    given = model
    model, sized_by_values = _rewrite_for_tvm(model, shapes)
    refuse(model.graph, sized_by_values)
    opset = next((o.version for o in model.opset_import if o.domain in folding.STANDARD_DOMAINS), 1)
    try:
        # TVM prints the failing operator; standard output belongs to the caller's results.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importer = converters.importer_class()({name: list(shape) for name, shape in shapes.items()}, "float32")
            return importer.from_onnx(model.graph, opset)
    except Exception as error:  # converters raise errors of any type
        raise _failed(error, _find_misfit(given, shapes)) from error


def _find_misfit(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the inputs and the shapes chosen for them with which the model cannot compute, else ""."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    chosen = []
    for value in copy.graph.input:
        dimensions = value.type.tensor_type.shape.dim
        if value.name not in shapes or all(each.dim_value > 0 for each in dimensions):
            continue
        chosen.append(f"{value.name}={','.join(map(str, shapes[value.name]))}")
        for dimension, size in zip(dimensions, shapes[value.name], strict=False):
            dimension.dim_value = size
    if not chosen:
        return ""
    del copy.graph.value_info[:]
    try:
        onnx.shape_inference.infer_shapes(copy, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return " ".join(chosen)
    except (ValueError, RuntimeError):  # larger than a protobuf message can be
        return ""
    return ""


def find_obstacles(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> list[Obstacle]:
    """List every node that cannot be imported even after rewriting. Does not change the model."""
    rewritten, sized_by_values = _rewrite_for_tvm(model, shapes)
    return list_obstacles(rewritten.graph, sized_by_values)


def _rewrite_for_tvm(
    model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[onnx.ModelProto, frozenset[str]]:
    """Rewrite a copy for TVM: drop training parts, fold what follows from `shapes`, replace badly imported operators.

    Also return the nodes whose result sizes depend on values.
    """
    copy = onnx.ModelProto()
    # Exporters wrap parts of a model in functions of their own domain, whose bodies are ordinary operators.
    copy.CopyFrom(onnx.inliner.inline_local_functions(model) if model.functions else model)
    _respell_constants(copy.graph)
    if half_precision.needs_widening(copy.graph, tvm.target.Target.current(allow_none=True)):
        half_precision.widen_model(copy)
    # ONNX IR < 4 lists initializers among the inputs; TVM would make them parameters of the function.
    weights = {i.name for i in copy.graph.initializer}
    inputs = [value for value in copy.graph.input if value.name not in weights]
    del copy.graph.input[:]
    copy.graph.input.extend(inputs)
    sized_by_values: frozenset[str] = frozenset()
    if folding.is_needed(copy):
        copy, sized_by_values = folding.fold(copy, shapes)

    _drop_dropout(copy.graph)
    bindings.fold_batch_norm(copy.graph)
    return copy, sized_by_values


def _respell_constants(graph: onnx.GraphProto) -> None:
    """Give each Constant its number or numbers as a tensor, the only form that TVM reads."""
    for node in folding.list_nodes(graph):
        name = node.attribute[0].name if node.op_type == "Constant" and len(node.attribute) == 1 else ""
        if name in ("value_float", "value_floats", "value_int", "value_ints"):
            numbers = np.array(onnx.helper.get_attribute_value(node.attribute[0]))
            tensor = onnx.numpy_helper.from_array(numbers.astype("float32" if "float" in name else "int64"))
            node.attribute[0].CopyFrom(onnx.helper.make_attribute("value", tensor))


def _drop_dropout(graph: onnx.GraphProto) -> None:
    """Remove Dropout, the identity at inference.

    TVM keeps it as an operator with two results, which layout conversion cannot handle, and a mask of the wrong type.
    """
    outputs = {value.name for value in graph.output}
    captured = {name for node in graph.node for body in folding.bodies(node) for name in folding.names_read(body)}
    read = folding.names_read(graph) | outputs
    off = {i.name for i in graph.initializer if i.data_type == onnx.TensorProto.BOOL and not _value(i).any()}
    off |= {n.output[0] for n in graph.node if n.op_type == "Constant" and any(_is_false(a) for a in n.attribute)}
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = renamed.get(name, name)
        # A third input, since opset 12, can enable training.
        training = [name for name in node.input[2:] if name and name not in off]
        if node.op_type != "Dropout" or node.domain not in folding.STANDARD_DOMAINS or training:
            nodes.append(node)
            continue
        data, result = node.input[0], node.output[0]
        if result in outputs or result in captured:
            nodes.append(onnx.helper.make_node("Identity", [data], [result], name=node.name))
        else:
            renamed[result] = data
        for mask in read.intersection(node.output[1:]):
            true = onnx.helper.make_tensor("true", onnx.TensorProto.BOOL, [1], [True])
            nodes.append(onnx.helper.make_node("Shape", [data], [f"{mask}__shape"], name=f"{node.name}__shape"))
            nodes.append(
                onnx.helper.make_node(
                    "ConstantOfShape", [f"{mask}__shape"], [mask], name=f"{node.name}__mask", value=true
                )
            )
    del graph.node[:]
    graph.node.extend(nodes)


def _is_false(attribute: onnx.AttributeProto) -> bool:
    return attribute.t.data_type == onnx.TensorProto.BOOL and not _value(attribute.t).any()


def _value(tensor: onnx.TensorProto) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = onnx.numpy_helper.to_array(tensor)
    return array


def _failed(error: Exception, misfit: str) -> UsageError:
    """Make an error that names the operator and node whose conversion raised, with TVM's message.

    `misfit` are input shapes with which the model cannot compute; then the error names these instead.
    """
    reason = find_reason(error)
    if not isinstance(error, AssertionError):
        reason = f"{type(error).__name__}: {reason}"
    elif reason == AssertionError.__name__:
        reason = "its converter does not accept its inputs"
    node = _node_being_converted(error)
    where = " this model" if node is None else f" the operator {node.op_type} (node {folding.node_name(node)!r})"
    if misfit:
        return UsageError(
            f"the model cannot compute with the shape {misfit}; in{where}: {find_reason(error)}",
            "Choose shapes that fit the model: many require multiples of some number.",
        )
    return UsageError(f"TVM cannot import{where}: {reason}", "" if node is None else find_hint(node))


def _node_being_converted(error: Exception) -> onnx.NodeProto | None:
    """Return the innermost node on the traceback; TVM's own message names the operator only."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        node = trace.tb_frame.f_locals.get("node")
        if isinstance(node, onnx.NodeProto):
            found = node
        trace = trace.tb_next
    return found


_HINTS |= {"LSTM": _HINTS["GRU"], "RNN": _HINTS["GRU"]}


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


def list_obstacles(graph: onnx.GraphProto, sized_by_values: Container[str]) -> list[Obstacle]:
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
    if found := list_obstacles(graph, sized_by_values):
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
