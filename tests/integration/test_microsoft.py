"""ONNX Runtime's own operators, as its optimiser and quantiser write them, give what ONNX Runtime gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from farm.artifacts.compile import compile_model
from farm.models.quantise import open_session
from farm.search import tvm_env
from tests.onnx_suite import cases, judging

RNG = np.random.default_rng(7)


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype("float32")


def bytes_(*shape: int, dtype: str = "uint8") -> Any:
    low = 0 if dtype == "uint8" else -128
    return RNG.integers(low, low + 256, shape).astype(dtype)


def lstm(directions: int, zero: Any) -> list[Any]:
    """Inputs of DynamicQuantizeLSTM; the zero points are of both weights."""
    weights = [bytes_(directions, depth, 32, dtype=str(zero.dtype)) for depth in (12, 8)]
    if zero.dtype == np.int8:  # two products fit 16 bits: ONNX Runtime's sums saturate where x86-64 has no VNNI
        weights = [each // 2 for each in weights]
    states = [floats(directions, 1, 8), floats(directions, 1, 8)]
    scale = np.abs(floats(*zero.shape)) / 100
    return [
        floats(6, 1, 12),
        *weights,
        floats(directions, 64),
        None,
        *states,
        floats(directions, 24),
        *(scale, zero) * 2,
    ]


SCALE, OTHER = np.float32(0.04), np.float32(0.03)
ZERO, MIDDLE = np.uint8(120), np.uint8(128)

# Operator, inputs (the first is the model's, the others are weights), attributes, and which results count.
OPERATORS: dict[str, tuple[str, list[Any], dict[str, Any], tuple[int, ...]]] = {
    "matmul": ("FusedMatMul", [floats(2, 4, 3), floats(2, 4, 5)], {"transA": 1, "alpha": 0.5}, (0,)),
    "gemm": ("FusedGemm", [floats(4, 3), floats(5, 3), floats(5)], {"transB": 1, "activation": "Relu"}, (0,)),
    "conv": ("FusedConv", [floats(1, 4, 6, 6), floats(8, 4, 3, 3), floats(8)], {"activation": "Relu"}, (0,)),
    "conv_leaky": (
        "FusedConv",
        [floats(1, 4, 6, 6), floats(8, 4, 3, 3), floats(8)],
        {"activation": "LeakyRelu", "activation_params": [0.2], "pads": [1, 1, 1, 1]},
        (0,),
    ),
    "quick_gelu": ("QuickGelu", [floats(3, 9)], {}, (0,)),
    "skip_norm": ("SkipLayerNormalization", [floats(2, 3, 8), floats(2, 3, 8), floats(8), floats(8)], {}, (0, 3)),
    "skip_norm_bias": (
        "SkipLayerNormalization",
        [floats(2, 3, 8), floats(2, 3, 8), floats(8), floats(8), floats(8)],
        {"epsilon": 1e-5},
        (0,),
    ),
    "skip_rms": ("SkipSimplifiedLayerNormalization", [floats(2, 3, 8), floats(2, 3, 8), floats(8)], {}, (0, 3)),
    "add": ("QLinearAdd", [bytes_(2, 8), SCALE, ZERO, bytes_(2, 8), OTHER, MIDDLE, SCALE, ZERO], {}, (0,)),
    "multiply": ("QLinearMul", [bytes_(2, 8), SCALE, ZERO, bytes_(2, 8), OTHER, MIDDLE, SCALE, ZERO], {}, (0,)),
    "sigmoid": ("QLinearSigmoid", [bytes_(2, 8), SCALE, ZERO, np.float32(1 / 256), np.uint8(0)], {}, (0,)),
    "leaky": ("QLinearLeakyRelu", [bytes_(2, 8), SCALE, ZERO, SCALE, ZERO], {"alpha": 0.1}, (0,)),
    "average": ("QLinearGlobalAveragePool", [bytes_(1, 4, 5, 5), SCALE, ZERO, OTHER, MIDDLE], {}, (0,)),
    "concat": (
        "QLinearConcat",
        [SCALE, ZERO, bytes_(2, 8), SCALE, ZERO, bytes_(2, 4), OTHER, MIDDLE],
        {"axis": 1},
        (0,),
    ),
    "gemm_8": (
        "QGemm",
        [
            bytes_(4, 16),
            SCALE,
            ZERO,
            bytes_(16, 8),
            OTHER,
            MIDDLE,
            np.arange(8, dtype="int32") * 50,
            np.float32(0.2),
            ZERO,
        ],
        {},
        (0,),
    ),
    "few_bits": (
        "MatMulNBits",
        [floats(3, 40), bytes_(6, 3, 8), np.abs(floats(6, 3)), bytes_(6, 2)],
        {"K": 40, "N": 6, "bits": 4, "block_size": 16},
        (0,),
    ),
    "groups": (
        "GroupQueryAttention",
        [
            floats(1, 3, 64),
            floats(1, 3, 32),
            floats(1, 3, 32),
            floats(1, 2, 5, 16),
            floats(1, 2, 5, 16),
            np.array([7], "int32"),
            np.array(8, "int32"),
            floats(16, 8),
            floats(16, 8),
        ],
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1},
        (0, 1, 2),
    ),
    "groups_packed": (
        "GroupQueryAttention",
        [floats(2, 3, 64), None, None, None, None, np.array([2, 1], "int32"), np.array(3, "int32")],
        {"num_heads": 4, "kv_num_heads": 2, "scale": 0.5},
        (0,),
    ),
    "heads": (
        "MultiHeadAttention",
        [
            floats(2, 3, 16),
            floats(2, 5, 16),
            floats(2, 5, 16),
            floats(48),
            np.array([[1, 1, 1, 0, 0], [1] * 5], "int32"),
        ],
        {"num_heads": 2},
        (0,),
    ),
    "dynamic_lstm": ("DynamicQuantizeLSTM", lstm(1, np.zeros(1, "int8")), {"hidden_size": 8}, (0, 1, 2)),
    "dynamic_lstm_columns": (
        "DynamicQuantizeLSTM",
        lstm(2, np.full((2, 32), 128, "uint8")),
        {"hidden_size": 8, "direction": "bidirectional"},
        (0,),
    ),
    "to_float": ("MatMulIntegerToFloat", [bytes_(4, 16), bytes_(16, 8), SCALE, OTHER, ZERO, MIDDLE], {}, (0,)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_it_gives_what_onnx_runtime_gives(name: str) -> None:
    """Equal floats up to rounding; bytes that differ by one at most, where a sum lies between two."""
    operator, inputs, attributes, wanted = OPERATORS[name]
    first = next(at for at, each in enumerate(inputs) if each is not None and each.ndim)
    names = ["" if each is None else f"x{at}" for at, each in enumerate(inputs)]
    outputs = [f"y{at}" if at in wanted else "" for at in range(max(wanted) + 1)]
    node = helper.make_node(operator, names, outputs, domain="com.microsoft", **attributes)
    kind = helper.np_dtype_to_tensor_dtype(inputs[first].dtype)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(names[first], kind, inputs[first].shape)],
        [onnx.ValueInfoProto(name=each) for each in outputs if each],
        [
            onnx.numpy_helper.from_array(np.asarray(a), n)
            for n, a in zip(names, inputs, strict=True)
            if n and n != names[first]
        ],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    session = open_session(model.SerializeToString())
    given = {names[first]: inputs[first]}
    expected = session.run(None, given)
    case = cases.Case(name, model, given, tuple(expected), 1e-4, 1e-5)
    compiled = compile_model(model, case.shapes, tvm_env.host_target(1), "graph/2", [], None)
    for found, one in zip(judging.run(compiled.library, case), expected, strict=True):
        assert found.dtype == one.dtype
        tolerance = {"atol": 1} if one.dtype.kind in "iu" else {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(found.astype("float64"), one.astype("float64"), **tolerance)
