"""The live view of a run: its facts at one moment, and the table that MetaSchedule's users know, drawn from them."""

from __future__ import annotations

import dataclasses

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

# Column titles, and whether a narrow terminal gets them too.
_TITLES = (
    ("ID", True),
    ("Name", True),
    ("FLOP", False),
    ("Weight", True),
    ("Speed\n(GFLOPS)", True),
    ("Latency\n(us)", True),
    ("Weighted\nLatency\n(us)", True),
    ("Trials", True),
    ("Done", False),
)


@dataclasses.dataclass(frozen=True)
class WorkloadProgress:
    """One line of the table. `best_s` is None before the first good trial; `trials` counts those that count."""

    index: int
    name: str
    flop: float
    weight: int
    best_s: float | None
    trials: int
    done: bool


@dataclasses.dataclass(frozen=True)
class Progress:
    """`latency_s` is the model's, summed over workloads; None while one has no good trial. Times are in seconds."""

    workloads: tuple[WorkloadProgress, ...]
    trials: int
    budget: int
    latency_s: float | None
    boards: int
    boards_busy: int
    faults: dict[str, int]
    elapsed_s: float
    phase: str

    @property
    def trials_per_minute(self) -> float:
        """Since the run began."""
        return 60 * self.trials / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds until the budget is spent at the pace so far; None before there is a pace."""
        if not self.trials:
            return None
        return self.elapsed_s / self.trials * max(0, self.budget - self.trials)


# Narrower than this the columns that say least are left out, so that names can still be told apart.
_FULL_WIDTH = 96
# What stands around the workloads: three lines of titles, a rule, the rest in one line, and up to three of summary.
_OTHER_LINES = 9


def draw(progress: Progress, height: int | None = None, width: int | None = None) -> RenderableType:
    """The table and the line below it. `height` and `width` are a terminal's, in characters; None stands for a file.

    Workloads that do not fit are summed up, long names are cut, and a narrow terminal gets fewer columns.
    """
    wide = width is None or width >= _FULL_WIDTH
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for title, _ in (pair for pair in _TITLES if wide or pair[1]):
        # Only the name may shrink; its text is cut rather than folded (see `_cells`).
        table.add_column(title, justify="left" if title == "Name" else "right", no_wrap=title != "Name")
    shown = len(progress.workloads) if height is None else max(3, height - _OTHER_LINES)
    rows = [_cells(line) for line in progress.workloads[:shown]]
    if hidden := progress.workloads[shown:]:
        trials = str(sum(w.trials for w in hidden))
        rows.append(("…", f"{len(hidden)} lighter workloads", "", "", "", "", _us(_weighted(hidden)), trials, ""))
    for row in rows:
        index, name, *rest = (cell for cell, (_, always) in zip(row, _TITLES, strict=True) if wide or always)
        table.add_row(index, Text(name, no_wrap=True, overflow="ellipsis"), *rest)
    return Group(table, Text("\n".join(_fold(_summary(progress), width))))


def summary_line(progress: Progress) -> str:
    """One line: how far, how fast, what went wrong, how long still."""
    return " | ".join(_summary(progress))


def _summary(progress: Progress) -> list[str]:
    latency = "–" if progress.latency_s is None else f"{progress.latency_s * 1e3:.2f} ms"
    faults = ", ".join(f"{name.removesuffix('_faults')} {count}" for name, count in progress.faults.items() if count)
    eta = progress.eta_s
    parts = [
        f"trials {progress.trials}/{progress.budget}",
        f"model latency {latency}",
        f"boards busy {progress.boards_busy}/{progress.boards}",
        f"{progress.trials_per_minute:.0f} trials/min",
        f"faults: {faults or 'none'}",
        f"{progress.phase}",
        f"elapsed {_clock(progress.elapsed_s)}",
    ]
    if eta is not None and progress.phase != "done":
        parts.append(f"ETA {_clock(eta)}")
    return parts


def _fold(parts: list[str], width: int | None) -> list[str]:
    """Parts joined to lines, broken between parts alone."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]} | {part}"
        if width is None or len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _cells(line: WorkloadProgress) -> tuple[str, ...]:
    known = line.best_s is not None and line.best_s > 0
    return (
        str(line.index),
        line.name,
        f"{line.flop:,.0f}",
        str(line.weight),
        f"{line.flop / line.best_s / 1e9:.2f}" if line.best_s else "–",
        _us(line.best_s if known else None),
        _us(line.best_s * line.weight if line.best_s else None),
        str(line.trials),
        "Y" if line.done else "",
    )


def _weighted(lines: tuple[WorkloadProgress, ...]) -> float | None:
    known = [line.best_s * line.weight for line in lines if line.best_s is not None]
    return sum(known) if known else None


def _us(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:,.1f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
