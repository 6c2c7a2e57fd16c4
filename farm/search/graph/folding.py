"""Fold the parts of an ONNX graph that follow from its input shapes: computed shapes, `If`, `Loop`.

Exporters write these for inputs of any size; TVM needs constants. The rest of the graph is left unchanged, so that
workloads do not depend on a tool's version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx

from farm.processes import confined
from farm.search.graph import microsoft

# TVM looks converters up by operator name alone, so an operator of another domain would be mistaken for its namesake.
STANDARD_DOMAINS = ("", "ai.onnx")
# Inputs that TVM needs as constants, by operator.
NUMBERS: Mapping[str, tuple[int, ...]] = {
    "AffineGrid": (1,), "CenterCropPad": (1,), "Col2Im": (1, 2), "ConstantOfShape": (0,), "CumSum": (1,),
    "DFT": (1, 2), "Expand": (1,), "OneHot": (1,), "Pad": (1, 3), "Range": (0, 1, 2), "Reshape": (1,),
    "Resize": (1, 2, 3), "STFT": (1, 3), "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,), "Tile": (1,),
    "TopK": (1,), "Trilu": (1,), "Unsqueeze": (1,), "Upsample": (1,),
}  # fmt: skip
# Operators whose result size depends on values.
SIZED_BY_VALUES = frozenset({"Compress", "If", "NonMaxSuppression", "NonZero", "Unique"})

# Operators without a converter of TVM's, whose bodies replace them; of others TVM computes the first result alone.
_REPLACED = frozenset(
    {
        "Attention", "BlackmanWindow", "CausalConvWithState", "Celu", "CenterCropPad", "HammingWindow",
        "HannWindow", "LinearAttention", "NegativeLogLikelihoodLoss", "RotaryEmbedding", "SoftmaxCrossEntropyLoss",
        "SwiGLU", "Swish",
    }
)  # fmt: skip
_REPLACED_FOR_MORE = frozenset({"LayerNormalization"})
# Larger tensors do not determine shapes; only their shapes are passed on.
_MOST_SHAPE = 4096
_MEMORY_BYTES = 6 << 30
_CHILD = f"{__package__}.folding_child"
# Operators that read shapes, or may depend on them, and one without a converter, which folding evaluates.
_ASKING = frozenset({"Loop", "MelWeightMatrix", "Scan", "Shape", "Size"}) | SIZED_BY_VALUES


def is_replaced(node: onnx.NodeProto) -> bool:
    """Say whether a node stands for its body (`find_body`)."""
    if microsoft.is_known(node):
        return True
    if node.domain not in STANDARD_DOMAINS:
        return (node.domain, node.op_type) == ("ai.onnx.preview", "FlexAttention")
    return node.op_type in _REPLACED or (node.op_type in _REPLACED_FOR_MORE and any(node.output[1:]))


def find_body(
    node: onnx.NodeProto, opsets: Mapping[str, int], types: Sequence[onnx.TypeProto | None]
) -> onnx.GraphProto | None:
    """Return the body of a node whose inputs have `types`, its attributes filled in; None where there is none.

    `opsets` are the model's by domain, "" for ONNX's own. Names of the graph's inputs and outputs are the operator's;
    inputs that the node does not give are left out.
    """
    if microsoft.is_known(node):
        return microsoft.make_body(node, [kind or onnx.TypeProto() for kind in types])
    domain = "" if node.domain in STANDARD_DOMAINS else node.domain
    opset = opsets[""]
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
    except onnx.defs.SchemaError:
        return None
    versions = schema.context_dependent_function_opset_versions or schema.function_opset_versions
    if not versions:
        return None
    version = max((each for each in versions if each <= opset), default=min(versions))
    if schema.has_context_dependent_function:
        given = [(kind or onnx.TypeProto()).SerializeToString() for kind in types]
        data = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), given)
    else:
        data = schema.get_function_with_opset_version(version)
    if not data:
        return None
    function = onnx.FunctionProto.FromString(data)
    values = {each.name: each for each in function.attribute_proto}
    values |= {name: each.default_value for name, each in schema.attributes.items() if each.default_value.type}
    values |= {each.name: each for each in node.attribute}
    graph = onnx.GraphProto()
    graph.node.extend(function.node)
    _fill_in(graph, values)
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in function.input)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in function.output)
    return graph


def _fill_in(graph: onnx.GraphProto, values: dict[str, onnx.AttributeProto]) -> None:
    """Replace references to the function's attributes by their values; drop those without a value."""
    for node in graph.node:
        kept = []
        for attribute in node.attribute:
            if not attribute.ref_attr_name:
                kept.append(attribute)
            elif attribute.ref_attr_name in values:
                value = onnx.AttributeProto()
                value.CopyFrom(values[attribute.ref_attr_name])
                value.name = attribute.name
                kept.append(value)
        copies = [onnx.AttributeProto.FromString(each.SerializeToString()) for each in kept]
        del node.attribute[:]
        node.attribute.extend(copies)
        for body in bodies(node):
            _fill_in(body, values)


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs inside a node: branches of If, bodies of Loop and Scan."""
    return [*(a.g for a in node.attribute if a.HasField("g")), *(g for a in node.attribute for g in a.graphs)]


def list_nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Yield every node, including those of inner graphs."""
    for node in graph.node:
        yield node
        for body in bodies(node):
            yield from list_nodes(body)


