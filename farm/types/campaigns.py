"""Campaigns: the order that an engine carries out, the campaign as the store returns it, and what `--json` prints.

An order is made from a plan once (`farm.campaign.submit`) and never changes, but for the budget, kept beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic

from device_agent.protocol import OperatingPoint
from farm.errors import PermanentError, UsageError
from farm.types import documents
from farm.types.states import CampaignState

# A number as stored: an integer stays one.
Number = int | float


class _Stored(pydantic.BaseModel):
    """What the store keeps; another version's fields are left out."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)


class Budget(_Stored):
    """The limits of a campaign; None: unlimited. The first limit reached ends it.

    `trials` and `per_workload` count trials that ended well or by the candidate's fault; `per_workload` is per
    workload, board type and operating point. `wall_clock_s` runs from the start, pauses left out. `board_s` is time
    that boards were held for it, repeated and abandoned measurements included; `energy_j` is what they used then.
    """

    trials: int | None = None
    wall_clock_s: Number | None = None
    board_s: Number | None = None
    per_workload: int | None = None
    energy_j: Number | None = None

    @pydantic.model_validator(mode="after")
    def _require_room(self) -> Budget:
        for name, value in self:
            if value is not None and not value > 0:
                raise UsageError(
                    f"a budget of {value:g} for {name} allows nothing",
                    "Give more than zero, or leave it out for no limit.",
                )
        return self

    def change(self, changes: Mapping[str, Any]) -> Budget:
        """Return it with some limits changed. Raises UsageError for a limit of nothing."""
        return Budget(**{**self.model_dump(), **changes})


class WorkloadOrder(_Stored):
    """A tunable function. `weight`: calls in one inference of each of `models`, in sum; `calls`: of each.

    `predicted_s`: estimated time of a call (s) at default clocks; None where no family has an estimate.
    """

    hash: str
    name: str
    kind: str
    flop: Number
    weight: Number
    models: tuple[str, ...]
    calls: tuple[Number, ...]
    predicted_s: Number | None = None


class TypeOrder(_Stored):
    """The work on boards of one type: `target` is TVM's, as a dict; a candidate runs on `threads`.

    `points` are operating points by their text in trials and records. `is_host`: the board is the machine that searches
    and builds.
    """

    board_type: str
    simulated: bool
    target: dict[str, Any]
    threads: int
    pipeline: str
    points: dict[str, OperatingPoint]
    workloads: tuple[WorkloadOrder, ...]
    is_host: bool = False


class SearchOrder(_Stored):
    """How candidates are found; see `farm.campaign.spec.SearchSpec`."""

    tuner: str
    loss: str | None
    early_stopping: int | None
    warm_start: bool
    seed: int
    early_stopping_all: int | None = None
    exact: bool = False


class MeasureOrder(_Stored):
    """How a candidate is timed, in seconds. `verify_top` of a workload's best are verified.

    Without `repeat_alone` what has no rival is checked only, and its trial counts: a candidate alone, or a baseline
    that no trial beats by the rule's advantage.
    """

    number: int
    repeat: int
    min_repeat_s: Number
    timeout_s: Number
    memory_bytes: int
    verify_top: int
    repeat_alone: bool = True


class ModelOrder(_Stored):
    """A planned model: `plan.to_document` of it, and shapes as the file gives them.

    `lengths` is the range of lengths that it is one size of, the last of its shapes; "" for none.
    """

    name: str
    origin: str
    sha256: str
    batch: int | None
    shapes: tuple[str, ...] = ()
    lengths: str = ""


class Order(_Stored):
    """A whole campaign. `labels` are required of its boards; `priority` is against its owner's other campaigns.

    `boards` are the only ones to use, by name; empty: all that fit. `rivals` are what its models are timed beside at
    the end. `compile_to` is the folder for the finished campaign's artifacts; None: none are wanted. `process` is the
    command that watches it (`process_identity`): where that is killed, the campaign is paused; None: it goes on.
    `objective` (see `farm.points.values.Objective`) and `deadline_s`, per inference, decide between finalists.
    """

    name: str
    owner: str
    models: tuple[ModelOrder, ...]
    types: tuple[TypeOrder, ...]
    budget: Budget
    search: SearchOrder
    measure: MeasureOrder
    labels: dict[str, str] = pydantic.Field(default_factory=dict)
    priority: int = 0
    boards: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    compile_to: str | None = None
    process: dict[str, Any] | None = None
    objective: str = "latency"
    deadline_s: Number | None = None

    def may_use(self, board: str, labels: Mapping[str, str]) -> bool:
        """Whether a board of one of its types may be used, by its name and labels."""
        return self.labels.items() <= labels.items() and (not self.boards or board in self.boards)


class FleetCampaign(_Stored):
    """A fleet campaign as stored.

    `order` is the request, `budget` its present limits, `progress` its engine's progress (None: not started). `wanted`
    is the operators' request: `run`, `pause` or `cancel`. `engine` identifies the process that carries it out, None
    without one. `started_at` is its submission; both times are wall-clock seconds since the epoch.
    """

    id: int
    name: str
    owner: str
    command: str
    state: CampaignState
    reason: str
    wanted: str
    order: Order = pydantic.Field(repr=False)
    budget: Budget
    progress: dict[str, Any] | None = pydantic.Field(repr=False)
    engine: dict[str, Any] | None
    started_at: float
    finished_at: float | None

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> FleetCampaign:
        """Read a stored row. Raises PermanentError, which names the campaign, for one that does not fit."""
        try:
            return cls(**row)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            told = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except UsageError as error:
            told = error.message
        raise PermanentError(f"the stored campaign {row['name']!r} cannot be read: {told}")

    @property
    def over(self) -> bool:
        return self.state.over


class CampaignType(documents.Model):
    """What a campaign wants of one board type."""

    type: str
    simulated: bool
    device: str
    pipeline: str
    points: list[str]
    workloads: int


class CampaignInfo(documents.Model):
    """An entry of `farm campaign list --json`."""

    campaign: int
    name: str
    owner: str
    priority: float
    state: str
    reason: str
    wanted: str
    command: str
    started_at: float
    finished_at: float | None
    models: list[ModelOrder]
    types: list[CampaignType]
    labels: dict[str, str]
    search: SearchOrder
    measure: MeasureOrder
    budget: Budget
    progress: dict[str, Any] | None


class Winner(documents.Model):
    """What a task came to; None: no record."""

    board_type: str
    point: str
    workload: str
    name: str
    weight: float
    flop: float
    candidate: str | None
    median_s: float | None
    predicted_s: float | None
    max_rel_error: float | None
    verified_at: float | None
    since: bool
    evidence: dict[str, Any] | None


class CampaignInFull(CampaignInfo):
    """`farm campaign show NAME --json`."""

    trials: dict[str, dict[str, int]]
    boards: list[dict[str, Any]]
    winners: list[Winner]
    curves: list[dict[str, Any]]
    events: list[dict[str, Any]]


class CampaignPage(documents.Page):
    """Campaigns, the newest first."""

    items: list[CampaignInfo]


class BudgetChange(documents.Model):
    """Limits that change; what is left out stays, null takes a limit away."""

    trials: int | None = pydantic.Field(None, ge=1, le=10**9)
    per_workload: int | None = pydantic.Field(None, ge=1, le=10**9)
    wall_clock_s: float | None = pydantic.Field(None, gt=0, le=1e9)
    board_s: float | None = pydantic.Field(None, gt=0, le=1e9)
    energy_j: float | None = pydantic.Field(None, gt=0, le=1e12)
