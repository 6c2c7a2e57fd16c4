"""The page's charts as SVG text: lines, bars, a scatter, a timeline of boards.

The style sheet has the colours, so that charts follow light, dark and print. Every text is escaped.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from farm import foreign

WIDTH = 640
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 14, 26, 40
# A letter on a telephone, where the style sheet has the largest ones, what is between two texts, and a line of them.
_LETTER, _BETWEEN, _LINE = 9.0, 8.0, 17.0
_SERIES = 8
# Values above are seconds since the epoch, whose ticks are these apart.
_LEAST_TIME = 1e9
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 7 * 86400)
# Where energies differ by more than this, only factors tell them apart.
_LOG_FROM = 4.0
# Of the median distance between values: a longer one is a time without data.
_GAP = 5.0


@dataclasses.dataclass(frozen=True)
class ChartAxis:
    """Maps values to positions between two ends; `log` for values that differ by factors."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Return a value's position."""
        low, high = self._scale(self.low), self._scale(self.high)
        share = (self._scale(min(max(value, self.low), self.high)) - low) / ((high - low) or 1.0)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, about: int = 6) -> list[float]:
        """Return round values; for times (s since the epoch) whole minutes and hours."""
        if self.low > _LEAST_TIME:
            apart = next((each for each in _TIME_STEPS if (self.high - self.low) / each <= about), _TIME_STEPS[-1])
            return [float(n * apart) for n in range(math.ceil(self.low / apart), math.floor(self.high / apart) + 1)]
        if self.log:
            found = [m * 10.0**e for e in range(-12, 13) for m in (1, 2, 5) if self.low <= m * 10.0**e <= self.high]
            if len(found) > 2:
                return found[:: max(1, len(found) // about)]
        step = _round_step((self.high - self.low) / about)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step) + 1)] if step else [self.low]

    def _scale(self, value: float) -> float:
        return math.log(value) if self.log else value


def span_axis(values: Iterable[float], start: float, end: float, *, zero: bool = False, log: bool = False) -> ChartAxis:
    """Return an axis with room for all values."""
    known = list(values) or [0.0, 1.0]
    low, high = min(known), max(known)
    if log:
        return ChartAxis(low / 1.08, high * 1.08, start, end, log=True)
    extent = (high - low) or abs(high) or 1.0
    return ChartAxis(0.0 if zero else low - 0.06 * extent, high + 0.06 * extent, start, end)


def _round_step(rough: float) -> float:
    if rough <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(float(m * power) for m in (1, 2, 5, 10) if rough <= m * power * 1.0001)


def _say(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.6g}"


def text(value: object) -> Markup:
    """Escape a text from an untrusted source."""
    return escape(foreign.show_controls(str(value)))


def picture(parts: Iterable[str], height: float, label: str, *, width: float = WIDTH, kind: str = "") -> Markup:
    """Return the whole chart; `label` says in words what it shows."""
    head = f'<svg class="chart {kind}" viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{text(label)}">'
    return Markup(f"{head}{''.join(parts)}</svg>")  # noqa: S704 - texts in the parts are escaped


def frame(
    x: ChartAxis, y: ChartAxis, x_title: str, y_title: str, say_x: Callable[[float], str] = _say
) -> Iterator[str]:
    """Draw grid, ticks and titles. `y.start` is the bottom."""
    below = math.inf
    for value in y.ticks(5):
        if below - (at := y.place(value)) < _LINE:
            continue
        below = at
        yield f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at}" y2="{at}"/>'
        yield f'<text class="tick" x="{x.start - 6}" y="{at + 3.5}" text-anchor="end">{_say(value)}</text>'
    for at, said in _space_out(x, x.ticks(6), say_x):
        yield f'<line class="grid" x1="{at}" x2="{at}" y1="{y.start}" y2="{y.start + 4}"/>'
        yield f'<text class="tick" x="{at}" y="{y.start + 17}" text-anchor="middle">{text(said)}</text>'
    yield f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{y.start}" y2="{y.start}"/>'
    if x_title:
        yield f'<text class="title" x="{x.end}" y="{y.start + 35}" text-anchor="end">{text(x_title)}</text>'
    yield f'<text class="title" x="{x.start - 66}" y="{y.end - 13}">{text(y_title)}</text>'


def _space_out(x: ChartAxis, values: Iterable[float], say: Callable[[float], str]) -> Iterator[tuple[float, str]]:
    """Return positions and texts of the ticks whose texts do not overlap."""
    end = -math.inf
    for value in values:
        at, said = x.place(value), say(value)
        half = len(said) * _LETTER / 2
        if at - half > end and at + half <= x.end + _RIGHT:
            end = at + half + _BETWEEN
            yield at, said


