"""Compare models on a board with its alternatives: other engines, predicted schedules, untuned code.

Another engine runs the model's file, or pnnx's conversion for ncnn and PyTorch. All alternate on one board and
operating point, with the same threads and inputs; outputs are compared too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import io
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from device_agent.protocol import CPU, GPU, Description, Engine, Limits
from farm.artifacts import compile, make
from farm.artifacts.artifact_folder import Artifact
from farm.artifacts.checking import find_tolerance_factor, read_energy, run_reference
from farm.artifacts.given_model import GivenModel
from farm.artifacts.manifest import FLOAT32, LIBRARY
from farm.artifacts.on_board import HeldForModels
from farm.artifacts.timing import Timed, Turns, Variant, describe_runs, ordered
from farm.artifacts.verify import compare
from farm.crew.choice import TargetPlan, plan_target
from farm.crew.visits import plan_window
from farm.errors import PermanentError, UnavailableError, UsageError
from farm.inventory.board_types import BoardType
from farm.models import tflite
from farm.models.inputs import make_inputs
from farm.processes.jobs import compile_in_subprocess
from farm.search import gpus
from farm.settings import Settings
from farm.store import Store

# The engines by name, best known first, as people call them.
ENGINES = {
    Engine.ONNXRUNTIME: "ONNX Runtime",
    Engine.NCNN: "ncnn",
    Engine.PYTORCH: "PyTorch",
    Engine.TFLITE: "TensorFlow Lite",
    Engine.TENSORRT: "TensorRT",
}
_FILES = {Engine.NCNN: ("model.ncnn.param", "model.ncnn.bin"), Engine.PYTORCH: ("model_pnnx.py", "model.pnnx.bin")}
_CONVERT_S = 300.0
# The deadline of TensorRT's build on the board, which tries kernels.
_BUILD_S = 900.0
OURS, ONNXRUNTIME, RULE, UNTUNED, BASELINE = "tvm-farm", "onnxruntime", "rule", "untuned", "baseline"
RIVALS = (*map(str, ENGINES), RULE, UNTUNED)
LABELS = {
    **{str(engine): called for engine, called in ENGINES.items()},
    OURS: "tvm-farm",
    RULE: "tvm-farm, no record",
    UNTUNED: "TVM, untuned",
    BASELINE: "the baseline",
}
_WINDOW_S, _MOST_BATCH = 2.0, 4096


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to time on a board's CPU or GPU (`device`).

    `artifact` is already compiled; None compiles it from the records. `baseline` is another artifact to compare with.
    """

    opened: GivenModel
    device: str = CPU
    artifact: Artifact | None = None
    baseline: Artifact | None = None

    def list_artifacts(self) -> dict[str, Artifact]:
        """Return what needs no compilation, by variant."""
        found = {OURS: self.artifact, BASELINE: self.baseline}
        return {name: artifact for name, artifact in found.items() if artifact is not None}


def read_rivals(text: str) -> tuple[str, ...]:
    """Parse names such as `onnxruntime,rule,untuned` into a fixed order. Raises UsageError."""
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [word for word in wanted if word not in RIVALS]:
        raise UsageError(f"--against: there is no {unknown[0]!r}", f"Known: {', '.join(RIVALS)}.")
    return tuple(name for name in RIVALS if name in wanted)


