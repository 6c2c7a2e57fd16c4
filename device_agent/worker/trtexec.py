"""Time a model in TensorRT by `trtexec`, which JetPack has where the agent's Python has no TensorRT.

Formats: samples/common/sampleReporting.cpp of NVIDIA/TensorRT. Engines are kept, because building takes minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from device_agent.platforms.describe import find_engine_versions, find_trtexec
from device_agent.protocol import Engine, Outcome, RunDetails, RunSpec, Status
from device_agent.worker.plan import LoadError, Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

# TensorFloat-32 would round what all others compute in float32.
_ALWAYS = ("--noTF32", "--duration=0")
_WARMUP_MS = 200
_INT64_SINCE = 10  # earlier versions of TensorRT take int32 instead


def run(spec: RunSpec, program: Path, arrays: Arrays, plan: Plan) -> tuple[Outcome, list[NDArray[Any]]]:
    """Build the engine of an ONNX file or find it, time `spec.runs` runs; return the outcome and the outputs.

    A latency is the GPU's time for a run, without copies from and to the CPU. Raises LoadError.
    """
    command = find_trtexec()
    if command is None:
        raise LoadError("trtexec of TensorRT is not on this board")
    version = find_engine_versions()[Engine.TENSORRT.value]
    digest = hashlib.sha256(program.read_bytes()).hexdigest()[:32]
    kept = Path(tempfile.gettempdir()) / f"tvm-farm-tensorrt-{os.getuid()}"
    kept.mkdir(mode=0o700, exist_ok=True)
    if kept.stat().st_uid != os.getuid():
        raise LoadError(f"{kept} belongs to another user")
    engine = kept / f"{digest}-{version}.engine"
    if not engine.exists():
        part = engine.with_suffix(f".{os.getpid()}.part")
        _call([command, f"--onnx={program}", f"--saveEngine={part}", "--iterations=1", "--warmUp=0", *_ALWAYS])
        part.rename(engine)
    plan.marks.set("loaded_s", time.monotonic())
    before = plan.sensors.read()
    with tempfile.TemporaryDirectory(dir=program.parent) as name:
        times, outputs = Path(name) / "times.json", Path(name) / "outputs.json"
        inputs = []
        for number, (called, array) in enumerate(arrays.items()):
            old = array.dtype == np.int64 and version.partition(".")[0].isdecimal() and int(version.partition(".")[0])
            narrowed = array.astype(np.int32) if old and old < _INT64_SINCE else array
            narrowed.tofile(path := Path(name) / f"{number}.bin")
            inputs.append(f"'{called}':{path}")
        plan.marks.set("running_s", time.monotonic())
        started_s = plan.mark("timing_start_s")
        _call(
            [
                *(command, f"--loadEngine={engine}", f"--loadInputs={','.join(inputs)}", *_ALWAYS, "--avgRuns=1"),
                *(f"--iterations={spec.runs}", f"--warmUp={_WARMUP_MS}"),
                *(f"--exportTimes={times}", f"--exportOutput={outputs}"),
            ]
        )
        timing_s = plan.mark("timing_end_s") - started_s
        plan.marks.set("cpu_s", time.process_time())
        latency_s, found = read_times(times.read_text(), spec.runs), read_outputs(outputs.read_text())
    outcome = Outcome(
        Status.OK, latency_s=latency_s, calls_per_sample=1, timing_s=timing_s, before=before,
        after=plan.sensors.read(), details=RunDetails(None),
    )  # fmt: skip
    return outcome, found


def read_times(text: str, runs: int) -> tuple[float, ...]:
    """Return the latest `runs` latencies in s of the file of `--exportTimes`. Raises LoadError."""
    try:
        return tuple(float(each["computeMs"]) / 1e3 for each in json.loads(text))[-runs:]
    except (ValueError, TypeError, LookupError) as error:
        raise LoadError(f"trtexec wrote times that cannot be read: {error}") from error


def read_outputs(text: str) -> list[NDArray[Any]]:
    """Return the arrays in the file of `--exportOutput`, in float32. Raises LoadError."""
    try:
        return [
            np.array(each["values"], np.float32).reshape([int(size) for size in each["dimensions"].split("x")])
            for each in json.loads(text)
        ]
    except (ValueError, TypeError, LookupError) as error:
        raise LoadError(f"trtexec wrote outputs that cannot be read: {error}") from error


def _call(command: Sequence[str]) -> None:
    """Run trtexec; this worker's deadline is its own. Raises LoadError with its last error."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        said = [line for line in lines if "[E]" in line] or lines[-1:]
        raise LoadError(f"trtexec: {said[0].strip() if said else f'exit code {done.returncode}'}")
