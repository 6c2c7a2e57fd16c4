"""`farm sweep export`, and comparing two sweeps: use a sweep's result. `sweep.py` runs sweeps."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from farm import units
from farm.cli import options, output, tables
from farm.errors import UsageError
from farm.inventory import board_types
from farm.sweep import rows as sweep_rows
from farm.sweep.export import chosen as exporting
from farm.sweep.export import compare as comparing
from farm.sweep.export import document as export_document

Sweep = Annotated[int, typer.Argument(metavar="ID", help="Number of the sweep; `farm sweep list` has them.")]


@output.command
def export(
    sweep: Sweep,
    form: Annotated[
        exporting.ExportForm, typer.Option("--as", help="Format: a stanza for chosen.conf, JSON, or a shell script.")
    ],
    key: Annotated[
        str | None,
        typer.Option(
            "--operating-point",
            metavar="POINT",
            help="Operating point instead of the pick, as `farm sweep show` names it.",
        ),
    ] = None,
    variant: Annotated[
        str | None, typer.Option("--variant", metavar="NAME", help="Variant; default: tuned, if there is one.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", metavar="N", help="Batch size.")] = None,
    out: Annotated[
        pathlib.Path | None, typer.Option("--out", metavar="FILE", help="File to write instead of stdout.")
    ] = None,
) -> None:
    """Write the setting of a measured point. For a board to be set to it, with the evidence as comments."""
    document = _fetch(sweep)
    series = _choose_series(document, variant, batch)
    chosen = exporting.choose_point(document, series, key)
    board_type = board_types.require_board_type(chosen.document["board"]["type"])
    text = exporting.WRITERS[form](chosen, board_type)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
        output.tell(f"{chosen.row['key']} as {form} in {out}")


def compare(one: int, other: int, mixed: bool) -> output.Document:
    """Compare two sweeps at the operating points that both measured; ratios are `other` over `one`."""
    first, second = _fetch(one), _fetch(other)
    pairs = comparing.compare_sweeps(first, second, mixed=mixed)
    yield comparing.comparison_to_dict(first, second, pairs)
    for letter, document in (("A", first), ("B", second)):
        board = document["board"]
        simulated = ", simulated" if board["simulated"] else ""
        where = sweep_rows.name_boards(document)
        print(f"{letter}: sweep {document['sweep']}, {document['model']} on {where}{simulated}")
    for pair in pairs:
        _print_pair(pair)


def _fetch(sweep: int) -> dict[str, Any]:
    """Return a sweep's document, with the picks for its own goal."""
    with options.open_store() as store:
        return export_document.make_document(store, sweep)


def _choose_series(document: Mapping[str, Any], variant: str | None, batch: int | None) -> Mapping[str, Any]:
    """Return the chosen series: tuned before others; one batch size, or the named one. Raises UsageError."""
    found = export_document.find_series(document, variant, batch)
    best = sweep_rows.order_series({"series": found})[0]
    batches = sorted({series["batch"] for series in found})
    if len(batches) > 1:
        raise UsageError(f"the sweep has batch sizes {', '.join(map(str, batches))}", "Name one with --batch.")
    return best


def _print_pair(pair: comparing.SeriesPair) -> None:
    names = [f"{series['variant']}, batch {series['batch']}" for series in (pair.one, pair.other)]
    print(f"\n{names[0]}" if names[0] == names[1] else f"\nA: {names[0]}; B: {names[1]}")
    times = [row["latency_s"]["value"] for each in (*pair.points, *pair.bests) for row in (each.one, each.other)]
    scale = units.seconds_scale(times)
    columns = ["Operating point", f"A, {scale.unit}", f"B, {scale.unit}", "Latency B/A", "Power B/A", "Energy B/A"]
    rows = [_row(units.format_point(each.label), each, scale) for each in pair.points]
    rows += [_row(_describe_best(each), each, scale) for each in pair.bests]
    tables.print_table(columns, rows)
    for quantity in ("latency", "energy"):
        if len(pair.points) > 1 and (summary := pair.summarise(quantity)):
            print(
                f"{quantity}: B is {summary['mean']:.3f} times A, geometric mean over {len(pair.points)} points "
                f"({summary['least']:.3f} to {summary['greatest']:.3f})"
            )
    if pair.left_out:
        print(f"{pair.left_out} points were measured in one of both only")
    print("= stands by ratios that chance alone may have moved from 1")


def _row(label: str, pair: comparing.PointPair, scale: units.Scale) -> Sequence[str]:
    times = [scale.number(row["latency_s"]["value"]) for row in (pair.one, pair.other)]
    return label, *times, *(_ratio(pair.ratios[name]) for name in ("latency", "power", "energy"))


def _describe_best(pair: comparing.PointPair) -> str:
    keys = [units.format_point(row["key"]) for row in (pair.one, pair.other)]
    return f"{pair.label}: {keys[0]}" + (f" / {keys[1]}" if keys[0] != keys[1] else "")


def _ratio(ratio: sweep_rows.VariantRatio | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio.value:.3f} ({ratio.low:.3f} – {ratio.high:.3f}){' =' if ratio.is_one else '  '}"