def read_batches(text: str) -> tuple[int | None, ...]:
    """Parse batch sizes such as `1,2,4`, ascending; "" is the model's own. Raises UsageError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if wrong := [word for word in words if not word.isdecimal() or not 0 < int(word[:9]) <= _MOST_BATCH]:
        raise UsageError(
            f"--batch: {wrong[0][:80]!r} is no batch size", f"Give numbers from 1 to {_MOST_BATCH}, as in 1,2,4,8."
        )
    return tuple(sorted({int(word) for word in words})) or (None,)


def bench(
    subjects: Sequence[Subject],
    board: HeldForModels,
    board_type: BoardType,
    rivals: Sequence[str],
    settings: Settings,
    store: Store,
    say: Callable[[str], None],
    per_layer: bool = False,
    instances: int = 1,
) -> tuple[dict[str, Any], list[Timed]]:
    """Compile what is missing while holding the board, then time; return the `--json` document and the timings.

    `instances` processes of each program run at once and share the threads. Raises UsageError, PermanentError.
    """
    settings.share_linker_cache()
    about = board.description
    host_cores = len(os.sched_getaffinity(0))
    limits = board.limits(plan_target(board_type, about.to_dict(), host_cores).threads)
    if instances > 1:
        limits = _share(limits, instances, board, subjects)
    models, timings, clocks = [], list[Timed](), ""
    needs: dict[str, dict[int, int]] = {}
    for subject in subjects:
        source = subject.opened.source
        name = source.name
        artifacts = subject.list_artifacts()
        for artifact in artifacts.values():
            board.require_fit(artifact.manifest)
        kind = gpus.require_device(board_type, subject.device)
        target = plan_target(kind, about.to_dict(), host_cores)
        if target.config is not None:
            gpus.prepare_boards(target.config, settings)
        order = make.CompileOrder(subject.opened, kind, simulated=about.simulated)
        candidates = make.fetch_candidates(order, store)
        done = _compile_missing(subject, order, target, candidates, rivals, say)
        batch = subject.opened.about.batch or 1
        needed = done[OURS].memory_bytes if OURS in done else artifacts[OURS].manifest.memory_bytes
        needs.setdefault(name, {})[batch] = needed
        if 0 < about.memory_bytes < needed * instances and subject.artifact is None:
            say(f"{name}, batch {batch}: left out, {instances * needed >> 20} MiB do not fit {board.name}")
            continue
        programs = {each: compiled.library for each, compiled in done.items()}
        programs |= {each: artifact.read_file(LIBRARY) for each, artifact in artifacts.items()}
        names = [OURS, *[BASELINE] * (subject.baseline is not None), *rivals]
        algorithms = list_algorithms(subject, done)
        inputs = make_inputs(subject.opened.inputs, settings.seed)
        variants = _list_own(subject, [each for each in names if each in programs], programs, inputs)
        variants[1:1], missing = _list_engines(subject.opened, inputs, about, rivals, instances)
        say(f"{name}: timing {', '.join(LABELS[each.name] for each in variants)} in turns")
        energy, runs = plan_window(about, _WINDOW_S).to_energy(), settings.model_runs
        turns = Turns(variants, runs, limits, energy=energy, per_layer=per_layer, instances=instances)
        timed = turns.run_all(board.run)
        timed.missing |= missing
        clocks = board.read_clocks(timed.outcomes[OURS], subject.device)
        (reference,) = run_reference(source, [("", inputs)])
        sizes = {each.name: len(each.program) for each in variants}
        models.append(_describe(subject, timed, reference, names, algorithms, sizes, about.engine_versions))
        timings.append(timed)
    if not models:
        raise PermanentError(f"no model fits the memory of {board.name}", "Take smaller batches or another board.")
    memory_bytes = min(about.memory_bytes // instances, limits.memory_bytes)
    greatest = {name: find_greatest_batch(known, memory_bytes) for name, known in needs.items()}
    document = {
        "board": board.describe(),
        "operating_point": board.point,
        "threads": limits.threads,
        "instances": instances,
        "clocks": clocks,
        "runs": describe_runs(settings.model_runs),
        "models": models,
        "greatest_batch": {name: batch for name, batch in greatest.items() if batch is not None},
    }
    return document, timings


def _compile_missing(
    subject: Subject,
    order: make.CompileOrder,
    target: TargetPlan,
    candidates: make.Candidates,
    rivals: Sequence[str],
    say: Callable[[str], None],
) -> dict[str, compile.Compiled]:
    """Compile the farm's own programs that are no artifact yet, by variant."""
    artifacts, name = subject.list_artifacts(), subject.opened.source.name
    wanted = [each for each in (OURS, *rivals) if each not in tuple(ENGINES) and each not in artifacts]
    if not wanted:
        return {}
    own = subject.artifact.manifest.pipeline if subject.artifact else order.board_type.pipeline
    ways = {
        each: make.CompileWay(compile.UNTUNED_PIPELINE if each == UNTUNED else own, each == OURS) for each in wanted
    }
    say(f"{name}: compiling")
    job = functools.partial(make.compile_ways, order, target, candidates, ways)
    return dict(compile_in_subprocess(job, name, say=say)[0])


