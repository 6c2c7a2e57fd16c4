"""`farm model explain`: where an artifact's time goes, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from farm.artifacts import artifact_folder, given_model, places
from farm.artifacts import explain as explaining
from farm.cli import options, output, tables
from farm.cli.model_artifacts import Folder
from farm.report import model_pages
from farm.units import format_latency, format_number


@output.command
def explain(
    folder: Folder,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for a chart and the JSON; it is created.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Path of the model, if it has moved.")
    ] = None,
) -> output.Document:
    """Explain an artifact's latency. Each layer's plan, estimate, record, share of the roofline, and its limit."""
    if out is not None:
        places.require_room(out)
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
