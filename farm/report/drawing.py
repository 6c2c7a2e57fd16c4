"""Draw charts with Matplotlib: as PNG and SVG for reports, and as SVG with plain texts for pages."""

from __future__ import annotations

import bisect
import io
import math
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from farm import foreign, units
from farm.report import charts
from farm.report.charts import BASELINE, FAINT, INK, RED, RIVAL, Chart, ChartAxis, Marks, Panel, Picture, Reference

WIDTH_INCHES, PAGE_INCHES = 8.4, 5.8
DPI = 200
# A palette of so many colours halves a PNG; text stays as smooth.
_COLOURS = 128
# Inches for headline and subtitle, for a line of legend, and for the note below.
_HEAD, _LEGEND, _FOOT = 0.68, 0.24, 0.3
# Letters of a legend in an inch.
_LETTERS = 11.0
# As text on white.
_INKS = {RIVAL: "#a06e00", BASELINE: FAINT}
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "text.color": INK,
    # Names of models and boards are no formulas.
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "savefig.facecolor": "white",
    # Outlined text in the SVG needs no font on the reader's machine.
    "svg.fonttype": "path",
    "svg.hashsalt": "tvm-farm",
}
# Places of a name beside its point, in points: below left no other point is as good.
_SHIFTS = [(dx * reach, dy * reach) for reach in (9, 18, 30) for dx in (-1, 1) for dy in (-1, 1)]
# Ticks of a time axis are these apart.
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 604800)
_clean = foreign.show_controls
# Matplotlib's style is global.
_LOCK = threading.Lock()


def save(chart: Chart, folder: pathlib.Path) -> Picture:
    """Write the PNG, without dates: equal charts give equal files; return the picture with its SVG."""
    with _LOCK, matplotlib.rc_context(_STYLE):
        figure = draw(chart)
        pixels = io.BytesIO()
        figure.savefig(pixels, dpi=DPI)
        with Image.open(pixels) as image:
            few = image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
            few.save(folder / f"{chart.name}.png", optimize=True, dpi=(DPI, DPI))
        return Picture(chart.name, chart.caption, _write_svg(figure))


def write_page_svg(chart: Chart) -> str:
    """Return the SVG for a page, which has the headline itself; texts stay texts."""
    style = _STYLE | {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": chart.name}
    with _LOCK, matplotlib.rc_context(style):
        return _write_svg(draw(chart, on_page=True), transparent=True)


def _write_svg(figure: Figure, *, transparent: bool = False) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=transparent, metadata={"Date": None, "Creator": "tvm-farm"})
    return text.getvalue()


