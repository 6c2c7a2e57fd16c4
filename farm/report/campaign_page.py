"""The report of a campaign: HTML, Markdown, its charts, and all of it as JSON. `campaign_words.py` has the texts."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from farm import units
from farm.report import campaign_rows, campaign_words, canvas, pages
from farm.report.campaign_rows import Gain
from farm.report.canvas import Picture

Rows = Sequence[Mapping[str, Any]]

# The most that one chart shows: boards, the busiest first, and tasks, those with the nearest rivals first.
_MOST_BOARDS = 30
_MOST_TASKS = 24
# Fault sides and their colours; good trials first.
SIDES = {
    "ok": ("good", "#0072b2"),
    "candidate": ("the candidate's fault", "#56b4e9"),
    "sample": ("noisy or at wrong clocks", "#e69f00"),
    "board": ("the board's fault", "#d55e00"),
    "farm": ("the farm's fault", "#222222"),
}
# Ratios beyond this are cut: such a rival is far behind.
_FAR = 1.5


def plot_boards(folder: pathlib.Path, boards: Rows, title: str, *, simulated: bool) -> Picture:
    """Draw for each board its trials by fault side, and the time for which they held it. `boards` must not be empty."""
    shown = sorted(boards, key=lambda each: -each["board_hours"])[:_MOST_BOARDS]
    shown = sorted(shown, key=lambda each: (each["board_type"], each["board"]))
    left_out = f"; the {len(shown)} busiest of {len(boards)}" if len(shown) < len(boards) else ""
    counts = {side: [_count(each, side) for each in shown] for side in SIDES}
    used = [side for side in SIDES if any(counts[side])]
    handles = [Patch(color=SIDES[side][1], label=SIDES[side][0]) for side in used]
    subtitle = f"trials of every board, and the time that they held it{left_out}"
    room = 0.7 + 0.32 * len(shown)
    with canvas.framed(room, title, subtitle, "", handles, simulated=simulated, columns=5) as figure:
        trials, hours = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
        places = canvas.name_rows(trials, [each["board"] for each in shown])
        start = [0.0] * len(shown)
        for side in used:
            trials.barh(places, counts[side], left=start, height=0.66, color=SIDES[side][1], zorder=2)
            start = [before + count for before, count in zip(start, counts[side], strict=True)]
        factor, unit = _choose_span(max(each["board_hours"] for each in shown))
        held = [each["board_hours"] * factor for each in shown]
        hours.barh(places, held, height=0.66, color=canvas.GREY, zorder=2)
        for axes, what, ends, form in (
            (trials, "trials", start, "{:,.0f}"),
            (hours, f"board time, {unit}", held, "{:,.1f}"),
        ):
            axes.tick_params(axis="y", length=0)
            canvas.strip(axes, "x")
            axes.set_xlabel(what)
            axes.set_xlim(0, max(*ends, 1e-9) * 1.02)
            for place, end in zip(places, ends, strict=True):
                canvas.write_beside(axes, end, place, form.format(end))
        return canvas.finish(figure, folder, "boards", "Trials and time of every board")


def _choose_span(hours: float) -> tuple[float, str]:
    """Return the factor from hours, and the unit, in which a span has a digit before the point."""
    return (1.0, "h") if hours >= 1 else (60.0, "min") if hours >= 1 / 60 else (3600.0, "s")


# A rival's colour and meaning, by what the record's evidence says of it.
VERDICTS = {
    "slower": ("#0072b2", "slower than the winner"),
    "tied": ("#e69f00", "a tie: not distinguishable from it"),
    "faster": ("#009e73", "faster, but not by as much as replaces what was tried first"),
}


def list_contests(winners: Rows) -> list[Mapping[str, Any]]:
    """Return the winners that were measured beside rivals, the closest contests first."""
    contests = [each for each in winners if (each["evidence"] or {}).get("rivals")]
    return sorted(contests, key=lambda each: min(rival["ratio"] for rival in each["evidence"]["rivals"]))


def plot_winners(folder: pathlib.Path, winners: Rows, title: str, *, simulated: bool) -> Picture:
    """Draw for each task the latencies of its winner's rivals relative to the winner, with intervals.

    At least one of the winners must have rivals (`list_contests`).
    """
    contests = list_contests(winners)
    shown = contests[:_MOST_TASKS]
    band = max((each["evidence"].get("band") or 0.0) for each in shown)
    several = len({(each["board_type"], each["point"]) for each in shown}) > 1
    rivals = [rival for each in shown for rival in each["evidence"]["rivals"]]
    used = {rival["verdict"] for rival in rivals}
    handles = [_dot(colour, label) for verdict, (colour, label) in VERDICTS.items() if verdict in used]
    left_out = f"; the {len(shown)} closest of {len(contests)}" if len(shown) < len(contests) else ""
    subtitle = f"rivals of each winner, measured in turns with it on the same boards{left_out}"
    confidence = shown[0]["evidence"].get("confidence")
    note = "Dots: median ratio." + (f" Whiskers: its {confidence * 100:g} % interval." if confidence else "")
    note += f" Grey: differences below {band * 100:g} % do not matter." if band else ""
    room = 0.6 + (0.36 if several else 0.28) * len(shown)
    with canvas.framed(room, title, subtitle, note, handles, simulated=simulated) as figure:
        axes = figure.subplots()
        places = canvas.name_rows(axes, [_label(each, several) for each in shown], fontsize=8)
        far = min(_FAR, max(map(_reach, rivals)) * 1.02)
        low = min(0.99, *(rival["low"] for rival in rivals if rival["low"]))
        for place, each in zip(places, shown, strict=True):
            _draw_rivals(axes, place, each["evidence"]["rivals"], far)
        if band:
            axes.axvspan(1.0, 1.0 + band, color="#eeeeee", zorder=0)
        axes.axvline(1.0, color=canvas.INK, linewidth=1.2, zorder=2)
        axes.set_xlim(max(low - 0.005, 0.8), max(far, 1.02))
        axes.set_xlabel("latency of the rival over that of the winner")
        return canvas.finish(figure, folder, "winners", "Winners and how far behind their rivals are")


def _draw_rivals(axes: Axes, place: float, rivals: Rows, far: float) -> None:
    ordered = sorted(rivals, key=lambda rival: rival["ratio"])
    spread = min(0.16, 0.6 / max(1, len(ordered)))
    for index, rival in enumerate(ordered):
        level = place + spread * ((len(ordered) - 1) / 2 - index)
        colour = VERDICTS[rival["verdict"]][0]
        if rival["ratio"] > far:
            axes.plot(far, level, ">", color=colour, markersize=5, clip_on=False, zorder=4)
            continue
        axes.plot([rival["low"], min(_reach(rival), far)], [level, level], color=colour, linewidth=1.2, zorder=3)
        axes.plot(rival["ratio"], level, "o", color=colour, markersize=4, zorder=4)


def _reach(rival: Mapping[str, Any]) -> float:
    """Return the upper end of a rival's interval; the ratio itself where it has none."""
    return float(rival["ratio"] if rival["high"] is None else rival["high"])


