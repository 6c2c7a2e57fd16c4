"""Charts of a campaign, and of the latencies of one model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from farm import units
from farm.report import charts
from farm.report.campaign_rows import Gain
from farm.report.charts import Chart, ChartAxis, Interval, Marks, Panel, Reference

Rows = Sequence[Mapping[str, Any]]

# The most that one chart shows: boards, the busiest first; tasks, those with the nearest rivals first; models, those
# with the longest latencies first.
_MOST_BOARDS, _MOST_TASKS, _MOST_BARS = 30, 24, 24
# Fault sides and their colours; good trials first.
_SIDES = {
    "ok": ("good", "#0072b2"),
    "candidate": ("the candidate's fault", "#56b4e9"),
    "sample": ("noisy or at wrong clocks", "#e69f00"),
    "board": ("the board's fault", "#d55e00"),
    "farm": ("the farm's fault", "#222222"),
}
# A rival's colour and meaning, by what the record's evidence says of it.
VERDICTS = {
    "slower": ("#0072b2", "slower than the winner"),
    "tied": ("#e69f00", "a tie: not distinguishable from it"),
    "faster": ("#009e73", "faster, but not by as much as replaces what was tried first"),
}
# Ratios beyond this are cut: such a rival is far behind.
_FAR = 1.5
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
# Two latencies that round to the same.
_SAME = 0.005


def plan_latency(
    name: str, rows: Sequence[tuple[str, str, Mapping[str, float]]], title: str, subtitle: str, *, simulated: bool
) -> Chart:
    """Plan one bar for each row of a label, a colour, and `median`, `ci_low` and `ci_high` in seconds."""
    unit = units.seconds_scale(each["median"] for _, _, each in rows)
    marks = tuple(
        Marks(
            (each["median"] * unit.factor,), (-place,), colour, bars=0.62, bold=True,
            x_ends=((each["ci_low"] * unit.factor, each["ci_high"] * unit.factor),),
            texts=(_format(each["median"], unit),),
        )
        for place, (_, colour, each) in enumerate(rows)
    )  # fmt: skip
    x = ChartAxis(f"latency per inference, {unit.unit}; less is better", low=0, log=True)
    panel = Panel(x, ChartAxis(rows=tuple(label for label, _, _ in rows)), marks)
    note = "Median. Whiskers: 95 % confidence interval of the median."
    height = 0.6 + 0.5 * len(rows)
    return Chart(name, "Latency of the whole model", title, subtitle, (panel,), height, simulated, note)


def plan_progress(
    name: str,
    points: Sequence[tuple[int, float]],
    trials: int,
    references: Sequence[tuple[str, str, float]],
    title: str,
    *,
    simulated: bool,
) -> Chart:
    """Plan the sum of the workloads' best trials (s) over trials, up to the last of them.

    `references` are labels, colours and latencies.
    """
    points = [*points, (max(trials, points[-1][0]), points[-1][1])]
    unit = units.seconds_scale([*(level for _, level in points), *(level for _, _, level in references)])
    x, y = tuple(float(at) for at, _ in points), tuple(level * unit.factor for _, level in points)
    marks = (
        Marks(x, y, charts.OURS, line="steps", end=f"sum of best trials: {_format(points[-1][1], unit)}"),
        Marks(x[-1:], y[-1:], charts.OURS, shape="o"),
    )
    lines = tuple(
        Reference(colour, f"{label}: {_format(level, unit)}", y=level * unit.factor)
        for label, colour, level in references
    )
    panel = Panel(
        ChartAxis("trials measured", low=0, form="count"),
        ChartAxis(f"latency, {unit.unit}", low=0, log=True),
        marks,
        lines,
    )
    subtitle = "sum of the best trial of each workload, timed alone; lines: the whole model"
    caption = "Sum of the workloads' best trials, each timed alone"
    return Chart(name, caption, title, subtitle, (panel,), 3.0, simulated)


def _format(seconds: float, unit: units.Scale) -> str:
    """Format three significant digits in `unit`, or in the fitting unit where that would take five digits or more."""
    return units.format_latency(seconds) if seconds * unit.factor >= 1e4 else unit.text(seconds)


def plan_charts(document: Mapping[str, Any], gains: Sequence[Gain]) -> Iterator[Chart]:
    """Return the charts that the document has data for."""
    about = {"name": document["name"], "simulated": any(each["simulated"] for each in document["types"])}
    if any(each.predicted_s for each in gains):
        yield plan_gains(gains, **about)
    if any(each["steps"] for each in document["curves"]):
        yield plan_course(document["curves"], (document["progress"] or {}).get("counted", 0), **about)
    if any((each["evidence"] or {}).get("rivals") for each in document["winners"]):
        yield plan_winners(document["winners"], **about)
    if document["boards"]:
        yield _plan_boards(document["boards"], **about)


def _plan_boards(boards: Rows, name: str, *, simulated: bool) -> Chart:
    """Plan for each board its trials by fault side, and the time for which they held it."""
    shown = sorted(boards, key=lambda each: -each["board_hours"])[:_MOST_BOARDS]
    shown = sorted(shown, key=lambda each: (each["board_type"], each["board"]))
    left_out = f"; the {len(shown)} busiest of {len(boards)}" if len(shown) < len(boards) else ""
    places = tuple(-float(place) for place in range(len(shown)))
    marks, starts = [], (0.0,) * len(shown)
    for side, (label, colour) in _SIDES.items():
        counts = tuple(float(each["ok"] if side == "ok" else each["faults"].get(side, 0)) for each in shown)
        if any(counts):
            marks.append(Marks(counts, places, colour, label, bars=0.66, starts=starts))
            starts = tuple(map(sum, zip(starts, counts, strict=True)))
    marks.append(Marks(starts, places, charts.FAINT, texts=tuple(f"{each:,.0f}" for each in starts)))
    longest_h = max(each["board_hours"] for each in shown)
    # The unit in which that has a digit before the point.
    factor, unit = (1.0, "h") if longest_h >= 1 else (60.0, "min") if longest_h >= 1 / 60 else (3600.0, "s")
    held = tuple(each["board_hours"] * factor for each in shown)
    hours = Marks(held, places, charts.GREY, bars=0.66, texts=tuple(f"{each:,.1f}" for each in held))
    rows = ChartAxis(rows=tuple(each["board"] for each in shown))
    panels = (
        Panel(ChartAxis("trials", low=0), rows, tuple(marks)),
        Panel(ChartAxis(f"board time, {unit}", low=0), rows, (hours,)),
    )
    return Chart(
        "boards", "Trials and time of every board", f"{name}: what the boards did",
        f"trials of every board, and the time that they held it{left_out}", panels, 0.7 + 0.32 * len(shown), simulated,
        widths=(2.0, 1.0), shared="y",
    )  # fmt: skip


def plan_winners(winners: Rows, name: str, *, simulated: bool) -> Chart:
    """Plan for each task the latencies of its winner's rivals relative to the winner, the closest contests first.

    At least one of the winners must have rivals.
    """
    contests = [each for each in winners if (each["evidence"] or {}).get("rivals")]
    contests.sort(key=lambda each: min(rival["ratio"] for rival in each["evidence"]["rivals"]))
    shown = contests[:_MOST_TASKS]
    band = max((each["evidence"].get("band") or 0.0) for each in shown)
    several = len({(each["board_type"], each["point"]) for each in shown}) > 1
    rivals = list(_place_rivals(shown))
    far = min(_FAR, max(_find_ends(rival)[1] for rival, _ in rivals) * 1.02)
    marks = []
    for (verdict, (colour, label)), is_far in itertools.product(VERDICTS.items(), (False, True)):
        some = [each for each in rivals if each[0]["verdict"] == verdict and (each[0]["ratio"] > far) is is_far]
        x = tuple(min(rival["ratio"], far) for rival, _ in some)
        ends = tuple((low, min(high, far)) for low, high in (_find_ends(rival) for rival, _ in some))
        if some:
            shape, size = (">", 5) if is_far else ("o", 4)
            y = tuple(level for _, level in some)
            marks.append(Marks(x, y, colour, label, shape=shape, size=size, x_ends=() if is_far else ends))
    references = [Reference("#eeeeee", x=1.0, until=1.0 + band)] if band else []
    low = min(0.99, *(rival["low"] for rival, _ in rivals if rival["low"]))
    confidence = shown[0]["evidence"].get("confidence")
    note = "Dots: median ratio." + (f" Whiskers: its {confidence * 100:g} % interval." if confidence else "")
    note += f" Grey: differences below {band * 100:g} % do not matter." if band else ""
    left_out = f"; the {len(shown)} closest of {len(contests)}" if len(shown) < len(contests) else ""
    panel = Panel(
        ChartAxis("latency of the rival over that of the winner", max(low - 0.005, 0.8), max(far, 1.02)),
        ChartAxis(rows=tuple(_name_winner(each, several) for each in shown)),
        tuple(marks),
        (*references, Reference(charts.INK, x=1.0)),
    )
    return Chart(
        "winners", "Winners and how far behind their rivals are", f"{name}: winners and rivals",
        f"rivals of each winner, measured in turns with it on the same boards{left_out}", (panel,),
        0.6 + (0.36 if several else 0.28) * len(shown), simulated, note,
    )  # fmt: skip


def _place_rivals(shown: Rows) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Return each rival with its level in the row of its winner."""
    for place, each in enumerate(shown):
        rivals = sorted(each["evidence"]["rivals"], key=lambda rival: float(rival["ratio"]))
        spread = min(0.16, 0.6 / len(rivals))
        for index, rival in enumerate(rivals):
            yield rival, spread * ((len(rivals) - 1) / 2 - index) - place


