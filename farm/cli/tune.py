"""`farm tune`: find fast code for a model's workloads and keep it as records."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from farm import settings as farm_settings
from farm.cli import options, output
from farm.inventory.board_types import require_board_type


def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file, or a name from `farm model zoo`.")],
    board_type: Annotated[str, typer.Option("--board-type", metavar="TYPE", help="What to tune for.")] = "local",
    trials: options.Trials = 128,
    ops: Annotated[
        str, typer.Option("--ops", metavar="conv2d,dense", help="Tune workloads of these operators only.")
    ] = "",
    shape: options.Shapes = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not start from what earlier runs measured.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Tune a model for a board type; the best verified code of each workload becomes a record."""
    since = time.monotonic()

    def work() -> None:
        options.require_trials(trials)
        settings = farm_settings.load()
        kind = require_board_type(board_type)
        source, inputs = options.read_model(model, shape)
        screen = output.Screen()
        from farm.campaign.tuning import LocalTuning

        with options.open_store(settings) as store:
            try:
                with LocalTuning(settings, store, kind, screen) as local:
                    workloads = local.load(source, inputs, [op.strip() for op in ops.split(",") if op.strip()])
                    tuned = local.tune("tune", source, workloads, trials, fresh, since)
                    board = local.board()
            finally:
                screen.close()
        document = _document(source.name, board, tuned)
        if json:
            output.print_json(document)
        else:
            _print(document)

    output.run(work, debug)


def _document(model: str, board: Any, tuned: Any) -> dict[str, Any]:
    latency = tuned.progress.latency_s
    return {
        "model": model,
        "board": {"name": board.name, "type": board.board_type, "simulated": board.simulated},
        "campaign": tuned.campaign,
        "trials": tuned.trials,
        "recalled": tuned.recalled,
        "seconds_to_first_trial": tuned.seconds_to_first_trial,
        "seconds_tuning": tuned.seconds_tuning,
        "latency_ms": None if latency is None else latency * 1e3,
        "records": {
            "new": tuned.verdict.records,
            "unchanged": tuned.verdict.unchanged,
            "rejected": tuned.verdict.rejected,
        },
        "workloads": [
            {
                "name": line.name,
                "flop": line.flop,
                "weight": line.weight,
                "latency_us": None if line.best_s is None else line.best_s * 1e6,
                "trials": line.trials,
            }
            for line in tuned.progress.workloads
        ],
    }


def _print(document: dict[str, Any]) -> None:
    records, trials = document["records"], document["trials"]
    faults = ", ".join(f"{key.removesuffix('_faults')} {n}" for key, n in trials.items() if n and key != "ok")
    output.stdout.print(
        f"campaign {document['campaign']}: {trials['ok']} good trials, faults: {faults or 'none'}; "
        f"{records['new']} new records, {records['unchanged']} unchanged, {records['rejected']} rejected",
        soft_wrap=True,
    )
    if document["latency_ms"] is not None:
        output.stdout.print(f"model latency, summed over its workloads: {document['latency_ms']:.2f} ms")
    output.stdout.print("`farm record list` shows the records.")
