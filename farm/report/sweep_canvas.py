"""The common parts of a sweep's charts: legend, markers and their intervals, labels. `sweep_plots.py` chooses the
points.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from farm.report import canvas
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Row, Series
from farm.units import Scale

# Positions of a name: direction from its point, and its alignment. The first free one is taken.
_PLACES = (
    (1, 1, "left", "bottom"),
    (1, -1, "left", "top"),
    (-1, -1, "right", "top"),
    (-1, 1, "right", "bottom"),
    (0, 1, "center", "bottom"),
    (0, -1, "center", "top"),
    (1, 0, "left", "center"),
    (-1, 0, "right", "center"),
)
_DISTANCES_POINTS = (7.0, 12.0, 20.0, 32.0)
# Half the width of a marker, and of the ring around a pick.
_MARK_POINTS = 3.5
_RING_POINTS = 8.5
# A shift in points and two alignments.
_Spot = tuple[tuple[float, float], str, str]
# x0, y0, x1, y1: numbers, since thousands of pairs are compared and a Bbox takes a hundred times as long.
_Extents = tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True)
class Label:
    """A name at a place in data coordinates. Rank 1 is placed first and always; others only where there is room."""

    place: tuple[float, float]
    text: str
    colour: str
    rank: int
    bold: bool = False


def write_labels(
    axes: Axes,
    labels: Sequence[Label],
    marks: Sequence[tuple[float, float]],
    rings: Sequence[tuple[float, float]] = (),
) -> int:
    """Write labels around `marks` and the wider `rings` (data coordinates); return how many found room."""
    figure = axes.get_figure(root=True)
    if figure is None:
        return 0
    figure.draw_without_rendering()
    per_point = figure.dpi / 72
    taken: list[_Extents] = []
    for place, points in [*((mark, _MARK_POINTS) for mark in marks), *((ring, _RING_POINTS) for ring in rings)]:
        (x, y), half = axes.transData.transform(place), points * per_point
        taken.append((x - half, y - half, x + half, y + half))
    spots = [tuple(axes.transData.transform(mark)) for mark in marks]
    frame = axes.get_window_extent()
    written = 0
    for label in sorted(labels, key=lambda each: each.rank):
        box = _write(axes, label, taken, spots, frame)
        if box is not None:
            taken.append(_extents(box))
            written += 1
    return written


def _write(
    axes: Axes, label: Label, taken: Sequence[_Extents], spots: Sequence[tuple[float, float]], frame: Bbox
) -> Bbox | None:
    # A line behind a name must not cross it.
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    style: Any = {"color": label.colour, "fontsize": 9 if label.bold else 8, "bbox": paper, "zorder": 8}
    if label.bold:
        style |= {"fontweight": "bold", "zorder": 9}
    distances = _DISTANCES_POINTS if label.rank == 1 else _DISTANCES_POINTS[:2]
    least: tuple[float, _Spot] | None = None
    found: _Spot | None = None
    # Reuse one text and move it: making one takes many times as long as measuring it.
    text = axes.annotate(label.text, label.place, xytext=(0, 0), textcoords="offset points", **style)
    for distance, (dx, dy, ha, va) in itertools.product(distances, _PLACES):
        reach = distance + (5 if label.rank == 1 else 0)
        shift = (dx * reach, dy * reach)
        text.xyann = shift
        text.set(ha=ha, va=va)
        box = text.get_window_extent().padded(1.5)
        extents = _extents(box)
        outside = not (frame.x0 <= box.x0 and box.x1 <= frame.x1 + 8 and frame.y0 <= box.y0 and box.y1 <= frame.y1)
        covered = sum(_shared_area(extents, other) for other in taken)
        if not outside and not covered and (label.rank == 1 or _is_nearest(axes, label, box, spots)):
            found = shift, ha, va
            break
        if not outside and (least is None or covered < least[0]):
            least = covered, (shift, ha, va)
    text.remove()
    if found is None and label.rank == 1 and least is not None:
        found = least[1]
    return _annotate(axes, label, found, style) if found else None


def _annotate(axes: Axes, label: Label, spot: _Spot, style: Any) -> Bbox:
    shift, ha, va = spot
    arrow: Any = {"arrowstyle": "-", "color": label.colour, "linewidth": 0.7, "shrinkB": 7}
    far = max(map(abs, shift)) > _DISTANCES_POINTS[0] + 6
    text = axes.annotate(
        label.text,
        label.place,
        xytext=shift,
        textcoords="offset points",
        ha=ha,
        va=va,
        arrowprops=arrow if far else None,
        **style,
    )
    return text.get_window_extent().padded(1.5)


def _is_nearest(axes: Axes, label: Label, box: Bbox, spots: Sequence[tuple[float, float]]) -> bool:
    """Return whether a reader takes the name for its own point's: no other is nearer to it."""
    x, y = axes.transData.transform(label.place)
    own = _distance(box, (x, y))
    return all(_distance(box, spot) > 1.2 * own for spot in spots if max(abs(spot[0] - x), abs(spot[1] - y)) > 0.5)


