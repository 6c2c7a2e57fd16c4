"""The code for Jetsons' GPUs on any NVIDIA GPU of this machine: its driver compiles PTX of sm_53 for it.

`make test-gpu` runs these; no other command does. docs/gpu.md says when they last ran.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime
import pytest

from device_agent.protocol import GPU, Engine, Limits, RunSpec, Status
from farm.artifacts.compile import UNTUNED_PIPELINE, compile_model
from farm.artifacts.verify import compare
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.measure.session import BoardSession
from farm.models.inputs import InputSpec, make_inputs
from farm.models.zoo import ZOO
from farm.search import gpus, target

TYPE = "jetson-nano"
MODELS = ("squeezenet1.1", "mobilenet_v2", "resnet18")
SPEC = RunSpec(Engine.RELAX_VM, device=GPU, limits=Limits(timeout_s=120.0, threads=1))


def make_config() -> dict[str, Any]:
    """The target of a Nano's GPU beside this machine's processor."""
    plan = code.plan_gpu(load_board_types()[TYPE])
    return gpus.to_config(TYPE, plan, target.host_target(1), simulated=False)


@pytest.mark.parametrize("pipeline", [gpus.PIPELINE, UNTUNED_PIPELINE])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_references_output(board: BoardSession, name: str, pipeline: str) -> None:
    """By our families, and by TVM's defaults."""
    entry = ZOO[name]
    data = entry.build()
    model = onnx.load_model_from_string(data)
    compiled = compile_model(model, entry.input_shapes, make_config(), pipeline, [], None)
    inputs = make_inputs([InputSpec(*each, "float32") for each in entry.input_shapes.items()], 0)
    outcome, outputs = board.run_model(SPEC, compiled.library, inputs)
    assert outcome.status is Status.OK, outcome.message
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    comparison = compare(list(outputs.values()), session.run(None, dict(inputs)))
    assert comparison.matches, comparison.reason
