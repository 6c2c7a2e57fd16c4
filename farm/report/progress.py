"""The live view of a run: its facts at one moment, and the table that MetaSchedule's users know, drawn from them."""

from __future__ import annotations

import dataclasses

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


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


def draw(progress: Progress, height: int | None = None) -> RenderableType:
    """The table and the line below it. With `height` rows of terminal, workloads that do not fit are summed up."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in (
        "ID",
        "Name",
        "FLOP",
        "Weight",
        "Speed\n(GFLOPS)",
        "Latency\n(us)",
        "Weighted\nLatency (us)",
        "Trials",
    ):
        table.add_column(title, justify="left" if title == "Name" else "right", no_wrap=True)
    table.add_column("Done", justify="center")
    shown = len(progress.workloads) if height is None else max(3, height - 8)
    for line in progress.workloads[:shown]:
        table.add_row(*_cells(line))
    if hidden := progress.workloads[shown:]:
        table.add_row(
            "…",
            f"{len(hidden)} lighter workloads",
            "",
            "",
            "",
            "",
            _us(_weighted(hidden)),
            str(sum(w.trials for w in hidden)),
            "",
        )
    return Group(table, Text(summary_line(progress)))


def summary_line(progress: Progress) -> str:
    """One line: how far, how fast, what went wrong, how long still."""
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
    return " | ".join(parts)


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
