"""What timing models side by side is written as: the document and a chart for each model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from farm.artifacts.bench import ONNXRUNTIME, OURS, RULE, UNTUNED
from farm.points.values import format_conditions
from farm.report import plots

_ROLES = {OURS: plots.OURS, RULE: plots.OURS, ONNXRUNTIME: plots.RIVAL, UNTUNED: plots.BASELINE}


def write_report(document: dict[str, Any], folder: Path) -> list[str]:
    """One chart of latencies for each model, and the document; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    board, paths = document["board"], [str(folder / "bench.json")]
    (folder / "bench.json").write_text(json.dumps(document, indent=2) + "\n")
    for index, model in enumerate(document["models"]):
        rows = [
            plots.LatencyRow(
                each["label"],
                each["latency_s"]["median"],
                _ROLES[name],
                each["latency_s"]["ci_low"],
                each["latency_s"]["ci_high"],
            )
            for name, each in model["variants"].items()
            if each["latency_s"]
        ]
        same = [each["model"] for each in document["models"][:index]].count(model["model"])
        path = folder / f"latency-{model['model']}{f'-{same + 1}' if same else ''}.png"
        subtitle = format_conditions(document["threads"], document["clocks"], document["operating_point"])
        title = f"{model['model']} on {board['type']}/{board['name']}"
        plots.plot_latency(path, rows, title, subtitle, simulated=board["simulated"])
        paths.append(str(path))
    return paths
