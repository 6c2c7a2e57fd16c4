"""`device_agent.run_model`: whole programs on three engines, outputs compared with NumPy."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from device_agent.protocol import Engine, Limits, ProtocolError, RunSpec, Status
from tests.integration import candidates
from tests.integration.conftest import Board


@pytest.fixture(scope="module")
def relax_model(library_folder: pathlib.Path) -> bytes:
    return candidates.build_relax_model(library_folder)


def random_array(*shape: int) -> Any:
    return np.random.default_rng(7).standard_normal(shape).astype("float32")


def test_a_relax_model_computes_what_numpy_does(board: Board, relax_model: bytes) -> None:
    """Both outputs of a Relax VM program equal the reference, and each timed run is one sample."""
    x = random_array(4, 8)
    outcome, outputs = board.run_model(RunSpec(Engine.RELAX_VM, runs=5, warmup=2), relax_model, {"arg_000": x})
    assert outcome.status is Status.OK, outcome.message
    assert len(outcome.latency_s) == 5
    product = x @ candidates.relax_weights()
    np.testing.assert_allclose(outputs[0], product, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs[1], np.maximum(product, 0), rtol=1e-5, atol=1e-6)


def test_a_kernel_returns_all_its_arguments(board: Board, matmul: bytes) -> None:
    """The outputs of a destination-passing function are its arguments after one run."""
    a, b = random_array(64, 64), random_array(64, 64).T
    arrays = {"arg_000": a, "arg_001": b, "arg_002": np.zeros_like(a)}
    outcome, outputs = board.run_model(RunSpec(Engine.KERNEL), matmul, arrays)
    assert outcome.status is Status.OK, outcome.message
    np.testing.assert_array_equal(outputs[0], a)
    np.testing.assert_allclose(outputs[2], a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", [("w", "x"), ("arg_000", "arg_001")])
def test_onnxruntime_takes_inputs_by_name_or_in_order(board: Board, names: tuple[str, str]) -> None:
    """Arrays named as the graph's inputs are matched by name, others by order."""
    pytest.importorskip("onnxruntime")
    x, w = random_array(4, 8), random_array(8, 3)
    arrays = {"w": w, "x": x} if names == ("w", "x") else {"arg_000": x, "arg_001": w}
    spec = RunSpec(Engine.ONNXRUNTIME, runs=3, limits=Limits(threads=1))
    outcome, outputs = board.run_model(spec, candidates.build_onnx_model(), arrays)
    assert outcome.status is Status.OK, outcome.message
    assert len(outcome.latency_s) == 3
    np.testing.assert_allclose(outputs[0], x @ w, rtol=1e-5, atol=1e-6)


def test_outputs_and_functions_are_those_asked_for(board: Board, relax_model: bytes) -> None:
    """Without return_outputs only the outcome travels back. A VM program without the wanted function is load_failed,
    naming it.
    """
    spec = RunSpec(Engine.RELAX_VM, return_outputs=False)
    outcome, outputs = board.run_model(spec, relax_model, {"arg_000": random_array(4, 8)})
    assert outcome.status is Status.OK
    assert outputs == []
    outcome, _ = board.run_model(RunSpec(Engine.RELAX_VM, entry="decode"), relax_model, {})
    assert outcome.status is Status.LOAD_FAILED
    assert "decode" in outcome.message


def test_a_candidate_is_no_relax_program(board: Board, matmul: bytes) -> None:
    """A library without a VM executable, a missing function and bytes that are no model are load_failed."""
    for engine, program, said in (
        (Engine.RELAX_VM, matmul, "no Relax VM program"),
        (Engine.KERNEL, b"rubbish", ""),
        (Engine.ONNXRUNTIME, b"rubbish", "ONNX Runtime"),
    ):
        outcome, _ = board.run_model(RunSpec(engine), program, {})
        assert outcome.status is Status.LOAD_FAILED
        assert said in outcome.message


def test_inputs_that_are_no_npz_are_nobodys_bad_model(board: Board, matmul: bytes) -> None:
    """Garbled inputs are a farm_error; pickled objects are never loaded."""
    import io

    from device_agent import protocol

    pickled = io.BytesIO()
    np.savez(pickled, arg_000=np.array([{"an": "object"}], dtype=object))
    function = board.rpc.get_function(protocol.RUN_MODEL)
    for inputs in (b"rubbish", pickled.getvalue()):
        text, _ = protocol.unpack_frame(bytes(function(RunSpec(Engine.KERNEL).to_json(), matmul, inputs)))
        assert protocol.Outcome.from_json(text).status is Status.FARM_ERROR


def test_a_crashing_model_is_an_outcome(board: Board, bad: bytes, relax_model: bytes) -> None:
    """A program that crashes or loops ends as an outcome, and the next one runs on the same session."""
    outcome, _ = board.run_model(RunSpec(Engine.KERNEL, entry="segfault"), bad, {})
    assert (outcome.status, outcome.signal) == (Status.CRASHED, "SIGSEGV")
    outcome, _ = board.run_model(RunSpec(Engine.KERNEL, entry="loops", limits=Limits(timeout_s=0.5)), bad, {})
    assert outcome.status is Status.RUN_TIMEOUT
    outcome, _ = board.run_model(RunSpec(Engine.RELAX_VM), relax_model, {"arg_000": random_array(4, 8)})
    assert outcome.status is Status.OK


def test_stacked_inputs_run_once_each(board: Board, relax_model: bytes) -> None:
    """Outputs lie in the order of the inputs, one sample each; a worker takes no other number and no other engine."""
    x = random_array(5, 4, 8)
    outcome, outputs = board.run_model(RunSpec(Engine.RELAX_VM, stacked=5), relax_model, {"arg_000": x})
    assert (outcome.status, len(outcome.latency_s)) == (Status.OK, 5), outcome.message
    np.testing.assert_allclose(outputs[0], x @ candidates.relax_weights(), rtol=1e-5, atol=1e-6)
    outcome, _ = board.run_model(RunSpec(Engine.RELAX_VM, stacked=4), relax_model, {"arg_000": x})
    assert (outcome.status, "not 4 along" in outcome.message) == (Status.FARM_ERROR, True)
    with pytest.raises(ProtocolError, match="stacked inputs"):
        RunSpec(Engine.ONNXRUNTIME, stacked=2)
