"""Models that compute shapes, as exporters write them for inputs of any size, are imported and compute right."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.errors import UsageError
from farm.models import inputs as model_inputs
from farm.models import zoo
from farm.search import tvm_env
from farm.search.graph import folding, importer, pipelines
from tests.integration import onnx_graphs
from tests.integration.exported_graphs import GRAPHS, Shapes, Writer, quantised, unrolled_loop, yolo_head
from tests.integration.onnx_graphs import make_model, node, random

tvm = tvm_env.load()

# A product of matrices in float16 is rounded at every step.
TOLERANCES = {"float16": 1e-2}


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
def test_an_exported_model_computes_what_onnx_runtime_computes(
    build: Callable[[], tuple[onnx.ModelProto, Shapes]],
) -> None:
    """Shapes, If and Loop that follow from the inputs' shapes are folded, and the result is that of the model given."""
    model, shapes = build()
    host = tvm_env.make_target(tvm_env.host_target(1))
    module, used = pipelines.prepare(importer.import_onnx(model, shapes), host, pipelines.require_pipeline("graph/2"))
    executable = tvm.compile(pipelines.finish(module, host, None, used), target=host)
    for value in model.graph.input:
        kind = value.type.tensor_type.elem_type
        value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shapes[value.name]))
    assert onnx_graphs.largest_error(model, executable) < TOLERANCES.get(build.__name__, 1e-5)


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
def test_nothing_that_asks_for_shapes_is_left(build: Callable[[], tuple[onnx.ModelProto, Shapes]]) -> None:
    """Folding leaves no Shape, If or Loop, and no node whose size depends on values."""
    folded, sized_by_values = folding.fold(*build())
    assert not {each.op_type for each in folded.graph.node} & {"Shape", "Size", "If", "Loop", "Range"}
    assert not sized_by_values
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(folded, strict_mode=True))


def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    """A branch whose output is its last node's."""
    return helper.make_graph(list(nodes), name, [], [helper.make_tensor_value_info(nodes[-1].output[0], 1, None)])


def if_of_two_sizes(write: Writer) -> str:
    return str(
        write.op("If", write.op("Greater", write.op("ReduceSum", "x", keepdims=0), np.float32(0)),
                 then_branch=branch("then", helper.make_node("Relu", ["x"], ["one"])),
                 else_branch=branch("else", helper.make_node("Concat", ["x", "x"], ["two"], axis=1)))
    )  # fmt: skip


def largest(write: Writer) -> str:
    return str(write.op("Reshape", write.op("Cast", write.op("ReduceMax", "x", keepdims=0), to=7), [1]))


def loop_of(write: Writer, rounds: Any, going: Any) -> str:
    body = helper.make_graph(
        [helper.make_node("Tanh", ["state"], ["next"]), helper.make_node("Identity", ["going"], ["going_on"])],
        "body",
        [
            helper.make_tensor_value_info(n, k, s)
            for n, k, s in (("number", 7, []), ("going", 9, []), ("state", 1, None))
        ],
        [helper.make_tensor_value_info(n, k, s) for n, k, s in (("going_on", 9, []), ("next", 1, None))],
    )
    return str(write.op("Loop", rounds, going, "x", body=body))


