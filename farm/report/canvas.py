"""What all pictures have in common: sizes, colours, headline, the simulated mark, and how they are written.

What they show is in `plots.py`, `campaign_plots.py`, `campaign_evidence.py` and `sweep_plots.py`.
"""

from __future__ import annotations

import bisect
import dataclasses
import io
import pathlib
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

WIDTH_INCHES = 8.4
DPI = 200
# Told apart by the colour-blind too (Okabe and Ito's palette), and in grey.
BLUE, ORANGE, GREY, RED, INK, FAINT = "#0072b2", "#e69f00", "#9a9a9a", "#b3261e", "#222222", "#5a5a5a"
STYLE: Any = {
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


def new_figure(height_inches: float) -> Figure:
    """A figure of its own canvas: pyplot would keep it in a global and pick a display."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches))
    FigureCanvasAgg(figure)
    return figure


def strip(axes: Axes, grid: Literal["x", "y", "both"]) -> None:
    """A grid, and no frame on the far sides."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid, color="#e2e2e2", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)


def draw_title(figure: Figure, title: str, subtitle: str, note: str = "", *, simulated: bool) -> None:
    """Headline, subtitle and the simulated mark at the top, a note at the foot, all at the left edge of the picture."""
    width, height = figure.get_size_inches()
    left, room = 0.1 / width, width - (2.6 if simulated else 0.25)
    text = figure.text(left, 1 - 0.1 / height, title, va="top", fontsize=13, fontweight="bold")
    shorten(text, room * figure.dpi)
    text = figure.text(left, 1 - 0.38 / height, subtitle, va="top", fontsize=9.5, color=FAINT)
    shorten(text, (width - 0.25) * figure.dpi)
    if simulated:
        tag = {"facecolor": "white", "edgecolor": RED, "boxstyle": "round,pad=0.3"}
        place = (1 - 0.2 / width, 1 - 0.13 / height)
        figure.text(*place, "SIMULATED, not hardware", va="top", ha="right", color=RED, fontweight="bold", bbox=tag)
    figure.text(left, 0.06 / height, note, va="bottom", fontsize=8.5, color=FAINT)


def shorten(text: Text, room: float) -> None:
    """Cut what would run out of the picture, with `room` in pixels."""
    whole = text.get_text()
    if text.get_window_extent().width <= room:
        return

    def is_too_long(kept: int) -> bool:
        text.set_text(whole[:kept] + "…")
        return bool(text.get_window_extent().width > room)

    text.set_text(whole[: max(bisect.bisect_left(range(len(whole)), True, key=is_too_long) - 1, 1)] + "…")


def save(figure: Figure, path: pathlib.Path) -> None:
    """Write the PNG. Dates are left out: equal documents give equal files."""
    figure.savefig(path, dpi=DPI, metadata={"Software": "tvm-farm"})


def finish(figure: Figure, folder: pathlib.Path, name: str, caption: str) -> Picture:
    """Write the PNG, return the picture with its SVG."""
    save(figure, folder / f"{name}.png")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": "tvm-farm"})
    return Picture(name, caption, text.getvalue())