def _label(winner: Mapping[str, Any], several: bool) -> str:
    name = winner["name"] if len(winner["name"]) <= 44 else winner["name"][:43] + "…"
    return f"{name}\n{winner['board_type']} @ {winner['point']}" if several else str(name)


def _dot(colour: str, label: str) -> Line2D:
    return Line2D([], [], linestyle="none", marker="o", color=colour, markersize=5, label=label)


def _count(board: Mapping[str, Any], side: str) -> int:
    return int(board["ok"] if side == "ok" else board["faults"].get(side, 0))


Curves = Sequence[Mapping[str, Any]]

# Safe for colour blindness: Okabe and Ito's palette without yellow, which is faint on white.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#222222", "#9a9a9a")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_PANEL_INCHES = 2.9
# The most bars in one chart; of more, those with the largest gain in time are shown.
_MOST_BARS = 24
# Marks of models whose workloads all have records, and of models with measured latencies only.
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
    """Draw one panel; return the label of each line's end."""
    levels = [latency_s for each in curves for _, latency_s in each["steps"]]
    # Beside a model that takes a hundred times as long, the gain of a short one is invisible.
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
    """Draw two bars or dots for each model on each type at each point: untuned prediction and tuned.

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


PAGE, MARKDOWN, JSON = "report.html", "report.md", "report.json"


def write_campaign_report(document: Mapping[str, Any], folder: pathlib.Path) -> dict[str, str]:
    """Write the report into `folder`, made if need be; return the paths of `page`, `markdown`, `json` and charts.

    `document` is what `farm campaign show NAME --json` prints. Raises OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    gains = campaign_rows.list_gains(document)
    pictures = list(_draw(document, gains, folder))
    page = campaign_words.write_page(document, gains)
    texts = {
        "page": (PAGE, pages.write_html(page, pictures, (MARKDOWN, JSON))),
        "markdown": (MARKDOWN, pages.write_markdown(page, pictures)),
        "json": (JSON, json.dumps(document, indent=2, allow_nan=False) + "\n"),
    }
    for name, text in texts.values():
        (folder / name).write_text(text, encoding="utf-8")
    paths = {kind: str(folder / name) for kind, (name, _) in texts.items()}
    return paths | {each.name: str(folder / each.file) for each in pictures}


def _draw(document: Mapping[str, Any], gains: list[Gain], folder: pathlib.Path) -> Iterator[Picture]:
    """Draw the charts that the document has data for."""
    simulated = any(each["simulated"] for each in document["types"])
    name = document["name"]
    if any(each.predicted_s for each in gains):
        yield plot_gains(folder, gains, f"{name}: what tuning gained", simulated=simulated)
    if any(each["steps"] for each in document["curves"]):
        yield plot_course(
            folder,
            document["curves"],
            (document["progress"] or {}).get("counted", 0),
            f"{name}: workloads over trials",
            simulated=simulated,
        )
    if list_contests(document["winners"]):
        yield plot_winners(folder, document["winners"], f"{name}: winners and rivals", simulated=simulated)
    if document["boards"]:
        yield plot_boards(folder, document["boards"], f"{name}: what the boards did", simulated=simulated)