def draw_steps(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]], x_title: str, y_title: str, label: str, end: float
) -> Markup:
    """Draw values that hold until the next one, such as best latencies, up to `end`."""
    height = 230.0
    points = [point for _, steps in series for point in steps]
    x = ChartAxis(0.0, max(end, 1.0), _LEFT, WIDTH - _RIGHT)
    y = span_axis([value for _, value in points], height - _BOTTOM, _TOP, log=bool(points))
    parts = list(frame(x, y, x_title, y_title))
    for index, (name, steps) in enumerate(series):
        if not steps:
            continue
        path = [f"M{x.place(steps[0][0])} {y.place(steps[0][1])}"]
        path += [f"H{x.place(at)}V{y.place(value)}" for at, value in steps[1:]]
        path.append(f"H{x.place(end)}")
        parts.append(f'<path class="line s{index % _SERIES}" d="{"".join(path)}"><title>{text(name)}</title></path>')
    return picture(parts, height, label)


def draw_lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    y_title: str,
    label: str,
    say_x: Callable[[float], str],
    times: Sequence[float] = (),
) -> Markup:
    """Draw values over time. A line breaks where values are missing for much longer than usual.

    The axis has room for `times`, too, so that several charts share one axis.
    """
    height = 170.0
    points = [point for _, line in series for point in line]
    x = span_axis([*times, *(at for at, _ in points)], _LEFT, WIDTH - _RIGHT)
    y = span_axis([value for _, value in points], height - _BOTTOM, _TOP)
    parts = list(frame(x, y, "", y_title, say_x))
    for index, (name, line) in enumerate(series):
        runs = split_at_gaps(line)
        path = "".join("M" + "L".join(f"{x.place(at)} {y.place(value)}" for at, value in run) for run in runs)
        parts.append(f'<path class="line s{index % _SERIES}" d="{path}"><title>{text(name)}</title></path>')
        # A path of one place draws nothing.
        parts += [
            f'<circle class="s{index % _SERIES}" cx="{x.place(run[0][0])}" cy="{y.place(run[0][1])}" r="2"/>'
            for run in runs
            if len(run) == 1
        ]
    return picture(parts, height, label)


