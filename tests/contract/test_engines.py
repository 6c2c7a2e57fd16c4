"""Every engine that this machine has: one model, given by the coordinator and run by the agent's loader."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest

from device_agent.protocol import Engine, Limits, RunSpec
from device_agent.worker import rivals as loaders
from device_agent.worker.plan import LoadError
from farm.artifacts.bench import make_variant
from farm.artifacts.checking import run_reference
from farm.artifacts.given_model import GivenModel, open_model
from farm.errors import UnavailableError
from farm.models.inputs import make_inputs
from tests.integration.tflite_models import Writer
from tests.unit.artifacts import description

ENGINES = (Engine.ONNXRUNTIME, Engine.NCNN, Engine.PYTORCH, Engine.TFLITE)
BOARD = dataclasses.replace(description("x86_64", "local"), engines=tuple(map(str, ENGINES)))


def open_for(engine: Engine, folder: pathlib.Path) -> GivenModel:
    if engine is not Engine.TFLITE:
        return open_model("tiny-cnn")
    writer = Writer()
    x, y = writer.input(1, 8), writer.tensor((1, 4))
    weights = np.random.default_rng(0).standard_normal((4, 8)).astype("float32")
    writer.add("FULLY_CONNECTED", [x, writer.constant(weights)], y)
    path = folder / "dense.tflite"
    path.write_bytes(writer.finish(y))
    return open_model(str(path))


# PyTorch, which is large, has its case in tests/torch.
@pytest.mark.parametrize("engine", [each for each in ENGINES if each is not Engine.PYTORCH])
def test_an_engine_computes_what_onnxruntime_does(engine: Engine, tmp_path: pathlib.Path) -> None:
    """Each runs the same seeded inputs twice; bytes that are no model are a LoadError that names the engine."""
    check_engine(engine, tmp_path)


def check_engine(engine: Engine, tmp_path: pathlib.Path) -> None:
    """Compare an engine's outputs with ONNX Runtime's, and give it rubbish."""
    opened = open_for(engine, tmp_path)
    inputs = make_inputs(opened.inputs, 0)
    variant = make_variant(engine, opened, inputs, BOARD)
    program, spec = tmp_path / "program.so", RunSpec(engine, limits=Limits(threads=1))
    program.write_bytes(variant.program)
    run, collect = loaders.LOADERS[engine](spec, program, dict(variant.inputs))
    (reference,) = run_reference(opened.source, [("", inputs)])
    run()
    for given, wanted in zip(collect(run()), reference, strict=True):
        np.testing.assert_allclose(given.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)
    program.write_bytes(b"rubbish")
    with pytest.raises(LoadError, match="cannot load the model"):
        loaders.LOADERS[engine](spec, program, dict(variant.inputs))


@pytest.mark.parametrize(
    ("engine", "batch", "said"),
    [
        (Engine.TENSORRT, None, "TensorRT is not installed on b"),
        (Engine.TFLITE, None, "with the .tflite file of a model"),
        (Engine.NCNN, 2, "ncnn takes one example at a time"),
    ],
)
def test_what_an_engine_cannot_take_has_a_reason(engine: Engine, batch: int | None, said: str) -> None:
    """A missing engine, a model of another format and a batch are one sentence each."""
    opened = open_model("tiny-cnn", batch=batch)
    with pytest.raises(UnavailableError, match=said):
        make_variant(engine, opened, make_inputs(opened.inputs, 0), BOARD)


def test_virtual_boards_run_no_other_engine() -> None:
    """Its code would be this machine's: one sentence says so."""
    board = dataclasses.replace(BOARD, architecture="aarch64", simulated=True, engines=())
    opened = open_model("tiny-cnn")
    with pytest.raises(UnavailableError, match="ncnn is not emulated on b"):
        make_variant(Engine.NCNN, opened, make_inputs(opened.inputs, 0), board)
