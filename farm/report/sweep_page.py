"""The report of a sweep: one self-contained HTML page, with CSV, JSON and charts beside it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from farm import units
from farm.report import drawing, pages, sweep_answer, sweep_charts, sweep_tables
from farm.report.charts import Picture
from farm.report.pages import Content, PageTable, make_table
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Document, Series

PAGE, CSV, JSON = "sweep.html", "sweep.csv", "sweep.json"
_STATES = {
    "running": "This sweep is still running; what follows is what there is so far.",
    "interrupted": "This sweep was interrupted before it was done.",
    "failed": "This sweep failed before it was done.",
    "voided": "This sweep was voided: nothing below should be relied on.",
}


def write_sweep_report(document: Mapping[str, Any], folder: pathlib.Path) -> dict[str, str]:
    """Write the report into `folder`, made if need be; return the paths of `page`, `csv`, `json` and charts.

    `document` is what `farm sweep show ID --json` prints. Raises OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [drawing.save(chart, folder) for chart in sweep_charts.plan_charts(document)]
    texts = {
        "page": (PAGE, write_page(document, pictures)),
        "csv": (CSV, sweep_tables.write_csv(document)),
        "json": (JSON, json.dumps(document, indent=2, allow_nan=False) + "\n"),
    }
    for name, text in texts.values():
        (folder / name).write_text(text, encoding="utf-8")
    paths = {kind: str(folder / name) for kind, (name, _) in texts.items()}
    return paths | {picture.name: str(folder / f"{picture.name}.png") for picture in pictures}


def write_page(document: Document, pictures: list[Picture]) -> str:
    """Return the page's text."""
    simulated = bool(document["board"]["simulated"])
    series = sweep_rows.order_series(document)
    rails = [table for each in series if (table := sweep_tables.list_rails(document, each))]
    summary = sweep_answer.compare_variants(document)
    if not sweep_rows.has_energy(document):
        summary.append("This board has no power sensor for its total: power and energy are not known.")
    page = pages.ReportPage(
        title=f"{document['model']} on {sweep_rows.name_boards(document)}{' (simulated)' if simulated else ''}",
        subtitle=_subtitle(document),
        simulated="this board is a model of hardware. No figure below was measured on a real one." if simulated else "",
        answers=sweep_answer.write_answers(document),
        summary=summary,
        sections=(),
        footer=f"Written by farm sweep report {document['sweep']}."
        + (" All figures are simulated." if simulated else ""),
    )
    return pages.write_html(
        page,
        pictures,
        (CSV, JSON),
        "sweep.html",
        broken=_STATES.get(document["state"], ""),
        several=len(series) > 1,
        variants=sweep_answer.list_variants(document),
        unmeasured=_unmeasured(document),
        runners_up=[table for each in series if (table := _runners_up(document, each))],
        how_to_read=_how_to_read(document),
        points=[_points(document, each) for each in series],
        schedules=sweep_tables.tell_schedules(document),
        rails=rails,
        rail_count=len(sweep_rows.list_rails(document)),
        most_rails=sweep_tables.MOST_RAILS,
        merged=_merged(document),
        drift=_drift(document),
        notes=document["notes"],
        environment=_environment(document),
        csv=CSV,
    )


def _subtitle(document: Document) -> str:
    grid, board = document["grid"], document["board"]
    when = units.format_minute(document["started_at"])
    names = ", ".join(board["names"])
    points = f"{grid['measured']} of {grid['points']} operating points measured"
    took = units.format_duration(document["seconds"])
    word = "board" if len(board["names"]) == 1 else "boards"
    return f"Sweep {document['sweep']} · {word} {names} · {points} · started {when}, took {took}"


def _runners_up(document: Document, series: Series) -> PageTable | None:
    if not series["pick"] or not series["pick"]["runners_up"]:
        return None
    time_scale = units.seconds_scale(row["latency_s"]["value"] for row in sweep_rows.counted(series))
    energies = [row["energy_j"]["value"] for row in sweep_rows.counted(series) if row["energy_j"]]
    energy_scale = units.joule_scale(energies)
    rows: list[list[Content]] = []
    for runner in series["pick"]["runners_up"]:
        row = sweep_rows.find_row(series, runner["key"])
        if row is None or not row["latency_s"]:
            continue
        cells: list[Content] = [units.format_point(runner["key"]), time_scale.interval(row["latency_s"])]
        if energies:
            cells.append(units.WATT.number(row["power_w"]["value"] if row["power_w"] else None))
            cells.append(energy_scale.interval(row["energy_j"]) if row["energy_j"] else units.NOTHING)
        rows.append(cells)
    head = [
        "operating point",
        f"latency, {time_scale.unit}",
        *(["power, W", f"energy, {energy_scale.unit}"] if energies else []),
    ]
    return make_table(head, rows, caption=sweep_rows.name_series(series, document))


