"""TensorRT by its command: its options, and the files that it writes."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from device_agent.platforms.evidence import Sensors, find_engine_versions
from device_agent.protocol import GPU, Engine, Evidence, RunSpec
from device_agent.worker import rivals
from device_agent.worker.plan import LoadError, Plan

FAKE = """#!/bin/sh
echo "$@" >> {log}
for each in "$@"; do case $each in
  --onnx=*) grep -q rubbish "${{each#*=}}" && {{ echo "[E] [TRT] cannot parse"; exit 1; }} ;;
  --saveEngine=*) echo engine > "${{each#*=}}" ;;
  --exportTimes=*) echo '[{{"computeMs": 9}}, {{"computeMs": 1.5}}, {{"computeMs": 2.5}}]' > "${{each#*=}}" ;;
  --exportOutput=*) echo '[{{"name": "y", "dimensions": "1x2", "values": [0.5, 2]}}]' > "${{each#*=}}" ;;
esac; done
"""


class Still(Sensors):
    def __init__(self) -> None:
        pass

    def read(self) -> Evidence:
        return Evidence()


@pytest.fixture
def log(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A trtexec on PATH that logs its arguments; engines are kept below the test's folder."""
    log = tmp_path / "log"
    (tmp_path / "trtexec").write_text(FAKE.format(log=log))
    (tmp_path / "trtexec").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return log


def test_an_engine_is_built_once_and_timed_on_the_gpu(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The latest runs' compute times are the latencies; the second timing loads the kept engine."""
    program, x = tmp_path / "model.onnx", np.ones((1, 3), "float32")
    program.write_bytes(b"model")
    assert "tensorrt" in find_engine_versions()
    for _ in range(2):
        outcome, outputs = rivals.run_trtexec(
            RunSpec(Engine.TENSORRT, runs=2, device=GPU), program, {"x": x}, Plan(Still())
        )
    assert outcome.latency_s == (1.5e-3, 2.5e-3)
    np.testing.assert_array_equal(outputs[0], [[0.5, 2.0]])
    build, *timed = log.read_text().splitlines()
    assert f"--onnx={program} --saveEngine=" in build
    assert [" --iterations=2 " in each and " --loadInputs='x':" in each for each in timed] == [True, True]


def test_what_it_refuses_is_a_load_error(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Its own error is the reason, and files that it spoilt are one."""
    program = tmp_path / "model.onnx"
    program.write_bytes(b"rubbish")
    with pytest.raises(LoadError, match="cannot parse"):
        rivals.run_trtexec(RunSpec(Engine.TENSORRT, device=GPU), program, {}, Plan(Still()))
    for wrong in ("[", '[{"computeMs": "x"}]', '[{"dimensions": "2", "values": [1]}]'):
        with pytest.raises(LoadError, match="cannot be read"):
            rivals.read_outputs(wrong)
    with pytest.raises(LoadError, match="cannot be read"):
        rivals.read_times('[{"latencyMs": 1}]', 1)
