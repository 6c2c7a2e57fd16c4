"""What goes into the fleet scheduler and what comes out of it: campaigns, events, decisions, settings.

They hold facts and do nothing. The scheduler's own state is in `state`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from device_agent.protocol import FaultSide, StrEnum
from farm.errors import UsageError
from farm.values import DEFAULT_POINT


@dataclasses.dataclass(frozen=True)
class SchedulerSettings:
    """How far ahead to work, and when to give up. Times are in seconds.

    `batch` candidates are asked of a search at a time, up to `max_batch` where many boards wait; `warmup` of a workload
    that was never tried. Ahead of each board lie candidates for as long as search and build take, at most
    `max_ahead` of them. `builders` candidates are compiled at once.

    The engine must end a measurement after `measure_limit_s`, changing clocks included: board time is reserved by it.
    `switch_s` is what changing a board's clocks costs; `credit_s` is how long an owner who could not use the fleet may
    make up for it afterwards. A measurement is a straggler after `straggler_factor` times the usual, and never before
    `straggler_min_s`. A task whose search failed `max_search_losses` times in a row is given up: once or twice may be
    an accident.
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
    WAITING = "waiting"  # no board that it may use is here; goes on by itself when one comes
    PAUSED = "paused"  # by an operator, or since nothing works; goes on when an operator says so
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
    """One tunable function. `weight` is its calls per inference, over all models of the campaign that have it."""

    name: str
    kind: str
    weight: float
    flop: float


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a campaign may use; None is without limit. Whichever is reached first ends it.

    `trials` and `per_workload` count trials that ended well or by the candidate's fault; `per_workload` holds for each
    workload on each board type at each operating point. `wall_clock_s` runs from the start, pauses left out.
    `board_s` is time that boards were held for it, repeated and abandoned measurements included.
    """

    trials: int | None = None
    wall_clock_s: float | None = None
    board_s: float | None = None
    per_workload: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise UsageError(
                    f"a budget of {value:g} for {field.name} allows nothing",
                    "Give more than zero, or leave it out for no limit.",
                )


class Part(NamedTuple):
    """What a campaign searches on boards of one type at one operating point."""

    board_type: str
    point: str
    workloads: tuple[CampaignWorkload, ...]


@dataclasses.dataclass(frozen=True)
class ScheduledCampaign:
    """A campaign as planned: every workload on every board type at every operating point, or `parts` where board types
    differ in their workloads or points.

    Boards must have all `labels`. A `priority` one higher doubles the campaign's part of its owner's share.
    `early_stopping` ends a workload after so many counted trials without a better one; `early_stopping_all` ends the
    campaign after so many without a better one of any workload.
    """

    name: str
    owner: str
    workloads: tuple[CampaignWorkload, ...]
    board_types: tuple[str, ...]
    budget: Budget
    points: tuple[str, ...] = (DEFAULT_POINT,)
    labels: frozenset[str] = NO_LABELS
    priority: int = 0
    early_stopping: int | None = None
    early_stopping_all: int | None = None
    parts: tuple[Part, ...] = ()

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """What there is to search, whichever way it was given."""
        crossed = (Part(kind, point, self.workloads) for kind in self.board_types for point in self.points)
        return self.parts or tuple(crossed)


class TaskKey(NamedTuple):
    """One workload of a campaign on one board type at one operating point: what is searched, and ends as a record."""

    campaign: str
    workload: str
    board_type: str
    point: str


@dataclasses.dataclass(frozen=True)
class Done:
    """What an earlier run made of a workload: counted trials, the best latency, and trials since that.

    `banned`: candidates under which several boards were lost.
    """

    task: TaskKey
    counted: int
    best_s: float | None = None
    since_best: int = 0
    banned: frozenset[str] = frozenset()


# Events: what happened. An event that names something that is over is late, and changes nothing.


@dataclasses.dataclass(frozen=True)
class CampaignAdded:
    """A campaign begins, or goes on after a restart with what its trials in the store say.

    `done` has at most one entry for a task; `board_s` and `wall_clock_s` are what earlier runs used of the budgets.
    Raises UsageError, when observed, where its name is taken, it has nothing to do, or `done` is of another campaign.
    """

    spec: ScheduledCampaign
    done: tuple[Done, ...] = ()
    board_s: float = 0.0
    wall_clock_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class BudgetChanged:
    """A campaign's budget is another from now on. Work that no longer fits is given back."""

    campaign: str
    budget: Budget


