"""What the fleet scheduler knows of boards, campaigns and work: records that refer to each other; settings and worker.

`fleet.FleetState` keeps them in step. Their number is bounded by the fleet and its queued work, not by trials.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from device_agent.protocol import StrEnum
from farm.types.campaigns import Budget, Order, TypeOrder, WorkloadOrder
from farm.values import DEFAULT_POINT

if TYPE_CHECKING:
    from device_agent.protocol import Outcome
    from farm.search.tuners.decisions import Candidate


@dataclasses.dataclass(frozen=True)
class SchedulerSettings:
    """How far ahead to work, and when to give up. Times are in seconds.

    `batch` candidates are requested of a search at a time, up to `max_batch` for many waiting boards; `warmup` of a new
    workload. Each board's queue covers the time of search and build, with at most `max_ahead` candidates. `builders`
    candidates are compiled at once.

    The engine must end a measurement after `measure_limit_s`, changing clocks included: board time is reserved by it.
    `switch_s` is the cost of changing a board's clocks; `credit_s` is the board time that an owner who was absent may
    catch up on. A measurement is a straggler after `straggler_factor` times the usual, and never before
    `straggler_min_s`. A task is given up after `max_search_losses` failures of its search in a row: one or two may be
    accidents.
    """

    batch: int = 16
    max_batch: int = 64
    warmup: int = 4
    max_ahead: float = 8.0
    builders: int = 4
    measure_limit_s: float = 60.0
    switch_s: float = 2.0
    credit_s: float = 60.0
    straggler_factor: float = 4.0
    straggler_min_s: float = 10.0
    max_attempts: int = 3
    max_losses: int = 2
    max_search_losses: int = 3
    max_faults_in_a_row: int = 20


class Status(StrEnum):
    """What a campaign is doing."""

    RUNNING = "running"
    WAITING = "waiting"  # no usable board is here; resumes by itself when one arrives
    PAUSED = "paused"  # by an operator, or since nothing works; an operator resumes it
    FINISHED = "finished"
    CANCELLED = "cancelled"


OVER = (Status.FINISHED, Status.CANCELLED)
GOING = (Status.RUNNING, Status.WAITING)


class Phase(StrEnum):
    """What a host does that is a board itself."""

    FIRST = "first"  # searches and builds, and has measured nothing yet
    PREPARING = "preparing"
    MEASURING = "measuring"


class TaskKey(NamedTuple):
    """One workload of a campaign on one board type at one operating point: it is searched, and ends as a record."""

    campaign: str
    workload: str
    board_type: str
    point: str


class Worker(Protocol):
    """Carries out what the scheduler decides, at once; `events` takes the answers. No call may change the fleet."""

    def search(self, request: SearchRequest) -> None:
        """Request candidates; `proposed` or `search_failed` is the answer."""

    def build(self, job: Job) -> None:
        """Compile a candidate; `built` is the answer."""

    def measure(self, assignment: Assignment) -> None:
        """Send a candidate to a board, to wait there where it is not started; `measured` is the answer."""

    def revoke(self, assignment: Assignment) -> None:
        """Take a measurement from a board, begun or not; its answer, if any, is late."""

    def count(self, job: Job, latency_s: float | None) -> None:
        """Write a trial, once, then let the search learn; `latency_s` None is a fault of the candidate."""

    def drop(self, task: Task, candidate: Candidate, banned: str) -> None:
        """Let a search propose a candidate again that is not measured, unless it is `banned` for this reason."""

    def change(self, campaign: CampaignEntry) -> None:
        """Report a campaign's new status."""


@dataclasses.dataclass(eq=False)
class Pool:
    """The boards that differ in their clocks alone, and each participant's use of their time.

    `idle` are boards without work, `room` busy boards with an empty queue, both by operating point, the longest waiting
    first. `used` is board time divided by weight, by account: owner, campaign or lane. Accounts are per pool, so that
    use of plentiful boards does not count against scarce ones. `is_host`: its board is the machine that searches and
    builds.
    """

    board_type: str
    labels: frozenset[str]
    boards: int = 0
    lanes: list[Lane] = dataclasses.field(default_factory=list)
    idle: dict[str, list[BoardEntry]] = dataclasses.field(default_factory=dict)
    room: dict[str, list[BoardEntry]] = dataclasses.field(default_factory=dict)
    used: dict[Account, float] = dataclasses.field(default_factory=dict)
    straggler_check_s: float = 0.0
    is_host: bool = False


@dataclasses.dataclass(eq=False)
class BoardEntry:
    """A board at hand. `point` is where its clocks are, or will be once its measurement has begun. One that `yields`
    gets no more work.
    """

    name: str
    pool: Pool
    point: str = DEFAULT_POINT
    running: Assignment | None = None
    waiting: Assignment | None = None
    yields: bool = False