def _distance(box: Bbox, spot: tuple[float, float]) -> float:
    dx = max(box.x0 - spot[0], 0.0, spot[0] - box.x1)
    dy = max(box.y0 - spot[1], 0.0, spot[1] - box.y1)
    return math.hypot(dx, dy)


def _extents(box: Bbox) -> _Extents:
    return float(box.x0), float(box.y0), float(box.x1), float(box.y1)


def _shared_area(a: _Extents, b: _Extents) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0


DOMINATED = "#b4b4b4"


@dataclasses.dataclass(frozen=True)
class Look:
    """The style of a series."""

    series: Series
    label: str
    colour: str
    shape: str


@dataclasses.dataclass(frozen=True)
class PlottedPoint:
    """A point: position, lengths of its intervals below and above, and style."""

    place: tuple[float, float]
    x_errors: tuple[float, float] | None
    y_errors: tuple[float, float]
    row: Row
    colour: str
    small: bool = False


def draw_points(axes: Axes, marks: Iterable[PlottedPoint], look: Look) -> None:
    """Draw markers, hollow for predictions, and their intervals; equal styles in one call."""
    alike: dict[tuple[Any, ...], list[PlottedPoint]] = {}
    for mark in marks:
        style = mark.colour, mark.small, bool(mark.row["on_front"]), bool(mark.row["measured"])
        alike.setdefault((*style, mark.x_errors is None), []).append(mark)
    for (colour, small, on_front, measured, _), some in alike.items():
        level = 5.0 if on_front else 4.0
        x, y = zip(*(mark.place for mark in some), strict=True)
        if not small:
            x_errors, y_errors = ([mark.x_errors for mark in some], [mark.y_errors for mark in some])
            axes.errorbar(
                x,
                y,
                xerr=None if x_errors[0] is None else list(zip(*x_errors, strict=True)),
                yerr=list(zip(*y_errors, strict=True)),
                fmt="none",
                ecolor=colour,
                elinewidth=0.9,
                zorder=level - 1,
            )
        axes.plot(
            x,
            y,
            look.shape,
            markersize=2.6 if small else 6.0,
            color=colour,
            markerfacecolor=colour if measured else "white",
            markeredgewidth=0.5 if small else 1.2,
            zorder=level - (1.5 if small else 0),
        )


def draw_ring(axes: Axes, place: tuple[float, float], colour: str) -> None:
    """Mark a pick, visible on every colour."""
    axes.plot(
        *place, "o", markersize=13, markerfacecolor="none", markeredgecolor=canvas.INK, markeredgewidth=1.5, zorder=7
    )
    axes.plot(
        *place, "o", markersize=15.5, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.0, zorder=6
    )


def plan_legend(looks: Sequence[Look], rows: Sequence[Row], *, front: bool, dominated: bool) -> list[Line2D]:
    """Return legend entries for the marks that occur."""
    marks = []
    for look in looks:
        meaning = f"{look.label}, on the front" if front else look.label
        marks.append(_mark(look.shape, look.colour, look.colour, meaning))
    if front and dominated:
        marks.append(_mark("o", DOMINATED, DOMINATED, "not on the front"))
    if any(row["predicted"] for row in rows):
        marks.append(_mark("o", canvas.FAINT, "white", "predicted, not measured"))
    if any(sweep_rows.find_pick(look.series) for look in looks):
        ring = _mark("o", canvas.INK, "none", "pick")
        ring.set_markersize(11)
        marks.append(ring)
    return marks


def _mark(shape: str, edge: str, face: str, label: str) -> Line2D:
    return Line2D([], [], linestyle="none", marker=shape, color=edge, markerfacecolor=face, markersize=6.5, label=label)


def find_errors(row: Row, quantity: str, scale: Scale) -> tuple[float, float]:
    """Return how far a figure's interval reaches below and above it."""
    value = row[quantity]
    return (
        max(value["value"] - value["low"], 0) * scale.factor,
        max(value["high"] - value["value"], 0) * scale.factor,
    )


def grow(axes: Axes, share: float, which: str = "xy") -> None:
    """Add room beyond the outermost points, for names and rings."""
    for letter, get, set_ in _axes_of(axes):
        if letter in which:
            low, high = get()
            if (axes.get_xscale() if letter == "x" else axes.get_yscale()) == "log":
                factor = (high / low) ** share
                set_(low / factor, high * factor)
            else:
                set_(low - share * (high - low), high + share * (high - low))


def _axes_of(axes: Axes) -> Iterator[tuple[str, Callable[[], Any], Callable[..., Any]]]:
    yield "x", axes.get_xlim, axes.set_xlim
    yield "y", axes.get_ylim, axes.set_ylim
