"""ncnn's aarch64 code on a virtual Nano: run in QEMU, recorded, estimated."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest

from device_agent.emulated.pipeline import load_core
from device_agent.emulated.runs import Emulator
from device_agent.protocol import Engine, Limits, RunSpec, count_seconds
from device_agent.session.plan import LoadError
from device_agent.virtual import recorded
from farm.artifacts.checking import run_reference
from farm.artifacts.given_model import open_model
from farm.artifacts.rivals import make_variant
from farm.models.inputs import make_inputs
from farm.settings import load
from tests.unit.artifacts import description


def test_ncnn_is_recorded_once(emulated_root: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are ONNX Runtime's; four threads take less time than one; the second run is read from the cache.

    A file that is no model is one sentence.
    """
    opened, settings = open_model("tiny-cnn"), dataclasses.replace(load(), home=str(tmp_path))
    inputs = make_inputs(opened.inputs, 0)
    board = dataclasses.replace(description("aarch64", "jetson-nano"), simulated=True)
    variant = make_variant(Engine.NCNN, opened, inputs, board, settings)
    program = tmp_path / "program.so"
    program.write_bytes(variant.program)
    core = load_core("cortex-a57")
    assert core is not None
    folder, spec = tmp_path / "cache" / "emulator" / "engines", RunSpec(Engine.NCNN, limits=Limits(threads=1))

    def run(threads: int) -> recorded.Execution:
        emulator = Emulator(tmp_path / "no.sock", core, tasks=threads, kept=tmp_path / "kept")
        return recorded.Execution(folder, emulator, spec, program, dict(variant.inputs))

    one = run(1)
    (reference,) = run_reference(opened.source, [("", inputs)])
    for given, wanted in zip(one.run(), reference, strict=True):
        np.testing.assert_allclose(given.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)
    program.write_bytes(b"rubbish")
    with pytest.raises(LoadError, match="in the emulator: ncnn cannot load the model: File is not a zip file"):
        run(1)
    program.write_bytes(variant.program)
    monkeypatch.setattr(recorded, "record", lambda *_: pytest.fail("it ran again"))
    seconds = [count_seconds(each.count(), core, 1e9, tasks)[0] for each, tasks in ((one, 1), (run(4), 4))]
    assert 0 < seconds[1] < seconds[0]
