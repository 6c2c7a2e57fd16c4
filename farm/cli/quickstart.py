"""`farm quickstart`: the main job, end to end, on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from farm import settings as farm_settings
from farm.artifacts import artifact_folder
from farm.campaign import tune
from farm.cli import options, output, tables
from farm.cli.campaign_options import CampaignScreen
from farm.inventory import board_types
from farm.quickstart import run as job
from farm.report import quickstart_page
from farm.units import seconds_scale

# The wait for another farm that measures on this machine; its campaign may take hours.
_WAIT_S = 3600.0


@output.command
def quickstart(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="FILE.onnx|ZOO_NAME",
            help="Model to tune: an ONNX or TFLite file, or a name from `farm model zoo`.",
        ),
    ] = "squeezenet1.1",
    trials: options.Trials = 128,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the report.")] = Path(
        "quickstart-report"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start without results of earlier runs.")] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep/--no-sweep", help="Also sweep a virtual Jetson Nano's clocks.")
    ] = True,
    shape: options.Shapes = None,
) -> output.Document:
    """Tune a model on this machine, compile it, check it, time it against untuned TVM and ONNX Runtime."""
    since = time.monotonic()
    options.require_trials(trials)
    settings = farm_settings.load()
    source, inputs = options.read_model(model, shape)
    artifact_folder.require_room(out)
    screen = CampaignScreen()

    with options.open_store(settings) as store:
        try:
            request = job.QuickstartRequest(source, inputs, trials, out.absolute(), fresh, since, sweep, _WAIT_S)
            kind = board_types.require_board_type("local")
            document = job.run(request, settings, store, kind, screen)
        finally:
            screen.close()
    failure = tune.find_failure(document["trials"], document["records"]["used"])
    yield output.Failed(document, 1 if document["outputs_match"] is False else failure)
    _print(document)


def _print(document: dict[str, Any]) -> None:
    if document["doubt"]:
        output.say(f"do not rely on these latencies, {document['doubt']}")
    scale = seconds_scale(each["median"] / 1e3 for each in document["latency_ms"].values() if each)
    rows: list[tuple[str | None, ...]] = []
    for name, label in quickstart_page.list_variants(document):
        figures = document["latency_ms"][name]
        if figures is None:
            rows.append((label, "not timed", None, None, None, None, None))
            continue
        low, high = (scale.number(each / 1e3) for each in figures["ci"])
        cells = [scale.number(figures[key] / 1e3) for key in ("median", "mean", "min", "max", "std")]
        rows.append((label, cells[0], f"{low} – {high}", *cells[1:]))
    tables.print_table((f"Latency ({scale.unit})", "Median", "95 % CI", "Mean", "Min", "Max", "Std"), rows)
    trials = document["trials"]
    lines = [f"the model itself: {document['gained']}"]
    if document["speedup_vs_untuned"] is not None:
        lines.append(f"{document['speedup_vs_untuned']:.1f} times as fast as untuned TVM")
    if document["ratio_to_onnxruntime"] is not None:
        lines.append(f"{document['ratio_to_onnxruntime']:.2f} times the latency of ONNX Runtime")
    match = {True: "matches", False: "DOES NOT MATCH", None: "was not checked against"}[document["outputs_match"]]
    error = document["max_rel_error"]
    lines.append(
        f"output {match} the reference" + (f" (largest relative error {error:.1e})" if error is not None else "")
    )
    faults = ", ".join(f"{key.removesuffix('_faults')} {n}" for key, n in trials.items() if n and key != "ok")
    lines.append(f"{trials['ok']} good trials, faults: {faults or 'none'}")
    if document["seconds_to_first_trial"] is not None:
        lines.append(
            f"first trial after {document['seconds_to_first_trial']:.0f} s, all in {document['seconds_total']:.0f} s"
        )
    if document["sweep"] is not None:
        for series in document["sweep"]["series"]:
            if series["pick"] is not None:
                lines.append(f"on a virtual Jetson Nano (simulated), {series['variant']}: {series['pick']['text']}")
    if left_out := document["left_out"]:
        lines.append(f"{left_out['what']} not swept over the clocks of a virtual Jetson Nano: {left_out['why']}; both:")
        lines += [f"    {command}" for command in left_out["commands"]]
    lines += document["notes"]
    lines.append(f"report: {document['report']['page']}")
    output.say(*lines)