def names_read(graph: onnx.GraphProto) -> set[str]:
    """Return the names that the nodes read; inner graphs read outer values, also as their outputs."""
    names = {name for node in list_nodes(graph) for name in node.input}
    return names | {value.name for node in list_nodes(graph) for body in bodies(node) for value in body.output}


def node_label(node: onnx.NodeProto) -> str:
    """Return a unique label: names of nodes may repeat."""
    return next((name for name in node.output if name), "")


def node_name(node: onnx.NodeProto) -> str:
    """Return the name to show to users: the node's, or its first output's."""
    return node.name or (node.output[0] if node.output else "?")


def names_read_by(node: onnx.NodeProto) -> set[str]:
    """Return the outer values that a node reads, also in its inner graphs."""
    read = {name for name in node.input if name}
    for body in bodies(node):
        inner = names_read(body) | {value.name for value in body.output}
        own = {each.name for each in (*body.input, *body.initializer)}
        read |= inner - own - {name for each in list_nodes(body) for name in each.output} - {""}
    return read


def renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """Copy a node with names replaced, also in its inner graphs."""
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


# Folding a thousand nodes takes a second.
_TIMEOUT_S, _HINT_TIMEOUT_S = 120.0, 15.0


def is_needed(model: onnx.ModelProto) -> bool:
    """Say whether the graph computes with shapes, or computes inputs that TVM needs as constants."""
    made = {value.name for value in model.graph.input}
    for node in list_nodes(model.graph):
        if node.op_type in _ASKING or is_replaced(node):
            return True
        if any(name in made for at, name in enumerate(node.input) if at in NUMBERS.get(node.op_type, ())):
            return True
        if node.op_type != "Constant":
            made.update(node.output)
    return False


def fold(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> tuple[onnx.ModelProto, frozenset[str]]:
    """Fold the model for these input shapes in a confined process. Weights must not be among the inputs.

    Also return the nodes, by first output, whose result sizes depend on values. Raises UsageError where it takes too
    much memory or time.
    """
    bare = drop_weights(model, shapes)
    limits = confined.ConfinedLimits(_MEMORY_BYTES, _TIMEOUT_S)
    left = {value.name for value in bare.graph.input}
    answer = confined.call(f"{_CHILD}:fold", bare.SerializeToString(), "the model's shapes were not computed", limits)
    answered = onnx.ModelProto.FromString(answer)
    found = answered.graph
    folded = _frame(model, shapes)
    del folded.opset_import[:]
    folded.opset_import.extend(answered.opset_import)
    folded.graph.node.extend(found.node)
    folded.graph.initializer.extend(found.initializer)
    held = {tensor.name for tensor in found.initializer}
    folded.graph.initializer.extend(t for t in _weights(model.graph) if t.name in left and t.name not in held)
    return folded, frozenset(each.key for each in answered.metadata_props)


def find_fitting(model: onnx.ModelProto, candidates: Sequence[Mapping[str, tuple[int, ...]]]) -> int | None:
    """Return the index of the first choice of shapes with which every node can compute, as far as ONNX can tell."""
    bare = drop_weights(model, candidates[0])
    bare.metadata_props.add(key="candidates", value=json.dumps(list(map(dict, candidates))))
    limits = confined.ConfinedLimits(_MEMORY_BYTES, _HINT_TIMEOUT_S)
    answer = confined.call(f"{_CHILD}:find_fitting", bare.SerializeToString(), "no shapes were found", limits)
    number = int(answer) if answer.isdigit() else None
    return number if number is not None and number < len(candidates) else None


def _frame(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    """Make a model with the inputs (of these shapes) and outputs, but no nodes."""
    frame = onnx.ModelProto(ir_version=max(model.ir_version, 4), functions=model.functions)
    frame.opset_import.extend(model.opset_import)
    frame.graph.name = model.graph.name
    weights = {tensor.name for tensor in model.graph.initializer}
    frame.graph.input.extend(value for value in model.graph.input if value.name not in weights)
    for value in frame.graph.input:
        if value.name in shapes:
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, shapes[value.name]))
    frame.graph.output.extend(model.graph.output)
    frame.graph.sparse_initializer.extend(model.graph.sparse_initializer)
    return frame


def drop_weights(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    """Return the model with these input shapes, and its large weights, possibly gigabytes, as inputs."""
    bare = _frame(model, shapes)
    bare.graph.node.extend(node for node in model.graph.node if _large_constant(node) is None)
    for tensor in _weights(model.graph):
        if math.prod(tensor.dims) > _MOST_SHAPE:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            bare.graph.input.append(value)
        else:
            bare.graph.initializer.append(tensor)
    return bare


def _weights(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    """List the initializers and the large constants of nodes."""
    held = list(graph.initializer)
    for node in graph.node:
        if (tensor := _large_constant(node)) is not None:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = node.output[0]
            held.append(copy)
    return held


def _large_constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    if node.op_type != "Constant":
        return None
    values = (each.t for each in node.attribute if each.name == "value")
    return next((tensor for tensor in values if math.prod(tensor.dims) > _MOST_SHAPE), None)
