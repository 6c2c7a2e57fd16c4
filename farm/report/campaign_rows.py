"""A campaign's progress: as rows (groups of tasks, sums, gains) for reports and pages, and as a live table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from farm.points.values import format_conditions, format_threads
from farm.types import campaigns
from farm.units import format_latency
from farm.values import DEFAULT_POINT

Document = Mapping[str, Any]
_SIDES = {
    "ok": "good",
    "candidate": "candidate: the schedule was at fault; the cost model learns from it",
    "board": "board: measured again elsewhere, the schedule not blamed",
    "farm": "farm: measured again, no board blamed",
    "sample": "sample: too noisy or at wrong clocks, measured again",
}
# On narrower terminals the least important columns are left out, so that names stay readable.
_FULL_WIDTH = 100
# `farm campaign show --json` says in full why a task has ended.
_STATE_WIDTH = 16
# Lines around the tasks: titles, a rule, and up to six below.
_OTHER_LINES = 9
# Boards named one by one; more are counted.
_MOST_BOARDS = 8


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """The tasks of one board type at one operating point, the most expensive first.

    `latency_s` is the weighted sum of the best, `predicted` of them by prediction where no trial was good; None while
    one has neither.
    """

    board_type: str
    point: str
    tasks: tuple[Document, ...]

    @property
    def title(self) -> str:
        task = self.tasks[0] if self.tasks else {}
        words = [format_threads(task["threads"])] if task.get("threads") else []
        words += [task["clocks"]] if self.point == DEFAULT_POINT and task.get("clocks") else []
        return ", ".join([f"{self.board_type} @ {self.point}", *words])

    @property
    def counted(self) -> int:
        return sum(int(task["counted"]) for task in self.tasks)

    @property
    def latency_s(self) -> float | None:
        times = [task["weight"] * (task["best_s"] or task.get("predicted_s") or 0.0) for task in self.tasks]
        return sum(times) if all(times) else None

    @property
    def predicted(self) -> int:
        return sum(not task["best_s"] for task in self.tasks)


def list_groups(progress: Document) -> list[RowGroup]:
    """Return the tasks by type and point, in the order of the document."""
    found: dict[tuple[str, str], list[Document]] = {}
    for task in progress.get("tasks", ()):
        found.setdefault((task["board_type"], task["point"]), []).append(task)
    return [RowGroup(*key, tuple(sorted(tasks, key=_find_share, reverse=True))) for key, tasks in found.items()]


def _find_share(task: Document) -> tuple[float, float]:
    best_s = task["best_s"] or 0.0
    return task["weight"] * best_s, task["weight"] * task["flop"]


def find_gflops(task: Document) -> float | None:
    """Return billions of operations per second of the best candidate; None where it or the count is not known."""
    return task["flop"] / task["best_s"] / 1e9 if task["best_s"] and task["flop"] else None


def note_flop(names: Iterable[str]) -> str:
    """Explain the FLOP of functions whose code computes another number than the model; empty where none does."""
    known, told = list(names), []
    if any("winograd" in name for name in known):
        told.append(
            "FLOP are those of the direct algorithm: Winograd's computes fewer, so that its GFLOPS may exceed the "
            "core's peak."
        )
    if any("strided_slice" in name for name in known):
        told.append("FLOP of a strided_slice include what it cuts off: channels that fill up vectors.")
    return " ".join(told)


def list_faults(progress: Document) -> dict[str, int]:
    """Count failed trials by fault side; sides without any are left out."""
    return {side.removesuffix("_faults"): count for side, count in progress.get("faults", {}).items() if count}


def list_sides(by_side: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return what each fault side means, and its trials."""
    return [(said, f"{by_side.get(side, 0):,}") for side, said in _SIDES.items()]


def note_statuses(by_status: Mapping[str, int]) -> str:
    """Count the trials that were not ok by status; empty where there are none."""
    failed = [f"{count:,} {status}" for status, count in sorted(by_status.items()) if count and status != "ok"]
    return f"Not ok: {', '.join(failed)}." if failed else ""


def list_limits(progress: Document, budget: campaigns.Budget) -> list[str]:
    """Say how much of each limit of the budget is used, as in `trials 812/4,000`."""
    parts = [_of("trials", "{:,.0f}".format, progress.get("counted", 0), budget.trials)]
    if budget.wall_clock_s is not None:
        used_s, limit_s = progress.get("wall_clock_s", 0.0), budget.wall_clock_s
        over = f", {format_clock(used_s - limit_s)} over: winners and models are measured to their end"
        if (ends_s := progress.get("trials_end_s")) is not None:
            over = f", trials end at {format_clock(ends_s)}"
        said = used_s > limit_s + 1 or ends_s is not None
        parts.append(_of("time", format_clock, used_s, limit_s) + (over if said else ""))
    parts.append(_of("board time", format_clock, progress.get("board_s", 0.0), budget.board_s))
    if budget.energy_j is not None:
        parts.append(_of("energy", "{:,.0f} J".format, progress.get("energy_j", 0.0), budget.energy_j))
    if winners := progress.get("winners"):
        parts.append(f"winners measured {winners['measured']:,} times, at most {winners['at_most']:,}")
        if winners.get("timing"):
            parts.append(f"models compiled and timed {winners['timed']}/{winners['models']}")
    if budget.per_workload is not None:
        parts.append(f"at most {budget.per_workload:,} per workload")
    return parts


