"""`farm tune`: find fast code for a model's workloads and keep it as records."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from farm import settings as farm_settings
from farm.cli import options, output
from farm.cli.durations import read_duration_s
from farm.inventory.board_types import BoardType, require_board_type
from farm.store import Store


def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file, or a name from `farm model zoo`.")],
    board_type: Annotated[
        str | None,
        typer.Option("--board-type", metavar="TYPE", help="Board type to tune for; local: this machine."),
    ] = None,
    board: Annotated[
        str | None, typer.Option("--board", metavar="NAME", help="Board of the fleet to use, and no other.")
    ] = None,
    wait: Annotated[
        str, typer.Option("--wait", metavar="10m", help="Longest wait for a board of the fleet to become free.")
    ] = "60s",
    trials: options.Trials = 128,
    ops: Annotated[
        str, typer.Option("--ops", metavar="conv2d,dense", help="Operators whose workloads are tuned; default: all.")
    ] = "",
    shape: options.Shapes = None,
    batch: options.Batch = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start without results of earlier runs.")] = False,
    exact: options.Exact = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Tune a model for a board type; the best verified code of each workload becomes a record.

    Exit code 1 where none was found.
    """
    since = time.monotonic()

    def work() -> None:
        options.require_trials(trials)
        wait_s = read_duration_s("--wait", wait)
        settings = farm_settings.load()
        with options.open_store(settings) as store:
            kind = options.make_exact(_choose_type(store, board_type, board), exact)
            source, inputs = options.read_model(model, shape, batch)
            screen = output.Screen()
            from farm.campaign.fleet_tuning import FleetTuning
            from farm.campaign.tuning import LocalTuning, Tuning, find_failure

            tuning: Tuning
            if board is None and kind.host_is_board:
                tuning = LocalTuning(settings, store, kind, screen)
            else:
                tuning = FleetTuning(settings, store, kind, screen, board, wait_s, f"tune {source.name}")
            try:
                with tuning:
                    workloads = tuning.load(source, inputs, [op.strip() for op in ops.split(",") if op.strip()])
                    tuned = tuning.tune("tune", source, workloads, trials, fresh, since)
                    used = tuning.board()
            finally:
                screen.close()
        document = _document(source.name, used, tuned)
        if json:
            output.print_json(document)
        else:
            _print(document)
        if error := find_failure(tuned.trials, tuned.verdict.records + tuned.verdict.unchanged):
            raise error

    output.run(work, debug)


def _choose_type(store: Store, board_type: str | None, board: str | None) -> BoardType:
    """The type that was named, else the board's, else this machine's. Raises UsageError."""
    if board_type is None and board is not None:
        return require_board_type(str(store.require_board(board)["board_type"]))
    return require_board_type(board_type or "local")


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
            "slower_than_untuned": tuned.verdict.slower,
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
    records, trials, used = document["records"], document["trials"], document["board"]
    faults = ", ".join(f"{key.removesuffix('_faults')} {n}" for key, n in trials.items() if n and key != "ok")
    output.stdout.print(
        f"campaign {document['campaign']}: {trials['ok']} good trials, faults: {faults or 'none'}; "
        f"{records['new']} new records, {records['unchanged']} unchanged, {records['rejected']} rejected",
        soft_wrap=True,
    )
    simulated = ", which is simulated: nothing of it holds for a real board" if used["simulated"] else ""
    output.stdout.print(f"measured on {used['type']}/{used['name']}{simulated}", soft_wrap=True)
    if document["latency_ms"] is not None:
        output.stdout.print(f"model latency, summed over its workloads: {document['latency_ms']:.2f} ms")
    option = " --simulated" if used["simulated"] else ""
    output.stdout.print(
        f"`farm record list{option}` shows the records; `farm model compile MODEL --board-type "
        f"{used['type']}{option} --out DIR` makes a library of them.",
        soft_wrap=True,
        markup=False,
    )
