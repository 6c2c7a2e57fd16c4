"""The report of `farm model explain`: a chart of the time by layer, coloured by its limit, and JSON."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from farm import units
from farm.report import charts, drawing, pages
from farm.report.charts import Chart, ChartAxis, Marks, Panel
from farm.search.families.family import LIMITS

_MOST_LAYERS = 24
_UNKNOWN = "unknown"


def write_report(document: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
    """Write chart and document into `folder`, made if need be; return the files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    pages.write_files(folder, {"explain.json": json.dumps(document, indent=2, allow_nan=False) + "\n"})
    picture = drawing.save(plan_chart(document), folder)
    return [str(folder / picture.file), str(folder / "explain.json")]


def plan_chart(document: Mapping[str, Any]) -> Chart:
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
