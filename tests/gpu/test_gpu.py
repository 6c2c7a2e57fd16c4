"""The code for Jetsons' GPUs on any NVIDIA GPU of this machine: its driver compiles PTX of sm_53 for it.

`make test-gpu` runs these; no other command does. docs/gpu.md says when they last ran.
"""

from __future__ import annotations

import statistics
from typing import Any

import onnx
import onnxruntime
import pytest

from device_agent.protocol import GPU, Engine, Limits, MeasureSpec, RunSpec, Status, TensorSpec
from farm.artifacts.compile import UNTUNED_PIPELINE, compile_model
from farm.artifacts.verify import compare
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.measure.session import BoardSession
from farm.models.inputs import InputSpec, make_inputs
from farm.models.zoo import ZOO
from farm.search import default_schedule, gpus, target, tvm_env
from farm.search.build import builder, lowering
from farm.search.workloads import prepare_model

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


def test_a_family_is_faster_than_the_thread_binding_default(board: BoardSession) -> None:
    """A 3x3 convolution by its first plan takes at most a third of the time that TVM's default takes."""
    tvm = tvm_env.load_compiler()
    import tvm.s_tir.meta_schedule as ms

    config = make_config()
    entry = ZOO["resnet18"]
    model = onnx.load_model_from_string(entry.build())
    prepared = prepare_model(model, entry.input_shapes, config, gpus.PIPELINE)
    workload = next(each for each in prepared.workloads if "3x3 56x56x64>64" in each.name)
    module = tvm.ir.load_json(workload.module_json)
    found = default_schedule.find_default(
        workload, ms.database.MemoryDatabase().commit_workload(module), prepared.target
    )
    spec = MeasureSpec(
        tuple(TensorSpec(shape, dtype) for shape, dtype in workload.arguments), repeat=5, min_repeat_s=0.05, device=GPU
    )
    seconds = []
    for scheduled in (found.candidate.sch.mod, lowering.bind_rest(module, prepared.target)):
        outcome = board.measure(spec, builder.build_candidate(tvm.ir.save_json(scheduled), config))
        assert outcome.status is Status.OK, outcome.message
        seconds.append(statistics.median(outcome.latency_s))
    ours, default = seconds
    assert 3 * ours < default
