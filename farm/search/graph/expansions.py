"""Bodies of operators: what an operator computes, as a graph of other operators, as ONNX's schemas publish it.

`folding.is_replaced` says which operators are replaced by theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from farm.search.graph import microsoft
from farm.search.graph.folding import STANDARD_DOMAINS, bodies


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