def split_at_gaps(line: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Split a line where two values are more than `_GAP` times the median distance and a minute apart."""
    apart = [after[0] - before[0] for before, after in itertools.pairwise(line)]
    longest_s = max(60.0, _GAP * statistics.median(apart)) if apart else 0.0
    runs = [list(line[:1])]
    for distance, value in zip(apart, line[1:], strict=True):
        if distance > longest_s:
            runs.append([])
        runs[-1].append(value)
    return runs


def draw_bars(values: Sequence[float], minutes: float, label: str) -> Markup:
    """Draw trials per minute, one bar for each part of the time."""
    height = 130.0
    x = ChartAxis(0.0, len(values) * minutes, _LEFT, WIDTH - _RIGHT)
    y = ChartAxis(0.0, max([*values, 1.0]) * 1.05, height - _BOTTOM, _TOP)
    width = max(0.5, (x.end - x.start) / max(1, len(values)) - 0.6)
    parts = list(frame(x, y, "minutes", "trials per minute"))
    for index, value in enumerate(values):
        top, at = y.place(value), x.place(index * minutes)
        parts.append(f'<rect class="bar" x="{at}" y="{top}" width="{width:.1f}" height="{y.start - top:.1f}"/>')
    return picture(parts, height, label)


def draw_spark(values: Sequence[tuple[float, float]], end: float, label: str) -> Markup:
    """Draw a table row's sparkline: how a latency fell."""
    width, height = 120.0, 22.0
    if not values:
        return Markup("")
    x, y = ChartAxis(0.0, max(end, 1.0), 1, width - 1), span_axis([v for _, v in values], height - 2, 2, log=True)
    path = [f"M{x.place(values[0][0])} {y.place(values[0][1])}"]
    path += [f"H{x.place(at)}V{y.place(value)}" for at, value in values[1:]]
    return picture([f'<path class="line s0" d="{"".join(path)}H{x.end}"/>'], height, label, width=width, kind="spark")


@dataclasses.dataclass(frozen=True)
class Lane:
    """A board's lane in a timeline: its work, and its gaps with their cause (all s since the epoch)."""

    name: str
    spans: Sequence[Sequence[float]]
    gaps: Sequence[tuple[float, float, str]]


def draw_timeline(lanes: Sequence[Lane], began: float, ended: float, say: Callable[[float], str], label: str) -> Markup:
    """Draw a lane for each board: who worked when."""
    lane_height, left, above = 19.0, 150.0, 6.0
    height = above + lane_height * len(lanes) + 26
    x = ChartAxis(began, max(ended, began + 1.0), left, WIDTH - _RIGHT)
    parts = []
    for index, lane in enumerate(lanes):
        top = above + index * lane_height
        name = lane.name if len(lane.name) <= 15 else lane.name[:14] + "…"
        parts.append(f'<text class="tick" x="{left - 8}" y="{top + 13}" text-anchor="end">{text(name)}</text>')
        parts.append(f'<rect class="lane" x="{left}" y="{top + 2}" width="{x.end - left}" height="{lane_height - 5}"/>')
        path = []
        for start, end in lane.spans:
            # A piece of work is seen, however short it was.
            from_, to = x.place(start), max(x.place(end), x.place(start) + 0.4)
            path.append(f"M{from_} {top + 2}H{to:.1f}v{lane_height - 5}H{from_}z")
        parts.append(f'<path class="work" d="{"".join(path)}"/>')
        for start, end, why in lane.gaps:
            from_ = x.place(start)
            width = max(1.0, x.place(end) - from_)
            parts.append(
                f'<rect class="gap" x="{from_}" y="{top + 2}" width="{width:.1f}" height="{lane_height - 5}">'
                f"<title>{text(f'{lane.name}: {end - start:.0f} s idle: {why}')}</title></rect>"
            )
    for at, said in _space_out(x, x.ticks(6), say):
        parts.append(f'<text class="tick" x="{at}" y="{height - 8}" text-anchor="middle">{text(said)}</text>')
    return picture(parts, height, label)


def draw_scatter(document: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> Markup:
    """Draw a sweep's points, latency against energy (or power where no energy is known): the front, dominated points,
    the pick of each series.

    `others` are sweeps drawn beside it.
    """
    height = 320.0
    drawn = [(which, each) for which, one in enumerate((document, *others)) for each in one["series"]]
    points = [(row, series, which) for which, series in drawn for row in series["rows"] if _is_shown(row)]
    x = span_axis([row["latency_s"]["value"] * 1e3 for row, _, _ in points], _LEFT, WIDTH - _RIGHT, log=bool(points))
    energies = [row["energy_j"]["value"] * 1e3 for row, _, _ in points]
    wide = bool(energies) and max(energies) > _LOG_FROM * min(energies)
    y = span_axis(energies, height - _BOTTOM, _TOP, log=wide)
    parts = list(frame(x, y, "latency, ms", "energy per inference, mJ"))
    for index, (_, series) in enumerate(drawn):
        front = [row for key in series["front"] for row in series["rows"] if row["key"] == key and _is_shown(row)]
        if front:
            path = "L".join(f"{_at(x, row, 'latency_s')} {_at(y, row, 'energy_j')}" for row in front)
            parts.append(f'<path class="front s{index % _SERIES}" d="M{path}"/>')
    for index, (_, series) in enumerate(drawn):
        parts += [_draw_point(x, y, row, series, index) for row in series["rows"] if _is_shown(row)]
    return picture(parts, height, f"Latency against energy of {len(points)} operating points", kind="scatter")


def _draw_point(x: ChartAxis, y: ChartAxis, row: Mapping[str, Any], series: Mapping[str, Any], index: int) -> str:
    at, height = _at(x, row, "latency_s"), _at(y, row, "energy_j")
    picked = bool(series["pick"]) and series["pick"]["key"] == row["key"]
    kind = "front" if row["on_front"] else "measured" if row["measured"] else "predicted"
    power = f", {row['power_w']['value']:.3g} W" if row["power_w"] else ""
    said = f"{series['variant']} x{series['batch']}, {row['key']}: {row['latency_s']['value'] * 1e3:.4g} ms"
    said += f", {row['energy_j']['value'] * 1e3:.4g} mJ{power}{'' if row['measured'] else ', predicted'}"
    ring = f'<circle class="ring s{index % _SERIES}" cx="{at}" cy="{height}" r="9"/>' if picked else ""
    size = 5 if row["on_front"] else 3.2
    return (
        f'{ring}<circle class="point {kind} s{index % _SERIES}" cx="{at}" cy="{height}" r="{size}" '
        f'data-key="{text(row["key"])}" data-series="{index}"><title>{text(said)}</title></circle>'
    )


def _at(axis: ChartAxis, row: Mapping[str, Any], quantity: str) -> float:
    return axis.place(row[quantity]["value"] * 1e3)


def _is_shown(row: Mapping[str, Any]) -> bool:
    return bool(row["latency_s"] and row["energy_j"]) and not row["invalid"] and not row["throttled"]
