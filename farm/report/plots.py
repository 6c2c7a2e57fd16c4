"""PNG charts with titles, units and error bars. Figures come in as seconds; what they mean is decided by the caller."""

from __future__ import annotations

import dataclasses
import enum
import math
import pathlib
from collections.abc import Sequence
from typing import Literal

import matplotlib
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from farm.report import canvas

# Above this ratio the short bars of a linear axis can no longer be told apart.
LOG_RATIO = 8.0
_PER_SECOND = {"s": 1.0, "ms": 1e3, "µs": 1e6}


class Role(enum.Enum):
    """What a figure is to the reader; decides its colour everywhere."""

    OURS = canvas.BLUE
    RIVAL = canvas.ORANGE
    BASELINE = canvas.GREY


@dataclasses.dataclass(frozen=True)
class LatencyRow:
    """One bar: the median in seconds, its confidence interval where there is one, and a word beside it."""

    label: str
    median_s: float
    role: Role
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
    role: Role


def plot_latency(
    path: pathlib.Path, rows: Sequence[LatencyRow], title: str, subtitle: str, *, simulated: bool = False
) -> None:
    """Write a chart with one horizontal bar per row, the first row on top. Error bars are the confidence intervals.

    The axis is logarithmic, and says so, where the longest bar would dwarf the shortest. `rows` must not be empty.
    """
    scale, unit = _unit(min(row.median_s for row in rows))
    medians = [row.median_s * scale for row in rows]
    log = max(medians) > LOG_RATIO * min(medians)
    with matplotlib.rc_context(canvas.STYLE):
        figure = canvas.new_figure(1.6 + 0.5 * len(rows))
        axes = figure.subplots()
        positions = list(range(len(rows)))[::-1]
        axes.barh(positions, medians, height=0.62, color=[row.role.value for row in rows], zorder=2)
        axes.set_yticks(positions, [row.label for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-0.55, max(len(rows) - 0.45, 1.0))
        if log:
            log_axis(axes, "x", max(medians) / min(medians))
        axes.set_xlabel(f"latency per inference, {unit}{' (logarithmic axis)' if log else ''}; less is better")
        has_interval = any(row.low_s is not None for row in rows)
        note = "Bars: median. Whiskers: 95 % confidence interval of the median." if has_interval else ""
        _lay_out(figure, axes, title, subtitle, note, grid="x", simulated=simulated)
        widths = [_draw_row(axes, position, row, scale, unit) for position, row in zip(positions, rows, strict=True)]
        _fit_values(axes, medians, widths, log)
        canvas.save(figure, path)


def plot_progress(
    path: pathlib.Path,
    points: Sequence[ProgressPoint],
    title: str,
    subtitle: str,
    *,
    references: Sequence[Reference] = (),
    simulated: bool = False,
) -> None:
    """Write a chart of the best model latency over trials, as steps, with the last value at its end.

    `points` must not be empty.
    """
    levels = [*(point.latency_s for point in points), *(reference.latency_s for reference in references)]
    scale, unit = _unit(min(levels))
    log = max(levels) > LOG_RATIO * min(levels)
    trials = [point.trials for point in points]
    values = [point.latency_s * scale for point in points]
    with matplotlib.rc_context(canvas.STYLE):
        figure = canvas.new_figure(3.7)
        axes = figure.subplots()
        axes.step(trials, values, where="post", color=Role.OURS.value, linewidth=2, zorder=3)
        axes.plot(trials[-1], values[-1], "o", color=Role.OURS.value, markersize=6, zorder=4)
        axes.set_xlim(0, max(1, *trials) * 1.02)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 4, 5, 8, 10]))
        if log:
            log_axis(axes, "y", max(levels) / min(levels))
            axes.set_ylim(min(levels) * scale / 1.4, max(levels) * scale * 1.4)
        else:
            axes.set_ylim(0, max(levels) * scale * 1.12)
        labels = [(values[-1], f"best so far: {_text(points[-1].latency_s, unit)}", Role.OURS)]
        for reference in references:
            level = reference.latency_s * scale
            axes.axhline(level, color=reference.role.value, linewidth=1.3, linestyle=(0, (5, 3)), zorder=2)
            labels.append((level, f"{reference.label}: {_text(reference.latency_s, unit)}", reference.role))
        axes.set_xlabel("trials measured")
        axes.set_ylabel(f"model latency, {unit}{' (logarithmic)' if log else ''}")
        room = 0.25 + 0.098 * max(len(text) for _, text, _ in labels)
        _lay_out(figure, axes, title, subtitle, "", grid="both", simulated=simulated, right_inches=room)
        _label_right(axes, labels)
        canvas.save(figure, path)