def draw(chart: Chart, *, on_page: bool = False) -> Figure:
    """Make a figure with headline, legend and the simulated mark at the top, and a note at the foot."""
    width = PAGE_INCHES if on_page else WIDTH_INCHES
    handles = _make_legend(chart)
    letters = [len(str(each.get_label())) + 5 for each in handles]
    room = int(width * _LETTERS)
    columns = len(handles) if sum(letters) <= room else max(1, room // max(letters))
    head = 0.06 if on_page else _HEAD
    top = head + _LEGEND * -(-len(handles) // max(1, columns))
    height = top + chart.height + (_FOOT if chart.note and not on_page else 0.08)
    # With a canvas of its own: pyplot would keep it in a global and pick a display.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if not on_page:
        _write_head(figure, chart)
    if handles:
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(0.02 / width, 1 - (head - 0.08) / height),
            ncols=columns, frameon=False, fontsize=9 if not on_page else None, handlelength=1.6, handletextpad=0.5,
            columnspacing=1.6, borderpad=0.2,
        )  # fmt: skip
    sides = (0.2 if on_page else 0.1) / width
    rect: Any = (sides, 1 - (top + chart.height) / height, 1 - 2 * sides, chart.height / height)
    engine: Any = figure.get_layout_engine()
    engine.set(rect=rect, w_pad=0.02, h_pad=0.04, wspace=0.03, hspace=0.03)
    _draw_panels(figure, chart)
    return figure


def _write_head(figure: Figure, chart: Chart) -> None:
    width, height = figure.get_size_inches()
    for text, down, room, style in (
        (chart.headline, 0.1, 2.6 if chart.simulated else 0.25, {"fontsize": 13, "fontweight": "bold"}),
        (chart.subtitle, 0.38, 0.25, {"fontsize": 9.5, "color": FAINT}),
    ):
        made = figure.text(0.1 / width, 1 - down / height, _clean(text), va="top", **style)  # type: ignore[arg-type]
        _shorten(made, (width - room) * figure.dpi)
    if chart.simulated:
        tag = {"facecolor": "white", "edgecolor": RED, "boxstyle": "round,pad=0.3"}
        place = (1 - 0.2 / width, 1 - 0.13 / height)
        figure.text(*place, "SIMULATED, not hardware", va="top", ha="right", color=RED, fontweight="bold", bbox=tag)
    figure.text(0.1 / width, 0.06 / height, _clean(chart.note), va="bottom", fontsize=8.5, color=FAINT)


def _shorten(text: Text, room: float) -> None:
    """Cut a text that is wider than `room` pixels."""
    whole = text.get_text()
    if text.get_window_extent().width <= room:
        return

    def is_too_long(kept: int) -> bool:
        text.set_text(whole[:kept] + "…")
        return bool(text.get_window_extent().width > room)

    text.set_text(whole[: max(bisect.bisect_left(range(len(whole)), True, key=is_too_long) - 1, 1)] + "…")


def _make_legend(chart: Chart) -> list[Any]:
    """Return an entry for each name."""
    made: dict[str, Any] = {}
    # Predictions and picks, which are hollow, come last.
    for marks in sorted(chart.list_marks(), key=lambda each: each.hollow):
        if not marks.name or marks.name in made:
            continue
        label = _clean(marks.name)
        if marks.bars or marks.line == "area":
            made[marks.name] = Patch(color=marks.colour, label=label)
            continue
        made[marks.name] = Line2D(
            [], [], color=marks.colour, linestyle=marks.dash if marks.line else "none", linewidth=2, label=label,
            marker=marks.shape or None, markersize=min(marks.size, 10), markerfacecolor=_face(marks),
        )  # fmt: skip
    for each in (each for panel in chart.panels for each in panel.references):
        if each.label and each.y is None:
            made[each.label] = Line2D([], [], color=each.colour, linestyle=(0, (4, 3)), label=_clean(each.label))
    return list(made.values())


def _face(marks: Marks) -> str:
    return "none" if marks.hollow else marks.colour


def _draw_panels(figure: Figure, chart: Chart) -> None:
    rows = -(-len(chart.panels) // len(chart.widths))
    grid = figure.subplots(
        rows, len(chart.widths), squeeze=False, width_ratios=chart.widths,
        sharex="all" if chart.shared == "x" else "none", sharey="all" if chart.shared == "y" else "none",
    )  # fmt: skip
    drawn = list(zip(grid.flat, chart.panels, strict=False))
    for axes in list(grid.flat)[len(drawn) :]:
        axes.remove()
    for axes, panel in drawn:
        _draw_panel(axes, panel)
    if chart.shared == "x":
        for axes, _ in drawn[:-1]:
            axes.set_xlabel("")
        figure.align_ylabels()
    ends = [(axes, panel) for axes, panel in drawn if panel.names or _list_ends(panel)]
    if ends:
        figure.draw_without_rendering()
    for axes, panel in ends:
        _write_ends(axes, _list_ends(panel))
        write_names(axes, panel)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x" if panel.y.rows else "both", color="#e2e2e2", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.set_title(_clean(panel.title), loc="left", fontsize=10, fontweight="bold")
    axes.margins(0.12 if panel.names else 0.05)
    is_log = {
        which: axis.log and _make_log(axes, which, _list_values(panel, which))
        for which, axis in (("x", panel.x), ("y", panel.y))
    }
    for order, marks in enumerate(panel.marks):
        _draw_marks(axes, marks, 3 + order / len(panel.marks), log=is_log["x"])
    # What is compared with has room; limits have it only where they are near.
    for reference in (each for each in panel.references if each.y is not None):
        axes.axhline(reference.y, **_limit_style(reference))  # type: ignore[arg-type]
    for which, axis in (("x", panel.x), ("y", panel.y)):
        _finish_axis(axes, which, axis, log=is_log[which])
    for reference in panel.references:
        _draw_limit(axes, reference)


def _list_values(panel: Panel, which: str) -> list[float]:
    values = [value for marks in panel.marks for value in getattr(marks, which)]
    return values + [getattr(each, which) for each in panel.references if which == "y" and each.y is not None]


def _make_log(axes: Axes, which: str, values: Sequence[float]) -> bool:
    """Make an axis logarithmic where the longest value would dwarf the shortest; return whether it is.

    Its numbers are plain: at 1, 2 and 5, or at the decades alone where these would crowd.
    """
    ratio = max(values) / min(values)
    if ratio <= charts.LOG_RATIO:
        return False
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5) if ratio < 500 else (1,)))
    axis.set_minor_locator(ticker.NullLocator())
    return True


