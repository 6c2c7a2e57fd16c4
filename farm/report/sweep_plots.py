"""Pictures of a sweep: latency against energy with the front, and latency, power and energy over each clock.

Points that were only predicted are hollow, points that others beat in both are grey. Each figure is written as PNG for
slides and given as SVG for the page.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from farm.report import plots, sweep_labels, sweep_rows, sweep_words
from farm.report.sweep_rows import Document, Row, Series
from farm.report.sweep_words import Scale

# Told apart by shape too, for readers who see no colours and for print.
_COLOURS = (plots.BLUE, "#c85200", "#00775a", "#8f4f86")
_SHAPES = ("o", "s", "^", "D")
_VARIANTS = ("tuned", "untuned")
_DOMINATED = "#b4b4b4"
# With more predictions than this, their intervals and outlines would cover everything else.
_CROWD = 60
_LEFT_INCHES, _TOP_INCHES = 0.85, 1.05
# Points so many times slower or dearer than all of the front are left to the table: they would squeeze the rest.
_FAR = 3.0
# A font that is outlined in the SVG needs none on the reader's machine.
_STYLE: Any = plots.STYLE | {"svg.fonttype": "path", "axes.labelsize": 10}


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure: its name as a file's stem, what it shows, and its SVG text."""

    name: str
    caption: str
    svg: str


@dataclasses.dataclass(frozen=True)
class _Look:
    """How a series is drawn."""

    series: Series
    label: str
    colour: str
    shape: str


def draw_pictures(document: Document, folder: pathlib.Path) -> list[Picture]:
    """Write every picture that the document gives cause for as PNG into `folder`, which exists."""
    pictures = []
    for batch in sweep_rows.list_batches(document):
        looks = _plan_looks(document, batch)
        suffix = f"-batch{batch}" if len(sweep_rows.list_batches(document)) > 1 else ""
        rows = [row for look in looks for row in sweep_rows.counted(look.series)]
        points = {row["key"] for row in rows}
        if len(points) > 1 and any(row["energy_j"] for row in rows):
            pictures.append(_draw_front(document, looks, folder, suffix))
        for clock in sweep_rows.find_swept_clocks(document):
            if slices := _plan_slices(looks, clock):
                pictures.append(_draw_clock(document, clock, slices, folder, suffix))
    return pictures


def _plan_slices(looks: Sequence[_Look], clock: Sequence[str]) -> list[tuple[_Look, list[Row]]]:
    """The rows of each series in which this clock alone changes, all other clocks being the same in all of them."""
    first = next((rows for look in looks if len(rows := sweep_rows.choose_slice(look.series, clock)) > 1), None)
    if first is None:
        return []
    slices = [(look, sweep_rows.find_slice(look.series, clock, first[0])) for look in looks]
    return [(look, rows) for look, rows in slices if len(rows) > 1]


def _plan_looks(document: Document, batch: int) -> list[_Look]:
    """Tuned first: it is what one ships. A variant has the same colour in every picture of every sweep."""
    others = [series["variant"] for series in document["series"] if series["variant"] not in _VARIANTS]
    known = [*_VARIANTS, *dict.fromkeys(others)]
    return [
        _Look(series, series["variant"], _COLOURS[index % len(_COLOURS)], _SHAPES[index % len(_SHAPES)])
        for series in sweep_rows.order_series(document)
        if series["batch"] == batch
        for index in (known.index(series["variant"]),)
    ]


def _draw_front(document: Document, looks: Sequence[_Look], folder: pathlib.Path, suffix: str) -> Picture:
    rows, left_out = _choose_rows(looks)
    times = [row["latency_s"]["value"] for row in rows]
    energies = [row["energy_j"]["value"] for row in rows]
    time, energy = sweep_words.seconds_scale(times), sweep_words.joule_scale(energies)
    with matplotlib.rc_context(_STYLE):
        figure = _new_figure(4.6)
        axes = figure.subplots()
        for look in looks:
            _draw_cloud(axes, look, [row for row in look.series["rows"] if row in rows], time, energy)
        if max(times) > plots.LOG_RATIO * min(times):
            plots.log_axis(axes, "x", max(times) / min(times))
        if max(energies) > plots.LOG_RATIO * min(energies):
            plots.log_axis(axes, "y", max(energies) / min(energies))
        _grow(axes, 0.06)
        axes.set_xlabel(f"latency per inference, {time.unit}")
        axes.set_ylabel(f"energy per inference, {energy.unit}")
        handles = _legend(looks, rows, front=True, dominated=any(not row["on_front"] for row in rows))
        beyond = f"; {left_out} points far from the front are in the table only" if left_out else ""
        _frame(figure, [axes], document, f"Latency against energy, lower left is better{beyond}", handles)
        _draw_limits(axes, document["goal"], time, energy)
        _label_points(axes, document, looks, rows, time, energy)
        caption = "Latency and energy per inference at every operating point, with the Pareto front"
        return _finish(figure, folder, f"front{suffix}", caption)


