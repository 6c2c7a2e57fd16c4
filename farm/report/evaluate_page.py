"""The report of `farm model evaluate`: accuracy by precision, beside latency, as a table, a chart and a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farm import units
from farm.points.values import format_conditions
from farm.report import charts, drawing, pages
from farm.report.charts import Chart, ChartAxis, Marks, Panel

HEADS = {
    "top1": "Top 1 (%)",
    "top5": "Top 5 (%)",
    "map50": "mAP50 (%)",
    "map": "mAP50:95 (%)",
    "error": "Error, RMS (%)",
}


def name_row(row: Mapping[str, Any]) -> str:
    """Return a variant's name for people."""
    return str(row.get("label") or row["precision"])


def list_rows(document: Mapping[str, Any]) -> tuple[list[str], list[list[str | None]]]:
    """Return headings and cells of the precisions that were made."""
    made = [row for row in document["rows"] if "scores" in row]
    heads = ["Precision"]
    rows: list[list[str | None]] = [[name_row(row)] for row in made]
    for metric in made[0]["scores"]:
        is_share = metric in made[-1]["change"]
        heads += [HEADS[metric], "95 % CI", "Change"] if is_share else [HEADS[metric], "Range"]
        for cells, row in zip(rows, made, strict=True):
            form = ("{:.2f}", "{:.1f} – {:.1f}") if is_share else ("{:.3g}", "{:.2g} – {:.2g}")
            cells += [form[0].format(100 * row["scores"][metric]), form[1].format(*_percent(row, metric))]
            if is_share:
                change = row["change"].get(metric)
                cells += [None if change is None else f"{100 * change[0]:+.2f}"]
    for cells, row in zip(rows, made, strict=True):
        latency, energy_j = row["latency_s"], row.get("energy_j")
        median = f"{latency['median'] * 1e3:.3f}" if latency else None
        energy = None if energy_j is None else f"{energy_j * 1e3:.2f}"
        cells += [median, energy, units.format_bytes(row["bytes"]) if latency else None]
    return [*heads, "Median (ms)", "Energy (mJ)", "Size"], rows


def _percent(row: Mapping[str, Any], metric: str) -> tuple[float, float]:
    low, high = row["intervals"][metric]
    return 100 * low, 100 * high


def plan_chart(document: Mapping[str, Any]) -> Chart:
    """Plan the first score with its interval beside latency, a row for each precision."""
    made = [row for row in document["rows"] if "scores" in row]
    metric = next(iter(made[0]["scores"]))
    timed = [(place, row["latency_s"]) for place, row in enumerate(made) if row["latency_s"]]
    unit = units.seconds_scale(each["median"] for _, each in timed)
    colours = [charts.RIVAL if row["latency_s"] is None else charts.OURS for row in made]
    right = tuple(
        Marks(
            (100 * row["scores"][metric],), (-place,), colour, shape="o", size=9, bold=True,
            x_ends=(_percent(row, metric),), texts=(f"{100 * row['scores'][metric]:.1f} %",),
        )
        for place, (row, colour) in enumerate(zip(made, colours, strict=True))
    )  # fmt: skip
    quick = tuple(
        Marks(
            (each["median"] * unit.factor,), (-place,), charts.OURS, bars=0.5, bold=True,
            x_ends=((each["ci_low"] * unit.factor, each["ci_high"] * unit.factor),),
            texts=(f"{each['median'] * unit.factor:.3g} {unit.unit}",),
        )
        for place, each in timed
    )  # fmt: skip
    names = ChartAxis(rows=tuple(name_row(row) for row in made))
    is_share, title = metric != "error", f"{HEADS[metric].removesuffix(' (%)')}, %"
    # Room for texts right of 100 %.
    axis = ChartAxis(title, 0, 125, ticks=(0, 25, 50, 75, 100)) if is_share else ChartAxis(title, low=0)
    panels = (
        Panel(axis, names, right, title="accuracy" if is_share else "error"),
        Panel(ChartAxis(f"latency, {unit.unit}; less is better", low=0), names, quick, title="latency"),
    )
    board = document["board"]
    title = f"{document['model']} on {board['type']}/{board['name']}"
    subtitle = f"{document['count']} examples; " + format_conditions(
        document["threads"], document["clocks"], document["operating_point"]
    )
    note = "Whiskers: 95 % confidence intervals." if is_share else "Whiskers: all examples, and 95 % of the median."
    note += " Latencies are doubtful: see the report." if document["doubt"] else ""
    height = 0.8 + 0.45 * len(made)
    return Chart(
        "accuracy", "Accuracy and latency by precision", title, subtitle, panels, height, board["simulated"], note,
        widths=(1.0, 1.0), shared="y",
    )  # fmt: skip


def write_report(document: Mapping[str, Any], folder: Path) -> list[str]:
    """Write page, Markdown, chart and JSON into `folder`, made if need be; return their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    chart = plan_chart(document)
    pictures = [drawing.save(chart, folder)]
    head, rows = list_rows(document)
    table = pages.make_table(head, [[each or units.NOTHING for each in row] for row in rows])
    page = pages.ReportPage(
        title=chart.headline,
        subtitle=chart.subtitle,
        simulated="nothing was measured on a real board." if chart.simulated else "",
        answers=(),
        summary=[f"Do not rely on these latencies, {document['doubt']}."] * bool(document["doubt"])
        + [f"{row['precision']}: {row['reason']}." for row in document["rows"] if "reason" in row],
        sections=(pages.Section("Accuracy", [table]),),
        footer="Change: points against ONNX Runtime in float32. Written by farm model evaluate.",
    )
    text = json.dumps(document, indent=2) + "\n"
    return list(pages.write_page(folder, "evaluate", page, pictures, {"json": text}).values())