def _find_ends(rival: Mapping[str, Any]) -> Interval:
    """Return a rival's interval; the ratio itself where it has no end."""
    low, high = (rival["ratio"] if rival[end] is None else rival[end] for end in ("low", "high"))
    return float(low), float(high)


def _name_winner(winner: Mapping[str, Any], several: bool) -> str:
    name = winner["name"] if len(winner["name"]) <= 44 else winner["name"][:43] + "…"
    return f"{name}\n{winner['board_type']} @ {winner['point']}" if several else str(name)


def plan_course(curves: Rows, counted: int, name: str, *, simulated: bool) -> Chart:
    """Plan a panel for each board type and operating point with a line for each model: its latency over trials.

    Lines end at the last of the `counted` trials. Curves without steps are left out; at least one must have some.
    """
    curves = [each for each in curves if each["steps"]]
    models = list(dict.fromkeys(each["model"] for each in curves))
    last = max(counted, *(each["steps"][-1][0] for each in curves))
    by_place: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in curves:
        by_place.setdefault((each["board_type"], each["point"]), []).append(each)
    panels = tuple(_plan_course(" @ ".join(place), some, models, last) for place, some in by_place.items())
    columns = min(2, len(panels))
    return Chart(
        "course", "Sum of the best trials of every model's workloads", f"{name}: workloads over trials",
        "sum over each model's workloads of their best trials so far, each timed alone; less is better", panels,
        2.9 * -(-len(panels) // columns), simulated,
        "Each counts as often as the model calls it; a line begins where all have run. Whole models: see gains.",
        (1.0,) * columns,
    )  # fmt: skip


def _plan_course(title: str, curves: Rows, models: Sequence[str], last: int) -> Panel:
    levels = [latency_s for each in curves for _, latency_s in each["steps"]]
    # Beside a model that takes many times as long, the gain of a short one is invisible.
    is_relative = max(levels) > charts.LOG_RATIO * min(levels)
    scale = units.seconds_scale(levels)
    marks = []
    for each in curves:
        index = models.index(each["model"])
        colour, dash = charts.COLOURS[index % 8], _DASHES[index // 8 % len(_DASHES)]
        factor = 100 / each["steps"][0][1] if is_relative else scale.factor
        steps = [*each["steps"], (last, each["steps"][-1][1])]
        x, y = tuple(float(at) for at, _ in steps), tuple(latency_s * factor for _, latency_s in steps)
        end = units.format_latency(steps[-1][1])
        marks.append(Marks(x, y, colour, each["model"], line="steps", dash=dash, end=end))
        marks.append(Marks(x[:1], y[:1], colour, shape="o", size=3.5))
    y_title = "latency, % of its first" if is_relative else f"latency, {scale.unit}"
    return Panel(
        ChartAxis("counted trials of the whole campaign", low=0, form="count"), ChartAxis(y_title, low=0), tuple(marks),
        title=title,
    )  # fmt: skip


def plan_gains(gains: Sequence[Gain], name: str, *, simulated: bool) -> Chart:
    """Plan two bars for each model on each type at each point: untuned prediction and tuned.

    Gains that lack a figure are left out; at least one must be whole.
    """
    whole = [each for each in gains if each.predicted_s is not None and each.last_s is not None]
    shown = sorted(whole, key=lambda each: each.last_s or 0.0, reverse=True)[:_MOST_BARS]
    unit = units.seconds_scale([each.last_s or 0.0 for each in shown])
    marks = []
    for place, each in enumerate(shown):
        colour, label = charts.BLUE, "winners, measured again and checked"
        if not each.verified:
            colour, label = "#56b4e9", "best measured, not all of it checked"
        before, after = each.predicted_s or 0.0, each.last_s or 0.0
        faster = each.factor is not None and abs(each.factor - 1) >= _SAME
        told = units.format_latency(after) + (f"   {each.factor:.2f} times as fast" if faster else "")
        for shift, value, ink, text, name_, bold in (
            (0.19, before, charts.GREY, units.format_latency(before), "without a trial", False),
            (-0.19, after, colour, told, label, True),
        ):
            at = (value * unit.factor,)
            marks.append(Marks(at, (shift - place,), ink, name_, bars=0.34, texts=(text,), bold=bold))
    rows = tuple(f"{each.model}\n{each.board_type} @ {each.point}" for each in shown)
    left_out = f"; the {len(shown)} longest of {len(whole)}" if len(shown) < len(whole) else ""
    caption = "Latency of every model without a trial and as it is compiled now"
    subtitle = f"latency of each model without a trial and as it is compiled now{left_out}; less is better"
    panel = Panel(ChartAxis(f"latency per inference, {unit.unit}", low=0, log=True), ChartAxis(rows=rows), tuple(marks))
    height = 0.7 + 0.56 * len(shown)
    return Chart("gains", caption, f"{name}: what tuning gained", subtitle, (panel,), height, simulated)
