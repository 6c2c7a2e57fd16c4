"""Pictures of what a campaign gained: every model's latency over trials, and before and after. See `campaign_frame`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from farm.report import campaign_frame, campaign_rows, canvas, plots
from farm.report.campaign_models import Gain
from farm.report.canvas import Picture

Curves = Sequence[Mapping[str, Any]]

_PANEL_INCHES = 2.5
# Bars that one picture can hold; of more the ones that gained most in time are shown.
_MOST_BARS = 24
# Where all workloads of a model have records, and where the best measured has to do.
_COLOURS = {True: canvas.BLUE, False: "#56b4e9"}
_OURS = {True: "winners, measured again and checked", False: "best measured, not all of it checked"}
# Two latencies that round to the same.
_SAME = 0.005


def plot_course(folder: pathlib.Path, curves: Curves, title: str, *, simulated: bool) -> Picture:
    """Draw a panel for each board type and operating point with a line for each model: its latency over trials.

    Curves without steps are left out; at least one must have some.
    """
    curves = [each for each in curves if each["steps"]]
    panels = list(dict.fromkeys((each["board_type"], each["point"]) for each in curves))
    models = list(dict.fromkeys(each["model"] for each in curves))
    looks = {model: campaign_frame.choose_look(index) for index, model in enumerate(models)}
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    last = max(each["steps"][-1][0] for each in curves)
    with matplotlib.rc_context(canvas.STYLE):
        legend_rows = -(-len(models) // 4)
        figure = canvas.new_figure(1.15 + 0.24 * legend_rows + (_PANEL_INCHES + 0.35) * rows)
        handles = [
            Line2D([], [], color=colour, linestyle=dash, linewidth=2, label=model)
            for model, (colour, dash) in looks.items()
        ]
        bottom, top = campaign_frame.draw_head(
            figure,
            title,
            "latency of each model, from the trial on with which every one of its workloads had run; less is better",
            "Sum over a model's workloads of the best measured so far, each as often as the model calls it.",
            handles,
            simulated=simulated,
        )
        height = figure.get_size_inches()[1]
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in list(grid.flat)[len(panels) :]:
            axes.remove()
        for (kind, point), axes in zip(panels, grid.flat, strict=False):
            mine = [each for each in curves if (each["board_type"], each["point"]) == (kind, point)]
            axes.set_title(f"{kind} @ {point}", loc="left", fontsize=10, fontweight="bold")
            _draw_course(axes, mine, looks, last)
        width = figure.get_size_inches()[0]
        figure.subplots_adjust(
            left=0.78 / width,
            right=1 - 0.75 / width,
            top=top - 0.3 / height,
            bottom=bottom + 0.45 / height,
            hspace=0.5,
            wspace=0.6,
        )
        return canvas.finish(figure, folder, "course", "Latency of every model over the campaign's trials")


def _draw_course(axes: Axes, curves: Curves, looks: Mapping[str, tuple[str, Any]], last: int) -> None:
    levels = [latency_s for each in curves for _, latency_s in each["steps"]]
    # Beside a model that takes a hundred times as long, no gain of a short one can be seen.
    relative = max(levels) > plots.LOG_RATIO * min(levels)
    scale, unit = campaign_rows.choose_unit(min(levels))
    ends, top = [], 0.0
    for each in curves:
        colour, dash = looks[each["model"]]
        factor = 100 / each["steps"][0][1] if relative else scale
        trials = [counted for counted, _ in each["steps"]] + [last]
        values = [latency_s * factor for _, latency_s in each["steps"]]
        top = max(top, *values)
        axes.step(trials, [*values, values[-1]], where="post", color=colour, linestyle=dash, linewidth=1.8, zorder=3)
        axes.plot(trials[0], values[0], "o", color=colour, markersize=3.5, zorder=4)
        ends.append((values[-1], campaign_rows.format_latency(each["steps"][-1][1]), colour))
    canvas.strip(axes, "both")
    axes.set_ylim(0, top * 1.1)
    axes.set_xlim(0, last * 1.01)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(4, integer=True, steps=[1, 2, 4, 5, 10]))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("counted trials of the whole campaign")
    axes.set_ylabel("latency, % of its first" if relative else f"latency, {unit}")
    _label_ends(axes, ends)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write the last value right of each line, moved apart where they would overlap."""
    axes.figure.canvas.draw()
    step = 12 / 72 * axes.figure.dpi / axes.get_window_extent().height
    below = -1.0
    for level, text, colour in sorted(ends):
        place = max(axes.transAxes.inverted().transform(axes.transData.transform((0, level)))[1], below + step)
        below = place
        axes.text(1.02, place, text, transform=axes.transAxes, va="center", fontsize=8.5, color=colour)


