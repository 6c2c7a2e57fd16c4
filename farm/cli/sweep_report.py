"""A sweep's result: `farm sweep export`, a comparison of two, and the document as text. `sweep.py` runs sweeps."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from farm import units
from farm.cli import options, output, tables
from farm.errors import UsageError
from farm.inventory import board_types
from farm.programs.metrics import LATENCY, ProgramMetric, read_metric
from farm.report import sweep_page
from farm.sweep import rows as sweep_rows
from farm.sweep.export import chosen as exporting
from farm.sweep.export import compare as comparing
from farm.sweep.export import document as export_document

Sweep = Annotated[int, typer.Argument(metavar="ID", help="Number of the sweep; `farm sweep list` has them.")]
# A terminal holds no more columns (a TX2 has twelve rails).
_MOST_RAILS = 3


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
        str | None,
        typer.Option(
            "--variant",
            metavar="NAME|xN|NAMExN",
            help="Variant and batch size, as `tuned x4`; default: tuned, if there is one.",
        ),
    ] = None,
    out: Annotated[
        pathlib.Path | None, typer.Option("--out", metavar="FILE", help="File to write instead of stdout.")
    ] = None,
) -> None:
    """Write the setting of a measured point. For a board to be set to it, with the evidence as comments."""
    document = _fetch(sweep)
    series = _choose_series(document, variant)
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
        _print_pair(pair, read_metric(first["goal"]))


def _fetch(sweep: int) -> dict[str, Any]:
    """Return a sweep's document, with the picks for its own goal."""
    with options.open_store() as store:
        return export_document.make_document(store, sweep)


def _choose_series(document: Mapping[str, Any], variant: str | None) -> Mapping[str, Any]:
    """Return the chosen series: tuned before others; one batch size, or the named one. Raises UsageError."""
    found = export_document.find_series(document, variant)
    best = sweep_rows.order_series({"series": found})[0]
    batches = sorted({series["batch"] for series in found})
    if len(batches) > 1:
        raise UsageError(
            f"the sweep has batch sizes {', '.join(map(str, batches))}", f"Name one: --variant x{batches[0]}."
        )
    return best


def _print_pair(pair: comparing.SeriesPair, metric: ProgramMetric) -> None:
    names = [f"{series['variant']}, batch {series['batch']}" for series in (pair.one, pair.other)]
    print(f"\n{names[0]}" if names[0] == names[1] else f"\nA: {names[0]}; B: {names[1]}")
    times = [row["latency_s"]["value"] for each in (*pair.points, *pair.bests) for row in (each.one, each.other)]
    scale, head = metric.scale(times), "Time for one" if metric.counted else metric.title
    columns = ["Operating point", f"A, {scale.unit}", f"B, {scale.unit}", f"{head} B/A", "Power B/A", "Energy B/A"]
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


def print_sweep(document: Mapping[str, Any]) -> None:
    """Print everything."""
    board = document["board"]
    names = ", ".join(board["names"])
    simulated = f" (simulated, {board['watts']}: nothing was measured on a real board)" if board["simulated"] else ""
    grid = document["grid"]
    output.say(
        f"sweep {document['sweep']}: {document['model']} on {sweep_rows.name_boards(document, names)}{simulated}, "
        f"{grid['measured']} of {grid['points']} points measured, {document['state']}, {document['seconds']:.0f} s"
    )
    for series in document["series"]:
        output.say("")
        output.say(_name(series))
        _print_rows(series, document)
        if series["drift"]["corrected"] or series["drift"]["void"]:
            output.say(f"drift: {series['drift']['text']}")
    _print_variants(document)
    output.say("")
    print_picks(document, document["series"])
    for merge in grid["merged"]:
        output.say(f"merged into {merge['kept']}: {', '.join(merge['dropped'])} ({merge['reason']})")
    for note in document["notes"]:
        output.say(f"note: {note}")
    if "report" in document:
        output.say(f"report: {document['report']['page']}")
    else:
        number = document["sweep"]
        output.say(f"`farm sweep show {number} --out DIR` writes the page, `farm sweep export {number}` the setting")
    if any(series["pick"] for series in document["series"]) and not document["metrics"]:
        output.say("`farm campaign run FILE` with the pick under `operating_points` finds the schedules best there")


def _print_variants(document: Mapping[str, Any]) -> None:
    """Print the farm's code against untuned, a row per operating point."""
    for variants in sweep_page.pair_variants(document):
        head, lines = sweep_page.tabulate(variants)
        output.say("")
        output.say(f"{variants.name} against untuned" + (f", batch {variants.batch}" if variants.batch > 1 else ""))
        tables.print_table(["Operating point", *head], [[text for text, _ in line] for line in lines])


