"""Pictures of what a campaign gained: every model's latency over trials, and before and after."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from farm import units
from farm.report import canvas
from farm.report.campaign_models import Gain
from farm.report.canvas import Picture

Curves = Sequence[Mapping[str, Any]]

# Told apart by the colour-blind too (Okabe and Ito's palette without yellow, which is faint on white).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#222222", "#9a9a9a")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_PANEL_INCHES = 2.9
# Bars that one picture can hold; of more the ones that gained most in time are shown.
_MOST_BARS = 24
# Where all workloads of a model have records, and where the best measured has to do.
_OURS = {
    True: (canvas.BLUE, "winners, measured again and checked"),
    False: ("#56b4e9", "best measured, not all of it checked"),
}
# Two latencies that round to the same.
_SAME = 0.005


def plot_course(folder: pathlib.Path, curves: Curves, counted: int, title: str, *, simulated: bool) -> Picture:
    """Draw a panel for each board type and operating point with a line for each model: its latency over trials.

    Lines end at the last of the `counted` trials. Curves without steps are left out; at least one must have some.
    """
    curves = [each for each in curves if each["steps"]]
    panels = list(dict.fromkeys((each["board_type"], each["point"]) for each in curves))
    models = list(dict.fromkeys(each["model"] for each in curves))
    looks = {
        model: (_COLOURS[index % len(_COLOURS)], _DASHES[index // len(_COLOURS) % len(_DASHES)])
        for index, model in enumerate(models)
    }
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    last = max(counted, *(each["steps"][-1][0] for each in curves))
    handles = [
        Line2D([], [], color=colour, linestyle=dash, linewidth=2, label=model)
        for model, (colour, dash) in looks.items()
    ]
    subtitle = "sum over each model's workloads of their best trials so far, each timed alone; less is better"
    note = "Each counts as often as the model calls it; a line begins where all have run. Whole models: see gains."
    with canvas.framed(_PANEL_INCHES * rows, title, subtitle, note, handles, simulated=simulated) as figure:
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes in grid[len(panels) :]:
            axes.remove()
        ends = []
        for panel, axes in zip(panels, grid, strict=False):
            axes.set_title(" @ ".join(panel), loc="left", fontsize=10, fontweight="bold")
            ends.append(_draw_course(axes, [e for e in curves if (e["board_type"], e["point"]) == panel], looks, last))
        for axes, labels in zip(grid, ends, strict=False):
            canvas.label_right(axes, labels, fontsize=8.5)
        return canvas.finish(figure, folder, "course", "Sum of the best trials of every model's workloads")


def _draw_course(axes: Axes, curves: Curves, looks: Mapping[str, tuple[str, Any]], last: int) -> canvas.Labels:
    """One panel; returns what is to be said of each line's end."""
    levels = [latency_s for each in curves for _, latency_s in each["steps"]]
    # Beside a model that takes a hundred times as long, no gain of a short one can be seen.
    relative = max(levels) > canvas.LOG_RATIO * min(levels)
    scale = units.seconds_scale(levels)
    top = 0.0
    ends = []
    for each in curves:
        colour, dash = looks[each["model"]]
        factor = 100 / each["steps"][0][1] if relative else scale.factor
        trials = [counted for counted, _ in each["steps"]] + [last]
        values = [latency_s * factor for _, latency_s in each["steps"]]
        top = max(top, *values)
        axes.step(trials, [*values, values[-1]], where="post", color=colour, linestyle=dash, linewidth=1.8, zorder=3)
        axes.plot(trials[0], values[0], "o", color=colour, markersize=3.5, zorder=4)
        ends.append((values[-1], units.format_latency(each["steps"][-1][1]), colour))
    canvas.strip(axes, "both")
    axes.set_ylim(0, top * 1.1)
    axes.set_xlim(0, last * 1.01)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(4, integer=True, steps=[1, 2, 4, 5, 10]))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("counted trials of the whole campaign")
    axes.set_ylabel("latency, % of its first" if relative else f"latency, {scale.unit}")
    return ends


def plot_gains(folder: pathlib.Path, gains: Sequence[Gain], title: str, *, simulated: bool) -> Picture:
    """Draw two bars or dots for each model on each type at each point: without a trial, and as it is compiled.

    Gains that lack a figure are left out; at least one must be whole.
    """
    whole = [each for each in gains if each.predicted_s is not None and each.last_s is not None]
    shown = sorted(whole, key=lambda each: each.last_s or 0.0, reverse=True)[:_MOST_BARS]
    unit = units.seconds_scale([each.last_s or 0.0 for each in shown])
    first = [(each.predicted_s or 0.0) * unit.factor for each in shown]
    last = [(each.last_s or 0.0) * unit.factor for each in shown]
    handles = [Patch(color=canvas.GREY, label="without a trial")] + [
        Patch(color=colour, label=label)
        for verified, (colour, label) in _OURS.items()
        if any(each.verified is verified for each in shown)
    ]
    left_out = f"; the {len(shown)} longest of {len(whole)}" if len(shown) < len(whole) else ""
    subtitle = f"latency of each model without a trial and as it is compiled now{left_out}; less is better"
    caption = "Latency of every model without a trial and as it is compiled now"
    with canvas.framed(0.7 + 0.56 * len(shown), title, subtitle, "", handles, simulated=simulated) as figure:
        axes = figure.subplots()
        labels = [f"{each.model}\n{each.board_type} @ {each.point}" for each in shown]
        places = canvas.name_rows(axes, labels, fontsize=8.5)
        colours = [_OURS[each.verified][0] for each in shown]
        log = canvas.scale(axes, "x", first + last)
        for shift, values, inks in ((0.19, first, [canvas.GREY] * len(first)), (-0.19, last, colours)):
            canvas.draw_levels(axes, [place + shift for place in places], values, inks, height=0.34, log=log)
        axes.set_xlim(min(first + last) / 2 if log else 0)
        axes.set_xlabel(f"latency per inference, {unit.unit}{' (logarithmic axis)' if log else ''}")
        for place, each, before, after in zip(places, shown, first, last, strict=True):
            canvas.write_beside(axes, before, place + 0.19, units.format_latency(before / unit.factor))
            gain = f"{units.format_latency(after / unit.factor)}   {_times(each)}"
            canvas.write_beside(axes, after, place - 0.19, gain, color=canvas.INK, fontweight="bold")
        return canvas.finish(figure, folder, "gains", caption)


def _times(gain: Gain) -> str:
    if gain.factor is None or abs(gain.factor - 1) < _SAME:
        return ""
    return f"{gain.factor:.2f} times as fast"
