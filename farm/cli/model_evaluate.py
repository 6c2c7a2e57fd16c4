"""`farm model evaluate`: accuracy on data beside latency, energy and size, by precision."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from farm import settings as farm_settings
from farm.artifacts import artifact_folder, checking, given_model, on_board
from farm.artifacts import bench as benching
from farm.cli import options, output, tables
from farm.cli import result as result_cli
from farm.cli.model_artifacts import Board, Wait, read_labels
from farm.cli.model_board import Point, read_subject
from farm.cli.options import read_duration_s
from farm.errors import UsageError
from farm.evaluation import datasets
from farm.evaluation import evaluate as evaluation
from farm.points import requests
from farm.points import values as point_values
from farm.report import model_pages
from farm.search import gpus
from farm.values import EVALUATE

_CALIBRATED = 32
# Examples that are shown one by one.
_SHOWN = 12


@output.command
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL|ARTIFACT", help="A model, or an artifact compiled from one.")],
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            metavar="FOLDER",
            help="Images in a folder per class or beside a CSV (file,label) or a COCO JSON; or .npz of inputs and "
            "outputs.",
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="classify|detect|error", help="Score; default: what the model is for."),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            "--weights", metavar="float32,bf16,fp16,int8", help="Variants to compile and compare; default: float32."
        ),
    ] = "",
    board: Board = "local",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=0, help="Most examples; 0: all.")] = 0,
    labels: Annotated[
        Path | None, typer.Option("--classes", metavar="FILE", help="File with the names of the classes, one per line.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for the report.")] = None,
    operating_point: Point = "default",
    device: options.Device = "cpu",
    shape: options.Shapes = None,
    wait: Wait = "60s",
) -> output.Document:
    """Score a model on data. By precision: accuracy with its change, latency, energy and size, on a board."""
    precisions = evaluation.read_precisions(weights or "float32")
    point, wait_s = requests.parse_point(operating_point), read_duration_s("--wait", wait)
    if out is not None:
        artifact_folder.require_room(out)
    subject = read_subject(model, shape, device)
    opened = subject.opened
    if subject.artifact is not None and weights:
        raise UsageError("--weights: an artifact has its own", "Give the model instead.")
    facts = describe(subject, labels)
    scored = datasets.choose_task(task, facts.task)
    examples = datasets.read_dataset(data, scored, facts.names, facts.classes, limit)

    def calibrate() -> Any:
        found = given_model.read_calibration(str(data), opened.inputs, _CALIBRATED, facts.task)
        return found[:: -(-len(found) // _CALIBRATED)]

    settings = farm_settings.load()
    with options.open_store(settings) as store, tempfile.TemporaryDirectory(prefix="farm-evaluate-") as scratch:
        kind, known = on_board.find_board(store, board)
        made, missing = dict[str, Any](), dict[str, str]()
        if subject.artifact is not None:
            made = {benching.find_precision(subject, benching.OURS): subject.artifact}
        else:
            simulated = known is not None and store.boards.require(known).simulated
            used, folder = gpus.require_device(kind, device), Path(scratch)
            made, missing = evaluation.make_variants(
                opened, used, simulated, precisions, facts.text, calibrate, folder, settings, store, output.note
            )
        for artifact in made.values():
            on_board.prepare_gpu(artifact.manifest, settings)
        with on_board.hold_board(settings, store, board, wait_s, "evaluate", output.note) as held:
            held.pin(point, operating_point)
            part = evaluation.evaluate(made, opened.source, held, examples, scored, settings.model_runs, output.note)
            about = held.description
        document: dict[str, Any] = {
            "model": opened.about.name,
            "task": scored,
            "data": str(data),
            "count": len(examples),
            "board": {"name": about.name, "type": about.board_type, "simulated": about.simulated},
            "device": device,
            "operating_point": operating_point,
            "calibration": str(data) if evaluation.INT8 in made else None,
            **part,
        }
        document["rows"] += [{"precision": name, "latency_s": None, "reason": why} for name, why in missing.items()]
        result_cli.keep(store, EVALUATE, document, model=opened.about.name, board=document["board"], device=device)
    if out is not None:
        document["report"] = model_pages.write_evaluate_report(document, out)
    yield document
    _print(document)


@dataclasses.dataclass(frozen=True)
class Facts:
    """A model's task, the number of its classes, their names ([] if unknown), and the text of --classes."""

    task: dict[str, Any]
    classes: int
    names: list[str]
    text: bytes | None


def describe(subject: Any, labels: Path | None = None) -> Facts:
    """Return what data must fit. Raises UsageError where --classes does not."""
    text = read_labels(labels)
    if subject.artifact is not None:
        if text is not None:
            raise UsageError("--classes: an artifact has its names", "`farm model compile --classes` gives them to it.")
        manifest = subject.artifact.manifest
        task, outputs, names = manifest.task, manifest.outputs, checking.read_labels(subject.artifact)
    else:
        task, outputs = given_model.find_given_task(subject.opened.source, subject.opened.inputs)
        names = (text or given_model.find_labels(subject.opened) or b"").decode().splitlines()
    if text is not None:
        given_model.require_labels(text, task, outputs)
    return Facts(task, given_model.count_classes(task, outputs) or 0, names, text)


def _print(document: dict[str, Any]) -> None:
    if document["doubt"]:
        output.say(f"do not rely on these latencies, {document['doubt']}")
    examples, made = document["examples"], [row for row in document["rows"] if "scores" in row]
    if len(examples) <= _SHOWN and any(each["found"] for each in examples):
        found = [
            (each["file"], each["label"], *(best and f"{best['label']} {100 * best['share']:.1f} %" for best in bests))
            for each in examples
            for bests in [[each["found"].get(row["precision"]) for row in made]]
        ]
        heads = ["Example", "Label", *map(model_pages.name_row, made)]
        tables.print_table(heads, found, left=range(len(heads)))
    heads, rows = model_pages.list_rows(document)
    tables.print_table(heads, rows, spare=("Size", "Energy (mJ)"))
    board = document["board"]
    simulated = " (simulated: nothing was measured on a real board)" if board["simulated"] else ""
    conditions = point_values.format_conditions(document["threads"], document["clocks"], document["operating_point"])
    lines = [f"{row['precision']}: {row['reason']}" for row in document["rows"] if "reason" in row]
    lines += [f"{document['count']} examples; {board['type']}/{board['name']}{simulated}, {conditions}"]
    lines += ["change: points against ONNX Runtime in float32, on the same examples"]
    lines += [f"int8 was calibrated with images of {document['calibration']}"] if document["calibration"] else []
    output.say(*lines, *(f"report: {path}" for path in document.get("report", ())))
