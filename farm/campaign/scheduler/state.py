"""What the fleet scheduler knows of boards, campaigns and work: plain records, which `fleet.FleetState` keeps in step.

Their number is bounded by the fleet and its queued work, not by the number of trials.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from farm.campaign.scheduler.priority import WorkloadState
from farm.campaign.scheduler.values import ScheduledCampaign, Status, TaskKey
from farm.types.campaigns import Budget
from farm.values import DEFAULT_POINT


class PoolKey(NamedTuple):
    """The key of boards that differ in their clocks alone."""

    board_type: str
    labels: tuple[str, ...]


@dataclasses.dataclass
class Pool:
    """The boards of one key, and each participant's use of their time.

    `idle` are boards without work, `room` busy boards with an empty queue, both by operating point, the longest waiting
    first. `used` is board time divided by weight, by owner, campaign and lane. Accounts are per pool, so that use of
    plentiful boards does not count against scarce ones. `is_host`: its board is the machine that searches and builds.
    """

    boards: int = 0
    lanes: tuple[int, ...] = ()
    idle: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    room: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    owner_used: dict[str, float] = dataclasses.field(default_factory=dict)
    campaign_used: dict[str, float] = dataclasses.field(default_factory=dict)
    lane_used: dict[int, float] = dataclasses.field(default_factory=dict)
    straggler_check_s: float = 0.0
    is_host: bool = False


@dataclasses.dataclass
class BoardEntry:
    """A board at hand. `point` is where its clocks are, or will be once its measurement has begun. One that `yields`
    gets no more work.
    """

    name: str
    pool: PoolKey
    point: str = DEFAULT_POINT
    running: int | None = None
    waiting: int | None = None
    yields: bool = False


@dataclasses.dataclass
class LaneEntry:
    """The tasks of a campaign for one board type at one operating point, and their jobs on the way to boards.

    `again` are built jobs that were tried before, `ready` those that were not. `searching` are requested candidates.
    `boards` is its fair share of boards. Times are running means; None before the first.
    """

    number: int
    campaign: str
    board_type: str
    point: str
    tasks: tuple[int, ...]
    to_build: list[int] = dataclasses.field(default_factory=list)
    ready: list[int] = dataclasses.field(default_factory=list)
    again: list[int] = dataclasses.field(default_factory=list)
    building: int = 0
    searching: int = 0
    waiting: int = 0
    boards: float = 0.0
    dry: bool = False
    search_s: float | None = None
    build_s: float | None = None
    measure_s: float | None = None
    planned: int = 0
    wants: bool = False

    @property
    def ahead(self) -> int:
        """Count the candidates queued before the boards."""
        return self.searching + len(self.to_build) + self.building + len(self.ready) + len(self.again)


@dataclasses.dataclass
class TaskEntry:
    """A workload on one board type at one operating point.

    `open` are requested trials without a result. `ended` is why it is searched no further; `closed`: its jobs are
    dropped too. `state.exhausted`: nothing may be requested now, because it ended or its search works.
    """

    number: int
    key: TaskKey
    lane: int
    state: WorkloadState
    counted: int = 0
    open: int = 0
    since_best: int = 0
    ended: str = ""
    closed: bool = False
    search_losses: int = 0
    best_s: float | None = None
    in_round: int = 0
    banned: frozenset[str] = frozenset()


@dataclasses.dataclass
class CampaignEntry:
    """A campaign and its use. `on_board` are its measurements at boards; `faulty` the boards that failed since the last
    trial that counted.
    """

    spec: ScheduledCampaign
    budget: Budget
    status: Status
    began_s: float
    reason: str = ""
    lanes: tuple[int, ...] = ()
    counted: int = 0
    open: int = 0
    on_board: int = 0
    board_s: float = 0.0
    energy_j: float = 0.0
    since_best: int = 0
    pause_began_s: float = 0.0
    pauses_s: float = 0.0
    faults_in_a_row: int = 0
    faulty: frozenset[str] = frozenset()

    @property
    def weight(self) -> float:
        """Its part of its owner's share, against the owner's other campaigns."""
        return float(2.0**self.spec.priority)

    @property
    def ends_s(self) -> float | None:
        """When its wall clock is over; None without a limit."""
        limit = self.budget.wall_clock_s
        return None if limit is None else self.began_s + self.pauses_s + limit

    def may_measure(self, limit_s: float) -> bool:
        """Whether one more measurement of at most `limit_s` fits into its board time."""
        return self.budget.board_s is None or self.board_s + (self.on_board + 1) * limit_s <= self.budget.board_s


@dataclasses.dataclass
class RequestEntry:
    """Candidates requested of a search. `count` shrinks with the budget."""

    number: int
    task: int
    count: int
    asked_s: float


@dataclasses.dataclass
class JobEntry:
    """A candidate from proposal to result; `stage` is where it is.

    `lost_on` are the boards that were lost under it, once for each time; `avoid` all boards that did not finish it.
    """

    number: int
    task: int
    candidate: str
    stage: str
    since_s: float
    attempts: int = 0
    lost_on: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    assignments: tuple[int, ...] = ()


@dataclasses.dataclass
class Assignment:
    """A job at a board. `started_s` None: it waits there. `charged_s` was charged to the accounts for it."""

    number: int
    job: int
    board: str
    charged_s: float
    started_s: float | None
