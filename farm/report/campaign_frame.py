"""What the pictures of a campaign have in common: figures, headline, legend, colours. What they show is elsewhere."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from farm.report import plots

# Told apart by the colour-blind too (Okabe and Ito's palette without yellow, which is faint on white).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#222222", "#9a9a9a")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
# Room in inches for headline and subtitle, for a line of legend, and for the note below.
_HEAD, _LEGEND, _FOOT = 0.62, 0.24, 0.3


def new_figure(height_inches: float) -> Figure:
    """A figure of its own canvas: pyplot would keep it in a global and pick a display."""
    figure = Figure(figsize=(plots.WIDTH_INCHES, height_inches))
    FigureCanvasAgg(figure)
    return figure


def choose_look(index: int) -> tuple[str, Any]:
    """Colour and dashes of the line with this number."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def strip(axes: Axes, grid: str) -> None:
    """A grid, and no frame on the far sides."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid, color="#e2e2e2", linewidth=0.8, zorder=0)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def draw_head(
    figure: Figure,
    title: str,
    subtitle: str,
    note: str = "",
    handles: Sequence[Line2D | Patch] = (),
    *,
    simulated: bool,
    columns: int = 4,
) -> tuple[float, float]:
    """Headline, subtitle, legend, note and the simulated mark; returns the share of the height that is left between:
    bottom and top.
    """
    width, height = figure.get_size_inches()
    left, room = 0.1 / width, width - (2.6 if simulated else 0.25)
    text = figure.text(left, 1 - 0.1 / height, title, va="top", fontsize=13, fontweight="bold")
    plots.shorten(text, room * figure.dpi)
    text = figure.text(left, 1 - 0.36 / height, subtitle, va="top", fontsize=9.5, color=plots.FAINT)
    plots.shorten(text, (width - 0.25) * figure.dpi)
    if simulated:
        tag = {"facecolor": "white", "edgecolor": plots.RED, "boxstyle": "round,pad=0.3"}
        place = (1 - 0.2 / width, 1 - 0.13 / height)
        figure.text(
            *place, "SIMULATED, not hardware", va="top", ha="right", color=plots.RED, fontweight="bold", bbox=tag
        )
    top = height - _HEAD
    if handles:
        figure.legend(
            handles=list(handles),
            loc="upper left",
            bbox_to_anchor=(0.02 / width, top / height),
            ncols=min(columns, len(handles)),
            frameon=False,
            fontsize=9,
            handlelength=1.6,
            handletextpad=0.5,
            columnspacing=1.6,
            borderpad=0.2,
        )
        top -= _LEGEND * -(-len(handles) // columns)
    if note:
        figure.text(left, 0.06 / height, note, va="bottom", fontsize=8.5, color=plots.FAINT)
    return (_FOOT if note else 0.08) / height, top / height


def save(figure: Figure, path: pathlib.Path) -> None:
    """Write the PNG; dates are left out, so that equal documents give equal files."""
    figure.savefig(path, dpi=plots.DPI, metadata={"Software": "tvm-farm"})
