"""Reports of a board's certificate and of `model bench`, with a chart for each model."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from device_agent.protocol import format_mhz
from farm import foreign
from farm.artifacts.bench import BASELINE, OURS, RULE, UNTUNED
from farm.points.values import format_conditions
from farm.report import campaign_charts, charts, drawing, pages

PAGE, JSON = "report.md", "report.json"
_LEVELS = {"ok": "ok", "warning": "**look**", "failed": "**FAILED**", "not tried": "not tried"}


def write_certificate(document: Mapping[str, Any], folder: pathlib.Path) -> dict[str, str]:
    """Write both files into `folder`, made if need be; return their paths. Raises OSError."""
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    pages.write_files(folder, {PAGE: write_page(document), JSON: text})
    return {"page": str(folder / PAGE), "json": str(folder / JSON)}


def write_page(document: Mapping[str, Any]) -> str:
    """Return the certificate's text."""
    values = {"board": "", "levels": _LEVELS} | foreign.escaped(dict(document))
    rails = _list_rails(values["facts"].get("power") or {})
    return pages.render_markdown(
        "certificate.md", values | {"rails": rails}, {"mhz": lambda hz: format_mhz(hz, "none")}
    )


def _list_rails(power: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return each rail's power and their sum: idle, where known, and busy."""
    windows = {
        name: {rail["rail"]: rail for rail in window["rails"]} | ({"total": window["total"]} if window["total"] else {})
        for name, window in power.items()
        if window
    }
    return [(name, windows.get("idle", {}).get(name), rail) for name, rail in windows.get("busy", {}).items()]


_ROLES = {OURS: charts.OURS, RULE: charts.OURS, BASELINE: charts.BASELINE, UNTUNED: charts.BASELINE}


def write_report(document: dict[str, Any], folder: Path) -> list[str]:
    """Write a chart of latencies for each model, and the document; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    board, paths = document["board"], [str(folder / "bench.json")]
    (folder / "bench.json").write_text(json.dumps(document, indent=2) + "\n")
    for index, model in enumerate(document["models"]):
        rows = [
            (f"{each['label']} {each['version']}".rstrip(), _ROLES.get(name, charts.RIVAL), each["latency_s"])
            for name, each in model["variants"].items()
            if each["latency_s"]
        ]
        same = [each["model"] for each in document["models"][:index]].count(model["model"])
        name = f"latency-{model['model']}{f'-{same + 1}' if same else ''}"
        subtitle = format_conditions(document["threads"], document["clocks"], document["operating_point"])
        title = f"{model['model']} on {board['type']}/{board['name']}"
        chart = campaign_charts.plan_latency(name, rows, title, subtitle, simulated=board["simulated"])
        drawing.save(chart, folder)
        paths.append(str(folder / f"{name}.png"))
    return paths