def _list_own(
    subject: Subject, names: Sequence[str], programs: Mapping[str, bytes], inputs: Mapping[str, Any]
) -> list[Variant]:
    """Return what the board runs of the farm's own programs."""
    given, main = ordered(inputs), (OURS, BASELINE)
    return [
        Variant(each, Engine.RELAX_VM, programs[each], given, each in main, subject.device, each == UNTUNED)
        for each in names
    ]


def _list_engines(
    opened: GivenModel, inputs: Mapping[str, Any], board: Description, rivals: Sequence[str], instances: int
) -> tuple[list[Variant], dict[str, str]]:
    """Return what the board runs in the other engines, and by engine why not."""
    missing, added = {}, []
    for engine in (each for each in ENGINES if each in rivals):
        try:
            if instances > 1 and engine is Engine.TENSORRT:
                raise UnavailableError("a GPU runs one instance at a time")
            added.append(make_variant(engine, opened, inputs, board))
        except UnavailableError as error:
            missing[str(engine)] = error.message
    return added, missing


def _share(limits: Limits, instances: int, board: HeldForModels, subjects: Sequence[Subject]) -> Limits:
    """Return the limits of one of several instances. Raises UsageError where the board cannot run them at once."""
    if board.description.simulated:
        raise UsageError(f"--instances: {board.name} is simulated, and simulated boards run one instance at a time")
    if any(each.device != CPU for each in subjects):
        raise UsageError("--instances: a GPU runs one instance at a time", "Leave --device and --instances apart.")
    if instances > board.cores:
        raise UsageError(f"--instances {instances}: {board.name} has {board.cores} cores")
    return dataclasses.replace(limits, threads=max(1, limits.threads // instances))


def find_greatest_batch(needs: Mapping[int, int], memory_bytes: int) -> int | None:
    """Return the greatest batch in so much memory by a line through the needs (bytes) of known batches, or None.

    Activations grow with the batch, weights do not.
    """
    least, greatest = min(needs), max(needs)
    if least == greatest or memory_bytes <= 0 or needs[greatest] <= needs[least]:
        return None
    each = (needs[greatest] - needs[least]) / (greatest - least)
    return max(0, int(least + (memory_bytes - needs[least]) / each))


def list_algorithms(subject: Subject, done: Mapping[str, compile.Compiled]) -> dict[str, list[str]]:
    """List each program's algorithms (`find_tolerance_factor`)."""
    algorithms: dict[str, list[str]] = {str(engine): [] for engine in ENGINES}
    for name, compiled in done.items():
        algorithms[name] = [each.algorithm for each in compiled.served]
    for name, artifact in subject.list_artifacts().items():
        algorithms[name] = [each.algorithm for each in artifact.manifest.workloads]
    # Every engine rounds the accumulators of an 8-bit model.
    everywhere = ["8 bits"] if subject.opened.source.is_quantised else []
    return {name: [*each, *everywhere] for name, each in algorithms.items()}


def find_precision(subject: Subject, name: str) -> str:
    """Return what the weights of a program are stored in."""
    if subject.opened.source.is_quantised:
        return "int8"
    artifact = {OURS: subject.artifact, RULE: subject.artifact, BASELINE: subject.baseline}.get(name)
    return artifact.manifest.weights.asked if artifact else FLOAT32


def _describe(
    subject: Subject,
    timed: Timed,
    reference: Sequence[Any],
    names: Sequence[str],
    algorithms: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    ours = timed.summary(OURS)
    assert ours is not None  # `run_all` raises otherwise
    batch = subject.opened.about.batch or 1
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        summary = timed.summary(name)
        if summary is None:
            rows[name] = {"label": LABELS[name], "latency_s": None, "reason": timed.missing.get(name, "")}
            continue
        outputs = timed.outputs[name]
        if name == Engine.NCNN:  # it has no batch dimension
            outputs = [
                np.reshape(each, wanted.shape) if each.size == wanted.size else each
                for each, wanted in zip(outputs, reference, strict=False)
            ]
        verdict = compare(outputs, reference, find_tolerance_factor(algorithms[name]))
        energy_j, power_w = read_energy(timed.outcomes[name])
        details = timed.describe_details(name)
        if energy_j is not None and (together := details["instances_s"]):  # the window counts the first one's calls
            energy_j /= summary.median * sum(1 / each for each in together)
        rows[name] = {
            "label": LABELS[name],
            "latency_s": dataclasses.asdict(summary),
            "fps": batch * sum(1 / each for each in details["instances_s"] or [summary.median]),
            "ratio": summary.median / ours.median,
            "precision": find_precision(subject, name),
            "version": versions.get(name, ""),
            "matches": verdict.matches,
            "reason": verdict.reason,
            "energy_j": energy_j,
            "power_w": power_w,
            "bytes": sizes[name],
            **details,
        }
    return {
        "model": subject.opened.source.name,
        "artifact": str(subject.artifact.folder) if subject.artifact else None,
        "device": subject.device,
        "precision": find_precision(subject, OURS),
        "batch": batch,
        "sha256": subject.opened.about.sha256,
        "variants": rows,
        "doubt": timed.find_doubt(),
    }


def make_variant(engine: Engine, opened: GivenModel, inputs: Mapping[str, Any], board: Description) -> Variant:
    """Return what the board runs in this engine. Raises UnavailableError: the engine or the model does not allow it."""
    called, data, arrays = ENGINES[engine], opened.source.onnx_bytes, dict(inputs)
    if str(engine) not in board.engines:
        is_emulated = board.simulated and board.architecture == "aarch64"
        raise UnavailableError(f"{called} is not {'emulated' if is_emulated else 'installed'} on {board.name}")
    if engine in _FILES:
        if engine is Engine.NCNN:
            if any(array.ndim < 2 or array.shape[0] != 1 for array in arrays.values()):
                raise UnavailableError("ncnn takes one example at a time: inputs must have a batch size of 1")
            arrays = {name: array[0] for name, array in arrays.items()}
        data = convert(engine, data, [array.shape for array in inputs.values()])
    elif engine is Engine.TFLITE:
        path = Path(opened.about.origin)
        if path.suffix != tflite.SUFFIX or opened.about.batch is not None:
            raise UnavailableError("TensorFlow Lite is timed with the .tflite file of a model, which this model is not")
        data = path.read_bytes()
    device, timeout_s = (GPU, _BUILD_S) if engine is Engine.TENSORRT else (CPU, None)
    return Variant(str(engine), engine, data, arrays, device=device, load_timeout_s=timeout_s)


def convert(engine: Engine, model: bytes, shapes: Sequence[tuple[int, ...]]) -> bytes:
    """Convert an ONNX model by pnnx in float32 for ncnn or PyTorch; return a zip. Raises UnavailableError."""
    pnnx, wanted, called = _find_pnnx(), _FILES[engine], ENGINES[engine]
    with tempfile.TemporaryDirectory(prefix="farm-pnnx-") as name:
        folder, packed = Path(name), io.BytesIO()
        (folder / "model.onnx").write_bytes(model)
        listed = ",".join(str(list(shape)).replace(" ", "") for shape in shapes)
        command = [pnnx, "model.onnx", f"inputshape={listed}", "fp16=0"]
        try:
            subprocess.run(command, cwd=folder, capture_output=True, timeout=_CONVERT_S)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"pnnx did not convert the model for {called} in {_CONVERT_S:.0f} s") from error
        if missing := [each for each in wanted if not (folder / each).exists()]:
            raise UnavailableError(f"pnnx cannot convert the model for {called}: it wrote no {missing[0]}")
        with zipfile.ZipFile(packed, "w") as archive:
            for each in wanted:
                archive.write(folder / each, each)
    return packed.getvalue()


def _find_pnnx() -> str:
    """Find the converter: the program in its wheel, whose Python code alone needs PyTorch, or on PATH."""
    spec = importlib.util.find_spec("pnnx")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if found := shutil.which("pnnx", path=folder):
            return found
    if found := shutil.which("pnnx"):
        return found
    raise UnavailableError(
        "pnnx, which converts models for ncnn and PyTorch, is not installed: pip install --no-deps pnnx"
    )
