"""The report of a sweep: one self-contained HTML page, with CSV, JSON and charts beside it."""

from __future__ import annotations

import csv
import io
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from farm import units
from farm.report import drawing, pages, sweep_answer, sweep_charts
from farm.report.charts import Picture
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Document, Row, Series

PAGE, CSV, JSON = "sweep.html", "sweep.csv", "sweep.json"
_STATES = {
    "running": "This sweep is still running; what follows is what there is so far.",
    "interrupted": "This sweep was interrupted before it was done.",
    "failed": "This sweep failed before it was done.",
    "voided": "This sweep was voided: nothing below should be relied on.",
}
# Predictions beyond the front have a line each only while they are few.
_MAX_PREDICTIONS = 40
# A page holds no more columns (a TX2 has twelve rails); the CSV has all.
_MOST_RAILS = 6
# From a point's own visits; estimates combine them with the fit.
_ALONE = ("latency_s", "power_w", "energy_j")
_ESTIMATES = ("latency_s", "power_w", "energy_j", "energy_above_idle_j")


def write_sweep_report(document: Mapping[str, Any], folder: pathlib.Path) -> dict[str, str]:
    """Write the report into `folder`, made if need be; return the paths of `page`, `csv`, `json` and charts.

    `document` is what `farm sweep show ID --json` prints. Raises OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [drawing.save(chart, folder) for chart in sweep_charts.plan_charts(document)]
    texts = {
        "page": (PAGE, write_page(document, pictures)),
        "csv": (CSV, write_csv(document)),
        "json": (JSON, json.dumps(document, indent=2, allow_nan=False) + "\n"),
    }
    return pages.write_report(folder, texts, pictures)


def write_page(document: Document, pictures: list[Picture]) -> str:
    """Return the page's text."""
    simulated = bool(document["board"]["simulated"])
    series = sweep_rows.order_series(document)
    summary = sweep_answer.compare_variants(document)
    if not sweep_rows.has_energy(document):
        summary.append("This board has no power sensor for its total: power and energy are not known.")
    boards = sweep_rows.name_boards(document)
    page = pages.ReportPage(
        title=f"{document['model']} on {boards}{' (simulated)' if simulated else ''}",
        subtitle=_subtitle(document),
        simulated="this board is a model of hardware. No figure below was measured on a real one." if simulated else "",
        answers=sweep_answer.write_answers(document),
        summary=summary,
        sections=(),
        footer=f"Written by farm sweep show {document['sweep']} --out DIR."
        + (" All figures are simulated." if simulated else ""),
    )
    return pages.write_html(
        page,
        pictures,
        (CSV, JSON),
        "sweep.html",
        _FILTERS,
        document=document,
        series=series,
        boards=boards,
        broken=_STATES.get(document["state"], ""),
        several=len(series) > 1,
        several_batches=len(sweep_rows.list_batches(document)) > 1,
        variants=sweep_answer.pair_variants(document),
        rails=[(each, rails) for each in series if (rails := sweep_rows.choose_rails(each, _MOST_RAILS))],
        rail_count=len(sweep_rows.list_rails(document)),
        most_rails=_MOST_RAILS,
        anchors={
            each["anchor"]
            for each in series
            if any(row["key"] == each["anchor"] and row["visits"] > 1 for row in each["rows"])
        },
        goal=sweep_rows.describe_goal(document["goal"]),
        watt=units.WATT,
        csv=CSV,
    )


def _subtitle(document: Document) -> str:
    grid, names = document["grid"], document["board"]["names"]
    when, took = units.format_minute(document["started_at"]), units.format_duration(document["seconds"])
    points = f"{grid['measured']} of {grid['points']} operating points measured"
    word = "board" if len(names) == 1 else "boards"
    return f"Sweep {document['sweep']} · {word} {', '.join(names)} · {points} · started {when}, took {took}"


def _choose_rows(series: Series) -> list[Row]:
    """Return rows for the page, without predictions where they are many. Slow clocks come last, as measured."""
    if sum(not row["measured"] for row in series["rows"]) <= _MAX_PREDICTIONS:
        return list(series["rows"])
    pick = sweep_rows.find_pick(series)
    return [row for row in series["rows"] if row["measured"] or row["on_front"] or row is pick]


def _find_scales(rows: list[Row]) -> tuple[units.Scale, units.Scale]:
    """Return the units of latency and energy."""
    times, energies = ([row[key]["value"] for row in rows if row[key]] for key in ("latency_s", "energy_j"))
    return units.seconds_scale(times), units.joule_scale(energies)


_FILTERS: dict[str, Callable[..., Any]] = {
    "series_name": sweep_rows.name_series,
    "shown_rows": _choose_rows,
    "scales": lambda series: _find_scales(_choose_rows(series)),
    "counted_scales": lambda series: _find_scales(sweep_rows.counted(series)),
    "common_words": lambda series: units.find_common_words(row["key"] for row in series["rows"]),
    "find_common": units.find_common_words,
    "tabulate": sweep_answer.tabulate,
    "seconds_scale": units.seconds_scale,
    "joule_scale": units.joule_scale,
    "point": units.format_point,
    "percent": units.format_percent,
    "duration": units.format_duration,
    "share": units.format_share,
}


def write_csv(document: Document) -> str:
    """Return the CSV with a heading line; predictions are marked."""
    rails, rows = sweep_rows.list_rails(document), [row for series in document["series"] for row in series["rows"]]
    clocks = list(dict.fromkeys(domain["name"] for row in rows for domain in row["domains"]))
    lines = [_line(document, series, row, clocks, rails) for series in document["series"] for row in series["rows"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]) if lines else ["sweep"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _line(document: Document, series: Series, row: Row, clocks: list[str], rails: list[str]) -> dict[str, Any]:
    line: dict[str, Any] = {
        "sweep": document["sweep"],
        "model": document["model"],
        "board_type": document["board"]["type"],
        "board": row["board"],
        "simulated": _truth(document["board"]["simulated"]),
        "variant": series["variant"],
        "batch": series["batch"],
        "operating_point": row["key"],
    }
    for clock in clocks:
        domain = sweep_rows.find_domain(row, clock) or {}
        line[f"{clock}_hz"] = domain.get("freq_hz")
        line[f"{clock}_held"] = _truth(domain.get("held", False))
        line[f"{clock}_units"] = domain.get("units")
    line |= {"measured": _truth(row["measured"]), "predicted": _truth(row["predicted"])}
    for name in _ESTIMATES:
        estimate = row[name] or {}
        line |= {name: estimate.get("value"), f"{name}_low": estimate.get("low"), f"{name}_high": estimate.get("high")}
    for name, estimate in (row.get("visits_alone") or dict.fromkeys(_ALONE)).items():
        alone = estimate or {}
        line |= {f"visits_{name}{end}": alone.get(end.removeprefix("_") or "value") for end in ("", "_low", "_high")}
    line["latency_p95_s"] = row["latency_p95_s"]
    line |= {f"rail_{rail}_w": row["rail_power_w"].get(rail) for rail in rails}
    per_joule = row["inferences_per_joule"]
    return line | {
        "temperature_c": row["temperature_c"],
        "throttled": _truth(row["throttled"]),
        "invalid": row["invalid"],
        "calls_per_joule": per_joule,
        "inputs_per_joule": None if per_joule is None else per_joule * series["batch"],
        "on_front": _truth(row["on_front"]),
        "is_pick": _truth(bool(series["pick"]) and series["pick"]["key"] == row["key"]),
        "visits": row["visits"],
    }


def _truth(value: object) -> int:
    return int(bool(value))
