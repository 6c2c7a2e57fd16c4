"""Inputs and outputs of the fleet scheduler: campaigns, events, decisions, settings.

The scheduler's own state is in `state`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from device_agent.protocol import FaultSide, StrEnum
from farm.types.campaigns import Budget
from farm.values import DEFAULT_POINT


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


NO_LABELS: frozenset[str] = frozenset()


class Status(StrEnum):
    """What a campaign is doing."""

    RUNNING = "running"
    WAITING = "waiting"  # no usable board is here; resumes by itself when one arrives
    PAUSED = "paused"  # by an operator, or since nothing works; an operator resumes it
    FINISHED = "finished"
    CANCELLED = "cancelled"


class Phase(StrEnum):
    """What a host does that is a board itself."""

    FIRST = "first"  # searches and builds, and has measured nothing yet
    PREPARING = "preparing"
    MEASURING = "measuring"


OVER = (Status.FINISHED, Status.CANCELLED)


@dataclasses.dataclass(frozen=True)
class CampaignWorkload:
    """One tunable function. `weight` is its calls per inference, in sum over the campaign's models."""

    name: str
    kind: str
    weight: float
    flop: float


class Part(NamedTuple):
    """What a campaign searches on boards of one type at one operating point."""

    board_type: str
    point: str
    workloads: tuple[CampaignWorkload, ...]


@dataclasses.dataclass(frozen=True)
class ScheduledCampaign:
    """A campaign as planned.

    Boards must have all `labels`. A `priority` one higher doubles the campaign's part of its owner's share.
    `early_stopping` ends a workload after this many counted trials without a better one; `early_stopping_all` ends the
    campaign likewise over all workloads.
    """

    name: str
    owner: str
    parts: tuple[Part, ...]
    budget: Budget
    labels: frozenset[str] = NO_LABELS
    priority: int = 0
    early_stopping: int | None = None
    early_stopping_all: int | None = None


class TaskKey(NamedTuple):
    """One workload of a campaign on one board type at one operating point: it is searched, and ends as a record."""

    campaign: str
    workload: str
    board_type: str
    point: str


@dataclasses.dataclass(frozen=True)
class Done:
    """An earlier run's results for a workload: counted trials, the best latency, and trials since that.

    `banned`: candidates under which several boards were lost.
    """

    task: TaskKey
    counted: int
    best_s: float | None = None
    since_best: int = 0
    banned: frozenset[str] = frozenset()


# Events. One that names something that is over is late, and changes nothing.


@dataclasses.dataclass(frozen=True)
class CampaignAdded:
    """A campaign begins, or continues after a restart from its trials in the store.

    `done` has at most one entry for a task; `board_s`, `wall_clock_s` and `energy_j` are what earlier runs used.
    Observing it raises UsageError where its name is taken, it has nothing to do, or `done` is of another campaign.
    """

    spec: ScheduledCampaign
    done: tuple[Done, ...] = ()
    board_s: float = 0.0
    wall_clock_s: float = 0.0
    energy_j: float = 0.0


@dataclasses.dataclass(frozen=True)
class BudgetChanged:
    """A campaign's budget changed. Work that no longer fits is dropped."""

    campaign: str
    budget: Budget


@dataclasses.dataclass(frozen=True)
class PriorityChanged:
    """An operator changed a campaign's priority among its owner's."""

    campaign: str
    priority: int


@dataclasses.dataclass(frozen=True)
class CampaignPaused:
    """No new work for a campaign; running measurements end as usual."""

    campaign: str


@dataclasses.dataclass(frozen=True)
class CampaignResumed:
    """A paused campaign resumes."""

    campaign: str


@dataclasses.dataclass(frozen=True)
class CampaignCancelled:
    """A campaign ends at once."""

    campaign: str


