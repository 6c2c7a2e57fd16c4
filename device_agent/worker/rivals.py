"""Load a model into another engine, inside a worker process: ONNX Runtime, ncnn, PyTorch, TensorFlow Lite; TensorRT.

Each loader returns how to run the program once, and how to copy its outputs. Raises LoadError, MemoryError.
TensorRT is timed by its `trtexec`, which JetPack has where the agent's Python has no TensorRT. Formats:
samples/common/sampleReporting.cpp of NVIDIA/TensorRT. Engines are kept, because building takes minutes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import runpy
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from device_agent.platforms.evidence import find_engine_versions, find_trtexec
from device_agent.protocol import Engine, Outcome, RunDetails, RunSpec, Status
from device_agent.worker import limits
from device_agent.worker.plan import Collector, LoadError, Plan, Runner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

# ncnn's options that are turned off: its 16-bit types.
NCNN_OFF = ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage")


def _import(called: str, *names: str) -> Any:
    """Import the first of these modules that the board has."""
    reason = ""
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = reason or str(error)
    raise LoadError(f"{called} is not installed on this board ({reason})")


@contextlib.contextmanager
def _loading(called: str) -> Iterator[None]:
    """Translate what an engine raises while it loads: engines' exceptions have no common base class."""
    try:
        yield
    except (MemoryError, LoadError):
        raise
    except Exception as error:
        if "bad_alloc" in str(error):
            raise MemoryError(str(error)) from error
        raise LoadError(f"{called} cannot load the model: {error}") from error


@contextlib.contextmanager
def _unpacked(program: Path) -> Iterator[Path]:
    """Unpack a program of several files into a folder, which is the working directory meanwhile."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(dir=program.parent) as folder, zipfile.ZipFile(program) as archive:
        archive.extractall(folder)
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def _load_onnxruntime(spec: RunSpec, program: Path, arrays: Arrays) -> tuple[Runner, Collector]:
    onnxruntime = _import("ONNX Runtime", "onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = limits.thread_count(spec.limits)
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    with _loading("ONNX Runtime"):
        session = onnxruntime.InferenceSession(str(program), options, providers=["CPUExecutionProvider"])
    names = [graph_input.name for graph_input in session.get_inputs()]
    feed = arrays if set(arrays) == set(names) else dict(zip(names, arrays.values(), strict=False))
    return lambda: session.run(None, feed), lambda outputs: [np.asarray(output) for output in outputs]


def _load_ncnn(spec: RunSpec, program: Path, arrays: Arrays) -> tuple[Runner, Collector]:
    """Load `model.ncnn.param` and `.bin` in float32; inputs and outputs have no batch dimension."""
    ncnn = _import("ncnn", "ncnn")
    net = ncnn.Net()
    net.opt.num_threads = limits.thread_count(spec.limits)
    net.opt.use_vulkan_compute = False
    for option in NCNN_OFF:
        setattr(net.opt, option, False)
    with _loading("ncnn"), _unpacked(program):
        if net.load_param("model.ncnn.param") or net.load_model("model.ncnn.bin"):
            raise LoadError("ncnn cannot load the model: it has a layer that this version of ncnn does not know")
    images = [ncnn.Mat(array) for array in arrays.values()]  # `arrays` outlives them: a Mat does not own its values
    inputs, outputs = list(net.input_names()), list(net.output_names())

    def run() -> list[Any]:
        extractor = net.create_extractor()
        for name, image in zip(inputs, images, strict=True):
            extractor.input(name, image)
        return [extractor.extract(name)[1] for name in outputs]

    return run, lambda mats: [np.array(mat) for mat in mats]


def _load_pytorch(spec: RunSpec, program: Path, arrays: Arrays) -> tuple[Runner, Collector]:
    """Load pnnx's module `model_pnnx.py` with its weights, run eagerly."""
    torch = _import("PyTorch", "torch")
    torch.set_num_threads(limits.thread_count(spec.limits))
    with _loading("PyTorch"), _unpacked(program) as folder:
        model = runpy.run_path(str(folder / "model_pnnx.py"))["Model"]().eval()
    tensors = [torch.from_numpy(array) for array in arrays.values()]

    def run() -> Any:
        with torch.inference_mode():
            return model(*tensors)

    return run, lambda found: [each.numpy() for each in (found if isinstance(found, tuple | list) else (found,))]


def _load_tflite(spec: RunSpec, program: Path, arrays: Arrays) -> tuple[Runner, Collector]:
    module = _import("TensorFlow Lite", "ai_edge_litert.interpreter", "tflite_runtime.interpreter")
    with _loading("TensorFlow Lite"):
        interpreter = module.Interpreter(str(program), num_threads=limits.thread_count(spec.limits))
        interpreter.allocate_tensors()
        for about, array in zip(interpreter.get_input_details(), arrays.values(), strict=True):
            interpreter.set_tensor(about["index"], array)
    outputs = [about["index"] for about in interpreter.get_output_details()]
    return interpreter.invoke, lambda _: [interpreter.get_tensor(index) for index in outputs]


LOADERS: dict[Engine, Callable[[RunSpec, Path, Arrays], tuple[Runner, Collector]]] = {
    Engine.ONNXRUNTIME: _load_onnxruntime,
    Engine.NCNN: _load_ncnn,
    Engine.PYTORCH: _load_pytorch,
    Engine.TFLITE: _load_tflite,
}


# TensorFloat-32 would round what all others compute in float32.
_ALWAYS = ("--noTF32", "--duration=0")
_WARMUP_MS = 200
_INT64_SINCE = 10  # earlier versions of TensorRT take int32 instead


def run_trtexec(spec: RunSpec, program: Path, arrays: Arrays, plan: Plan) -> tuple[Outcome, list[NDArray[Any]]]:
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
                *(
                    command,
                    f"--loadEngine={engine}",
                    f"--loadInputs={','.join(inputs)}",
                    *_ALWAYS,
                    "--avgRuns=1",
                ),
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