def plot_gains(folder: pathlib.Path, gains: Sequence[Gain], title: str, *, simulated: bool) -> Picture:
    """Draw two bars for each model on each type at each point: without a trial, and as it is compiled.

    Gains that lack a figure are left out; at least one must be whole.
    """
    whole = [each for each in gains if each.predicted_s is not None and each.last_s is not None]
    shown = sorted(whole, key=lambda each: each.last_s or 0.0, reverse=True)[:_MOST_BARS]
    labels = [f"{each.model}\n{each.board_type} @ {each.point}" for each in shown]
    first = [(each.predicted_s or 0.0) * 1e3 for each in shown]
    last = [(each.last_s or 0.0) * 1e3 for each in shown]
    ratio = max(first) / min(last)
    log = ratio > plots.LOG_RATIO
    with matplotlib.rc_context(canvas.STYLE):
        figure = canvas.new_figure(1.55 + 0.56 * len(shown))
        handles = [Patch(color=canvas.GREY, label="without a trial")] + [
            Patch(color=_COLOURS[verified], label=_OURS[verified])
            for verified in (True, False)
            if any(each.verified is verified for each in shown)
        ]
        left_out = f"; the {len(shown)} longest of {len(whole)}" if len(shown) < len(whole) else ""
        subtitle = f"latency of each model without a trial and as it is compiled now{left_out}; less is better"
        bottom, top = campaign_frame.draw_head(figure, title, subtitle, "", handles, simulated=simulated)
        axes = figure.subplots()
        places = [float(index) for index in range(len(shown))][::-1]
        axes.barh([place + 0.19 for place in places], first, height=0.34, color=canvas.GREY, zorder=2)
        colours = [_COLOURS[each.verified] for each in shown]
        axes.barh([place - 0.19 for place in places], last, height=0.34, color=colours, zorder=2)
        axes.set_yticks(places, labels, fontsize=8.5)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-0.6, len(shown) - 0.4)
        canvas.strip(axes, "x")
        if log:
            plots.log_axis(axes, "x", ratio)
            axes.set_xlim(min(last) / 2, max(first) * ratio**0.35)
        else:
            axes.set_xlim(0, max(first) * 1.35)
        axes.set_xlabel(f"latency per inference, ms{' (logarithmic axis)' if log else ''}")
        for place, each, before, after in zip(places, shown, first, last, strict=True):
            _write_value(axes, before, place + 0.19, campaign_rows.format_latency(before / 1e3), canvas.FAINT, "normal")
            gain = f"{campaign_rows.format_latency(after / 1e3)}   {_times(each)}"
            _write_value(axes, after, place - 0.19, gain, canvas.INK, "bold")
        width, height = figure.get_size_inches()
        longest = max(len(line) for label in labels for line in label.split("\n"))
        figure.subplots_adjust(
            left=(0.25 + 0.068 * longest) / width,
            right=1 - 0.15 / width,
            top=top - 0.06 / height,
            bottom=bottom + 0.42 / height,
        )
        return canvas.finish(
            figure, folder, "gains", "Latency of every model without a trial and as it is compiled now"
        )


def _times(gain: Gain) -> str:
    if gain.factor is None or abs(gain.factor - 1) < _SAME:
        return ""
    return f"{gain.factor:.2f} times as fast"


def _write_value(axes: Axes, value: float, place: float, text: str, colour: str, weight: str) -> None:
    axes.annotate(
        text,
        (value, place),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=colour,
        fontweight=weight,
    )
