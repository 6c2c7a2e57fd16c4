"""States of campaigns and what was decided about models, as values. They load no pydantic; campaigns.py does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from device_agent.protocol import StrEnum


class CampaignState(StrEnum):
    """The state of a fleet campaign."""

    SUBMITTED = "submitted"  # in the store; no engine has started it
    RUNNING = "running"
    CONNECTING = "connecting"  # connecting to its boards
    WAITING = "waiting"  # none of its boards is available
    PAUSED = "paused"  # by an operator
    VERIFYING = "verifying"  # the search is over; finalists are re-measured
    INTERRUPTED = "interrupted"  # its engine was killed or stopped; it can be resumed
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        """Whether the state is final."""
        return self in (CampaignState.FINISHED, CampaignState.CANCELLED, CampaignState.FAILED)


@dataclasses.dataclass(frozen=True)
class CampaignStanding:
    """What Prometheus shows of a campaign and its progress; None: its engine has not reported it."""

    id: int
    name: str
    state: str
    wanted: str
    models: Sequence[Mapping[str, Any]] | None = None
    boards: Sequence[Mapping[str, Any]] | None = None
    eta_s: float | None = None
    wall_clock_s: float | None = None
    search_s: float | None = None
    board_types: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TrialSums:
    """Sums over a campaign's trials up to `mark`, in seconds.

    `by_side` counts its search trials (`ok`, or the side at fault). `build_s` and `board_s` are the time of compilers
    and boards, verification included.
    """

    mark: int = 0
    by_side: Mapping[str, int] = dataclasses.field(default_factory=dict)
    build_s: float = 0.0
    board_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class ModelDecision:
    """The records from which a model is compiled, after it was timed itself: all but those that lost.

    It applies to the model with these `workloads` (`name_workloads`), on boards of a type at an operating point.
    `refused` maps workloads to the candidates of rejected records; a record with a newer candidate is undecided.
    `evidence` is the whole A/B test, as reports show it.
    """

    model_sha256: str
    workloads: str
    board_type: str
    operating_point: str
    simulated: bool
    refused: Mapping[str, str]
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    campaign: int | None = None
    decided_at: float = 0.0
