"""The common parts of all charts: frame with headline, legend and simulated mark, axes, files. Also charts of
latencies.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import io
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import matplotlib
from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from farm import units
from farm.units import Scale

WIDTH_INCHES = 8.4
DPI = 200
# Inches for headline and subtitle, for a line of legend, and for the note below.
_HEAD, _LEGEND, _FOOT = 0.68, 0.24, 0.3
# Above this ratio the short bars of a linear axis look alike.
LOG_RATIO = 8.0
# Safe for colour blindness (Okabe and Ito's palette), and in grey.
BLUE, ORANGE, GREY, RED, INK, FAINT = "#0072b2", "#e69f00", "#9a9a9a", "#b3261e", "#222222", "#5a5a5a"
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "savefig.facecolor": "white",
    # Outlined text in the SVG needs no font on the reader's machine.
    "svg.fonttype": "path",
    "svg.hashsalt": "tvm-farm",
}
# A level in data coordinates, a text, its colour.
Labels = Sequence[tuple[float, str, str]]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A chart: its name as a file's stem, its description, and its SVG text."""

    name: str
    caption: str
    svg: str

    @property
    def file(self) -> str:
        """Return the PNG's name."""
        return f"{self.name}.png"


@contextlib.contextmanager
def framed(
    room_inches: float,
    title: str,
    subtitle: str,
    note: str = "",
    handles: Sequence[Artist] = (),
    *,
    simulated: bool,
    columns: int = 4,
) -> Iterator[Figure]:
    """Make a figure with headline, subtitle, legend and the simulated mark at the top, and a note at the foot.

    The block draws into `room_inches` of height. Axes are placed when the figure is written.
    """
    top = _HEAD + _LEGEND * -(-len(handles) // columns)
    height = top + room_inches + (_FOOT if note else 0.08)
    with matplotlib.rc_context(_STYLE):
        # With a canvas of its own: pyplot would keep it in a global and pick a display.
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        FigureCanvasAgg(figure)
        left = 0.1 / WIDTH_INCHES
        text = figure.text(left, 1 - 0.1 / height, title, va="top", fontsize=13, fontweight="bold")
        _shorten(text, (WIDTH_INCHES - (2.6 if simulated else 0.25)) * figure.dpi)
        text = figure.text(left, 1 - 0.38 / height, subtitle, va="top", fontsize=9.5, color=FAINT)
        _shorten(text, (WIDTH_INCHES - 0.25) * figure.dpi)
        if simulated:
            tag = {"facecolor": "white", "edgecolor": RED, "boxstyle": "round,pad=0.3"}
            place = (1 - 0.2 / WIDTH_INCHES, 1 - 0.13 / height)
            figure.text(*place, "SIMULATED, not hardware", va="top", ha="right", color=RED, fontweight="bold", bbox=tag)
        figure.text(left, 0.06 / height, note, va="bottom", fontsize=8.5, color=FAINT)
        if handles:
            figure.legend(
                handles=list(handles),
                loc="upper left",
                bbox_to_anchor=(0.02 / WIDTH_INCHES, 1 - 0.6 / height),
                ncols=min(columns, len(handles)),
                frameon=False,
                fontsize=9,
                handlelength=1.6,
                handletextpad=0.5,
                columnspacing=1.6,
                borderpad=0.2,
            )
        sides = 0.1 / WIDTH_INCHES
        room: Any = (sides, 1 - (top + room_inches) / height, 1 - 2 * sides, room_inches / height)
        engine: Any = figure.get_layout_engine()
        engine.set(rect=room, w_pad=0.02, h_pad=0.04, wspace=0.03, hspace=0.03)
        yield figure


def strip(axes: Axes, grid: Literal["x", "y", "both"]) -> None:
    """Add a grid, and remove the frame on the far sides."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid, color="#e2e2e2", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)


def name_rows(axes: Axes, labels: Sequence[str], **style: Any) -> list[float]:
    """Make axes for rows, the first on top; return their positions."""
    places = [float(row) for row in reversed(range(len(labels)))]
    strip(axes, "x")
    axes.set_yticks(places, labels, **style)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    return places


def write_beside(axes: Axes, value: float, place: float, text: str, **style: Any) -> Text:
    """Write a text right of a value."""
    look: Any = {"va": "center", "fontsize": 8.5, "color": FAINT, "annotation_clip": False} | style
    return axes.annotate(text, (value, place), xytext=(6, 0), textcoords="offset points", **look)


def draw_levels(
    axes: Axes, places: Sequence[float], values: Sequence[float], colours: Sequence[str], *, height: float, log: bool
) -> None:
    """Draw a bar from zero for each value; on a logarithmic axis, which has no zero, a dot."""
    if not log:
        axes.barh(places, values, height=height, color=colours, zorder=2)
        return
    for place, value, colour in zip(places, values, colours, strict=True):
        axes.plot(value, place, "o", color=colour, markersize=4 + 6 * height, zorder=3)


def scale(axes: Axes, which: Literal["x", "y"], values: Iterable[float]) -> bool:
    """Make an axis logarithmic where the longest value would dwarf the shortest; return whether it is.

    Its numbers are plain: at 1, 2 and 5, or at the decades alone where these would crowd.
    """
    known = list(values)
    ratio = max(known) / min(known)
    if ratio <= LOG_RATIO:
        return False
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5) if ratio < 500 else (1,)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_locator(ticker.NullLocator())
    return True


def label_right(axes: Axes, labels: Labels, **style: Any) -> None:
    """Write labels right of the axes at their levels, moved apart where they would overlap."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    # The height of a line of text with a little air, as a share of the axes.
    step = 14 / 72 * axes.figure.dpi / axes.get_window_extent().height
    below = -math.inf
    for level, text, colour in sorted(labels):
        below = max(axes.transAxes.inverted().transform(axes.transData.transform((0, level)))[1], below + step)
        axes.text(1.015, below, text, transform=axes.transAxes, va="center", color=colour, **style)


def save(figure: Figure, path: pathlib.Path) -> None:
    """Write the PNG without dates: equal documents give equal files."""
    figure.savefig(path, dpi=DPI, metadata={"Software": "tvm-farm"})


def finish(figure: Figure, folder: pathlib.Path, name: str, caption: str) -> Picture:
    """Write the PNG; return the picture with its SVG."""
    save(figure, folder / f"{name}.png")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": "tvm-farm"})
    return Picture(name, caption, text.getvalue())


def _shorten(text: Text, room: float) -> None:
    """Cut a text that is wider than `room` pixels."""
    whole = text.get_text()
    if text.get_window_extent().width <= room:
        return

    def is_too_long(kept: int) -> bool:
        text.set_text(whole[:kept] + "…")
        return bool(text.get_window_extent().width > room)

    text.set_text(whole[: max(bisect.bisect_left(range(len(whole)), True, key=is_too_long) - 1, 1)] + "…")


# The role of a figure; decides its colour everywhere.
OURS, RIVAL, BASELINE = BLUE, ORANGE, GREY
# As text on white.
_INKS = {RIVAL: "#a06e00", BASELINE: FAINT}


@dataclasses.dataclass(frozen=True)
class LatencyRow:
    """One bar: the median in seconds, its confidence interval where there is one, and a label."""

    label: str
    median_s: float
    colour: str
    low_s: float | None = None
    high_s: float | None = None
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class ProgressPoint:
    """After `trials` trials the sum of the workloads' best latencies is `latency_s`."""

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
    with framed(0.6 + 0.5 * len(rows), title, subtitle, note, simulated=simulated) as figure:
        axes = figure.subplots()
        places = name_rows(axes, [row.label for row in rows])
        log = scale(axes, "x", medians)
        draw_levels(axes, places, medians, [row.colour for row in rows], height=0.62, log=log)
        axes.set_xlabel(f"latency per inference, {unit.unit}{' (logarithmic axis)' if log else ''}; less is better")
        for place, row in zip(places, rows, strict=True):
            _draw_row(axes, place, row, unit)
        axes.set_xlim(min(medians) / 3 if log else 0)
        return finish(figure, path.parent, path.stem, "Latency of the whole model")


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
    with framed(3.0, title, subtitle, simulated=simulated) as figure:
        axes = figure.subplots()
        strip(axes, "both")
        axes.step(counts, values, where="post", color=OURS, linewidth=2, zorder=3)
        axes.plot(counts[-1], values[-1], "o", color=OURS, markersize=6, zorder=4)
        axes.set_xlim(0, max(1, *counts) * 1.02)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 4, 5, 8, 10]))
        log = scale(axes, "y", levels)
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
        label_right(axes, labels, fontweight="bold")
        return finish(figure, path.parent, path.stem, "Sum of the workloads' best trials, each timed alone")


def _draw_row(axes: Axes, place: float, row: LatencyRow, unit: Scale) -> None:
    median = end = row.median_s * unit.factor
    if row.low_s is not None and row.high_s is not None:
        low, high = row.low_s * unit.factor, row.high_s * unit.factor
        end = max(end, high)
        whiskers = [[max(median - low, 0.0)], [max(high - median, 0.0)]]
        axes.errorbar(median, place, xerr=whiskers, color=INK, capsize=4, linewidth=1.4, zorder=3)
    paper: Any = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5}, "zorder": 4}
    bold = {"fontweight": "bold", "fontsize": 10.5, "color": INK}
    value = write_beside(axes, end, place, _text(row.median_s, unit), **bold, **paper)
    if row.remark:
        write_beside(axes, 1, 0.5, row.remark, xycoords=value, fontsize=10, **paper)


def _text(seconds: float, unit: Scale) -> str:
    """Format three significant digits in `unit`, or in the fitting unit where that would take five digits or more."""
    return units.format_latency(seconds) if seconds * unit.factor >= 1e4 else unit.text(seconds)