def _choose_rows(looks: Sequence[_Look]) -> tuple[list[Row], int]:
    """Rows to draw, and how many lie too far off."""
    rows = [row for look in looks for row in sweep_rows.counted(look.series) if row["energy_j"]]
    front = [row for row in rows if row["on_front"]] or rows
    slowest = max(row["latency_s"]["value"] for row in front)
    dearest = max(row["energy_j"]["value"] for row in front)
    near = [
        row
        for row in rows
        if row["latency_s"]["value"] <= _FAR * slowest and row["energy_j"]["value"] <= _FAR * dearest
    ]
    return near, len(rows) - len(near)


def _draw_cloud(axes: Axes, look: _Look, rows: Sequence[Row], time: Scale, energy: Scale) -> None:
    """Every point of a series, its front as a staircase: what is reached at the latency or less."""
    front = sorted((row for row in rows if row["on_front"]), key=lambda row: float(row["latency_s"]["value"]))
    place = _place("latency_s", "energy_j", time, energy)
    if len(front) > 1:
        x, y = zip(*map(place, front), strict=True)
        axes.step(x, y, where="post", color=look.colour, linewidth=1.4, alpha=0.75, zorder=2)
    crowded = sum(not row["measured"] for row in rows) > _CROWD
    for row in rows:
        colour = look.colour if row["on_front"] else _DOMINATED
        small = crowded and not row["measured"]
        _draw_point(
            axes,
            place(row),
            _errors(row, "latency_s", time),
            _errors(row, "energy_j", energy),
            row,
            look,
            colour,
            small,
        )
    pick = sweep_rows.find_pick(look.series)
    if pick and pick["energy_j"]:
        _ring(axes, place(pick), look.colour)


def _draw_point(
    axes: Axes,
    place: tuple[float, float],
    x_errors: list[list[float]] | None,
    y_errors: list[list[float]] | None,
    row: Row,
    look: _Look,
    colour: str,
    small: bool,
) -> None:
    """A marker, hollow where nothing was measured, and its intervals."""
    level = 5.0 if row["on_front"] else 4.0
    if not small:
        axes.errorbar(*place, xerr=x_errors, yerr=y_errors, fmt="none", ecolor=colour, elinewidth=0.9, zorder=level - 1)
    axes.plot(
        *place,
        look.shape,
        markersize=2.6 if small else 6.0,
        color=colour,
        markerfacecolor=colour if row["measured"] else "white",
        markeredgewidth=0.5 if small else 1.2,
        zorder=level - (1.5 if small else 0),
    )


def _ring(axes: Axes, place: tuple[float, float], colour: str) -> None:
    axes.plot(
        *place, "o", markersize=13, markerfacecolor="none", markeredgecolor=plots.INK, markeredgewidth=1.5, zorder=7
    )
    axes.plot(
        *place, "o", markersize=15.5, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.0, zorder=6
    )


def _draw_limits(axes: Axes, goal: Mapping[str, Any], time: Scale, energy: Scale) -> None:
    """The deadline, and the power that must not be exceeded: energy over latency. Named above the axes."""
    style: Any = {"color": plots.RED, "linewidth": 1.2, "linestyle": (0, (4, 3)), "zorder": 1.5}
    left, right = axes.get_xlim()
    low, high = axes.get_ylim()
    names: list[tuple[float, float, str]] = []
    if goal["deadline_s"] and left < (at := goal["deadline_s"] * time.factor) < right:
        axes.axvline(at, **style)
        names.append((at, high, f"deadline {time.text(goal['deadline_s'])}"))
    if goal["max_power_w"]:
        slope = goal["max_power_w"] / time.factor * energy.factor
        steps = [left + (right - left) * i / 200 for i in range(201)]
        inside = [(x, slope * x) for x in steps if low <= slope * x <= high]
        if len(inside) > 1:
            x, y = zip(*inside, strict=True)
            axes.plot(x, y, **style)
            names.append((x[-1], y[-1], f"{goal['max_power_w']:g} W"))
    # Two that end side by side are written away from each other.
    sides = ["center"] if len(names) == 1 else ["right", "left"]
    for (x_end, y_end, text), side in zip(sorted(names), sides, strict=False):
        at_right = x_end > left + 0.93 * (right - left)
        axes.annotate(
            text,
            (x_end, y_end),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right" if at_right else side,
            va="bottom",
            color=plots.RED,
            fontsize=8.5,
            annotation_clip=False,
        )
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)


