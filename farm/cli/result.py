"""`farm result`: kept results of `farm model bench`, `run` and `evaluate`, and the matrix of all."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farm.artifacts import artifact_folder
from farm.cli import options, output, tables
from farm.errors import FarmError, UsageError
from farm.inventory import board_types
from farm.processes import machine
from farm.report import matrix, results
from farm.units import format_bytes, format_minute, format_number
from farm.values import RESULT_KINDS

if TYPE_CHECKING:
    from farm.store import Store
    from farm.store.results import StoredResult

app = typer.Typer(help="Results: what `farm model bench`, `run` and `evaluate` measured.", no_args_is_help=True)

_MOST, _SHOWN = 10_000, 50
_Result = Annotated[int, typer.Argument(metavar="ID", min=0, help="Number of a result; `farm result list` has them.")]
_Other = Annotated[int | None, typer.Argument(metavar="[OTHER]", min=0, help="Number of another result.")]
_Model = Annotated[str, typer.Option("--model", metavar="MODEL", help="Only results of this model.")]
_BoardType = Annotated[str, typer.Option("--board-type", metavar="TYPE", help="Only results of this board type.")]
_Kind = Annotated[str, typer.Option("--kind", metavar="|".join(RESULT_KINDS), help="Only results of this command.")]
_Costs = Annotated[
    list[str] | None,
    typer.Option(
        "--cost",
        metavar="0.05EUR/h",
        help="Price of a board's hour (/h) or of electricity (/kWh), or a battery (50Wh).",
    ),
]


def keep(
    store: Store, kind: str, document: Mapping[str, Any], *, model: str, board: Mapping[str, Any], device: str
) -> None:
    """Keep a result of one model; `board` has its name, type, and whether it is simulated. Warn where it fails."""
    about = {"model": model, "board": board["name"], "board_type": board["type"], "simulated": board["simulated"]}
    try:
        number = store.results.add(kind, document, **about, device=device, by=machine.name_user())
    except FarmError as error:  # what was measured is shown in any case
        output.note(f"this result is not kept: {error}")
    else:
        output.note(f"result {number}; `farm result show {number}` shows it again")


@app.command("list")
@output.command
def list_results(model: _Model = "", board_type: _BoardType = "", kind: _Kind = "") -> output.Document:
    """List kept results, the newest first."""
    if kind and kind not in RESULT_KINDS:
        raise UsageError(f"--kind {kind[:40]!r} is unknown", f"Known: {', '.join(RESULT_KINDS)}.")
    with options.open_store_to_show() as store:
        found = store.results.fetch(kind=kind, model=model, board_type=_read_type(board_type), limit=_SHOWN)
    yield [each._asdict() for each in found]
    rows = []
    for each in found:
        figures = results.list_figures(each)
        ours = figures[0] if figures else None
        rows.append(
            (
                each.id,
                each.kind,
                each.model,
                _name_board(each),
                ours and ours.precision,
                ours and results.say_latency(ours),
                ours and f"{ours.fps:,.1f}",
                ", ".join(other.precision if other.code == results.OURS else other.code for other in figures[1:]),
                each.by,
                format_minute(each.recorded_at),
            )
        )
    heads = ("ID", "Command", "Model", "Board", "Precision", "Latency (ms)", "FPS", "Beside", "By", "Measured")
    spare = ("By", "Measured", "Beside", "Precision", "FPS")
    empty = "no results yet; `farm model bench MODEL` makes one"
    tables.print_table(heads, rows, left=(1, 2, 3, 4, 7, 8, 9), spare=spare, empty=empty)


@app.command("show")
@output.command
def show(
    result: _Result,
    other: _Other = None,
    mixed: Annotated[bool, typer.Option("--mixed", help="Compare even a simulated with a real one.")] = False,
) -> output.Document:
    """Show a result: every program. With OTHER: compare two, program by program.

    Judged where only latencies differ; a tie where intervals allow it.
    """
    if other is not None:
        yield from _compare(result, other, mixed)
        return
    with options.open_store_to_show() as store:
        found = store.results.require(result)
    figures = results.list_figures(found)
    yield found._asdict()
    heads = ["Code", "Precision", "Batch", "Latency (ms)", "95 % CI", "FPS", "Energy (mJ)", "Size"]
    scored = [name for name in results.SCORES if any(name in each.scores for each in figures)]
    heads += [results.SCORES[name] for name in scored]
    rows: list[tuple[Any, ...]] = []
    for each in figures:
        row = [each.code, each.precision, each.batch, results.say_latency(each)]
        row += [f"{each.low_s * 1e3:.3f} – {each.high_s * 1e3:.3f}", f"{each.fps:,.1f}"]
        row += [None if each.energy_j is None else format_number(each.energy_j * 1e3)]
        row += [None if each.size is None else format_bytes(each.size)]
        row += [results.say_score(name, each.scores[name]) if name in each.scores else None for name in scored]
        rows.append(tuple(row))
    tables.print_table(heads, rows, left=(0, 1))
    when = format_minute(found.recorded_at)
    _say_doubts(found)
    output.say(f"result {found.id}: {found.model} on {_name_board(found)}, {found.kind} of {when} by {found.by}")


def _compare(one: int, other: int, mixed: bool) -> output.Document:
    with options.open_store_to_show() as store:
        first, second = store.results.require(one), store.results.require(other)
    changes = results.compare(first, second, mixed=mixed)
    differences = results.list_differences(first, second)
    names = ("ratio", "low", "high", "energy", "verdict")
    yield [
        {"code": each.one.code, "precision": each.one.precision, "batch": each.one.batch}
        | {name: getattr(each, name) for name in names}
        | {"differences": differences}
        for each in changes
    ]
    tables.print_table(
        ("Code", "Precision", "Batch", f"{one} (ms)", f"{other} (ms)", "Ratio", "95 % interval", "Energy", "Verdict"),
        [
            (
                *(each.one.code, each.one.precision, each.one.batch),
                *(results.say_latency(figure) for figure in (each.one, each.other)),
                *(f"{each.ratio:.3f}", f"{each.low:.3f} – {each.high:.3f}"),
                None if each.energy is None else f"{each.energy:.3f}",
                each.verdict,
            )
            for each in changes
        ],
        left=(0, 1, 8),
        spare=("Batch", "Precision"),
    )
    _say_doubts(first, second)
    output.say(*(f"not judged, because these differ: {'; '.join(differences)}" for _ in differences[:1]))
    output.say(
        *(
            f"{each.id}: {each.model} on {_name_board(each)}, {format_minute(each.recorded_at)}"
            for each in (first, second)
        )
    )


@app.command("matrix")
@output.command
def show_matrix(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the page, Markdown, CSV and the chart.")
    ] = None,
    cost: _Costs = None,
) -> output.Document:
    """Show models x boards x precision. From kept results: gain over the best rival, FPS, joules, accuracy, cost."""
    costs = _read_costs(cost or [])
    if out is not None:
        artifact_folder.require_room(out)
    with options.open_store_to_show() as store:
        cells = matrix.make_matrix(store.results.fetch(limit=_MOST))
    paths = matrix.write_matrix(cells, costs, out) if out is not None and cells else {}
    yield {
        "cells": [
            {"model": each.model, "board": each.place, "result": each.result, "log2_gain": each.gain}
            | {"precision": each.figure.precision, "batch": each.figure.batch, "latency_s": each.figure.median_s}
            | {"rival": each.rival and each.rival.code, "fps": each.figure.fps, "energy_j": each.figure.energy_j}
            | {
                "doubt": each.figure.doubt,
                "scores": each.scores,
                "per_million": costs.price(each.figure),
                "per_battery": costs.count(each.figure),
            }
            for each in cells
        ],
        "currency": costs.currency,
        "report": paths,
    }
    heads, rows = matrix.list_columns(cells, costs)
    left = [heads.index(each) for each in ("Model", "Precision", "Board", "Best rival") if each in heads]
    spare = [each for each in ("Batch", "Best rival", "FPS", "Precision") if each in heads]
    tables.print_table(heads, rows, left=left, spare=spare, empty="no results yet; `farm model bench MODEL` makes one")
    output.say(*matrix.say_doubts(cells), *(f"{kind}: {shlex.quote(path)}" for kind, path in paths.items()))


def _read_costs(texts: list[str]) -> results.Costs:
    """Read `0.05EUR/h`, `0.30EUR/kWh` and `50Wh`. Raises UsageError."""
    given = {"/h": "", "/kwh": "", "wh": ""}
    for text in texts:
        end = next((each for each in ("/kwh", "/h", "wh") if text.lower().endswith(each)), "")
        if not end:
            raise UsageError(f"--cost {text!r} is no cost", "Examples: 0.05EUR/h, 0.30EUR/kWh, 50Wh.")
        given[end] = text if end == "wh" else text[: -len(end)]
    return results.read_costs(given["/h"], given["/kwh"], given["wh"])


def _read_type(board_type: str) -> str:
    return board_types.require_board_type(board_type).name if board_type else ""


def _say_doubts(*found: StoredResult) -> None:
    output.say(*(f"do not rely on result {each.id}, {doubt}" for each in found if (doubt := results.read_doubt(each))))


def _name_board(result: StoredResult) -> str:
    device = " GPU" if result.device == "gpu" else ""
    return f"{result.board_type}/{result.board}{device}{' (simulated)' if result.simulated else ''}"
