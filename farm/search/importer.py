"""ONNX to Relax: what TVM's importer needs done first, and its errors in plain words.

Model files are found and checked in `farm.models`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from farm.errors import UsageError
from farm.search import tvm_env


def import_onnx(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Import an ONNX graph as a `tvm.IRModule` with constant weights and static `shapes` (input name -> shape).

    Raises UsageError naming the operator and the node where TVM has no converter for it.
    """
    tvm = tvm_env.load()
    from tvm.relax.frontend.onnx import from_onnx

    model = _rewrite_for_tvm(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return from_onnx(model, shape_dict={n: list(s) for n, s in shapes.items()}, keep_params_in_input=False)
    except tvm.error.OpNotImplemented as error:
        raise _unsupported(model, str(error)) from error
    except Exception as error:  # the importer raises whatever its converters stumble over
        raise _failed(model, error) from error


def _rewrite_for_tvm(model: onnx.ModelProto) -> onnx.ModelProto:
    """Drop what inference does not need and spell what TVM imports badly another way. Works on a copy."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    # ONNX IR < 4 lists initializers among the inputs; TVM would make them parameters of the function.
    constants = {i.name for i in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    del graph.input[:]
    graph.input.extend(inputs)

    outputs = {value.name for value in graph.output}
    read = {name for node in graph.node for name in node.input} | outputs
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = renamed.get(name, name)
        # Dropout is the identity at inference; TVM keeps it as an operator with two results, which layout
        # conversion cannot handle.
        if node.op_type == "Dropout" and node.output[0] not in outputs and not read.intersection(node.output[1:]):
            renamed[node.output[0]] = node.input[0]
        # TVM imports Sum as stack + reduce over a fifth dimension.
        elif node.op_type == "Sum" and len(node.input) >= 2:
            nodes.extend(_sum_as_adds(node))
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    _fold_constant_of_shape(graph)
    return copy


def _sum_as_adds(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    adds = []
    left = node.input[0]
    for index, right in enumerate(node.input[1:], start=1):
        last = index == len(node.input) - 1
        output = node.output[0] if last else f"{node.output[0]}__sum{index}"
        adds.append(onnx.helper.make_node("Add", [left, right], [output], name=f"{node.name}__add{index}"))
        left = output
    return adds


def _fold_constant_of_shape(graph: onnx.GraphProto) -> None:
    """Weights made by ConstantOfShape on a constant shape become initializers, so that shapes are known early."""
    constants = {i.name: i for i in graph.initializer}
    nodes = []
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in constants:
            shape = onnx.numpy_helper.to_array(constants[node.input[0]])
            value = next(
                (onnx.numpy_helper.to_array(a.t) for a in node.attribute if a.name == "value"), np.zeros(1, "f4")
            )
            array = np.full(tuple(int(d) for d in shape), value.flat[0], value.dtype)
            graph.initializer.append(onnx.numpy_helper.from_array(array, node.output[0]))
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for node in graph.node for name in node.input}
    kept = [i for i in graph.initializer if i.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _unsupported(model: onnx.ModelProto, message: str) -> UsageError:
    """Name the operators that TVM lists as unsupported, each with the first node that uses it."""
    named = [node for node in model.graph.node if re.search(rf"\b{re.escape(node.op_type)}\b", message)]
    firsts = {node.op_type: node for node in reversed(named)}
    if not firsts:
        return UsageError(f"TVM cannot import this model: {message.strip()}")
    listed = ", ".join(f"{op} (node {_node_name(node)})" for op, node in sorted(firsts.items()))
    return UsageError(
        f"TVM cannot import the operator {listed}",
        "Replace the operator in the model (onnx-simplifier or a newer export often does), or leave that part out.",
    )


def _failed(model: onnx.ModelProto, error: Exception) -> UsageError:
    """Find the node that the importer stumbled over by importing growing prefixes of the graph."""
    text = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {text[-1] if text else 'no message'}"
    return UsageError(f"TVM cannot import this model: {reason}")


def _node_name(node: onnx.NodeProto) -> str:
    return repr(node.name or (node.output[0] if node.output else "?"))
