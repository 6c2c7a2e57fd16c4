"""What the engine keeps of the work under way. It holds facts and does nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from farm.campaign import scheduler


@dataclasses.dataclass(eq=False)
class Job:
    """A candidate on its way through the engine."""

    index: int
    candidate: Any
    attempt: int = 1
    losses: int = 0
    library: bytes | None = None
    sha256: str | None = None
    build_s: float | None = None


@dataclasses.dataclass
class Workload:
    """A workload and how far it is."""

    spec: Any
    state: scheduler.WorkloadState
    trials: int = 0
    open: int = 0
    search_losses: int = 0
    round_best_s: float | None = None

    @property
    def best_s(self) -> float | None:
        """The best latency so far, the unfinished round included."""
        known = [*self.state.best_s[-1:], *([] if self.round_best_s is None else [self.round_best_s])]
        return min(known, default=None)


@dataclasses.dataclass(frozen=True)
class Search:
    """A search that somebody waits for, until `deadline` (monotonic seconds)."""

    index: int
    count: int
    deadline: float


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A job at the board's actor, until `deadline` (monotonic seconds). `held` is what `Parts.held` was then."""

    job: Job
    actor: Any
    deadline: float
    held: tuple[object, ...]


def begin_workload(workload: Any, known: Sequence[tuple[str, str, float | None]]) -> Workload:
    """The state of a workload of which earlier runs measured these (candidate, trace, latency) already."""
    good = [latency for _, _, latency in known if latency is not None]
    return Workload(
        workload,
        scheduler.WorkloadState(
            kind=workload.kind,
            weight=workload.weight,
            flop=workload.flop,
            asked=len(known),
            best_s=(min(good),) if good else (),
        ),
    )