def _draw_row(axes: Axes, position: int, row: LatencyRow, scale: float, unit: str) -> tuple[float, float]:
    """Draw whiskers and texts. Returns where the texts start (data) and how wide they are (share of the axes)."""
    median = end = row.median_s * scale
    if row.low_s is not None and row.high_s is not None:
        low, high = row.low_s * scale, row.high_s * scale
        end = max(end, high)
        whiskers = [[max(median - low, 0.0)], [max(high - median, 0.0)]]
        axes.errorbar(median, position, xerr=whiskers, color=canvas.INK, capsize=4, linewidth=1.4, zorder=3)
    offset = 8.0
    points_per_axes = axes.get_window_extent().width * 72 / axes.figure.dpi
    for text, style in (
        (_text(row.median_s, unit), {"fontweight": "bold", "fontsize": 10.5}),
        (row.remark, {"color": canvas.FAINT}),
    ):
        if text:
            drawn = axes.annotate(
                text,
                (end, position),
                xytext=(offset, 0),
                textcoords="offset points",
                va="center",
                zorder=4,
                annotation_clip=False,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
                **style,
            )
            offset += drawn.get_window_extent().width * 72 / axes.figure.dpi + 10
    return end, min(offset / points_per_axes, 0.9)


def _fit_values(axes: Axes, medians: Sequence[float], ends: Sequence[tuple[float, float]], log: bool) -> None:
    """Choose the axis so that every bar and its text fit; a logarithmic one starts well below the shortest."""
    if log:
        low = min(medians) / 3
        span = max(math.log(end / low) / (1 - width) for end, width in ends)
        axes.set_xlim(low, low * math.exp(span))
    else:
        axes.set_xlim(0, max(end / (1 - width) for end, width in ends))


def log_axis(axes: Axes, which: Literal["x", "y"], ratio: float) -> None:
    """A logarithmic axis with plain numbers: at 1, 2 and 5, or at the decades alone where these would crowd."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5) if ratio < 500 else (1,)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_locator(ticker.NullLocator())


def _label_right(axes: Axes, labels: Sequence[tuple[float, str, Role]]) -> None:
    """Write labels right of the axes at their levels, moved apart where they would overlap."""
    height = axes.get_window_extent().height
    # The height of a line of text with a little air, as a share of the axes.
    step = 15 / 72 * axes.figure.dpi / height
    below = -math.inf
    for level, text, role in sorted(labels, key=lambda label: label[0]):
        place = max(axes.transAxes.inverted().transform(axes.transData.transform((0, level)))[1], below + step)
        below = place
        colour = canvas.FAINT if role is Role.BASELINE else "#a06e00" if role is Role.RIVAL else role.value
        axes.text(1.012, place, text, transform=axes.transAxes, va="center", color=colour, fontweight="bold")


def _lay_out(
    figure: Figure,
    axes: Axes,
    title: str,
    subtitle: str,
    note: str,
    *,
    grid: Literal["x", "both"],
    simulated: bool,
    right_inches: float = 0.12,
) -> None:
    """Put headline, subtitle and note around the axes, all at the left edge of the picture."""
    canvas.strip(axes, grid)
    canvas.draw_title(figure, title, subtitle, note, simulated=simulated)
    width, height = figure.get_size_inches()
    figure.canvas.draw()
    box = axes.get_tightbbox()
    label_inches = (box.x0 - axes.get_window_extent().x0) / figure.dpi if box else 0.0
    figure.subplots_adjust(
        left=(0.12 - label_inches) / width,
        right=1 - right_inches / width,
        top=1 - 0.68 / height,
        bottom=(0.75 if note else 0.52) / height,
    )


def _unit(smallest_s: float) -> tuple[float, str]:
    """The unit in which the smallest figure has at least one digit before the point: (units per second, name)."""
    name = "s" if smallest_s >= 1 else "ms" if smallest_s >= 1e-3 else "µs"
    return _PER_SECOND[name], name


def _text(seconds: float, unit: str) -> str:
    """Three significant digits in `unit`, or in the unit that fits where that would take five digits or more."""
    if seconds * _PER_SECOND[unit] >= 1e4:
        unit = _unit(seconds)[1]
    value = seconds * _PER_SECOND[unit]
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}" if value >= 10 else f"{value:.2f} {unit}"
