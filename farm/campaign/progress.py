"""What a run knows of itself at one moment, for tables and logs. Facts only; drawing is `farm.report.tables`."""

from __future__ import annotations

import dataclasses


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
    """`latency_s` is the model's, summed over workloads; None while one has no good trial."""

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