def _of(word: str, form: Callable[[float], str], used: float, limit: float | None) -> str:
    return f"{word} {form(used)}" + ("" if limit is None else f"/{form(limit)}")


def format_clock(seconds: float) -> str:
    """Format a span as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def list_finals(progress: Document | None) -> list[Document]:
    """Return each model's end-to-end result at the campaign's end; none before."""
    return list(((progress or {}).get("verdict") or {}).get("finals", ()))


def describe_final(final: Mapping[str, Any]) -> str:
    """Describe a model's end-to-end result in a line."""
    if not final.get("taken"):
        return f"{final['model']}: {final['said']}"
    conditions = format_conditions(final["threads"], final["clocks"], final["point"])
    where = f"{final['board_type']}/{final['board']}, {conditions}"
    told = f"{final['model']} takes {format_latency(final['latency_s'])} ({where}): {final['said']}"
    return f"do not rely on this latency, {final['doubt']}: {told}" if final.get("doubt") else told


@dataclasses.dataclass(frozen=True)
class Gain:
    """Latencies in seconds, None where not known: `predicted_s` is the model's without a trial, `last_s` that of what
    is compiled from now on, both timed in turns on a board (`said`: in a sentence). Where the model was not `timed`,
    `last_s` is the sum over its `workloads`: of the record where there is one (`recorded`), else of the best trial
    (`tried`), else of the prediction (`guessed`); None where one has none of these.

    `factor`: how many times as fast as without a trial it is; 1.0 where nothing was gained, None where its latencies
    are doubtful.
    """

    model: str
    board_type: str
    point: str
    predicted_s: float | None
    last_s: float | None
    factor: float | None
    said: str
    timed: bool
    workloads: int
    recorded: int
    tried: int
    guessed: int

    @property
    def verified(self) -> bool:
        """Return whether `last_s` is made only of candidates that were measured again."""
        return self.timed or self.recorded == self.workloads


def list_gains(document: Mapping[str, Any]) -> list[Gain]:
    """One for each curve of the document, in their order."""
    winners = {(each["board_type"], each["point"], each["workload"]): each for each in document["winners"]}
    finals = {(each["model"], each["board_type"], each["point"]): each for each in list_finals(document["progress"])}
    gains = []
    for curve in document["curves"]:
        key = (curve["model"], curve["board_type"], curve["point"])
        last_s: float | None = 0.0
        counts = [0, 0, 0]
        for workload, calls in curve["calls"].items():
            winner = winners.get((curve["board_type"], curve["point"], workload), {})
            # The most reliable first.
            times = (winner.get("median_s"), curve["best_s"].get(workload), winner.get("predicted_s"))
            source = next((at for at, time_s in enumerate(times) if time_s is not None), None)
            if source is None:
                last_s = None
                continue
            counts[source] += 1
            last_s = None if last_s is None else last_s + calls * times[source]
        final = finals.get(key, {})
        predicted_s = factor = None
        timed = bool(final.get("taken"))
        if timed:
            last_s = final["latency_s"]
            predicted_s = final["variants"].get("predicted", {}).get("median")
            factor = None if final.get("doubt") else (final["gain"] or {"value": 1.0})["value"]
        gains.append(
            Gain(*key, predicted_s, last_s, factor, final.get("said", ""), timed, len(curve["calls"]), *counts)
        )
    return gains


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
    groups = list_groups(progress)
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
        told += filter(None, [note_flop(task["name"] for group in groups for task in group.tasks)])
    below = Text("\n".join(told))
    return Stack(table, below) if groups else below


def summary_line(name: str, state: str, reason: str, budget: campaigns.Budget, progress: Mapping[str, Any]) -> str:
    """Return one line: progress, faults, time left."""
    return " | ".join([_head(name, state, reason), *list_limits(progress, budget), *_tail(progress)])


def summary(
    progress: Mapping[str, Any], budget: campaigns.Budget, width: int | None = None, most: int | None = None
) -> list[str]:
    """Return how much of the budget is used, faults and times; models; boards. The last two are cut to `most`
    characters.
    """
    lines = list(_fold([*list_limits(progress, budget), *_tail(progress)], width))
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
    faults = ", ".join(f"{side} {count:,}" for side, count in list_faults(progress).items())
    yield f"faults: {faults or 'none'}"
    yield f"elapsed {format_clock(progress.get('wall_clock_s', 0.0))}"
    if progress.get("eta_s") is not None:
        yield f"ETA {format_clock(progress['eta_s'])}"


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
        gflops = find_gflops(task)
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
    finals = {(each["model"], each["board_type"], each["point"]): each for each in list_finals(progress)}
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
    return _us(None) if group.latency_s is None else f"sum {'~' if group.predicted else ''}{_us(group.latency_s)}"


def _us(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:,.1f}"


def _state(task: Mapping[str, Any]) -> str:
    """Return a task's state; for a task without own trials, that its latency is a record's."""
    if task.get("from") == "record" and not task["counted"]:
        return "recorded before"
    return str(task["ended"] or "")
