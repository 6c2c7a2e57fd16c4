"""Several processes of one model on a board at once."""

from __future__ import annotations

import numpy as np

from device_agent.protocol import Engine, Limits, RunSpec, Status
from tests.integration import candidates
from tests.integration.conftest import Board


def test_instances_run_at_once_and_each_tells_its_latency(board: Board) -> None:
    """The first one gives samples and outputs, the other its median; one that cannot load fails the run alone."""
    x, w = np.ones((4, 8), "float32"), np.ones((8, 3), "float32")
    spec = RunSpec(Engine.ONNXRUNTIME, runs=5, warmup=1, instances=2, limits=Limits(threads=1))
    outcome, outputs = board.run_model(spec, candidates.build_onnx_model(), {"x": x, "w": w})
    assert outcome.status is Status.OK, outcome.message
    assert len(outcome.latency_s) == 5
    assert outcome.details is not None
    assert len(outcome.details.others_s) == 1
    assert outcome.details.others_s[0] > 0
    np.testing.assert_allclose(outputs[0], x @ w, rtol=1e-5)
    outcome, _ = board.run_model(spec, b"rubbish", {"x": x})
    assert outcome.status is Status.LOAD_FAILED
    outcome, _ = board.run_model(RunSpec(Engine.ONNXRUNTIME), candidates.build_onnx_model(), {"x": x, "w": w})
    assert outcome.status is Status.OK, outcome.message
