"""The report of `farm model bench`: charts of latencies, of the runs' statistics, and over batch sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farm import units
from farm.artifacts.bench import BASELINE, OURS, RULE, UNTUNED
from farm.points.values import format_conditions
from farm.report import campaign_charts, charts, drawing
from farm.report.charts import Chart, ChartAxis, Marks, Panel

_ROLES = {OURS: charts.OURS, RULE: charts.OURS, BASELINE: charts.BASELINE, UNTUNED: charts.BASELINE}
# A label, a colour, and `median`, `mean`, `std`, `min` and `max` in seconds.
Runs = Sequence[tuple[str, str, Mapping[str, float]]]
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1.5, 2)))


def write_report(document: dict[str, Any], folder: Path) -> list[str]:
    """Write the charts of each model and of its batch sizes, and the document; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    board, paths = document["board"], [str(folder / "bench.json")]
    (folder / "bench.json").write_text(json.dumps(document, indent=2) + "\n")
    conditions = format_conditions(document["threads"], document["clocks"], document["operating_point"])
    place, simulated = f"on {board['type']}/{board['name']}", board["simulated"]
    planned: list[charts.Chart] = []
    batches: dict[str, list[Any]] = {}
    for model in document["models"]:
        rows = [
            (f"{each['label']} {each['version']}".rstrip(), _ROLES.get(name, charts.RIVAL), each["latency_s"])
            for name, each in model["variants"].items()
            if each["latency_s"]
        ]
        about = f", batch {model['batch']}" if model["batch"] > 1 else ""
        title, stem = f"{model['model']}{about} {place}", model["model"] + about.replace(", batch ", "-batch")
        same = [chart.headline for chart in planned].count(title)
        stem += f"-{same + 1}" if same else ""
        doubt = f"do not rely on this, {model['doubt'].partition(':')[0]}; " if model["doubt"] else ""
        about = doubt + conditions
        planned.append(campaign_charts.plan_latency(f"latency-{stem}", rows, title, about, simulated=simulated))
        counts = f"{doubt}{rows[0][2]['count']:.0f} timed runs, {conditions}"
        planned.append(plan_runs(f"runs-{stem}", rows, f"{title}: runs", counts, simulated=simulated))
        batches.setdefault(model["model"], []).append(model)
    for name, models in batches.items():
        if len({model["batch"] for model in models}) > 1:
            doubts = [each["doubt"].partition(":")[0] for each in models if each["doubt"]]
            title = f"{name} {place}: batch sizes"
            about = f"do not rely on this, {doubts[0]}; {conditions}" if doubts else conditions
            planned.append(plan_batches(f"batches-{name}", models, title, about, simulated=simulated))
    for chart in planned:
        drawing.save(chart, folder)
        paths.append(str(folder / f"{chart.name}.png"))
    return paths


def plan_runs(name: str, rows: Runs, title: str, subtitle: str, *, simulated: bool) -> Chart:
    """Plan two lines for each row: the median between the shortest and longest run, and the mean with its deviation."""
    unit = units.seconds_scale(each["median"] for _, _, each in rows)
    marks = []
    for place, (_, colour, found) in enumerate(rows):
        median, mean, std, least, most = (found[key] * unit.factor for key in ("median", "mean", "std", "min", "max"))
        # On a logarithmic axis nothing lies below the shortest run.
        low = max(mean - std, least) if mean <= std else mean - std
        for shift, value, ends, shape, hollow, said in (
            (0.18, median, (least, most), "o", False, unit.text(found["median"])),
            (-0.18, mean, (low, mean + std), "D", True, f"{unit.number(found['mean'])} ± {unit.text(found['std'])}"),
        ):
            marks.append(
                Marks(
                    (value,), (shift - place,), colour, shape=shape, size=5.5, hollow=hollow, x_ends=(ends,),
                    texts=(said,), bold=not hollow,
                )
            )  # fmt: skip
    x = ChartAxis(f"latency of a run, {unit.unit}; less is better", low=0, log=True)
    panel = Panel(x, ChartAxis(rows=tuple(label for label, _, _ in rows)), tuple(marks))
    note = "Dot: median, between the shortest and the longest run. Diamond: mean ± standard deviation."
    return Chart(
        name, "Statistics of the timed runs", title, subtitle, (panel,), 0.6 + 0.62 * len(rows), simulated, note
    )


def plan_batches(
    name: str, models: Sequence[Mapping[str, Any]], title: str, subtitle: str, *, simulated: bool
) -> Chart:
    """Plan throughput and latency over batch size, a line for each program of `models`, which differ in batch alone."""
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for model in models:
        for key, each in model["variants"].items():
            if each["latency_s"]:
                lines.setdefault(key, []).append((model["batch"], each["fps"], each["latency_s"]["median"]))
    labels = {key: each["label"] for model in models for key, each in model["variants"].items()}
    unit = units.seconds_scale(latency_s for each in lines.values() for _, _, latency_s in each)
    sizes = tuple(float(model["batch"]) for model in models)
    panels = []
    for axis, column, factor in (("inferences/s; more is better", 1, 1.0), (f"latency, {unit.unit}", 2, unit.factor)):
        marks = tuple(
            Marks(
                tuple(point[0] for point in points), tuple(point[column] * factor for point in points),
                charts.COLOURS[index % 8], labels[key], line="line", dash=_DASHES[index // 8 % 4], shape="o",
            )
            for index, (key, points) in enumerate(lines.items())
        )  # fmt: skip
        panels.append(Panel(ChartAxis("batch size", ticks=sizes), ChartAxis(axis, low=0, log=True), marks))
    caption = "Throughput and latency over the batch size"
    note = "Medians. A program that takes no such batch has no point there."
    return Chart(name, caption, title, subtitle, tuple(panels), 2.9, simulated, note, widths=(1.0, 1.0))
