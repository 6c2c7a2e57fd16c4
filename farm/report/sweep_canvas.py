"""What the pictures of a sweep have in common: legend, markers and their intervals.

Which points a picture shows is decided in `sweep_plots.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from farm.report import canvas
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Row, Series
from farm.units import Scale

DOMINATED = "#b4b4b4"


@dataclasses.dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    series: Series
    label: str
    colour: str
    shape: str


@dataclasses.dataclass(frozen=True)
class PlottedPoint:
    """A point: where, how far its intervals reach below and above it, and how it is drawn."""

    place: tuple[float, float]
    x_errors: tuple[float, float] | None
    y_errors: tuple[float, float]
    row: Row
    colour: str
    small: bool = False


def draw_points(axes: Axes, marks: Iterable[PlottedPoint], look: Look) -> None:
    """Markers, hollow where nothing was measured, and their intervals: those that look alike in one go."""
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
    """The mark of a pick, visible on every colour."""
    axes.plot(
        *place, "o", markersize=13, markerfacecolor="none", markeredgecolor=canvas.INK, markeredgewidth=1.5, zorder=7
    )
    axes.plot(
        *place, "o", markersize=15.5, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.0, zorder=6
    )


def plan_legend(looks: Sequence[Look], rows: Sequence[Row], *, front: bool, dominated: bool) -> list[Line2D]:
    """What the marks mean, as far as they occur."""
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
    """How far a figure's interval reaches below and above it."""
    value = row[quantity]
    return (
        max(value["value"] - value["low"], 0) * scale.factor,
        max(value["high"] - value["value"], 0) * scale.factor,
    )


def grow(axes: Axes, share: float, which: str = "xy") -> None:
    """Room beyond the outermost points, for names and rings."""
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
