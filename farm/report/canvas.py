"""What all pictures have in common: the frame with headline, legend and simulated mark, axes, and how they are written.

What they show is in `plots.py`, `campaign_plots.py`, `campaign_evidence.py` and `sweep_plots.py`.
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

WIDTH_INCHES = 8.4
DPI = 200
# Room in inches for headline and subtitle, for a line of legend, and for the note below.
_HEAD, _LEGEND, _FOOT = 0.68, 0.24, 0.3
# Above this ratio the short bars of a linear axis can no longer be told apart.
LOG_RATIO = 8.0
# Told apart by the colour-blind too (Okabe and Ito's palette), and in grey.
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
    # A font that is outlined in the SVG needs none on the reader's machine.
    "svg.fonttype": "path",
    "svg.hashsalt": "tvm-farm",
}
# A level in data coordinates, a text, its colour.
Labels = Sequence[tuple[float, str, str]]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure: its name as a file's stem, what it shows, and its SVG text."""

    name: str
    caption: str
    svg: str

    @property
    def file(self) -> str:
        """The PNG's name."""
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
    """A figure with headline, subtitle, legend and the simulated mark at the top, a note at the foot, and `room_inches`
    of height between, where the block draws. Axes find their place as it is written, with all that stands beside them.
    """
    top = _HEAD + _LEGEND * -(-len(handles) // columns)
    height = top + room_inches + (_FOOT if note else 0.08)
    with matplotlib.rc_context(_STYLE):
        # One of its own canvas: pyplot would keep it in a global and pick a display.
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
    """A grid, and no frame on the far sides."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid, color="#e2e2e2", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)


def name_rows(axes: Axes, labels: Sequence[str], **style: Any) -> list[float]:
    """Axes for one row below the other, the first on top; returns where they are."""
    places = [float(row) for row in reversed(range(len(labels)))]
    strip(axes, "x")
    axes.set_yticks(places, labels, **style)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    return places


def write_beside(axes: Axes, value: float, place: float, text: str, **style: Any) -> Text:
    """A text right of a value."""
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
    """Make an axis logarithmic where the longest would dwarf the shortest; whether it is.

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
    """Write the PNG. Dates are left out: equal documents give equal files."""
    figure.savefig(path, dpi=DPI, metadata={"Software": "tvm-farm"})


def finish(figure: Figure, folder: pathlib.Path, name: str, caption: str) -> Picture:
    """Write the PNG, return the picture with its SVG."""
    save(figure, folder / f"{name}.png")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": "tvm-farm"})
    return Picture(name, caption, text.getvalue())


def _shorten(text: Text, room: float) -> None:
    """Cut what would run out of the picture, with `room` in pixels."""
    whole = text.get_text()
    if text.get_window_extent().width <= room:
        return

    def is_too_long(kept: int) -> bool:
        text.set_text(whole[:kept] + "…")
        return bool(text.get_window_extent().width > room)

    text.set_text(whole[: max(bisect.bisect_left(range(len(whole)), True, key=is_too_long) - 1, 1)] + "…")
