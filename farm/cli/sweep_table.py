"""A sweep's document as text on stdout: the table, the picks and notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from farm import units
from farm.cli import output, tables
from farm.report import sweep_page
from farm.sweep import rows as sweep_rows

# A terminal holds no more columns (a TX2 has twelve rails).
_MOST_RAILS = 3


def print_sweep(document: Mapping[str, Any]) -> None:
    """Print everything."""
    board = document["board"]
    names = ", ".join(board["names"])
    simulated = " (simulated: nothing was measured on a real board)" if board["simulated"] else ""
    grid = document["grid"]
    output.say(
        f"sweep {document['sweep']}: {document['model']} on {sweep_rows.name_boards(document, names)}{simulated}, "
        f"{grid['measured']} of {grid['points']} points measured, {document['state']}, {document['seconds']:.0f} s"
    )
    for series in document["series"]:
        output.say("")
        output.say(_name(series))
        _print_rows(series)
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
    if any(series["pick"] for series in document["series"]):
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
    simulated = " (simulated)" if document["board"]["simulated"] else ""
    limits = {"--deadline": document["goal"]["deadline_s"], "--max-power": document["goal"]["max_power_w"]}
    drop = " ".join(f"{option} none" for option, limit in limits.items() if limit)
    offer = f"; `farm sweep pick {document['sweep']} {drop}` drops what limits it" if drop else ""
    output.say(f"goal: {sweep_rows.describe_goal(document['goal'])}{offer}")
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


def _print_rows(series: Mapping[str, Any]) -> None:
    rows = [row for row in series["rows"] if row["measured"] or row["invalid"]]
    columns = _plan_columns(series, rows) if rows else []
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


def _plan_columns(series: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[_Column]:
    """Return all possible columns."""
    measured = [row for row in rows if row["measured"]]
    time = units.seconds_scale(row["latency_s"]["value"] for row in measured)
    latency = [row["latency_s"] if row["measured"] else None for row in rows]
    columns = [
        _Column("Operating point", 0, [row["key"] for row in rows], is_text=True),
        _Column(f"Latency ({time.unit})", 0, [_number(each and each["value"], time.factor) for each in latency]),
        _Column("95 % CI", 2, [_range(each, time.factor) for each in latency]),
        _Column("p95", 4, [_number(row["latency_p95_s"], time.factor) for row in rows]),
    ]
    if any(row["power_w"] for row in series["rows"]):
        columns += _plan_power(series, rows)
    celsius = [row["temperature_c"] for row in rows]
    columns += [
        _Column("°C", 3, [None if each is None else f"{each:.0f}" for each in celsius]),
        _Column("Visits", 5, [str(row["visits"]) for row in rows]),
        _Column("", 0, [_flags(series, row) for row in rows], is_text=True),
    ]
    return columns


def _plan_power(series: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[_Column]:
    """Return the columns of a board with a sensor."""
    joule = units.joule_scale(row["energy_j"]["value"] for row in rows if row["measured"] and row["energy_j"])
    power, energy = ([row[which] if row["measured"] else None for row in rows] for which in ("power_w", "energy_j"))
    above = [row["energy_above_idle_j"] for row in rows]
    per_joule = [row["inferences_per_joule"] if row["measured"] else None for row in rows]
    inferences = "Inf./J" if series["batch"] == 1 else f"Inf./J x {series['batch']}"
    return [
        _Column("Power (W)", 0, [_watts(each and each["value"]) for each in power]),
        *(
            _Column(rail, 7, [_watts(row["rail_power_w"].get(rail)) for row in rows])
            for rail in sweep_rows.choose_rails(series, _MOST_RAILS)
        ),
        _Column(f"Energy ({joule.unit})", 0, [_number(each and each["value"], joule.factor) for each in energy]),
        _Column("95 % CI", 1, [_range(each, joule.factor) for each in energy]),
        _Column("Above idle", 6, [_number(each and each["value"], joule.factor) for each in above]),
        _Column(inferences, 6, [_number(each, series["batch"]) for each in per_joule]),
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


def _number(value: float | None, factor: float = 1.0) -> str | None:
    return None if value is None else f"{value * factor:.4g}"


def _watts(value: float | None) -> str | None:
    """Format to the mW, a sensor's resolution."""
    return None if value is None else f"{value:.3f}"


def _range(estimate: Mapping[str, float] | None, factor: float) -> str | None:
    return None if estimate is None else f"{estimate['low'] * factor:.4g}–{estimate['high'] * factor:.4g}"