@dataclasses.dataclass(eq=False)
class CampaignEntry:
    """A campaign and its use. `on_board` are its measurements at boards; `faulty` the boards that failed since the last
    trial that counted. `lanes` and their tasks stay when it is over.

    `budget` is the search's part of its budget; boards must have all `labels`.
    """

    order: Order
    budget: Budget
    priority: int
    labels: frozenset[str]
    status: Status = Status.RUNNING
    reason: str = ""
    lanes: list[Lane] = dataclasses.field(default_factory=list)
    began_s: float = 0.0
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
    def name(self) -> str:
        return self.order.name

    @property
    def owner(self) -> str:
        return self.order.owner

    @property
    def tasks(self) -> list[Task]:
        return [task for lane in self.lanes for task in lane.tasks]

    @property
    def weight(self) -> float:
        """Its part of its owner's share, against the owner's other campaigns."""
        return float(2.0**self.priority)

    @property
    def ends_s(self) -> float | None:
        """When its wall clock is over; None without a limit."""
        limit = self.budget.wall_clock_s
        return None if limit is None else self.began_s + self.pauses_s + limit

    def get_wall_clock_s(self, now_s: float) -> float:
        """Return the time from the start without pauses, as the budget counts it."""
        end_s = self.pause_began_s if self.status is Status.PAUSED else now_s
        return end_s - self.began_s - self.pauses_s

    def has_board_time(self, limit_s: float) -> bool:
        """Whether one more measurement of at most `limit_s` fits into its board time."""
        return self.budget.board_s is None or self.board_s + (self.on_board + 1) * limit_s <= self.budget.board_s


@dataclasses.dataclass(eq=False)
class Lane:
    """The tasks of a campaign for one board type at one operating point, and their jobs on the way to boards.

    `again` are built jobs that were tried before, `ready` those that were not. `searching` are requested candidates.
    `boards` is its fair share of boards. Times are running means; None before the first.
    """

    campaign: CampaignEntry
    of_type: TypeOrder
    point: str
    tasks: list[Task] = dataclasses.field(default_factory=list)
    to_build: list[Job] = dataclasses.field(default_factory=list)
    ready: list[Job] = dataclasses.field(default_factory=list)
    again: list[Job] = dataclasses.field(default_factory=list)
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

    def __post_init__(self) -> None:
        self.accounts: tuple[Account, ...] = (self.campaign.owner, self.campaign, self)

    @property
    def board_type(self) -> str:
        return self.of_type.board_type

    @property
    def ahead(self) -> int:
        """Count the candidates queued before the boards."""
        return self.searching + len(self.to_build) + self.building + len(self.ready) + len(self.again)


# A participant in a pool's board time: an owner by name, a campaign among its owner's, a lane among its campaign's.
Account = str | CampaignEntry | Lane


@dataclasses.dataclass(eq=False, kw_only=True)
class Task:
    """A workload on one board type at one operating point.

    `asked` counts every trial requested, finished or not. `rounds_s` holds the best latency (s) after each finished
    round, oldest first; empty before the first good trial. `ended` is why it is searched no further; `closed`: its jobs
    are dropped too. `exhausted`: nothing may be requested now, because it ended or its search works.
    """

    key: TaskKey
    lane: Lane
    workload: WorkloadOrder
    asked: int = 0
    rounds_s: tuple[float, ...] = ()
    exhausted: bool = False
    counted: int = 0
    since_best: int = 0
    best_s: float | None = None
    ended: str = ""
    closed: bool = False
    search_losses: int = 0
    in_round: int = 0
    banned: frozenset[str] = frozenset()

    @property
    def open(self) -> int:
        """Count the requested trials without a result."""
        return self.asked - self.counted


@dataclasses.dataclass(eq=False)
class SearchRequest:
    """Candidates requested of a search. `count` shrinks with the budget."""

    number: int
    task: Task
    count: int
    asked_s: float


@dataclasses.dataclass(eq=False)
class Job:
    """A candidate from proposal to result; `stage` is where it is.

    `lost_on` are the boards that were lost under it, once for each time; `avoid` all boards that did not finish it. The
    worker's: the library once it is built, and the last `outcome` of build or measurement, with its time at a board.
    """

    number: int
    task: Task
    candidate: Candidate
    stage: str
    since_s: float
    attempts: int = 0
    lost_on: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    assignments: list[Assignment] = dataclasses.field(default_factory=list)
    library: bytes | None = None
    sha256: str | None = None
    build_s: float | None = None
    outcome: Outcome | None = None
    held_s: float | None = None


@dataclasses.dataclass(eq=False)
class Assignment:
    """A job at a board. `started_s` None: it waits there. `charged_s` was charged to the accounts for it."""

    number: int
    job: Job
    board: BoardEntry
    charged_s: float
    started_s: float | None


def to_campaign(order: Order, budget: Budget) -> CampaignEntry:
    """Return a campaign that has not begun; workloads are named by their hashes."""
    campaign = CampaignEntry(order, budget, order.priority, to_labels(order.labels) | to_names(order.boards))
    for of_type in order.types:
        for point in of_type.points if of_type.workloads else ():
            lane = Lane(campaign, of_type, point)
            campaign.lanes.append(lane)
            for each in of_type.workloads:
                key = TaskKey(order.name, each.hash, of_type.board_type, point)
                lane.tasks.append(Task(key=key, lane=lane, workload=each))
    return campaign


def to_labels(labels: Mapping[str, str]) -> frozenset[str]:
    """Format labels as the scheduler compares them."""
    return frozenset(f"{name}={value}" for name, value in labels.items())


def to_names(boards: Iterable[str]) -> frozenset[str]:
    """Return board names as labels with an empty name, which no real label has."""
    names = ",".join(sorted(boards))
    return frozenset({f"={names}"} if names else ())