def _finish_axis(axes: Axes, which: str, axis: ChartAxis, *, log: bool) -> None:
    """Set ends, ticks and title."""
    own = getattr(axes, f"{which}axis")
    own.set_major_formatter(ticker.FuncFormatter(_format_time) if axis.form == "time" else "{x:,.6g}")
    axes.set(**{f"{which}label": _clean(f"{axis.title} (log)" if log else axis.title)})
    if axis.rows:
        many = any("\n" in row for row in axis.rows) or max(map(len, axis.rows)) > 24
        axes.set_yticks([-row for row in range(len(axis.rows))], [*map(_clean, axis.rows)])
        axes.tick_params(axis="y", length=0, labelsize=8 if many else None)
        axes.set_ylim(0.4 - len(axis.rows), 0.6)
    elif axis.ticks:
        _set_ticks(axes, sorted(axis.ticks))
    elif axis.form == "time":
        span_s = (axis.high or 0.0) - (axis.low or 0.0)
        own.set_major_locator(
            ticker.MultipleLocator(next((each for each in _TIME_STEPS if span_s <= 5 * each), 604800))
        )
    elif not log:
        integer = axis.form == "count"
        own.set_major_locator(ticker.MaxNLocator(6, integer=integer, steps=[1, 2, 2.5, 5, 10]))
    low, high = None if log and axis.low == 0 else axis.low, axis.high
    if low is not None or high is not None:
        (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)


def _format_time(at: float, _: object) -> str:
    return time.strftime("%H:%M:%S", units.to_local_time(at))


