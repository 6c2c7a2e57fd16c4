"""The pages' charts, as SVG in the style sheet's colours, so that they follow light, dark and print."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from farm.report import charts, drawing, sweep_charts
from farm.report.charts import Chart, ChartAxis, Marks, Panel
from farm.report.sweep_charts import Look
from farm.sweep import rows as sweep_rows

Line = Sequence[tuple[float, float]]

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# The style sheet's name of each colour.
_THEME = {colour: f"var(--s{index})" for index, colour in enumerate(charts.COLOURS)} | {
    charts.INK: "var(--ink)", charts.FAINT: "var(--faint)", charts.RED: "var(--bad)", "#888888": "var(--strong)",
    "#e2e2e2": "var(--rule)", "#b4b4b4": "var(--strong)",
}  # fmt: skip
# Of the median distance between values: a longer one is a time without data.
_GAP = 5.0
# The page decides the font; attributes without a unit are pixels.
_LEFT_OUT = ("font-family", "font")


@functools.lru_cache(maxsize=128)
def show(chart: Chart) -> Markup:
    """Draw a chart for a page, whose security policy allows no style in elements. Charts drawn before are kept."""
    groups = {marks.key: marks for marks in chart.list_marks() if marks.key}
    root = ElementTree.fromstring(drawing.write_page_svg(chart))  # noqa: S314 - from a string of our own
    for element in list(root.iter()):
        style = dict(rule.split(":", 1) for rule in element.attrib.pop("style", "").split(";") if rule.strip())
        for name, value in style.items():
            if name.strip() not in _LEFT_OUT:
                element.set(name.strip(), _THEME.get(value.strip(), value.strip()))
        if marks := groups.get(element.get("id", "")):
            # A slider finds each point by its key.
            points = list(element.iter(f"{{{_SVG}}}use"))
            for point, key, title in zip(points, marks.keys, marks.titles, strict=False):
                point.attrib |= {"class": "point", "data-series": marks.key.split("-")[1], "data-key": key}
                ElementTree.SubElement(point, f"{{{_SVG}}}title").text = title
        elif element.tag == f"{{{_SVG}}}g":
            element.attrib.pop("id", None)
        for own in (each for each in list(element) if each.tag.endswith(("metadata", "style"))):
            element.remove(own)
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.attrib |= {"class": "chart", "role": "img", "aria-label": chart.caption}
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704 - ElementTree escapes texts


def plan_times(
    name: str,
    caption: str,
    unit: str,
    lines: Sequence[tuple[str, Line]],
    times: Sequence[float],
    high: float | None = None,
) -> Chart:
    """Plan values over time; a line breaks where values are missing for much longer than usual.

    The axis has room for `times`, too, so that several charts share one. Values from 0 to `high`, where given, fill it.
    """
    marks = []
    for (what, line), colour in zip(lines, charts.COLOURS, strict=False):
        runs = split_at_gaps(line)
        points = [point for run in runs for point in (*run, (run[-1][0], math.nan))]
        marks.append(Marks(*_columns(points), colour, what if len(lines) > 1 else "", line="line"))
        # A line of one value draws nothing.
        if alone := [run[0] for run in runs if len(run) == 1]:
            marks.append(Marks(*_columns(alone), colour, shape="o", size=3))
    ends = [*times, *(at for _, line in lines for at, _ in line)]
    x = ChartAxis(low=min(ends), high=max(ends), form="time")
    y = ChartAxis(unit, None if high is None else 0.0, high)
    return Chart(name, caption, "", "", (Panel(x, y, tuple(marks)),), 1.6, simulated=False)


def _columns(points: Line) -> tuple[charts.Numbers, charts.Numbers]:
    return tuple(float(at) for at, _ in points), tuple(float(value) for _, value in points)


def split_at_gaps(line: Line) -> list[Line]:
    """Split a line where two values are more than `_GAP` times the median distance and a minute apart."""
    apart = [after[0] - before[0] for before, after in itertools.pairwise(line)]
    longest_s = max(60.0, _GAP * statistics.median(apart)) if apart else 0.0
    cuts = [at for at, distance in enumerate(apart, 1) if distance > longest_s]
    return [line[start:end] for start, end in itertools.pairwise([0, *cuts, len(line)])]


def plan_course(lines: Sequence[tuple[str, Line]], end: float) -> Chart:
    """Plan best latencies (ms), which hold until the next one, over trials up to `end`."""
    marks = tuple(
        Marks(*_columns([*steps, (end, steps[-1][1])]), colour, name, line="steps")
        for (name, steps), colour in zip(lines, charts.COLOURS, strict=False)
    )
    panel = Panel(ChartAxis("trials", low=0, form="count"), ChartAxis("latency, ms", log=True), marks)
    return Chart("course", "Sum of the best trials of each model's workloads", "", "", (panel,), 2.2, simulated=False)


def to_plot(chart: Chart) -> dict[str, Any]:
    """Return a course for uPlot: a column of trials, one for each line (null before it begins), and whether in log."""
    places = sorted({at for marks in chart.list_marks() for at in marks.x})
    columns: list[list[float | None]] = []
    for marks in chart.list_marks():
        known, value, column = dict(zip(marks.x, marks.y, strict=True)), None, []
        for at in places:
            value = known.get(at, value)
            column.append(value)
        columns.append(column)
    values = [value for marks in chart.list_marks() for value in marks.y]
    log = bool(values) and max(values) > charts.LOG_RATIO * min(values)
    return {"names": [marks.name for marks in chart.list_marks()], "data": [places, *columns], "log": log}


def plan_pace(values: Sequence[float], minutes: float) -> Chart:
    """Plan counted trials per minute, for equal parts of the time."""
    x, y = tuple(index * minutes for index in range(len(values) + 1)), (*values, values[-1])
    marks = Marks(x, y, charts.BLUE, line="area")
    panel = Panel(ChartAxis("minutes", low=0), ChartAxis("counted per minute", low=0), (marks,))
    return Chart("pace", "Counted trials per minute", "", "", (panel,), 1.3, simulated=False)


def plan_scatter(document: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> Chart:
    """Plan a sweep's points, latency against energy, and those of another sweep beside it."""
    shown = [(each, series) for each in (document, other) if each for series in each["series"]]
    looks = []
    for index, (each, series) in enumerate(shown):
        if any(row["energy_j"] for row in sweep_rows.counted(series)):
            name = f"sweep {each['sweep']}: " * (each is other) + sweep_rows.name_series(series, each)
            looks.append(Look(series, name, charts.COLOURS[index % 8], "os^D"[index % 4], str(index)))
    return sweep_charts.plan_front(document, looks, far=math.inf)