SIZE, ROUNDS = "result whose size depends on computed values", "number of rounds"
REFUSED: Mapping[str, tuple[str, str, Callable[[Writer], str]]] = {
    "if": ("If", SIZE, if_of_two_sizes),
    "loop": ("Loop", ROUNDS, lambda w: loop_of(w, w.op("Squeeze", largest(w), [0]), np.array(True))),
    "endless loop": ("Loop", ROUNDS, lambda w: loop_of(w, "", np.array(True))),
    "non-zero": ("NonZero", SIZE, lambda w: w.op("Cast", w.op("NonZero", "x"), to=1)),
    "compress": ("Compress", SIZE, lambda w: w.op(
        "Compress", "x", w.op("Reshape", w.op("Greater", "x", np.float32(0)), [-1]))),
    "reshape": ("Reshape", SIZE, lambda w: w.op("Reshape", "x", w.op("Concat", largest(w), [-1], axis=0))),
    "slice": ("Slice", SIZE, lambda w: w.op("Slice", "x", [0], largest(w), [1])),
    "range": ("Range", SIZE, lambda w: w.op(
        "Cast", w.op("Range", np.array(0), w.op("Squeeze", largest(w), [0]), np.array(1)), to=1)),
    "expand": ("Expand", SIZE, lambda w: w.op("Expand", np.float32(1), largest(w))),
    "top-k": ("TopK", SIZE, lambda w: w.op("TopK", "x", largest(w), outputs=2, axis=1)[0]),
    "lstm": ("LSTM", "sequences of different lengths", lambda w: w.op(
        "LSTM", w.op("Unsqueeze", "x", [0]), random(1, 32, 4), random(1, 32, 8), random(1, 64), np.array([1], "int32"),
        outputs=3, hidden_size=8)[0]),
    "position in a sequence": ("SequenceAt", "constant position", lambda w: w.op(
        "SequenceAt", w.op("SplitToSequence", "x", np.array(1), axis=1), w.op("Squeeze", largest(w), [0]))),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_depends_on_values_is_refused_by_operator_and_node(case: str) -> None:
    """The operator, the node, a reason in plain words and what to do about it; no assertion, nor a class of errors."""
    operator, reason, build = REFUSED[case]
    write = Writer()
    model = write.model({"x": ("N", 4)}, {build(write): TensorProto.FLOAT})
    with pytest.raises(UsageError, match=rf"{operator} \(node '{operator}_\d+'\).*{reason}") as raised:
        importer.import_onnx(model, {"x": (1, 4)})
    assert "Error:" not in raised.value.message
    assert raised.value.hint
    assert (raised.value.hint == importer.HINT) == (operator == "SequenceAt")


def test_what_asks_for_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models without computed shapes, the zoo's among them, are imported as they are: their workloads stay the same."""
    monkeypatch.setattr(folding, "fold", lambda *_: pytest.fail("folded"))
    for name in ("tiny-cnn", "mobilenet_v2", "yolov4-tiny", "inception_v3"):
        assert not folding.is_needed(onnx.load_model_from_string(zoo.ZOO[name].build()))
    model = onnx.load_model_from_string(zoo.ZOO["tiny-cnn"].build())
    importer.import_onnx(model, {i.name: i.static_shape for i in model_inputs.read_inputs(model)})


def test_what_need_not_or_cannot_be_folded_is_left_alone() -> None:
    """Its bytes, by which it is known, are the same after the import. A model of a few bytes that asks for an array of
    terabytes is folded without making it.
    """
    model, shapes = yolo_head()
    before = model.SerializeToString(deterministic=True)
    importer.import_onnx(model, shapes)
    assert model.SerializeToString(deterministic=True) == before
    nodes = [node("Expand", "one large", "a"), node("ReduceSum", "a", "b", keepdims=0), node("Add", "x b", "y")]
    model = make_model(nodes, {"x": (1,)}, {"one": random(1), "large": np.array([1 << 20, 1 << 20])})
    folded, _ = folding.fold(model, {"x": (1,)})
    assert [each.op_type for each in folded.graph.node] == ["Expand", "ReduceSum", "Add"]


def test_models_in_8_bits_stay_so() -> None:
    """Weights in 8 bits are not turned into floats, though they are constant."""
    model, shapes = quantised()

    def counts(graph: onnx.GraphProto) -> dict[str, int]:
        found = collections.Counter(each.op_type for each in graph.node)
        return {name: found[name] for name in ("QuantizeLinear", "DequantizeLinear")}

    folded, _ = folding.fold(model, shapes)
    assert counts(folded.graph) == counts(model.graph)
    assert counts(folded.graph)["DequantizeLinear"] == 3


def test_large_weights_come_back_as_they_were() -> None:
    """Initializers, and constants that are nodes; they do not travel to the process that folds."""
    held, constant = random(4, 4000), random(4000, 2)
    nodes = [
        node("Constant", "", "c", value=numpy_helper.from_array(constant)),
        node("Shape", "x", "s"),
        node("Slice", "s zero one", "rows"),
        node("Concat", "rows rest", "t", axis=0),
        node("MatMul", "x w", "a"),
        node("Reshape", "a t", "b"),
        node("MatMul", "b c", "y"),
    ]
    numbers = {"zero": np.array([0]), "one": np.array([1]), "rest": np.array([4000])}
    model = make_model(nodes, {"x": (3, 4)}, {"w": held, **numbers})
    folded, _ = folding.fold(model, {"x": (3, 4)})
    tensors = {each.name: numpy_helper.to_array(each) for each in folded.graph.initializer}
    assert np.array_equal(tensors["w"], held)
    assert np.array_equal(tensors["c"], constant)
    assert [each.op_type for each in folded.graph.node] == ["MatMul", "Reshape", "MatMul"]


def test_branches_that_stand_twice_do_not_mix() -> None:
    """Two Ifs and two Loops with equal names inside keep their weights and results apart."""
    model, shapes = unrolled_loop()
    loop = next(each for each in model.graph.node if each.op_type == "Loop")
    again = onnx.NodeProto()
    again.CopyFrom(loop)
    again.name, again.output[:] = "again", ["last_again", "peaks_again"]
    again.input[2] = loop.output[0]
    model.graph.node.append(again)
    model.graph.output.append(helper.make_tensor_value_info("last_again", TensorProto.FLOAT, None))
    folded, _ = folding.fold(model, shapes)
    values = {"frames": random(*shapes["frames"])}
    theirs, ours = (onnx_graphs.run_onnx_runtime(each, values) for each in (model, folded))
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
