"""Pictures of a sweep: latency against energy with the front, and latency, power and energy over each clock.

Points that were only predicted are hollow, points that others beat in both are grey. Each figure is written as PNG for
slides and given as SVG for the page.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from farm import units
from farm.report import canvas, sweep_canvas
from farm.report.canvas import Picture
from farm.report.sweep_canvas import Look
from farm.sweep import rows as sweep_rows
from farm.sweep.rows import Document, Row
from farm.units import Scale

# Distinct shapes, for readers who see no colours and for print.
_COLOURS = (canvas.BLUE, "#c85200", "#00775a", "#8f4f86")
_SHAPES = ("o", "s", "^", "D")
_VARIANTS = ("tuned", "compiled", "untuned")
# More predictions than this are drawn without intervals and outlines, which would cover everything else.
_CROWD = 60
# Points so many times slower or more expensive than the whole front are only in the table: they would squeeze the rest.
_FAR = 3.0


def draw_pictures(document: Document, folder: pathlib.Path) -> list[Picture]:
    """Write every chart that the document has data for as PNG into `folder`, which exists."""
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


def _plan_slices(looks: Sequence[Look], clock: Sequence[str]) -> list[tuple[Look, list[Row]]]:
    """Return the rows of each series in which only this clock changes, with all other clocks equal."""
    first = next((rows for look in looks if len(rows := sweep_rows.choose_slice(look.series, clock)) > 1), None)
    if first is None:
        return []
    slices = [(look, sweep_rows.find_slice(look.series, clock, first[0])) for look in looks]
    return [(look, rows) for look, rows in slices if len(rows) > 1]


def _plan_looks(document: Document, batch: int) -> list[Look]:
    """Choose a colour for each variant, the same in every chart of every sweep; tuned first."""
    others = [series["variant"] for series in document["series"] if series["variant"] not in _VARIANTS]
    known = [*_VARIANTS, *dict.fromkeys(others)]
    return [
        Look(series, series["variant"], _COLOURS[index % len(_COLOURS)], _SHAPES[index % len(_SHAPES)])
        for series in sweep_rows.order_series(document)
        if series["batch"] == batch
        for index in (known.index(series["variant"]),)
    ]


def _draw_front(document: Document, looks: Sequence[Look], folder: pathlib.Path, suffix: str) -> Picture:
    rows, left_out = _choose_rows(looks)
    times = [row["latency_s"]["value"] for row in rows]
    energies = [row["energy_j"]["value"] for row in rows]
    time, energy = units.seconds_scale(times), units.joule_scale(energies)
    handles = sweep_canvas.plan_legend(looks, rows, front=True, dominated=any(not row["on_front"] for row in rows))
    points = "1 point far from the front is" if left_out == 1 else f"{left_out} points far from the front are"
    beyond = f"; {points} in the table only" if left_out else ""
    with _framed(document, 3.6, f"Latency against energy, lower left is better{beyond}", handles) as figure:
        axes = figure.subplots()
        canvas.strip(axes, "both")
        for look in looks:
            _draw_cloud(axes, look, [row for row in look.series["rows"] if row in rows], time, energy)
        canvas.scale(axes, "x", times)
        canvas.scale(axes, "y", energies)
        sweep_canvas.grow(axes, 0.06)
        axes.set_xlabel(f"latency per inference, {time.unit}")
        axes.set_ylabel(f"energy per inference, {energy.unit}")
        _draw_limits(axes, document["goal"], time, energy)
        _label_points(axes, document, looks, rows, time, energy)
        caption = "Latency and energy per inference at every operating point, with the Pareto front"
        return canvas.finish(figure, folder, f"front{suffix}", caption)


def _framed(
    document: Document, room_inches: float, subtitle: str, handles: Sequence[Artist]
) -> contextlib.AbstractContextManager[Figure]:
    title = f"{document['model']} on {sweep_rows.name_boards(document)}"
    simulated = document["board"]["simulated"]
    return canvas.framed(room_inches, title, subtitle, "", handles, simulated=simulated, columns=len(handles))


def _choose_rows(looks: Sequence[Look]) -> tuple[list[Row], int]:
    """Return the rows to draw, and how many lie too far off."""
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


def _draw_cloud(axes: Axes, look: Look, rows: Sequence[Row], time: Scale, energy: Scale) -> None:
    """Draw every point of a series, and its front as a staircase: the energy reached at a latency or less."""
    front = sorted((row for row in rows if row["on_front"]), key=lambda row: float(row["latency_s"]["value"]))
    place = _place("latency_s", "energy_j", time, energy)
    if len(front) > 1:
        x, y = zip(*map(place, front), strict=True)
        axes.step(x, y, where="post", color=look.colour, linewidth=1.4, alpha=0.75, zorder=2)
    crowded = sum(not row["measured"] for row in rows) > _CROWD
    marks = [
        sweep_canvas.PlottedPoint(
            place(row),
            sweep_canvas.find_errors(row, "latency_s", time),
            sweep_canvas.find_errors(row, "energy_j", energy),
            row,
            look.colour if row["on_front"] else sweep_canvas.DOMINATED,
            crowded and not row["measured"],
        )
        for row in rows
    ]
    sweep_canvas.draw_points(axes, marks, look)
    pick = sweep_rows.find_pick(look.series)
    if pick and pick["energy_j"]:
        sweep_canvas.draw_ring(axes, place(pick), look.colour)


def _draw_limits(axes: Axes, goal: Mapping[str, Any], time: Scale, energy: Scale) -> None:
    """Draw the deadline and the power limit, named above the axes."""
    style: Any = {"color": canvas.RED, "linewidth": 1.2, "linestyle": (0, (4, 3)), "zorder": 1.5}
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
    # Labels that end side by side are moved apart.
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
            color=canvas.RED,
            fontsize=8.5,
            annotation_clip=False,
        )
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)


def _label_points(
    axes: Axes, document: Document, looks: Sequence[Look], rows: Sequence[Row], time: Scale, energy: Scale
) -> None:
    """Label the pick, the ends of each front and as many others as find room."""
    common = units.find_common_words(row["key"] for look in looks for row in look.series["rows"])
    place = _place("latency_s", "energy_j", time, energy)
    wanted: list[sweep_canvas.Label] = []
    rings = []
    for look in looks:
        pick = sweep_rows.find_pick(look.series)
        front = [row for row in look.series["rows"] if row in rows and row["on_front"]]
        front.sort(key=lambda row: float(row["latency_s"]["value"]))
        for row in front:
            if row is not pick:
                rank = 2 if row is front[0] or row is front[-1] else 3
                text = units.format_label(row["key"], common)
                wanted.append(sweep_canvas.Label(place(row), text, canvas.FAINT, rank))
        if pick and pick["energy_j"]:
            text = f"pick: {units.format_label(pick['key'], common)}"
            wanted.append(sweep_canvas.Label(place(pick), text, look.colour, 1, bold=True))
            rings.append(place(pick))
    sweep_canvas.write_labels(axes, wanted, [place(row) for row in rows], rings)


def _draw_clock(
    document: Document,
    clock: Sequence[str],
    slices: Sequence[tuple[Look, list[Row]]],
    folder: pathlib.Path,
    suffix: str,
) -> Picture:
    """Draw latency, power and energy over one clock, one below the other, all series in each."""
    rows = [row for _, some in slices for row in some]
    scale = units.seconds_scale(row["latency_s"]["value"] for row in rows)
    panels: list[tuple[str, str, Scale]] = [("latency_s", "latency", scale)]
    if any(row["power_w"] for row in rows):
        panels.append(("power_w", "power", units.WATT))
    if energies := [row["energy_j"]["value"] for row in rows if row["energy_j"]]:
        panels.append(("energy_j", "energy", units.joule_scale(energies)))
    handles = sweep_canvas.plan_legend([look for look, _ in slices], rows, front=False, dominated=False)
    with _framed(document, 0.55 + 1.75 * len(panels), _explain_slice(document, clock, slices), handles) as figure:
        stack = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (quantity, label, unit) in zip(stack, panels, strict=True):
            for look, some in slices:
                _draw_course(axes, clock, look, some, quantity, unit)
            _finish_panel(axes, rows, quantity, f"{label}, {unit.unit}")
        stack[-1].set_xlabel(f"clock of {' and '.join(clock)}, MHz")
        _tick_clocks(stack[-1], sorted({(sweep_rows.clock_hz(row, clock) or 0) / 1e6 for row in rows}))
        figure.align_ylabels()
        name = "-".join(clock)
        quantities = " and ".join([label for _, label, _ in panels][:2])
        variants = " and ".join(look.label for look, _ in slices)
        caption = f"{quantities.capitalize()} over the clock of {' and '.join(clock)}: {variants}"
        return canvas.finish(figure, folder, f"clock-{name}{suffix}", caption)


def _draw_course(axes: Axes, clock: Sequence[str], look: Look, rows: list[Row], quantity: str, scale: Scale) -> None:
    """Draw one series' values over a clock, joined by a faint line."""
    known = [row for row in rows if row[quantity]]
    places = [
        ((sweep_rows.clock_hz(row, clock) or 0) / 1e6, float(row[quantity]["value"]) * scale.factor) for row in known
    ]
    if len(places) > 1:
        x, y = zip(*places, strict=True)
        axes.plot(x, y, color=look.colour, linewidth=1.0, alpha=0.5, zorder=2)
    pairs = list(zip(places, known, strict=True))
    marks = [
        sweep_canvas.PlottedPoint(place, None, sweep_canvas.find_errors(row, quantity, scale), row, look.colour)
        for place, row in pairs
    ]
    sweep_canvas.draw_points(axes, marks, look)
    for place, row in pairs:
        if look.series["pick"] and row["key"] == look.series["pick"]["key"]:
            sweep_canvas.draw_ring(axes, place, look.colour)


