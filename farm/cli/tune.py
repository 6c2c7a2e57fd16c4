"""`farm tune`: find fast code for a model's workloads and keep it as records."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from farm import settings as farm_settings
from farm.artifacts import artifact_folder, given_model, import_check, on_board
from farm.campaign import plan_models, submit
from farm.campaign import tune as campaign_tune
from farm.cli import campaign_options, options, output
from farm.cli.campaign_options import CampaignScreen
from farm.cli.options import read_duration_s
from farm.crew import local
from farm.errors import UsageError
from farm.processes import machine
from farm.report import campaign_rows
from farm.search import gpus
from farm.search.graph import pipelines
from farm.values import DEFAULT_POINT

if TYPE_CHECKING:
    from farm.campaign.tune import Tuned

# The most boards that the summary names; --json has all.
_MOST_NAMED = 6


@output.command
def tune(
    model: options.Model,
    board_type: Annotated[
        str | None, typer.Option("--board-type", metavar="TYPE", help="Board type to tune for; local: this machine.")
    ] = None,
    board: Annotated[
        str | None,
        typer.Option(
            "--board",
            metavar="NAME",
            help="Board of the fleet to use, and no other.",
            autocompletion=options.complete_board,
        ),
    ] = None,
    wait: Annotated[
        str, typer.Option("--wait", metavar="10m", help="Longest wait for a board, or this machine, to become free.")
    ] = "60s",
    virtual: Annotated[
        bool,
        typer.Option(
            "--virtual", help="Measure on virtual boards of the type, made if there are none, and make a package."
        ),
    ] = False,
    compile_to: campaign_options.CompileTo = None,
    trials: options.Trials = 128,
    ops: Annotated[
        str, typer.Option("--ops", metavar="conv2d,dense", help="Operators whose workloads are tuned; default: all.")
    ] = "",
    shape: options.Shapes = None,
    batch: options.Batch = None,
    trust_model: options.TrustModel = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start without results of earlier runs.")] = False,
    exact: options.Exact = False,
    weights: options.Weights = "float32",
    device: options.Device = "cpu",
    objective: Annotated[
        Literal["latency", "energy", "edp"],
        typer.Option("--objective", help="What finalists are chosen by; edp: energy times latency."),
    ] = "latency",
    deadline: Annotated[
        str, typer.Option("--deadline", metavar="33ms", help="Longest time of an inference, with --objective energy.")
    ] = "",
    json: options.Json = False,
) -> None:
    """Tune a model for a board type; the best verified code of each workload becomes a record.

    Exit code 1 where none was found.
    """
    since = time.monotonic()

    options.require_trials(trials)
    wait_s = read_duration_s("--wait", wait)
    if deadline and objective != "energy":
        raise UsageError("--deadline needs --objective energy")
    deadline_s = read_duration_s("--deadline", deadline) if deadline else None
    if virtual and (board_type is None or board is not None):
        raise UsageError(
            "--virtual needs --board-type, and goes without --board", "`farm board list --types` lists them."
        )
    folder = Path() if virtual and compile_to is None else compile_to
    if folder is not None:
        artifact_folder.require_room(folder)
    settings = farm_settings.load()
    screen = CampaignScreen()
    with options.open_store(settings) as store:
        kind, name = on_board.choose_board(store, board_type, board)
        if virtual and (added := local.require_virtual(store, kind, machine.name_user())):
            screen.note(f"added {' and '.join(added)} (simulated)")
        opened = given_model.open_model(model, shape or (), batch, trust_model)
        source = opened.source
        source.require_float(weights)
        own = pipelines.store_weights(gpus.require_device(pipelines.make_exact(kind, exact), device), weights)
        variants = plan_models.to_variants(opened)
        try:
            request = submit.OneModelRequest(
                "tune",
                variants[0],
                own,
                trials,
                board=name,
                ops=tuple(op.strip() for op in ops.split(",") if op.strip()),
                fresh=fresh,
                wait_s=wait_s,
                virtual=virtual,
                others=tuple(variants[1:]),
                objective=objective,
                deadline_s=deadline_s,
                since=since,
            )
            if folder is not None:
                import_check.require_right_import(source, opened.inputs, screen.note)
            tuned = campaign_tune.tune(request, settings, store, screen)
        finally:
            screen.close()
    typed = {"origin": model, "batch": batch, "shapes": shape or ()}
    used = tuned.board["board_type"], DEFAULT_POINT, bool(tuned.board["simulated"]), own.pipeline
    compiling = artifact_folder.ToCompile(typed, *used, artifact_folder.to_name(source.name, tuned.board["board_type"]))
    document = _document(source.name, tuned) | {"device": device, "compile": compiling.command}
    error = campaign_tune.find_failure(tuned.trials, tuned.records)
    if not json:
        _print(document, is_compiled=folder is not None and error is None)
    if folder is not None and error is None:
        with options.open_store(settings) as store:
            store.campaigns.change_folder(tuned.name, str(campaign_options.to_folder(folder)), machine.name_user())
        campaign_options.make(settings, tuned.name, screen.note, json, document)
    elif json:
        output.print_json(document)
    if error is not None:
        raise error


def _document(model: str, tuned: Tuned) -> dict[str, Any]:
    board, verdict = tuned.board, tuned.verdict
    return {
        "model": model,
        "board": {"name": board["name"], "type": board["board_type"], "simulated": board["simulated"]},
        "boards": [{"name": name, "trials": count} for name, count in tuned.measured.items()],
        "campaign": tuned.campaign,
        "campaign_name": tuned.name,
        "trials": tuned.trials,
        "recalled": tuned.recalled,
        "seconds_to_first_trial": tuned.seconds_to_first_trial,
        "seconds_tuning": tuned.seconds_tuning,
        "latency_ms": None if tuned.latency_s is None else tuned.latency_s * 1e3,
        "final": tuned.final,
        "records": {
            "new": verdict.get("records", 0),
            "unchanged": verdict.get("held", 0),
            "rejected": verdict.get("rejected", 0),
            "slower_than_untuned": verdict.get("untuned", 0),
        },
        "workloads": [
            {
                "name": task["name"],
                "flop": task["flop"],
                "weight": task["weight"],
                "latency_us": None if task["best_s"] is None else task["best_s"] * 1e6,
                "trials": task["counted"],
            }
            for task in tuned.tasks
        ],
    }


def _print(document: dict[str, Any], *, is_compiled: bool) -> None:
    records, trials, used = document["records"], document["trials"], document["board"]
    faults = ", ".join(f"{key.removesuffix('_faults')} {n}" for key, n in trials.items() if n and key != "ok")
    output.stdout.print(
        f"campaign {document['campaign']}: {trials['ok']} good trials, faults: {faults or 'none'}; "
        f"{records['new']} new records, {records['unchanged']} unchanged, {records['rejected']} rejected",
        soft_wrap=True,
    )
    output.say(_say_boards(document))
    if document["final"] is not None:
        output.say(campaign_rows.describe_final(document["final"]))
    option = " --simulated" if used["simulated"] else ""
    offer = "" if is_compiled else f"; `{document['compile']}` makes a library of them"
    output.say(f"`farm record list{option}` shows the records{offer}.")


def _say_boards(document: dict[str, Any]) -> str:
    """Say where it was measured, boards with most trials first."""
    used, boards = document["board"], document["boards"]
    where, verb = f"{used['type']}/{used['name']}", "is"
    if len(boards) > 1:
        named = ", ".join(
            f"{each['name']} ({each['trials']} trial{'' if each['trials'] == 1 else 's'})"
            for each in boards[:_MOST_NAMED]
        )
        more = f" and {len(boards) - _MOST_NAMED} more" if len(boards) > _MOST_NAMED else ""
        where, verb = f"{len(boards)} boards of type {used['type']}: {named}{more}", "are"
    simulated = f", which {verb} simulated: nothing was measured on a real board" if used["simulated"] else ""
    return f"measured on {where}{simulated}"
