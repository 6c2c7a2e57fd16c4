"""LSTM, GRU and RNN as loops, beside ONNX Runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from farm.errors import UsageError
from farm.search import tvm_env, workloads
from farm.search.graph import importer, pipelines

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
INPUTS = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator with what it is given: steps, batch, hidden size; which optional inputs, and attributes."""

    operator: str
    sizes: tuple[int, int, int]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    has_state: bool = True
    has_bias: bool = True
    has_peepholes: bool = False


CASES = {
    "lstm": Case("LSTM", (5, 1, 8), has_state=False),
    "lstm, both directions, peepholes": Case("LSTM", (4, 3, 10), {"direction": "bidirectional"}, has_peepholes=True),
    "lstm, backwards, clipped": Case("LSTM", (4, 2, 8), {"direction": "reverse", "clip": 0.5}),
    "gru, without bias": Case("GRU", (5, 2, 7), has_bias=False),
    "gru, reset after the product": Case("GRU", (5, 2, 8), {"linear_before_reset": 1, "direction": "bidirectional"}),
    "rnn, two activations": Case("RNN", (6, 1, 6), {"direction": "bidirectional", "activations": ["Relu", "Tanh"]}),
}


def make_model(case: Case) -> onnx.ModelProto:
    draw = np.random.default_rng(1)
    steps, batch, hidden = case.sizes
    directions = 2 if case.attributes.get("direction") == "bidirectional" else 1
    columns = _GATES[case.operator] * hidden
    weights: list[onnx.TensorProto] = []

    def weight(name: str, wanted: bool, *shape: int) -> str:
        if wanted:
            values = draw.standard_normal(shape, dtype="float32") * np.float32(0.4)
            weights.append(onnx.numpy_helper.from_array(values, name))
        return name if wanted else ""

    inputs = ["x", weight("w", True, directions, columns, INPUTS), weight("r", True, directions, columns, hidden)]
    inputs += [weight("b", case.has_bias, directions, 2 * columns), ""]
    inputs.append(weight("h0", case.has_state, directions, batch, hidden))
    outputs = ["y", "h"]
    if case.operator == "LSTM":
        inputs.append(weight("c0", case.has_state, directions, batch, hidden))
        inputs.append(weight("p", case.has_peepholes, directions, 3 * hidden))
        outputs.append("c")
    node = helper.make_node(case.operator, inputs, outputs, hidden_size=hidden, **case.attributes)
    graph = helper.make_graph(
        [node],
        "recurrent",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (steps, batch, INPUTS))],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def run(model: onnx.ModelProto, x: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    tvm = tvm_env.load_compiler()
    from tvm import relax

    target = tvm_env.make_target(tvm_env.host_target(1))
    prepared, used = pipelines.prepare(
        importer.import_onnx(model, {"x": x.shape}), target, pipelines.require_pipeline("graph/2")
    )
    kinds = {each.kind for each in workloads.extract(prepared, target, {}, used.name)}
    assert "dense" in kinds  # the product of the inputs; the loops are no workloads
    assert not kinds & {"lstm", "gru", "rnn"}
    executable = relax.build(pipelines.finish(prepared, target, None, used), target)
    outputs = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x))
    return [each.numpy() for each in outputs]


@pytest.mark.parametrize("name", CASES)
def test_what_comes_out_is_what_onnx_runtime_gives(name: str) -> None:
    """All states, the last state and the last cells."""
    model = make_model(CASES[name])
    steps, batch, _ = CASES[name].sizes
    x = np.random.default_rng(2).standard_normal((steps, batch, INPUTS), dtype="float32")
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    for ours, theirs in zip(run(model, x), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize(("pipeline_name", "calls"), [("graph/2", 0), ("graph/2-exact", 3)])
def test_gates_are_polynomials_where_the_pipeline_has_them(pipeline_name: str, calls: int) -> None:
    """Also for states that grow beyond what TVM's polynomial of the tangent holds."""
    model = make_model(CASES["lstm"])
    for each in model.graph.initializer:
        each.CopyFrom(onnx.numpy_helper.from_array(40 * onnx.numpy_helper.to_array(each), each.name))
    x = np.random.default_rng(2).standard_normal((*CASES["lstm"].sizes[:2], INPUTS), dtype="float32")
    target = tvm_env.make_target(tvm_env.host_target(1))
    imported = importer.import_onnx(model, {"x": x.shape})
    prepared, used = pipelines.prepare(imported, target, pipelines.require_pipeline(pipeline_name))
    loop = next(f for v, f in prepared.functions_items() if v.name_hint.startswith("lstm"))
    assert (used.name, loop.script().count("T.sigmoid(")) == (pipeline_name, calls)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    for ours, theirs in zip(run(model, x), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_the_batch_may_come_first() -> None:
    """`layout` 1, which ONNX Runtime has not got, is the other layout turned round."""
    case = CASES["lstm, both directions, peepholes"]
    steps, batch, _ = case.sizes
    plain = make_model(case)
    turned = make_model(case)
    turned.graph.node[0].attribute.append(helper.make_attribute("layout", 1))
    for each in turned.graph.initializer:
        if each.name in ("h0", "c0"):
            state = onnx.numpy_helper.to_array(each).swapaxes(0, 1)
            each.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(state), each.name))
    x = np.random.default_rng(2).standard_normal((steps, batch, INPUTS), dtype="float32")
    y, h, c = run(plain, x)
    turned_y, turned_h, turned_c = run(turned, np.ascontiguousarray(x.swapaxes(0, 1)))
    np.testing.assert_array_equal(turned_y, y.transpose(2, 0, 1, 3))
    np.testing.assert_array_equal(turned_h, h.swapaxes(0, 1))
    np.testing.assert_array_equal(turned_c, c.swapaxes(0, 1))


def test_the_length_of_a_sequence_is_no_code() -> None:
    """512 steps are the same loop as 2."""
    short, long = (dataclasses.replace(CASES["lstm"], sizes=(steps, 1, 8)) for steps in (2, 512))
    texts = [str(importer.import_onnx(make_model(each), {"x": (each.sizes[0], 1, INPUTS)})) for each in (short, long)]
    assert len(texts[0].splitlines()) == len(texts[1].splitlines())


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [({"activations": ["Elu", "Tanh", "Tanh"]}, "activation Elu"), ({"input_forget": 1}, "attribute input_forget")],
)
def test_what_is_not_done_is_refused_by_name(attributes: Mapping[str, Any], reason: str) -> None:
    """By operator and node, with what it is that is not done, and no advice about sequences."""
    model = make_model(dataclasses.replace(CASES["lstm"], attributes=attributes))
    with pytest.raises(UsageError, match=rf"LSTM .*does not support the {reason}") as raised:
        importer.import_onnx(model, {"x": (5, 1, INPUTS)})
    assert "sequence" not in raised.value.hint
