"""What artifacts are verified with: inputs that show wrong code, and that no table refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from farm.artifacts import checking
from farm.artifacts.given_model import GivenModel
from farm.artifacts.manifest import Tensor
from farm.artifacts.verify import compare
from farm.errors import UsageError
from farm.models.inputs import read_inputs
from farm.models.source import ModelSource
from tests.unit.artifacts import make_manifest

_OF_ONNX_RUNTIME = {
    "DynamicQuantizeMatMul": ["x", "w", "ws", "wz"],
    "MatMulIntegerToFloat": ["q", "w", "s", "ws", "z", "wz"],
    "QGemm": ["q", "s", "z", "w", "ws", "wz"],
}


def open_model(nodes: list[onnx.NodeProto], fed: dict[str, tuple[int, list[int]]], **tables: Any) -> GivenModel:
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info(name, *each) for name, each in fed.items()],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [onnx.numpy_helper.from_array(array, name) for name, array in tables.items()],
        ),
        opset_imports=[helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)],
        ir_version=8,
    )
    source = ModelSource("m", model.SerializeToString(), "0" * 64, "m.onnx")
    return GivenModel(source, read_inputs(model), make_manifest().model)


def make_cases(opened: GivenModel, given: Any = ()) -> dict[str, Any]:
    taken = tuple(Tensor(name=each.name, shape=each.static_shape, dtype=each.dtype) for each in opened.inputs)
    return dict(checking.make_cases(opened, make_manifest(inputs=taken), given))


def finds(kind: int, shape: list[int], right: Any, wrong: Any) -> bool:
    cases = make_cases(open_model([helper.make_node("Relu", ["x"], ["y"])], {"x": (kind, shape)}))
    return not all(compare([wrong(each["x"])], [right(each["x"])]).matches for each in cases.values())


def test_sums_that_cancel_or_stagnate_are_found() -> None:
    """A variance in float32 as the mean of squares less the square of the mean is found wrong. A mean in float16 that
    adds one number after another is found wrong.
    """
    assert finds(
        TensorProto.FLOAT,
        [4, 512],
        lambda x: x.astype("float64").var(axis=1).astype("float32"),
        lambda x: (x * x).mean(axis=1, dtype="float32") - x.mean(axis=1, dtype="float32") ** 2,
    )
    assert finds(
        TensorProto.FLOAT16,
        [1, 4096],
        lambda x: x.astype("float64").mean(axis=1).astype("float16"),
        lambda x: (np.cumsum(x, axis=1, dtype="float16")[:, -1:] / np.float16(4096)).reshape(1),
    )


@pytest.mark.parametrize("wrong", [lambda x: np.floor(x + 0.5), lambda x: x / (np.abs(x) + 1e-5)])
def test_ties_and_missing_epsilons_are_found(wrong: Any) -> None:
    """Halves rounded up instead of to even, and a lost epsilon, are found wrong."""
    right = np.round if wrong(np.float32(0.5)) == 1 else lambda x: np.sign(x)
    assert finds(TensorProto.FLOAT, [1, 256], right, wrong)


@pytest.mark.parametrize("operator", ["IsNaN", "IsInf"])
def test_a_model_that_asks_for_nan_gets_some(operator: str) -> None:
    """Inputs of a model with IsNaN or IsInf hold NaN and both infinities; those of another model none."""
    asking, other = ([helper.make_node(each, ["x"], ["y"])] for each in (operator, "Relu"))
    arrays = make_cases(open_model(asking, {"x": (TensorProto.FLOAT, [3, 20])}))["NaN and infinities"]
    assert {str(each) for each in arrays["x"][~np.isfinite(arrays["x"])]} == {"nan", "inf", "-inf"}
    for each in make_cases(open_model(other, {"x": (TensorProto.FLOAT, [3, 20])})).values():
        assert np.isfinite(each["x"]).all()


def test_given_inputs_replace_seeded_ones() -> None:
    """With inputs of the user's nothing else is tried; without, bytes take their whole range. An input of another shape
    is no case.
    """
    opened = open_model([helper.make_node("Cast", ["x"], ["y"], to=1)], {"x": (TensorProto.UINT8, [64, 64])})
    own = np.full((64, 64), 3, "uint8")
    assert list(make_cases(opened, [("own.npz", {"x": own})])) == ["own.npz"]
    assert all({0, 255} <= set(each["x"].flat) for each in make_cases(opened).values())
    opened = open_model([helper.make_node("Relu", ["x"], ["y"])], {"x": (TensorProto.FLOAT, [2])})
    with pytest.raises(UsageError, match="expected x"):
        make_cases(opened, [("own.npz", {"x": np.zeros(3, "float32")})])


@pytest.mark.parametrize(
    ("nodes", "rows"),
    [
        ([helper.make_node("Gather", ["table", "i"], ["y"])], 2),
        ([helper.make_node("Gather", ["table", "i"], ["y"], axis=-1)], 5),
        ([helper.make_node("GatherElements", ["table", "i"], ["y"], axis=1)], 5),
        ([helper.make_node("GatherND", ["table", "i"], ["y"])], 2),
        (
            [
                helper.make_node("Cast", ["i"], ["wide"], to=TensorProto.INT64),
                helper.make_node("Identity", ["table"], ["held"]),
                helper.make_node("Gather", ["held", "wide"], ["y"]),
            ],
            2,
        ),
        (
            [
                helper.make_node("Gather", ["big", "i"], ["a"]),
                helper.make_node("Gather", ["table", "i"], ["b"]),
                helper.make_node("Concat", ["a", "b"], ["y"], axis=1),
            ],
            2,
        ),
        ([helper.make_node("Gather", ["big", "i"], ["y"])], 300),
    ],
)
def test_indices_stay_within_their_table(nodes: list[onnx.NodeProto], rows: int) -> None:
    """Indices are read from the smallest table that they index, directly or through a cast, and reach both ends."""
    fed = {"i": (TensorProto.INT32, [4096])}
    opened = open_model(nodes, fed, table=np.zeros((2, 5), "float32"), big=np.zeros((300, 5), "float32"))
    assert opened.inputs[0].rows == rows
    for each in make_cases(opened).values():
        assert (each["i"].min(), each["i"].max()) == (0, rows - 1)


def test_inputs_are_nudged_by_rounding_alone() -> None:
    """Halves, infinities and integers stay: there, functions may jump, or nothing is rounded."""
    given = np.array([0.3, -7.1, 2.5, -1.0, 0.0, np.inf, np.nan], np.float32)
    moved = checking._nudge({"x": given, "n": np.arange(3)})
    off = moved["x"] != given
    assert off.tolist() == [True, True, False, False, False, False, True]  # NaN differs from itself
    np.testing.assert_allclose(moved["x"], given, rtol=2e-7)
    assert np.array_equal(moved["n"], np.arange(3))


@pytest.mark.parametrize("optimised", [True, False])
@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize(
    "operator", ["Conv", "MatMul", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", *_OF_ONNX_RUNTIME]
)
def test_the_reference_adds_8_bit_products_exactly(operator: str, is_constant: bool, optimised: bool) -> None:
    """64 products of 255 and 127 add up to what integers add up to, on processors whose 8-bit kernels saturate too."""
    is_conv = "Conv" in operator
    weights = np.full((1, 64, 1, 1) if is_conv else (64, 1), 127, np.int8)
    tables: dict[str, Any] = {
        name: np.array(value, kind)
        for name, value, kind in [("z", 0, "u1"), ("wz", 0, "i1"), ("s", 1 / 255, "f4"), ("ws", 0.01, "f4")]
    } | {"os": np.array(0.5, "f4")}
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])]
    if operator in _OF_ONNX_RUNTIME:
        nodes.append(helper.make_node(operator, _OF_ONNX_RUNTIME[operator], ["y"], domain="com.microsoft"))
    elif operator.endswith("Integer"):
        nodes.append(helper.make_node(operator, ["q", "w", "z", "wz"], ["sum"]))
        nodes.append(helper.make_node("Cast", ["sum"], ["y"], to=TensorProto.FLOAT))
    elif operator.startswith("Q"):
        nodes.append(helper.make_node(operator, ["q", "s", "z", "w", "ws", "wz", "os", "z"], ["o"]))
        nodes.append(helper.make_node("DequantizeLinear", ["o", "os", "z"], ["y"]))
    else:
        nodes.append(helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]))
        nodes.append(helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"]))
        nodes.append(helper.make_node(operator, ["d", "wd"], ["c"]))
        nodes.append(helper.make_node("QuantizeLinear", ["c", "os", "z"], ["o"]))
        nodes.append(helper.make_node("DequantizeLinear", ["o", "os", "z"], ["y"]))
    fed = {"x": (TensorProto.FLOAT, [1, 64, 1, 1] if is_conv else [1, 64])}
    if is_constant:
        tables["w"] = weights
    else:
        fed["w"] = (TensorProto.INT8, list(weights.shape))
    values = {"x": np.ones(fed["x"][1], "f4")} | ({} if is_constant else {"w": weights})
    source = open_model(nodes, fed, **tables).source
    run = checking.open_reference(source, optimised=optimised)
    wanted = 64 * 255 * 127 if operator.endswith("Integer") else 81.28 if operator in _OF_ONNX_RUNTIME else 81.5
    assert run(values)[0].item() == pytest.approx(wanted, rel=1e-6)
