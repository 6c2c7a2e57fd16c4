"""The confined process of `folding`: compute what follows from a graph's input shapes.

One walk visits the nodes in execution order. A node with known inputs is evaluated, any other has its result shapes
inferred. `If`, `Loop`, `Scan` and operators with a body are inlined; they share the walk's state, so one module.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx.reference
import onnx.version_converter

from farm.search.graph import microsoft
from farm.search.graph.evaluation import COMPUTED, MOST_NUMBERS, Array, count, evaluate, find_sizes
from farm.search.graph.folding import (
    NUMBERS,
    SIZED_BY_VALUES,
    STANDARD_DOMAINS,
    find_body,
    is_replaced,
    names_read_by,
    node_label,
    renamed,
)

# Limits on an inlined Loop.
_MOST_ROUNDS, _MOST_NODES = 4096, 100_000
# ONNX Runtime's operators, unknown to ONNX: the first result has the type of the first operand.
_LIKE_FIRST = frozenset({"BiasGelu", "FastGelu", "Gelu", "QuickGelu", "SkipLayerNormalization"})
_LIKE_OTHERS = {"DynamicQuantizeLSTM": "LSTM"}

# Operators that keep the elements and their order; Expand does where it repeats nothing.
_RESHAPING = frozenset({"Expand", "Flatten", "Reshape", "Squeeze", "Unsqueeze"})


def fold(data: bytes) -> bytes:
    """Fold the model; `metadata_props` then name the nodes, by first output, whose result sizes depend on values."""
    model = onnx.ModelProto.FromString(data)
    newer = any(node.op_type in microsoft.NEWER and microsoft.is_known(node) for node in model.graph.node)
    if newer and _read_opset(model) < microsoft.NEWER_OPSET:
        model = onnx.version_converter.convert_version(model, microsoft.NEWER_OPSET)
    folder = Folder(model)
    del model.metadata_props[:]
    for name in folder.write(model.graph):
        model.metadata_props.add(key=name)
    answer: bytes = model.SerializeToString()
    return answer


def find_fitting(data: bytes) -> bytes:
    """Return the index of the first choice of shapes that all nodes accept, as text; "" where there is none.

    `metadata_props` hold the choices as JSON.
    """
    model = onnx.ModelProto.FromString(data)
    for number, shapes in enumerate(json.loads(model.metadata_props[0].value)):
        for value in model.graph.input:
            if value.name in shapes:
                kind = value.type.tensor_type.elem_type
                value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, shapes[value.name]))
        if Folder(model, ends_at_misfit=True).fits:
            return str(number).encode()
    return b""


class Folder:
    """A walk over a model's graph. `fits`: all nodes can compute with the shapes of their inputs."""

    def __init__(self, model: onnx.ModelProto, ends_at_misfit: bool = False) -> None:
        self.fits = True
        self._opsets = list(model.opset_import)
        self._versions = {each.domain: each.version for each in self._opsets} | {"": _read_opset(model)}
        self._ir_version = model.ir_version
        self._nodes: list[onnx.NodeProto] = []
        self._known: dict[str, Array] = {}
        # As given; some types and the large ones of branches are not computed with.
        self._tensors: dict[str, onnx.TensorProto] = {}
        self._types: dict[str, onnx.TypeProto] = {}
        # Renamed values: results of an If or a Loop, by what replaced them.
        self._names: dict[str, str] = {}
        # Depth of bodies around a node; by reshaped value, the values that it was made of, the oldest first.
        self._in_body = 0
        self._sources: dict[str, list[str]] = {}
        for value in model.graph.input:
            self._types[value.name] = value.type
        for tensor in model.graph.initializer:
            self._add_tensor(tensor, tensor.name)
        for node in model.graph.node:
            self._visit(node)
            if ends_at_misfit and not self.fits:
                break

    def write(self, graph: onnx.GraphProto) -> list[str]:
        """Write what is left into the graph. Return the nodes, by first output, whose result sizes depend on values."""
        for value in graph.output:
            name = self._names.get(value.name, value.name)
            if name in self._known:
                tensor = onnx.numpy_helper.from_array(self._known[name])
                self._nodes.append(onnx.helper.make_node("Constant", [], [value.name], value.name, value=tensor))
            elif name != value.name:
                self._nodes.append(onnx.helper.make_node("Identity", [name], [value.name], value.name))
        wanted = {value.name for value in graph.output}
        kept = []
        for node in reversed(self._nodes):
            if wanted.intersection(node.output):
                kept.append(node)
                wanted.update(names_read_by(node))
        del graph.node[:], graph.initializer[:]
        graph.node.extend(reversed(kept))
        made = {name for node in kept for name in node.output}
        for name in sorted(wanted - made):
            if name in self._tensors:
                graph.initializer.append(self._tensors[name])
            elif name in self._known:
                graph.initializer.append(onnx.numpy_helper.from_array(self._known[name], name))
        return [node_label(node) for node in reversed(kept) if self._is_open(node)]

    def _is_open(self, node: onnx.NodeProto) -> bool:
        """Say whether a node with operands of known shape has a result whose size depends on their values."""
        if node.domain not in STANDARD_DOMAINS or node.op_type not in SIZED_BY_VALUES | NUMBERS.keys():
            return False
        given = [self._types.get(name) for name in names_read_by(node)]
        made = [self._types.get(name) for name in node.output if name]
        return all(find_sizes(kind) is not None for kind in given) and any(find_sizes(kind) is None for kind in made)

    def _add_tensor(self, tensor: onnx.TensorProto, name: str) -> None:
        self._types[name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        copy = onnx.TensorProto()
        copy.CopyFrom(tensor)
        copy.name = name
        self._tensors[name] = copy
        if tensor.data_type in COMPUTED and math.prod(tensor.dims) <= MOST_NUMBERS:
            self._known[name] = onnx.numpy_helper.to_array(tensor)

    def _visit(self, node: onnx.NodeProto) -> None:
        node = renamed(node, self._names)
        if node.domain in STANDARD_DOMAINS:
            if node.op_type == "If" and self._replace_if(node):
                return
            if node.op_type == "Loop" and self._replace_loop(node):
                return
            if node.op_type == "Scan" and self._replace_scan(node):
                return
        if is_replaced(node) and self._replace_by_body(node):
            return
        types = self._infer(node)
        self.fits = self.fits and self._is_possible(node, types)
        self._types |= types
        values = evaluate(node, types, self._types, self._known, self._opsets, self._ir_version)
        if values is None:
            if self._in_body and (same := self._find_same(node, types)):
                self._names[node.output[0]] = same
            else:
                self._nodes.append(node)
            return
        for name, array in values.items():
            self._keep(name, array)

    def _infer(self, node: onnx.NodeProto) -> dict[str, onnx.TypeProto]:
        """Infer the types of a node's results."""
        domain = "" if node.domain in STANDARD_DOMAINS else node.domain
        read = names_read_by(node)
        if any(name not in self._types for name in node.input if name):
            return {}
        try:
            schema = onnx.defs.get_schema(node.op_type, self._versions.get(domain, 1), domain)
            types = {name: self._types[name] for name in read if name in self._types}
            data = {name: onnx.numpy_helper.from_array(self._known[name], name) for name in read if name in self._known}
            return dict(
                onnx.shape_inference.infer_node_outputs(
                    schema, node, types, data, opset_imports=self._opsets, ir_version=self._ir_version
                )
            )
        except onnx.defs.SchemaError:
            if node.op_type in _LIKE_OTHERS:
                return self._infer(_respelt(node))
            like = self._types[node.input[0]] if node.op_type in _LIKE_FIRST and node.input else None
            return {} if like is None else {node.output[0]: like}
        except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
            self.fits = False
            return {}

    def _is_possible(self, node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto]) -> bool:
        """Check what ONNX's inference accepts: windows larger than the image, Reshape to another number of elements."""
        made = [find_sizes(types.get(name)) for name in node.output]
        if node.op_type == "Reshape":
            given = find_sizes(self._types.get(node.input[0]))
            if given is not None and made[0] is not None and math.prod(given) != math.prod(made[0]):
                return False
        windows = node.op_type in ("Conv", "MaxPool", "AveragePool", "LpPool", "ConvTranspose")
        return not windows or all(min(sizes or (1,)) > 0 for sizes in made)

    def _replace_by_body(self, node: onnx.NodeProto) -> bool:
        """Put an operator's body in its place, where its inputs' types are known."""
        types = [self._types.get(name) for name in node.input]
        if any(name and kind is None for name, kind in zip(node.input, types, strict=True)):
            return False
        body = find_body(node, self._versions, types)
        if body is None:
            return False
        given = [*node.input, *([""] * len(body.input))]
        bound = dict(zip((value.name for value in body.input), given, strict=False))
        self._in_body += 1
        found = self._inline(body, f"{node_label(node)}/", bound)
        self._in_body -= 1
        self._names.update((name, value) for name, value in zip(node.output, found, strict=False) if name)
        return True

    def _find_same(self, node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto]) -> str:
        """Return a value that equals a node's result, or ""; bodies add zeros, cast to one type, expand by one."""
        made = types.get(node.output[0])
        if made is None:
            return ""
        candidates = list(node.input[:1])
        if node.op_type in _RESHAPING:
            candidates = self._sources.setdefault(
                node.output[0], [*self._sources.get(node.input[0], ()), node.input[0]]
            )
            if node.op_type == "Expand" and count(self._types.get(node.input[0])) != count(made):
                del self._sources[node.output[0]]
                return ""
        elif node.op_type == "Add":
            candidates = [a for a, b in itertools.permutations(node.input) if not self._known.get(b, np.ones(1)).any()]
        elif node.op_type == "Where":
            condition = self._known.get(node.input[0])
            if condition is None or condition.all() != condition.any():
                return ""
            candidates = [node.input[1 if condition.all() else 2]]
        elif node.op_type not in ("Cast", "CastLike", "Identity"):
            return ""
        return next((name for name in candidates if self._types.get(name) == made), "")

    def _replace_if(self, node: onnx.NodeProto) -> bool:
        """Inline the branch taken, where the condition is known."""
        condition = self._known.get(node.input[0])
        if condition is None or condition.size != 1:
            return False
        wanted = "then_branch" if condition.item() else "else_branch"
        branch = next(each.g for each in node.attribute if each.name == wanted)
        found = self._inline(branch, f"{node_label(node)}/", {})
        self._names.update(zip(node.output, found, strict=False))
        return True

    def _replace_loop(self, node: onnx.NodeProto) -> bool:
        """Unroll a Loop, where the number of rounds is known."""
        most, go = ((self._known.get(name) if name else None) for name in (*node.input, "", "")[:2])
        unknown = [name for name in node.input[:2] if name and name not in self._known]
        if unknown or (most is None and go is None):
            return False
        rounds = _MOST_ROUNDS + 1 if most is None else int(most.item())
        going = go is None or bool(go.item())
        body = next(each.g for each in node.attribute if each.name == "body")
        before = len(self._nodes), dict(self._known), dict(self._types), dict(self._names), self.fits
        carried = list(node.input[2:])
        stacked: list[list[str]] = [[] for _ in node.output[len(carried) :]]
        number = 0
        while going and number < rounds:
            prefix = f"{node_label(node)}/{number}/"
            constants = (("number", np.array(number, "int64")), ("going", np.array(True)))
            given = [*(self._keep(f"{prefix}{name}", array) for name, array in constants), *carried]
            found = self._inline(body, prefix, dict(zip((v.name for v in body.input), given, strict=False)))
            condition = self._known.get(found[0])
            number += 1
            if condition is None or number > _MOST_ROUNDS or len(self._nodes) > _MOST_NODES:
                break
            going, carried = bool(condition.item()), found[1 : 1 + len(carried)]
            for names, name in zip(stacked, found[1 + len(carried) :], strict=False):
                names.append(name)
        else:
            if number or not stacked:
                self._names.update(zip(node.output, carried, strict=False))
                for name, rows in zip(node.output[len(carried) :], stacked, strict=False):
                    if name:
                        self._stack(rows, name)
                return True
        del self._nodes[before[0] :]
        _, self._known, self._types, self._names, self.fits = before
        return False

    def _replace_scan(self, node: onnx.NodeProto) -> bool:
        """Unroll a Scan over dimensions of known size."""
        given = {each.name: each for each in node.attribute}
        body, count = given["body"].g, given["num_scan_inputs"].i
        states, scanned = list(node.input[:-count]), node.input[-count:]
        shapes = [find_sizes(self._types.get(name)) for name in scanned]
        if self._versions[""] < 9 or not all(shapes):  # opset 8 has a batch, and lengths of each of its sequences
            return False
        results = node.output[len(states) :]

        def read(name: str, count: int) -> list[int]:
            return list(given[name].ints) if name in given else [0] * count

        axes, ways = read("scan_input_axes", count), read("scan_input_directions", count)
        rounds = (shapes[0] or ())[axes[0]]
        if not 0 < rounds <= _MOST_ROUNDS or rounds * len(body.node) > _MOST_NODES:
            return False
        rows: list[list[str]] = [[] for _ in results]
        for number in range(rounds):
            prefix = f"{node_label(node)}/{number}/"
            parts = []
            for at, (name, axis, backward) in enumerate(zip(scanned, axes, ways, strict=True)):
                parts.append(f"{prefix}part{at}")
                index = self._keep(f"{parts[-1]}/index", np.array(rounds - 1 - number if backward else number))
                self._visit(onnx.helper.make_node("Gather", [name, index], parts[-1:], parts[-1], axis=axis))
            bound = dict(zip((value.name for value in body.input), [*states, *parts], strict=True))
            found = self._inline(body, prefix, bound)
            states = found[: len(states)]
            for names, name in zip(rows, found[len(states) :], strict=False):
                names.append(name)
        self._names.update(zip(node.output, states, strict=False))
        axes, ways = read("scan_output_axes", len(results)), read("scan_output_directions", len(results))
        for name, names, axis, backward in zip(results, rows, axes, ways, strict=True):
            if name:
                self._stack(names[::-1] if backward else names, name, axis)
        return True

    def _keep(self, name: str, array: Array) -> str:
        """Add a constant; return its name."""
        self._known[name] = array
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        self._types[name] = onnx.helper.make_tensor_type_proto(kind, array.shape)
        return name

    def _stack(self, rows: Iterable[str], name: str, axis: int = 0) -> None:
        """Stack the results of a Loop's or a Scan's rounds along a new dimension."""
        parts = []
        for number, row in enumerate(rows):
            part = f"{name}/{number}"
            if self._versions[""] < 13:
                self._visit(onnx.helper.make_node("Unsqueeze", [row], [part], part, axes=[axis]))
            else:
                axes = self._keep(f"{name}/axes", np.array([axis]))
                self._visit(onnx.helper.make_node("Unsqueeze", [row, axes], [part], part))
            parts.append(part)
        self._visit(onnx.helper.make_node("Concat", parts, [name], name, axis=axis))

    def _inline(self, body: onnx.GraphProto, prefix: str, bound: Mapping[str, str]) -> list[str]:
        """Visit the nodes of an inner graph under unique names; return the names of its outputs."""
        names = dict(bound)
        for tensor in body.initializer:
            names[tensor.name] = f"{prefix}{tensor.name}"
            self._add_tensor(tensor, names[tensor.name])
        for node in body.node:
            copy = renamed(node, names)
            if copy.name:
                copy.name = f"{prefix}{copy.name}"
            for position, name in enumerate(node.output):
                if name:
                    names[name] = copy.output[position] = f"{prefix}{name}"
            self._visit(copy)
        found = [names.get(value.name, value.name) for value in body.output]
        return [self._names.get(name, name) for name in found]


def _respelt(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return ONNX's operator whose results have the same types; the weights do not decide them."""
    copy = onnx.NodeProto(op_type=_LIKE_OTHERS[node.op_type], input=[node.input[0]] * 3, output=node.output)
    copy.attribute.extend(node.attribute)
    return copy


def _read_opset(model: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operators."""
    return next((each.version for each in model.opset_import if each.domain in STANDARD_DOMAINS), 1)
