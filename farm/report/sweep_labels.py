"""Names beside the points of a scatter, placed so that none covers another or a point."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

# Where a name may stand: direction from its point, and how it is aligned there. The first that is free is taken.
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
    # One that is moved: to make it takes many times as long as to measure it.
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
    """Whether a reader would take the name for its own point's: no other is nearer to it."""
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
