"""PNG charts of latencies with units and error bars, from seconds; what they mean is decided by the caller."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes

from farm import units
from farm.report import canvas
from farm.report.canvas import Picture
from farm.units import Scale

# What a figure is to the reader; decides its colour everywhere.
OURS, RIVAL, BASELINE = canvas.BLUE, canvas.ORANGE, canvas.GREY
# As text on white.
_INKS = {RIVAL: "#a06e00", BASELINE: canvas.FAINT}


@dataclasses.dataclass(frozen=True)
class LatencyRow:
    """One bar: the median in seconds, its confidence interval where there is one, and a word beside it."""

    label: str
    median_s: float
    colour: str
    low_s: float | None = None
    high_s: float | None = None
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class ProgressPoint:
    """After `trials` trials the best workloads found add up to `latency_s`."""

    trials: int
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Reference:
    """A horizontal line to compare with."""

    label: str
    latency_s: float
    colour: str


def plot_latency(
    path: pathlib.Path, rows: Sequence[LatencyRow], title: str, subtitle: str, *, simulated: bool = False
) -> Picture:
    """Write a chart with one horizontal bar or dot per row, the first on top. Whiskers are the confidence intervals.

    The axis is logarithmic, and says so, where the largest would dwarf the smallest. `rows` must not be empty.
    """
    unit = units.seconds_scale(row.median_s for row in rows)
    medians = [row.median_s * unit.factor for row in rows]
    has_interval = any(row.low_s is not None for row in rows)
    note = "Median. Whiskers: 95 % confidence interval of the median." if has_interval else ""
    with canvas.framed(0.6 + 0.5 * len(rows), title, subtitle, note, simulated=simulated) as figure:
        axes = figure.subplots()
        places = canvas.name_rows(axes, [row.label for row in rows])
        log = canvas.scale(axes, "x", medians)
        canvas.draw_levels(axes, places, medians, [row.colour for row in rows], height=0.62, log=log)
        axes.set_xlabel(f"latency per inference, {unit.unit}{' (logarithmic axis)' if log else ''}; less is better")
        for place, row in zip(places, rows, strict=True):
            _draw_row(axes, place, row, unit)
        axes.set_xlim(min(medians) / 3 if log else 0)
        return canvas.finish(figure, path.parent, path.stem, "Latency of the whole model")


def plot_progress(
    path: pathlib.Path,
    points: Sequence[ProgressPoint],
    title: str,
    subtitle: str,
    *,
    trials: int = 0,
    references: Sequence[Reference] = (),
    simulated: bool = False,
) -> Picture:
    """Write a chart of the sum of the workloads' best trials over trials, as steps, with the last value at its end.

    `points` must not be empty; the line goes on to the last of `trials`.
    """
    points = [*points, ProgressPoint(max(trials, points[-1].trials), points[-1].latency_s)]
    levels = [*(point.latency_s for point in points), *(reference.latency_s for reference in references)]
    unit = units.seconds_scale(levels)
    counts = [point.trials for point in points]
    values = [point.latency_s * unit.factor for point in points]
    with canvas.framed(3.0, title, subtitle, simulated=simulated) as figure:
        axes = figure.subplots()
        canvas.strip(axes, "both")
        axes.step(counts, values, where="post", color=OURS, linewidth=2, zorder=3)
        axes.plot(counts[-1], values[-1], "o", color=OURS, markersize=6, zorder=4)
        axes.set_xlim(0, max(1, *counts) * 1.02)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 4, 5, 8, 10]))
        log = canvas.scale(axes, "y", levels)
        low, high = min(levels) * unit.factor, max(levels) * unit.factor
        axes.set_ylim(*((low / 1.4, high * 1.4) if log else (0, high * 1.12)))
        labels = [(values[-1], f"sum of best trials: {_text(points[-1].latency_s, unit)}", OURS)]
        for reference in references:
            level = reference.latency_s * unit.factor
            axes.axhline(level, color=reference.colour, linewidth=1.3, linestyle=(0, (5, 3)), zorder=2)
            text = f"{reference.label}: {_text(reference.latency_s, unit)}"
            labels.append((level, text, _INKS.get(reference.colour, reference.colour)))
        axes.set_xlabel("trials measured")
        axes.set_ylabel(f"latency, {unit.unit}{' (logarithmic)' if log else ''}")
        canvas.label_right(axes, labels, fontweight="bold")
        return canvas.finish(figure, path.parent, path.stem, "Sum of the workloads' best trials, each timed alone")


def _draw_row(axes: Axes, place: float, row: LatencyRow, unit: Scale) -> None:
    """Draw whiskers and texts."""
    median = end = row.median_s * unit.factor
    if row.low_s is not None and row.high_s is not None:
        low, high = row.low_s * unit.factor, row.high_s * unit.factor
        end = max(end, high)
        whiskers = [[max(median - low, 0.0)], [max(high - median, 0.0)]]
        axes.errorbar(median, place, xerr=whiskers, color=canvas.INK, capsize=4, linewidth=1.4, zorder=3)
    paper: Any = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5}, "zorder": 4}
    bold = {"fontweight": "bold", "fontsize": 10.5, "color": canvas.INK}
    value = canvas.write_beside(axes, end, place, _text(row.median_s, unit), **bold, **paper)
    if row.remark:
        canvas.write_beside(axes, 1, 0.5, row.remark, xycoords=value, fontsize=10, **paper)


def _text(seconds: float, unit: Scale) -> str:
    """Three significant digits in `unit`, or in the unit that fits where that would take five digits or more."""
    return units.format_latency(seconds) if seconds * unit.factor >= 1e4 else unit.text(seconds)