def _finish_panel(axes: Axes, rows: Sequence[Row], quantity: str, label: str) -> None:
    values = [row[quantity]["value"] for row in rows if row[quantity]]
    canvas.strip(axes, "both")
    if canvas.scale(axes, "y", values):
        sweep_canvas.grow(axes, 0.1, "y")
    else:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylabel(label)


def _tick_clocks(axes: Axes, clocks_mhz: Sequence[float]) -> None:
    """Set ticks at the existing clocks, as far as their numbers have room."""
    low, high = clocks_mhz[0], clocks_mhz[-1]
    margin = max(0.04 * (high - low), 1.0)
    axes.set_xlim(low - margin, high + margin)
    room = (high - low) / 13
    ticks = [high]
    for clock in reversed(clocks_mhz[:-1]):
        if ticks[-1] - clock >= room:
            ticks.append(clock)
    axes.set_xticks(ticks, [f"{tick:.5g}" for tick in ticks])


def _explain_slice(document: Document, clock: Sequence[str], slices: Sequence[tuple[Look, list[Row]]]) -> str:
    """Say which values the other clocks have in this chart; empty where they do not change."""
    look, rows = slices[0]
    words = rows[0]["key"].split()
    common = units.find_common_words(row["key"] for row in look.series["rows"])
    others = [word for word in words if word.partition("=")[0] not in clock and word not in common]
    at = f", with {units.format_point(' '.join(others))}" if others else ""
    return f"Over the clock of {' and '.join(clock)}{at}"


def _place(x: str, y: str, x_scale: Scale, y_scale: Scale) -> Callable[[Row], tuple[float, float]]:
    return lambda row: (float(row[x]["value"]) * x_scale.factor, float(row[y]["value"]) * y_scale.factor)