@dataclasses.dataclass(frozen=True)
class BoardArrived:
    """A board may be used; its clocks are at `point`.

    `labels` hold at least what campaigns ask for: boards that differ in them form separate pools. `is_host`: it is the
    machine that searches and builds, which rests while it measures; so are all boards of its type.
    """

    board: str
    board_type: str
    point: str = DEFAULT_POINT
    labels: frozenset[str] = NO_LABELS
    is_host: bool = False


@dataclasses.dataclass(frozen=True)
class BoardLeft:
    """A board may no longer be used."""

    board: str


@dataclasses.dataclass(frozen=True)
class BoardYields:
    """Another user gets the board next: it finishes its measurement, and gets no more."""

    board: str


@dataclasses.dataclass(frozen=True)
class Proposed:
    """A search's answer: as many candidates as requested, or fewer. `exhausted`: it will never have more."""

    request: int
    candidates: tuple[str, ...]
    exhausted: bool = False


@dataclasses.dataclass(frozen=True)
class SearchFailed:
    """A search died or missed its deadline, for `reason`."""

    request: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Built:
    """A build ended: well (`side` None), by the candidate's fault, or by the farm's."""

    job: int
    side: FaultSide | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measurement ended: well (`side` None, with its latency) or by a fault. It took `board_s` and `energy_j`."""

    assignment: int
    side: FaultSide | None
    board_s: float
    latency_s: float | None = None
    energy_j: float = 0.0


@dataclasses.dataclass(frozen=True)
class FinalistMeasured:
    """A lent board measured a finalist of a campaign, whose searches may be over; it took `board_s` and `energy_j`."""

    campaign: str
    board_s: float
    energy_j: float = 0.0


@dataclasses.dataclass(frozen=True)
class HostReserved:
    """Verification measures on the machine that searches and builds, which rests meanwhile; or it has ended."""

    reserved: bool


Event = (
    CampaignAdded | BudgetChanged | PriorityChanged | CampaignPaused | CampaignResumed | CampaignCancelled
    | BoardArrived | BoardLeft | BoardYields | Proposed | SearchFailed | Built | Measured | FinalistMeasured
    | HostReserved
)  # fmt: skip


# Decisions: what to do, and what to report.


@dataclasses.dataclass(frozen=True)
class Search:
    """Request `count` new candidates of a search; answer with Proposed or SearchFailed."""

    request: int
    task: TaskKey
    count: int


@dataclasses.dataclass(frozen=True)
class Build:
    """Compile a candidate; answer with Built."""

    job: int
    task: TaskKey
    candidate: str


@dataclasses.dataclass(frozen=True)
class Measure:
    """Send a candidate to a board; answer with Measured. `waits`: the board still measures another one before it."""

    assignment: int
    job: int
    task: TaskKey
    candidate: str
    board: str
    waits: bool


@dataclasses.dataclass(frozen=True)
class Revoke:
    """Take a measurement from a board, begun or not; its answer, if any, is late."""

    assignment: int
    board: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Count:
    """Count a trial, once: write it, and let the search learn.

    `latency_s` None is a fault of the candidate. `assignment` None: its build failed.
    """

    job: int
    assignment: int | None
    task: TaskKey
    candidate: str
    latency_s: float | None


@dataclasses.dataclass(frozen=True)
class Discard:
    """A candidate is not measured, and its trial returns to the budget: the search may propose it again.

    `job` is None where it exceeded the budget, and never became a job.
    """

    job: int | None
    task: TaskKey
    candidate: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Ban:
    """A candidate took boards down: it is never measured again. Its trial returns to the budget."""

    job: int
    task: TaskKey
    candidate: str
    reason: str


@dataclasses.dataclass(frozen=True)
class TaskEnded:
    """A workload is searched no further."""

    task: TaskKey
    reason: str


@dataclasses.dataclass(frozen=True)
class Changed:
    """A campaign has another status."""

    campaign: str
    status: Status
    reason: str


Decision = Search | Build | Measure | Revoke | Count | Discard | Ban | TaskEnded | Changed
