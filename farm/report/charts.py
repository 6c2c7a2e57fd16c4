"""The description of a chart, which reports and pages share; `drawing.py` draws it. It loads no plotting library."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeAlias

# Safe for colour blindness: Okabe and Ito's palette without yellow, which is faint on white.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#444444", "#9a9a9a")
BLUE, ORANGE, GREY, RED, INK, FAINT = COLOURS[0], COLOURS[1], COLOURS[7], "#b3261e", "#222222", "#5a5a5a"
# The role of a figure; decides its colour everywhere.
OURS, RIVAL, BASELINE = BLUE, ORANGE, GREY

# Above this ratio the short bars of a linear axis look alike.
LOG_RATIO = 8.0

Numbers: TypeAlias = tuple[float, ...]
Interval: TypeAlias = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class ChartAxis:
    """An axis: its quantity with unit, and its ends, where the values do not decide them.

    `log`: logarithmic where the largest value would dwarf the smallest. `rows`: names of rows, the first on top, at 0,
    -1 and so on. `ticks`: the values that exist. `form`: `count`, or `time` for seconds since the epoch.
    """

    title: str = ""
    low: float | None = None
    high: float | None = None
    log: bool = False
    rows: tuple[str, ...] = ()
    ticks: Numbers = ()
    form: str = ""


@dataclasses.dataclass(frozen=True)
class Marks:
    """Points of one style, with a line through them (`line`, `steps`, or an `area` below) or `bars` of this height.

    `name` is the legend's. `x_ends` and `y_ends` are intervals, `texts` stand beside the points, `end` right of the
    axes. On a page, `keys` and `titles` identify and explain each point, and `key` the group.
    """

    x: Numbers
    y: Numbers
    colour: str
    name: str = ""
    line: str = ""
    dash: Any = "-"
    shape: str = ""
    size: float = 6.0
    hollow: bool = False
    alpha: float = 1.0
    bars: float = 0.0
    starts: Numbers = ()
    x_ends: tuple[Interval, ...] = ()
    y_ends: tuple[Interval, ...] = ()
    texts: tuple[str, ...] = ()
    bold: bool = False
    end: str = ""
    key: str = ""
    keys: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reference:
    """A line to compare with: at `x`, at `y`, or where y is `slope` times x; `until` makes a band of it."""

    colour: str
    label: str = ""
    x: float | None = None
    y: float | None = None
    slope: float | None = None
    until: float | None = None


@dataclasses.dataclass(frozen=True)
class PointName:
    """A name beside a point, written where it has room; a bold one always."""

    x: float
    y: float
    text: str
    colour: str = FAINT
    bold: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """A pair of axes with all that they show."""

    x: ChartAxis
    y: ChartAxis
    marks: tuple[Marks, ...]
    references: tuple[Reference, ...] = ()
    names: tuple[PointName, ...] = ()
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart: its name as a file's stem, its description in words, its headline, and panels in rows.

    `height` is the panels' room in inches, `widths` their relative widths in a row, `shared` the axis in common.
    """

    name: str
    caption: str
    headline: str
    subtitle: str
    panels: tuple[Panel, ...]
    height: float
    simulated: bool
    note: str = ""
    widths: Numbers = (1.0,)
    shared: str = ""

    def list_marks(self) -> Iterator[Marks]:
        """Return the marks of all panels."""
        for panel in self.panels:
            yield from panel.marks


@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawn chart: its name as a file's stem, its description, and its SVG text."""

    name: str
    caption: str
    svg: str

    @property
    def file(self) -> str:
        """Return the PNG's name."""
        return f"{self.name}.png"