def _set_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Set ticks at existing values, as far as their numbers have room."""
    room = (values[-1] - values[0]) / 13
    ticks = [values[-1]]
    for value in reversed(values[:-1]):
        if ticks[-1] - value >= room:
            ticks.append(value)
    axes.set_xticks(ticks, [f"{tick:.5g}" for tick in ticks])


def _draw_marks(axes: Axes, marks: Marks, order: float, *, log: bool) -> None:
    x, y, colour = marks.x, marks.y, marks.colour
    if marks.line == "area":
        axes.fill_between(x, y, step="post", color=colour, linewidth=0, zorder=2)
    elif marks.line:
        way: Any = "steps-post" if marks.line == "steps" else "default"
        style: Any = {"linestyle": marks.dash, "linewidth": 1.6, "alpha": marks.alpha, "zorder": 2.5}
        axes.plot(x, y, color=colour, drawstyle=way, **style)
    shape, size = marks.shape, marks.size
    if marks.bars and log:
        # A logarithmic axis has no zero.
        shape, size = "o", 4 + 6 * marks.bars
    elif marks.bars:
        axes.barh(y, x, left=list(marks.starts) or None, height=marks.bars, color=colour, zorder=2)
    for ends, values, key in ((marks.x_ends, x, "xerr"), (marks.y_ends, y, "yerr")):
        if ends:
            reach: Any = [
                [max(value - low, 0.0), max(high - value, 0.0)] for value, (low, high) in zip(values, ends, strict=True)
            ]
            whiskers: Any = {key: list(zip(*reach, strict=True))}
            look: Any = (
                {"ecolor": INK, "capsize": 4, "elinewidth": 1.4}
                if marks.bars
                else {"ecolor": colour, "elinewidth": 0.9}
            )
            axes.errorbar(x, y, fmt="none", zorder=order, **whiskers, **look)
    if shape:
        (line,) = axes.plot(
            x, y, shape, markersize=size, color=colour, markerfacecolor=_face(marks), clip_on=shape != ">",
            markeredgewidth=1.2 if size > 3 else 0.5, zorder=order + 1,
        )  # fmt: skip
        line.set_gid(marks.key or None)
    beside: Any = {
        "va": "center",
        "xytext": (6, 0),
        "textcoords": "offset points",
        "annotation_clip": False,
        "zorder": 6,
    }
    beside |= {"color": INK, "fontweight": "bold"} if marks.bold else {"color": FAINT, "fontsize": 8.5}
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    reaches = [high for _, high in marks.x_ends] or x
    for at, reach, height, text in zip(x, reaches, y, marks.texts, strict=False):
        axes.annotate(_clean(text), (max(at, reach), height), bbox=paper, **beside)


def _limit_style(each: Reference) -> dict[str, Any]:
    return {"color": each.colour, "linewidth": 1.3, "linestyle": (0, (4, 3)), "zorder": 2}


def _draw_limit(axes: Axes, each: Reference) -> None:
    left, right, low, high = *axes.get_xlim(), *axes.get_ylim()
    if each.x is not None and each.until is not None:
        axes.axvspan(each.x, each.until, color=each.colour, zorder=0)
    elif each.x is not None:
        axes.axvline(each.x, **_limit_style(each))
    elif each.slope is not None:
        x = [left + (right - left) * share / 100 for share in range(101)]
        axes.plot(x, [each.slope * at for at in x], **_limit_style(each))
    axes.set(xlim=(left, right), ylim=(low, high))


def _list_ends(panel: Panel) -> list[tuple[float, str, str]]:
    """Return what stands right of the axes: a level, a text, its colour."""
    ends = [(marks.y[-1], marks.end, marks.colour) for marks in panel.marks if marks.end]
    return ends + [(each.y, each.label, each.colour) for each in panel.references if each.y is not None and each.label]


def _write_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write texts right of the axes at their levels, moved apart where they would overlap."""
    # The height of a line of text with a little air, as a share of the axes.
    step = 14 / 72 * axes.figure.dpi / axes.get_window_extent().height
    below = -math.inf
    for level, text, colour in sorted(ends):
        below = max(axes.transAxes.inverted().transform(axes.transData.transform((0, level)))[1], below + step)
        ink = _INKS.get(colour, colour)
        axes.text(1.015, below, _clean(text), transform=axes.transAxes, va="center", color=ink, fontsize=9)


def write_names(axes: Axes, panel: Panel) -> Sequence[Text]:
    """Write the names of points where they cover neither marks nor each other; bold ones first, and in any case."""
    scale = axes.figure.dpi / 72
    spots = [place for marks in panel.marks if marks.shape for place in zip(marks.x, marks.y, strict=True)]
    taken = [Bbox.from_extents(*(at - 4 * scale), *(at + 4 * scale)) for at in map(axes.transData.transform, spots)]
    frame, written = axes.get_window_extent().padded(4), []
    for name in sorted(panel.names, key=lambda each: not each.bold):
        style: Any = {"fontweight": "bold", "fontsize": 9} if name.bold else {"fontsize": 8}
        text = axes.annotate(
            _clean(name.text), (name.x, name.y), (0, 0), textcoords="offset points", color=name.colour, zorder=9,
            **style,
        )  # fmt: skip

        def move(shift: tuple[int, int], text: Any = text) -> Bbox:
            text.xyann = shift
            text.set(ha="left" if shift[0] > 0 else "right", va="bottom" if shift[1] > 0 else "top")
            return text.get_window_extent().padded(2)  # type: ignore[no-any-return]

        def is_bad(shift: tuple[int, int], move: Any = move) -> tuple[bool, int]:
            box = move(shift)
            return not (frame.contains(*box.min) and frame.contains(*box.max)), box.count_overlaps(taken)

        best = min(_SHIFTS if name.bold else _SHIFTS[:4], key=is_bad)
        if not name.bold and any(is_bad(best)):
            text.remove()
            continue
        box = move(best)
        taken.append(box)
        written.append(text)
    return written
