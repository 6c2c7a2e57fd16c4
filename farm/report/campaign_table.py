"""The live view of a campaign: its tasks by board type and operating point, its boards, faults and what is left."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from farm.report import campaign_rows
from farm.report.campaign_rows import RowGroup
from farm.types import campaigns

_NAME, _STATE = "Workload", "State"
_TEXTS = (_NAME, _STATE)
# Column titles, and whether a narrow terminal has them.
_TITLES = (
    (_NAME, True),
    ("FLOP", False),
    ("Weight", False),
    ("Trials", True),
    ("Speed\n(GFLOPS)", False),
    ("Best\n(us)", True),
    ("Weighted\n(us)", True),
    (_STATE, True),
)
# On narrower terminals the least important columns are left out, so that names stay readable.
_FULL_WIDTH = 100
# `farm campaign show --json` says in full why a task has ended.
_STATE_WIDTH = 16
# Lines around the tasks: titles, a rule, and up to six below.
_OTHER_LINES = 9
# Boards named one by one; more are counted.
_MOST_BOARDS = 8


def draw(
    name: str,
    state: str,
    reason: str,
    budget: campaigns.Budget,
    progress: Mapping[str, Any] | None,
    height: int | None = None,
    width: int | None = None,
) -> RenderableType:
    """The tables and the lines below. `height` and `width` are a terminal's, in characters; None stands for a file.

    A narrow terminal gets fewer columns. Where the height counts, tasks that do not fit are summed up by group and long
    texts are cut; else these are wrapped.
    """
    if progress is None:
        return Text(_head(name, state, reason))
    wide = width is None or width >= _FULL_WIDTH
    groups = campaign_rows.list_groups(progress)
    lines = None if height is None else max(1, height - _OTHER_LINES)
    room = None if lines is None else max(0, lines // max(1, len(groups)) - 2)
    rows = [row for group in groups[:lines] for row in _rows(group, room)]
    has_states = any(cells[-1] for cells, _ in rows)
    shown = [(wide or always) and (title != _STATE or has_states) for title, always in _TITLES]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for title, _ in itertools.compress(_TITLES, shown):
        # Only the name shrinks.
        table.add_column(title, justify="left" if title in _TEXTS else "right", no_wrap=title != _NAME)
    for cells, style in rows:
        first, *rest = itertools.compress(cells, shown)
        is_cut = height is not None
        table.add_row(Text(first, no_wrap=is_cut, overflow="ellipsis" if is_cut else "fold"), *rest, style=style)
    most = None if height is None else width
    told = [_cut(_head(name, state, reason), most), *summary(progress, budget, width, most)]
    if wide and height is None:
        told += filter(None, [campaign_rows.note_flop(task["name"] for group in groups for task in group.tasks)])
    below = Text("\n".join(told))
    return Stack(table, below) if groups else below


def summary_line(name: str, state: str, reason: str, budget: campaigns.Budget, progress: Mapping[str, Any]) -> str:
    """Return one line: progress, faults, time left."""
    return " | ".join([_head(name, state, reason), *campaign_rows.list_limits(progress, budget), *_tail(progress)])


def summary(
    progress: Mapping[str, Any], budget: campaigns.Budget, width: int | None = None, most: int | None = None
) -> list[str]:
    """Return how much of the budget is used, faults and times; models; boards. The last two are cut to `most`
    characters.
    """
    lines = list(_fold([*campaign_rows.list_limits(progress, budget), *_tail(progress)], width))
    if models := ", ".join(_list_models(progress)):
        lines.append(_cut(f"models: {models}", most))
    if boards := _list_boards(progress.get("boards", ())):
        lines.append(_cut(f"boards: {boards}", most))
    return lines


def _fold(parts: Sequence[str], width: int | None) -> Iterator[str]:
    """Join parts to lines, broken between parts only."""
    line = parts[0]
    for part in parts[1:]:
        longer = f"{line} | {part}"
        if width is None or len(longer) <= width:
            line = longer
        else:
            yield line
            line = part
    yield line


def _head(name: str, state: str, reason: str) -> str:
    return f"{name} is {state}" + (f": {reason}" if reason else "")


def _tail(progress: Mapping[str, Any]) -> Iterator[str]:
    faults = ", ".join(f"{side} {count:,}" for side, count in campaign_rows.list_faults(progress).items())
    yield f"faults: {faults or 'none'}"
    yield f"elapsed {campaign_rows.format_clock(progress.get('wall_clock_s', 0.0))}"
    if progress.get("eta_s") is not None:
        yield f"ETA {campaign_rows.format_clock(progress['eta_s'])}"


def _rows(group: RowGroup, room: int | None) -> Iterator[tuple[tuple[str, ...], str]]:
    """Return the cells of a group and their style; at most `room` of its tasks."""
    done = sum(bool(task["ended"]) for task in group.tasks)
    state = f"{done}/{len(group.tasks)} ended" if done else ""
    if group.predicted and group.latency_s:
        state = f"{group.predicted}/{len(group.tasks)} predicted"
    yield (group.title, "", "", f"{group.counted:,}", "", "", _sum(group), state), "bold"
    if room == 0:
        return
    shown = group.tasks[:room]
    for task in shown:
        gflops = campaign_rows.find_gflops(task)
        yield (
            (
                f"  {task['name']}",
                f"{task['flop']:,.0f}",
                f"{task['weight']:g}",
                f"{task['counted']:,}",
                "–" if gflops is None else f"{gflops:.2f}",
                _us(task["best_s"]),
                _us(task["weight"] * task["best_s"] if task["best_s"] else None),
                _cut(_state(task), _STATE_WIDTH),
            ),
            "",
        )
    if hidden := group.tasks[len(shown) :]:
        trials = sum(int(task["counted"]) for task in hidden)
        sum_s = sum(task["weight"] * task["best_s"] for task in hidden if task["best_s"]) or None
        yield (f"  … {len(hidden)} lighter", "", "", f"{trials:,}", "", "", _us(sum_s), ""), ""


def _list_models(progress: Mapping[str, Any]) -> Iterator[str]:
    several = len({(each["board_type"], each["point"]) for each in progress.get("models", ())}) > 1
    finals = {(each["model"], each["board_type"], each["point"]): each for each in campaign_rows.list_finals(progress)}
    for each in progress.get("models", ()):
        timed_s = finals.get((each["name"], each["board_type"], each["point"]), {}).get("latency_s")
        latency_s = timed_s or each["latency_s"]
        if latency_s is not None:
            where = f" on {each['board_type']} @ {each['point']}" if several else ""
            estimated = "" if timed_s else each.get("predicted")
            how = "timed whole" if timed_s else "sum of its workloads"
            how += f", {estimated} of {each['workloads']} predicted" if estimated else ""
            yield f"{each['name']} {'~' if estimated else ''}{latency_s * 1e3:.3g} ms{where} ({how})"


def _list_boards(boards: Sequence[Mapping[str, Any]]) -> str:
    if len(boards) <= _MOST_BOARDS:
        return ", ".join(f"{each['name']} {each['doing']}" for each in boards)
    doing: dict[str, int] = {}
    for each in boards:
        doing[each["doing"]] = doing.get(each["doing"], 0) + 1
    return ", ".join(f"{count} {what}" for what, count in doing.items())


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else line[: width - 1] + "…"


def _sum(group: RowGroup) -> str:
    """Return the sum over a group's workloads, measured one by one; `~` where some of them are estimates."""
    if group.latency_s is None:
        return _us(None)
    return f"sum {'~' if group.predicted else ''}{_us(group.latency_s)}"


def _us(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:,.1f}"


def _state(task: Mapping[str, Any]) -> str:
    """Return a task's state; for a task without own trials, that its latency is a record's."""
    if task.get("from") == "record" and not task["counted"]:
        return "recorded before"
    return str(task["ended"] or "")