def _label_points(
    axes: Axes, document: Document, looks: Sequence[_Look], rows: Sequence[Row], time: Scale, energy: Scale
) -> None:
    """Names beside the pick, the ends of each front and as many others as find room."""
    common = sweep_words.find_common_words(row["key"] for look in looks for row in look.series["rows"])
    place = _place("latency_s", "energy_j", time, energy)
    wanted: list[sweep_labels.Label] = []
    rings = []
    for look in looks:
        pick = sweep_rows.find_pick(look.series)
        front = [row for row in look.series["rows"] if row in rows and row["on_front"]]
        front.sort(key=lambda row: float(row["latency_s"]["value"]))
        for row in front:
            if row is not pick:
                rank = 2 if row is front[0] or row is front[-1] else 3
                text = sweep_words.format_label(row["key"], common)
                wanted.append(sweep_labels.Label(place(row), text, plots.FAINT, rank))
        if pick and pick["energy_j"]:
            text = f"pick: {sweep_words.format_label(pick['key'], common)}"
            wanted.append(sweep_labels.Label(place(pick), text, look.colour, 1, bold=True))
            rings.append(place(pick))
    sweep_labels.write_labels(axes, wanted, [place(row) for row in rows], rings)


def _draw_clock(
    document: Document,
    clock: Sequence[str],
    slices: Sequence[tuple[_Look, list[Row]]],
    folder: pathlib.Path,
    suffix: str,
) -> Picture:
    """Latency, power and energy over one clock, one below the other, all series in each."""
    rows = [row for _, some in slices for row in some]
    scale = sweep_words.seconds_scale(row["latency_s"]["value"] for row in rows)
    panels: list[tuple[str, str, Scale]] = [("latency_s", "latency", scale)]
    if any(row["power_w"] for row in rows):
        panels.append(("power_w", "power", sweep_words.WATT))
    if energies := [row["energy_j"]["value"] for row in rows if row["energy_j"]]:
        panels.append(("energy_j", "energy", sweep_words.joule_scale(energies)))
    with matplotlib.rc_context(_STYLE):
        figure = _new_figure(_TOP_INCHES + 0.55 + 1.75 * len(panels))
        stack = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (quantity, label, unit) in zip(stack, panels, strict=True):
            for look, some in slices:
                _draw_course(axes, clock, look, some, quantity, unit)
            _finish_panel(axes, rows, quantity, f"{label}, {unit.unit}")
        stack[-1].set_xlabel(f"clock of {' and '.join(clock)}, MHz")
        _tick_clocks(stack[-1], sorted({(sweep_rows.clock_hz(row, clock) or 0) / 1e6 for row in rows}))
        handles = _legend([look for look, _ in slices], rows, front=False, dominated=False)
        _frame(figure, list(stack), document, _explain_slice(document, clock, slices), handles)
        name = "-".join(clock)
        quantities = " and ".join([label for _, label, _ in panels][:2])
        variants = " and ".join(look.label for look, _ in slices)
        caption = f"{quantities.capitalize()} over the clock of {' and '.join(clock)}: {variants}"
        return _finish(figure, folder, f"clock-{name}{suffix}", caption)


def _draw_course(axes: Axes, clock: Sequence[str], look: _Look, rows: list[Row], quantity: str, scale: Scale) -> None:
    """One series' values over a clock, joined by a faint line."""
    known = [row for row in rows if row[quantity]]
    places = [
        ((sweep_rows.clock_hz(row, clock) or 0) / 1e6, float(row[quantity]["value"]) * scale.factor) for row in known
    ]
    if len(places) > 1:
        x, y = zip(*places, strict=True)
        axes.plot(x, y, color=look.colour, linewidth=1.0, alpha=0.5, zorder=2)
    for place, row in zip(places, known, strict=True):
        _draw_point(axes, place, None, _errors(row, quantity, scale), row, look, look.colour, False)
        if look.series["pick"] and row["key"] == look.series["pick"]["key"]:
            _ring(axes, place, look.colour)


def _finish_panel(axes: Axes, rows: Sequence[Row], quantity: str, label: str) -> None:
    values = [row[quantity]["value"] for row in rows if row[quantity]]
    if max(values) > plots.LOG_RATIO * min(values):
        plots.log_axis(axes, "y", max(values) / min(values))
        _grow(axes, 0.1, "y")
    else:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylabel(label)


def _tick_clocks(axes: Axes, clocks_mhz: Sequence[float]) -> None:
    """Ticks at the clocks that there are, as far as their numbers have room."""
    low, high = clocks_mhz[0], clocks_mhz[-1]
    margin = max(0.04 * (high - low), 1.0)
    axes.set_xlim(low - margin, high + margin)
    room = (high - low) / 13
    ticks = [high]
    for clock in reversed(clocks_mhz[:-1]):
        if ticks[-1] - clock >= room:
            ticks.append(clock)
    axes.set_xticks(ticks, [f"{tick:.5g}" for tick in ticks])


