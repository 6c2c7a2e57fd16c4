"""What the pictures of a campaign have in common: headline with legend, colours. What they show is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from farm.report import canvas

# Told apart by the colour-blind too (Okabe and Ito's palette without yellow, which is faint on white).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#222222", "#9a9a9a")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
# Room in inches for headline and subtitle, for a line of legend, and for the note below.
_HEAD, _LEGEND, _FOOT = 0.62, 0.24, 0.3


def choose_look(index: int) -> tuple[str, Any]:
    """Colour and dashes of the line with this number."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


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
    canvas.draw_title(figure, title, subtitle, note, simulated=simulated)
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
    return (_FOOT if note else 0.08) / height, top / height