def print_picks(document: Mapping[str, Any], chosen: Sequence[Mapping[str, Any]]) -> None:
    """Print the clocks to set, their cost, the confidence and the next command."""
    simulated = f" (simulated, {document['board']['watts']})" if document["board"]["simulated"] else ""
    goal = document["goal"]
    limits = {"--deadline": goal["deadline_s"], "--max-power": goal["max_power_w"], "--period": goal["period_s"]}
    drop = " ".join(f"{option} none" for option, limit in limits.items() if limit)
    offer = f"; `farm sweep pick {document['sweep']} {drop}` drops what limits it" if drop else ""
    output.say(f"goal: {sweep_rows.describe_goal(goal)}{offer}")
    for series in chosen:
        picked = series["pick"]
        if picked is None:
            output.say(f"no pick, {_name(series)}{simulated}: {series['no_pick']}")
        else:
            output.say(f"pick, {_name(series)}{simulated}: {picked['text']}")
            for other in picked["runners_up"]:
                output.say(f"  next: {other['key']}: {other['text']}")
        for other in series["unmeasured"]:
            output.say(f"  {other['text']}; `farm sweep pick {document['sweep']} --measure` measures it")


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of the table. A narrow terminal drops the least important one; 0 always stays."""

    title: str
    matters: int
    cells: list[str | None]
    is_text: bool = False


def _print_rows(series: Mapping[str, Any], document: Mapping[str, Any]) -> None:
    rows = [row for row in series["rows"] if row["measured"] or row["invalid"]]
    columns = _plan_columns(series, rows, document) if rows else []
    cells = list(zip(*(column.cells for column in columns), strict=True))
    left = [index for index, column in enumerate(columns) if column.is_text]
    order = sorted(range(len(columns)), key=lambda index: -columns[index].matters)
    spare = [index for index in order if columns[index].matters]
    tables.print_table([column.title for column in columns], cells, left, "nothing measured", spare)
    rails = sweep_rows.list_rails({"series": [series]})
    if rows and len(rails) > _MOST_RAILS:
        output.say(f"the {_MOST_RAILS} largest of {len(rails)} rails; `farm sweep show --out DIR` has all")
    unseen = len(series["rows"]) - len(rows)
    if unseen:
        points = "1 point was" if unseen == 1 else f"{unseen} points were"
        output.say(f"{points} not measured; `--json` has what is predicted")


def _plan_columns(
    series: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], document: Mapping[str, Any]
) -> list[_Column]:
    """Return all possible columns."""
    measured, metric = [row for row in rows if row["measured"]], read_metric(document["goal"])
    time = metric.scale(row["latency_s"]["value"] for row in measured)
    latency = [row["latency_s"] if row["measured"] else None for row in rows]
    columns = [
        _Column("Operating point", 0, [row["key"] for row in rows], is_text=True),
        _Column(f"{metric.title} ({time.unit})", 0, [_number(each and each["value"], time) for each in latency]),
        _Column("95 % CI", 2, [_range(each, time) for each in latency]),
        _Column("p95", 4, [_number(row["latency_p95_s"], time) for row in rows]),
        *(
            _Column(f"{name} ({unit})", 3, [_number(row["metrics"].get(name)) for row in rows])
            for name, unit in sweep_rows.list_others(document)
        ),
    ]
    if any(row["power_w"] for row in series["rows"]):
        columns += _plan_power(series, rows, metric)
    celsius = [row["temperature_c"] for row in rows]
    columns += [
        _Column("°C", 3, [None if each is None else f"{each:.0f}" for each in celsius]),
        _Column("Visits", 5, [str(row["visits"]) for row in rows]),
        _Column("", 0, [_flags(series, row) for row in rows], is_text=True),
    ]
    return columns


def _plan_power(series: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], metric: ProgramMetric) -> list[_Column]:
    """Return the columns of a board with a sensor."""
    joule = units.joule_scale(row["energy_j"]["value"] for row in rows if row["measured"] and row["energy_j"])
    power, energy = ([row[which] if row["measured"] else None for row in rows] for which in ("power_w", "energy_j"))
    above = [row["energy_above_idle_j"] for row in rows]
    per_joule = [row["inferences_per_joule"] if row["measured"] else None for row in rows]
    inferences = "Inf./J" if metric == LATENCY else f"{metric.per}/J"
    inferences += f" x {series['batch']}" if series["batch"] > 1 else ""
    means = [row["period"] and row["period"]["mean_power_w"]["value"] for row in rows]
    return [
        *([_Column("Mean (W)", 0, [_watts(each) for each in means])] if any(means) else []),
        _Column("Power (W)", 0, [_watts(each and each["value"]) for each in power]),
        *(
            _Column(rail, 7, [_watts(row["rail_power_w"].get(rail)) for row in rows])
            for rail in sweep_rows.choose_rails(series, _MOST_RAILS)
        ),
        _Column(f"Energy ({joule.unit})", 0, [_number(each and each["value"], joule) for each in energy]),
        _Column("95 % CI", 1, [_range(each, joule) for each in energy]),
        _Column("Above idle", 6, [_number(each and each["value"], joule) for each in above]),
        _Column(inferences, 6, [_number(each, units.Scale(series["batch"], "")) for each in per_joule]),
    ]


def _flags(series: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    picked = series["pick"]
    words = ["PICK"] if picked and picked["key"] == row["key"] else []
    words += ["front"] if row["on_front"] else []
    words += ["anchor"] if row["key"] == series["anchor"] else []
    words += ["throttled"] if row["throttled"] else ["invalid"] if row["invalid"] else []
    return " ".join(words)


def _name(series: Mapping[str, Any]) -> str:
    return str(series["variant"]) + (f", batch {series['batch']}" if series["batch"] > 1 else "")


def _number(value: float | None, scale: units.Scale = units.WATT) -> str | None:
    return None if value is None else f"{scale.convert(value):.4g}"


def _watts(value: float | None) -> str | None:
    """Format to the mW, a sensor's resolution."""
    return None if value is None else f"{value:.3f}"


def _range(estimate: Mapping[str, float] | None, scale: units.Scale) -> str | None:
    low, high = sorted(scale.convert(estimate[end]) for end in ("low", "high")) if estimate else (0.0, 0.0)
    return f"{low:.4g}–{high:.4g}" if estimate else None
