"""The report of `farm model bench`, with a chart for each model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from farm.artifacts.bench import BASELINE, OURS, RULE, UNTUNED
from farm.points.values import format_conditions
from farm.report import bench_charts, campaign_charts, charts, drawing

_ROLES = {OURS: charts.OURS, RULE: charts.OURS, BASELINE: charts.BASELINE, UNTUNED: charts.BASELINE}


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
        planned.append(bench_charts.plan_runs(f"runs-{stem}", rows, f"{title}: runs", counts, simulated=simulated))
        batches.setdefault(model["model"], []).append(model)
    for name, models in batches.items():
        if len({model["batch"] for model in models}) > 1:
            doubts = [each["doubt"].partition(":")[0] for each in models if each["doubt"]]
            title = f"{name} {place}: batch sizes"
            about = f"do not rely on this, {doubts[0]}; {conditions}" if doubts else conditions
            planned.append(bench_charts.plan_batches(f"batches-{name}", models, title, about, simulated=simulated))
    for chart in planned:
        drawing.save(chart, folder)
        paths.append(str(folder / f"{chart.name}.png"))
    return paths