def _explain_slice(document: Document, clock: Sequence[str], slices: Sequence[tuple[_Look, list[Row]]]) -> str:
    """What the other clocks are in this picture; nothing to say where they do not change."""
    look, rows = slices[0]
    words = rows[0]["key"].split()
    common = sweep_words.find_common_words(row["key"] for row in look.series["rows"])
    others = [word for word in words if word.partition("=")[0] not in clock and word not in common]
    at = f", with {sweep_words.format_point(' '.join(others))}" if others else ""
    return f"Over the clock of {' and '.join(clock)}{at}"


def _legend(looks: Sequence[_Look], rows: Sequence[Row], *, front: bool, dominated: bool) -> list[Line2D]:
    """What the marks mean, as far as they occur."""
    marks = []
    for look in looks:
        meaning = f"{look.label}, on the front" if front else look.label
        marks.append(_mark(look.shape, look.colour, look.colour, meaning))
    if front and dominated:
        marks.append(_mark("o", _DOMINATED, _DOMINATED, "not on the front"))
    if any(row["predicted"] for row in rows):
        marks.append(_mark("o", plots.FAINT, "white", "predicted, not measured"))
    if any(sweep_rows.find_pick(look.series) for look in looks):
        ring = _mark("o", plots.INK, "none", "pick")
        ring.set_markersize(11)
        marks.append(ring)
    return marks


def _mark(shape: str, edge: str, face: str, label: str) -> Line2D:
    return Line2D([], [], linestyle="none", marker=shape, color=edge, markerfacecolor=face, markersize=6.5, label=label)


def _new_figure(height_inches: float) -> Figure:
    """A figure of its own canvas: pyplot would keep it in a global and pick a display."""
    figure = Figure(figsize=(plots.WIDTH_INCHES, height_inches))
    FigureCanvasAgg(figure)
    return figure


def _frame(figure: Figure, stack: Sequence[Axes], document: Document, subtitle: str, handles: Sequence[Line2D]) -> None:
    """Title, subtitle, legend and the simulated mark above the axes; room for their labels around them."""
    board = document["board"]
    width, height = figure.get_size_inches()
    left, room = 0.1 / width, width - (2.6 if board["simulated"] else 0.25)
    for axes in stack:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(color="#e2e2e2", linewidth=0.8, zorder=0)
        axes.set_axisbelow(True)
    title = f"{document['model']} on {board['type']}"
    text = figure.text(left, 1 - 0.1 / height, title, va="top", fontsize=13, fontweight="bold")
    plots.shorten(text, room * figure.dpi)
    text = figure.text(left, 1 - 0.38 / height, subtitle, va="top", fontsize=9.5, color=plots.FAINT)
    plots.shorten(text, (width - 0.25) * figure.dpi)
    if board["simulated"]:
        tag = {"facecolor": "white", "edgecolor": plots.RED, "boxstyle": "round,pad=0.3"}
        place = (1 - 0.2 / width, 1 - 0.13 / height)
        figure.text(
            *place, "SIMULATED, not hardware", va="top", ha="right", color=plots.RED, fontweight="bold", bbox=tag
        )
    figure.legend(
        handles=list(handles),
        loc="upper left",
        bbox_to_anchor=(0.02 / width, 1 - 0.57 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handletextpad=0.3,
        columnspacing=1.4,
        borderpad=0.3,
    )
    figure.subplots_adjust(
        left=_LEFT_INCHES / width,
        right=1 - 0.2 / width,
        top=1 - _TOP_INCHES / height,
        bottom=0.55 / height,
        hspace=0.16,
    )
    figure.align_ylabels(list(stack))


def _place(x: str, y: str, x_scale: Scale, y_scale: Scale) -> Callable[[Row], tuple[float, float]]:
    return lambda row: (float(row[x]["value"]) * x_scale.factor, float(row[y]["value"]) * y_scale.factor)


def _errors(row: Row, quantity: str, scale: Scale) -> list[list[float]]:
    value = row[quantity]
    return [
        [max(value["value"] - value["low"], 0) * scale.factor],
        [max(value["high"] - value["value"], 0) * scale.factor],
    ]


def _grow(axes: Axes, share: float, which: str = "xy") -> None:
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


def _finish(figure: Figure, folder: pathlib.Path, name: str, caption: str) -> Picture:
    """Write the PNG, return the picture with its SVG. Dates are left out: equal documents give equal files."""
    figure.savefig(folder / f"{name}.png", dpi=plots.DPI, metadata={"Software": "tvm-farm"})
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": "tvm-farm"})
    return Picture(name, caption, text.getvalue())
