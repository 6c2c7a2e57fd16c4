"""The reports of `farm model bench`, `evaluate` and `explain`: charts, and a page of accuracies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farm import units
from farm.artifacts.bench import BASELINE, OURS, RULE, UNTUNED
from farm.points.values import format_conditions
from farm.report import campaign_charts, charts, drawing, pages
from farm.report.charts import Chart, ChartAxis, Marks, Panel
from farm.search.families.family import LIMITS

_ROLES = {OURS: charts.OURS, RULE: charts.OURS, BASELINE: charts.BASELINE, UNTUNED: charts.BASELINE}
# A label, a colour, and `median`, `mean`, `std`, `min` and `max` in seconds.
Runs = Sequence[tuple[str, str, Mapping[str, float]]]
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1.5, 2)))
HEADS = {
    "top1": "Top 1 (%)",
    "top5": "Top 5 (%)",
    "map50": "mAP50 (%)",
    "map": "mAP50:95 (%)",
    "error": "Error, RMS (%)",
}
_MOST_LAYERS = 24
_UNKNOWN = "unknown"


def write_bench_report(document: dict[str, Any], folder: Path) -> list[str]:
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


def plan_accuracy(document: Mapping[str, Any]) -> Chart:
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


def write_evaluate_report(document: Mapping[str, Any], folder: Path) -> list[str]:
    """Write page, Markdown, chart and JSON into `folder`, made if need be; return their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    chart = plan_accuracy(document)
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


def write_explain_report(document: Mapping[str, Any], folder: Path) -> list[str]:
    """Write chart and document into `folder`, made if need be; return the files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    pages.write_files(folder, {"explain.json": json.dumps(document, indent=2, allow_nan=False) + "\n"})
    picture = drawing.save(plan_layers(document), folder)
    return [str(folder / picture.file), str(folder / "explain.json")]


def plan_layers(document: Mapping[str, Any]) -> Chart:
    """Plan a bar for each layer, the longest first: all its calls in one inference, coloured by what limits it."""
    timed = [each for each in document["layers"] if each["total_s"]]
    shown = timed[:_MOST_LAYERS]
    unit = units.seconds_scale([each["total_s"] for each in shown[:1]])
    marks = []
    for limit, colour in zip((*LIMITS, _UNKNOWN), charts.COLOURS, strict=False):
        own = [(-float(at), each) for at, each in enumerate(shown) if (each["limit"] or _UNKNOWN) == limit]
        if own:
            x = tuple(each["total_s"] * unit.factor for _, each in own)
            texts = tuple(_tell(each, unit) for _, each in own)
            marks.append(Marks(x, tuple(at for at, _ in own), colour, limit, bars=0.62, texts=texts))
    left_out = f"; the {len(shown)} longest of {len(timed)}" if len(shown) < len(timed) else ""
    device = f"{document['board_type']} {document['device'].upper()}"
    rows = tuple(_name(each) for each in shown)
    panel = Panel(ChartAxis(f"time of all calls, {unit.unit}", low=0), ChartAxis(rows=rows), tuple(marks))
    note = "Percentages: float32 FLOP/s and memory bandwidth reached, of the device's peak. ~: estimated, no record."
    return Chart(
        "explain", "Time of every layer and what limits it", f"{document['model']} on {device}: time by layer",
        f"time of each layer in one inference, coloured by what limits it{left_out}; less is better", (panel,),
        0.7 + 0.27 * len(shown), document["simulated"], note,
    )  # fmt: skip


def _tell(layer: Mapping[str, Any], unit: units.Scale) -> str:
    mark = "" if layer["source"] == "record" else "~"
    shares = f"{layer['compute_share'] * 100:.0f} % FLOP/s, {layer['bandwidth_share'] * 100:.0f} % memory"
    return f"{mark}{unit.text(layer['total_s'])}   {shares}"


def _name(layer: Mapping[str, Any]) -> str:
    operators, _, shape = str(layer["name"]).partition(" ")
    room = max(8, 42 - len(shape))
    operators = operators if len(operators) <= room else operators[: room - 1] + "…"
    return f"{layer['weight']}x {operators} {shape}" if layer["weight"] > 1 else f"{operators} {shape}"
