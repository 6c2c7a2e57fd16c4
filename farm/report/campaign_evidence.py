"""Pictures of what a campaign's figures rest on: what every board did, and how winners were told from their rivals."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from farm.report import canvas
from farm.report.canvas import Picture

Rows = Sequence[Mapping[str, Any]]

# What one picture can hold: boards, the busiest first, and tasks, those first whose rivals came nearest.
_MOST_BOARDS = 30
_MOST_TASKS = 24
# Whose fault, and how it is drawn; good ones first.
SIDES = {
    "ok": ("good", "#0072b2"),
    "candidate": ("the candidate's fault", "#56b4e9"),
    "sample": ("noisy or at wrong clocks", "#e69f00"),
    "board": ("the board's fault", "#d55e00"),
    "farm": ("the farm's fault", "#222222"),
}
# Ratios beyond this are not worth an axis: such a rival is far behind.
_FAR = 1.5


def plot_boards(folder: pathlib.Path, boards: Rows, title: str, *, simulated: bool) -> Picture:
    """Draw for each board its trials, by whose fault they ended, and the time for which they held it.

    `boards` must not be empty.
    """
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
    """The factor from hours, and the unit, in which a span has a digit before the point."""
    return (1.0, "h") if hours >= 1 else (60.0, "min") if hours >= 1 / 60 else (3600.0, "s")


# By what a record's evidence says of a rival: its colour, and what that means.
VERDICTS = {
    "slower": ("#0072b2", "slower than the winner"),
    "tied": ("#e69f00", "a tie: cannot be told from it"),
    "faster": ("#009e73", "faster, but not by as much as replaces what was tried first"),
}


def list_contests(winners: Rows) -> list[Mapping[str, Any]]:
    """The winners that were measured beside rivals, those first whose nearest rival came closest."""
    contests = [each for each in winners if (each["evidence"] or {}).get("rivals")]
    return sorted(contests, key=lambda each: min(rival["ratio"] for rival in each["evidence"]["rivals"]))


def plot_winners(folder: pathlib.Path, winners: Rows, title: str, *, simulated: bool) -> Picture:
    """Draw for each task its winner's rivals: how many times as long they take, with the interval of that.

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
    """The upper end of a rival's interval; where it has none, the ratio itself."""
    return float(rival["ratio"] if rival["high"] is None else rival["high"])


def _label(winner: Mapping[str, Any], several: bool) -> str:
    name = winner["name"] if len(winner["name"]) <= 44 else winner["name"][:43] + "…"
    return f"{name}\n{winner['board_type']} @ {winner['point']}" if several else str(name)


def _dot(colour: str, label: str) -> Line2D:
    return Line2D([], [], linestyle="none", marker="o", color=colour, markersize=5, label=label)


def _count(board: Mapping[str, Any], side: str) -> int:
    return int(board["ok"] if side == "ok" else board["faults"].get(side, 0))
