"""Exponentials as arithmetic: close to the library's, and only where they are exact enough."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from farm.search import tvm_env
from farm.search.graph import decomposition

SQUARES = np.concatenate([np.linspace(-12, 12, 1999), [0.0]]).astype("float32").reshape(20, 100)


def _compute(operators: dict[str, Any], values: np.ndarray) -> dict[str, np.ndarray]:
    tvm = tvm_env.load()
    from tvm import relax

    x = relax.Var("x", relax.TensorType(values.shape, str(values.dtype)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            results = [builder.emit(operator(x)) for operator in operators.values()]
            output = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(output)
    config = tvm_env.host_target(1)
    module = decomposition.legalise()(builder.get())
    machine = relax.VirtualMachine(relax.build(module, target=tvm_env.make_target(config)), tvm.cpu())
    results = machine["main"](tvm.runtime.tensor(values))
    return {name: result.numpy() for name, result in zip(operators, results, strict=True)}


@pytest.mark.parametrize(("dtype", "error"), [("float32", 2e-6), ("float64", 1e-13)])
def test_functions_are_as_exact_as_their_type_asks(dtype: str, error: float) -> None:
    """Each function is near the exact one over the range where results differ."""
    from tvm.relax import op

    values = SQUARES.astype(dtype)
    exact = SQUARES.astype("float64")
    sigmoid = 1 / (1 + np.exp(-exact))
    erf = np.vectorize(math.erf)
    softmax = np.exp(exact - exact.max(-1, keepdims=True))
    expected = {
        "exp": np.exp(exact),
        "tanh": np.tanh(exact),
        "erf": erf(exact),
        "sigmoid": sigmoid,
        "silu": exact * sigmoid,
        "gelu": exact * 0.5 * (1 + erf(exact * 0.5**0.5)),
        "softmax": softmax / softmax.sum(-1, keepdims=True),
    }
    operators = {
        "exp": op.exp,
        "tanh": op.tanh,
        "erf": op.erf,
        "sigmoid": op.sigmoid,
        "silu": op.nn.silu,
        "gelu": op.nn.gelu,
        "softmax": op.nn.softmax,
    }
    for name, result in _compute(operators, values).items():
        assert result.dtype == dtype
        np.testing.assert_allclose(result, expected[name], rtol=error, atol=error, err_msg=name)


def test_no_function_leaves_its_range() -> None:
    """Large arguments give the limit, and a masked element of a softmax gives 0."""
    from tvm.relax import op

    values = np.array([[-1e30, -200.0, 0.0, 80.0], [-np.inf, 0.0, 1.0, 2.0]], "float32")
    results = _compute({"sigmoid": op.sigmoid, "tanh": op.tanh, "softmax": op.nn.softmax}, values)
    np.testing.assert_allclose(results["sigmoid"][0], [0, 0, 0.5, 1], atol=1e-6)
    np.testing.assert_allclose(results["tanh"][0], [-1, -1, 0, 1], atol=1e-6)
    np.testing.assert_allclose(results["softmax"].sum(-1), [1, 1], atol=1e-6)
    assert results["softmax"][1, 0] < 1e-30


def test_rows_are_multiplied_where_one_number_divides_them() -> None:
    """As near as a division but for a rounding; what divides neighbours by different numbers stays one."""
    from tvm.relax import op

    operators = {
        "rows": lambda x: op.divide(x, op.max(x, [-1], keepdims=True)),
        "columns": lambda x: op.divide(x, op.max(x, [0], keepdims=True)),
    }
    values = SQUARES + np.float32(20)
    exact = values.astype("float64")
    results = _compute(operators, values)
    np.testing.assert_allclose(results["rows"], exact / exact.max(-1, keepdims=True), rtol=2e-7)
    np.testing.assert_allclose(results["columns"], exact / exact.max(0, keepdims=True), rtol=7e-8)


def test_constants_are_multiplied_by_where_that_is_possible() -> None:
    """Numbers and rows of them; those over which 1 is no number of float32 stay a division."""
    from tvm import relax
    from tvm.relax import op

    row = np.linspace(1, 7, SQUARES.shape[-1], dtype="float32")
    small = row * np.float32(1e-40)
    operators = {
        "number": lambda x: op.divide(x, relax.const(np.float32(3))),
        "row": lambda x: op.divide(x, relax.const(row)),
        "out of range": lambda x: op.divide(op.multiply(x, relax.const(small)), relax.const(small)),
    }
    results = _compute(operators, SQUARES)
    np.testing.assert_allclose(results["number"], SQUARES.astype("float64") / 3, rtol=2e-7)
    np.testing.assert_allclose(results["row"], SQUARES.astype("float64") / row, rtol=2e-7)
    assert np.isfinite(results["out of range"]).all()