def _unmeasured(document: Document) -> list[str]:
    """Return points that may be better and were not measured."""
    told = []
    for series in sweep_rows.order_series(document):
        name = sweep_rows.name_series(series, document).capitalize()
        for each in series.get("unmeasured", ()):
            text = each["text"].replace(each["key"], units.format_point(each["key"]))
            told.append(f"{name}: {text}.")
    return told


def _how_to_read(document: Document) -> list[str]:
    told = ["Below each figure stands its 95 % interval. Latency is the median of one call of the whole model."]
    if any(row.get("visits_alone") for series in document["series"] for row in series["rows"]):
        told.append(
            "Figures of measured points join their own visits with a fit to all points, as front and pick do; "
            f"what the visits alone say is in {CSV}."
        )
    if sweep_rows.has_energy(document):
        told.append(
            "Energy is that of one call; above idle is without what the board draws at these clocks doing nothing."
        )
    if any(row["predicted"] for series in document["series"] for row in series["rows"]):
        told.append("Rows in italics were predicted by a fit to the measured ones, not measured.")
    return told


def _points(document: Document, series: Series) -> dict[str, object]:
    _, left_out = sweep_tables.choose_rows(series)
    table = sweep_tables.list_points(document, series)
    return {"name": sweep_rows.name_series(series, document), "table": table, "left_out": left_out}


def _merged(document: Document) -> PageTable | None:
    merged = document["grid"]["merged"]
    if not merged:
        return None
    rows = [(units.format_point(merge["kept"]), _list_dropped(merge["dropped"]), merge["reason"]) for merge in merged]
    return make_table(["measured", "stands for", "why"], rows, left=(0, 1, 2))


def _list_dropped(keys: list[str]) -> str:
    shown = "; ".join(map(units.format_point, keys[:4]))
    return shown + (f"; and {len(keys) - 4} more" if len(keys) > 4 else "")


def _drift(document: Document) -> list[str]:
    told = []
    for series in sweep_rows.order_series(document):
        drift = series["drift"]
        if not drift:
            continue
        text = drift["text"] or f"{drift['percent']:.1f} %" + (", corrected" if drift["corrected"] else "")
        told.append(f"{sweep_rows.name_series(series, document)}: {text}.")
    anchors = {
        series["anchor"]
        for series in document["series"]
        if (row := sweep_rows.find_row(series, series["anchor"] or "")) and row["visits"] > 1
    }
    if told and anchors:
        points = " and ".join(sorted(map(units.format_point, anchors)))
        told.append(f"The anchor, measured again and again in between: {points}.")
    return told


def _environment(document: Document) -> list[tuple[str, object]]:
    told: list[tuple[str, object]] = [("asked for", sweep_answer.describe_goal(document["goal"]))]
    if document.get("reason"):
        told.append(("ended because", document["reason"]))
    if cost := document.get("cost"):
        boards = max(1, len(document["board"]["names"]))
        share = min(1.0, cost["measuring_s"] / boards / max(cost["seconds"], 1e-9))
        told.append(
            (
                "time",
                f"{units.format_duration(cost['seconds'])}, {units.format_share(share)} of it measuring",
            )
        )
    facts = [(name, _plain(value)) for name, value in document["environment"].items() if value not in (None, "")]
    return told + [_name_fact(name, value) for name, value in facts]


def _plain(value: object) -> object:
    """Round spans to the digits that matter."""
    return f"{value:.3g}" if isinstance(value, float) else value


def _name_fact(name: str, value: object) -> tuple[str, object]:
    """Name a fact with its unit: `window_s` of 5 is a window of 5 s."""
    for ending, unit in (("_s", "s"), ("_c", "°C")):
        if name.endswith(ending):
            return name.removesuffix(ending).replace("_", " "), f"{value} {unit}"
    return name.replace("_", " "), value