@dataclasses.dataclass(frozen=True)
class PriorityChanged:
    """An operator gave a campaign another priority among its owner's."""

    campaign: str
    priority: int


@dataclasses.dataclass(frozen=True)
class CampaignPaused:
    """No new work for a campaign; what boards are measuring ends as usual."""

    campaign: str


@dataclasses.dataclass(frozen=True)
class CampaignResumed:
    """A paused campaign goes on."""

    campaign: str


@dataclasses.dataclass(frozen=True)
class CampaignCancelled:
    """A campaign ends at once."""

    campaign: str


@dataclasses.dataclass(frozen=True)
class BoardArrived:
    """A board may be used, and is held at `point`. `labels` need only hold what campaigns ask for: boards that differ
    in them are shared out separately. `is_host`: it is the machine that searches and builds, which rests while it
    measures; all boards of its type are.
    """

    board: str
    board_type: str
    point: str = DEFAULT_POINT
    labels: frozenset[str] = NO_LABELS
    is_host: bool = False


@dataclasses.dataclass(frozen=True)
class BoardLeft:
    """A board may no longer be used. `lost`: it went down under what it was measuring."""

    board: str
    lost: bool = False


@dataclasses.dataclass(frozen=True)
class BoardYields:
    """A board is to leave for somebody else: it ends what it measures, and is given nothing more."""

    board: str


@dataclasses.dataclass(frozen=True)
class Proposed:
    """A search's answer: so many candidates as were asked for, or fewer. `exhausted`: it will never have more."""

    request: int
    candidates: tuple[str, ...]
    exhausted: bool = False


@dataclasses.dataclass(frozen=True)
class SearchFailed:
    """A search died or missed its deadline, and `reason` says how."""

    request: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Built:
    """A build ended: well (`side` None), by the candidate's fault, or by the farm's."""

    job: int
    side: FaultSide | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measurement ended: well (`side` None, with its latency) or by somebody's fault. `board_s`: the board's time."""

    assignment: int
    side: FaultSide | None
    board_s: float
    latency_s: float | None = None


@dataclasses.dataclass(frozen=True)
class WinnerMeasured:
    """A board that had been lent measured a winner of a campaign, whose searches may be over: `board_s` are its own."""

    campaign: str
    board_s: float


@dataclasses.dataclass(frozen=True)
class HostReserved:
    """Winners are being measured on the machine that searches and builds, which rests meanwhile; or not any more."""

    reserved: bool


Event = (
    CampaignAdded
    | BudgetChanged
    | PriorityChanged
    | CampaignPaused
    | CampaignResumed
    | CampaignCancelled
    | BoardArrived
    | BoardLeft
    | BoardYields
    | Proposed
    | SearchFailed
    | Built
    | Measured
    | WinnerMeasured
    | HostReserved
)


# Decisions: what to do, and what to tell.


@dataclasses.dataclass(frozen=True)
class Search:
    """Ask a search for `count` new candidates; answer with Proposed or SearchFailed."""

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
    """Take a measurement from a board, begun or not; its answer, should one come, is late."""

    assignment: int
    board: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Count:
    """A trial counts, once: write it, and let the search learn. `latency_s` None is a fault of the candidate.
    `assignment` None: it never came to a board, since its build failed.
    """

    job: int
    assignment: int | None
    task: TaskKey
    candidate: str
    latency_s: float | None


@dataclasses.dataclass(frozen=True)
class Discard:
    """A candidate is not measured, and its place goes back to the budget: the search may propose it again.

    `job` is None where it was more than could still be taken, and never became a job.
    """

    job: int | None
    task: TaskKey
    candidate: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Ban:
    """A candidate took boards down: nobody may measure it again. Its place goes back to the budget."""

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
    """A campaign's status is another."""

    campaign: str
    status: Status
    reason: str


Decision = Search | Build | Measure | Revoke | Count | Discard | Ban | TaskEnded | Changed
