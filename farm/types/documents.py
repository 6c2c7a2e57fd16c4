"""The documents that `--json` prints and the API serves, as models: what they hold, for OpenAPI and for reports.

Stable within `/api/v1`: fields are added, none is taken away or changes its meaning. What is `dict[str, Any]` is an
account of the engine's or the sweep's own, and may gain keys.
"""

from __future__ import annotations

from typing import Any

import pydantic

from farm.values import Health, State, WorkKind


class Model(pydantic.BaseModel):
    """The base: frozen, with no other fields."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Problem(Model):
    """RFC 9457; `hint` says what can be done."""

    type: str
    title: str
    status: int
    detail: str
    hint: str


class LeaseInfo(Model):
    """Who holds a board; times in seconds since the epoch."""

    token: int
    owner: str
    purpose: str
    ttl_s: float
    acquired_at: float
    expires_at: float
    kind: str


class Quarantine(Model):
    """Of a quarantined board: its time without a fault in s, and whether an operator ordered it."""

    cooling_s: float
    held: bool


class BoardInfo(Model):
    """A board as `store.boards` returns it and `farm board list --json` prints it; times in seconds since the epoch.

    `seen_at` is None before the board was first seen. `power` lists the actions of its power commands, which may be
    confidential themselves; `power_cycled_s` are the times since the farm's counted power cycles.
    """

    name: str
    board_type: str
    simulated: bool
    labels: dict[str, str]
    transport: dict[str, Any]
    description: dict[str, Any]
    state: State
    state_reason: str
    state_since: float
    health: Health
    health_reason: str
    health_since: float
    added_at: float
    seen_at: float | None
    quarantine: Quarantine | None
    lease: LeaseInfo | None
    power: list[str]
    power_cycled_s: list[float]

    @property
    def on_demand(self) -> bool:
        """Whether its agent runs only while a command of this machine uses it, so that no connection is kept."""
        return bool(self.transport.get("on_demand"))

    def is_reserved_by(self, person: str) -> bool:
        """Whether a person has reserved it."""
        return self.lease is not None and self.lease.kind == WorkKind.RESERVED and self.lease.owner == person


class BoardEvent(Model):
    """What happened to a board."""

    id: int
    board: str
    at: float
    kind: str
    before: str | None
    after: str | None
    reason: str
    by: str


class BoardInFull(BoardInfo):
    """`farm board show NAME --json`."""

    calibration: dict[str, Any] | None
    events: list[BoardEvent]


class StoredSweep(Model):
    """A sweep as `store.sweeps` returns it; times in seconds since the epoch.

    `visits` is the number of its visits; `finished_at` is None while it runs, `summary` until it has one.
    """

    id: int
    command: str
    model: str
    model_sha256: str
    board_type: str
    simulated: bool
    request: dict[str, Any]
    goal: dict[str, Any]
    grid: dict[str, Any]
    settings: dict[str, Any]
    started_at: float
    finished_at: float | None
    state: str
    summary: dict[str, Any] | None
    visits: int


class Sweep(Model):
    """An entry of `farm sweep list --json`."""

    sweep: int
    model: str
    board_type: str
    simulated: bool
    series: list[str]
    points: int
    visits: int
    state: str
    goal: dict[str, Any]
    started_at: float
    finished_at: float | None


class SweepInFull(Model):
    """`farm sweep show ID --json`."""

    sweep: int
    model: str
    state: str
    board: dict[str, Any]
    started_at: float
    seconds: float
    goal: dict[str, Any]
    grid: dict[str, Any]
    series: list[dict[str, Any]]
    schedules: list[Any]
    reason: str
    cost: dict[str, Any] | None
    notes: list[str]
    programs: dict[str, Any]
    metrics: dict[str, str]
    environment: dict[str, Any]


class RecordInfo(Model):
    """An entry of `farm record list --json`."""

    workload: str
    name: str
    board_type: str
    operating_point: str
    device: str
    pipeline: str
    candidate: str
    latency_us: float
    energy_j: float | None
    objective: str
    gflops: float
    max_rel_error: float
    simulated: bool
    virtual_code: str | None
    verified_at: float
    origin: dict[str, Any] | None


class RecordInFull(RecordInfo):
    """A record of `farm record show WORKLOAD --json`."""

    evidence: dict[str, Any] | None


class WorkloadRecords(Model):
    """`farm record show WORKLOAD --json`."""

    hash: str
    name: str
    flop: float
    arguments: list[Any]
    target: dict[str, Any]
    pipeline: str
    records: list[RecordInFull]


class Event(Model):
    """Something that happened in the farm."""

    at: float
    kind: str
    subject: str
    message: str
    by: str


class Page(Model):
    """A part of a list: `total` entries there are, `next` is where it goes on."""

    total: int
    next: str | None


class BoardPage(Page):
    """Boards by name."""

    items: list[BoardInfo]


class SweepPage(Page):
    """Sweeps, the newest first."""

    items: list[Sweep]


class ArtifactInfo(Model):
    """An entry of `farm model artifacts --json`; `latency_s` is the newest measured median."""

    folder: str
    model: str
    board_type: str
    simulated: bool
    device: str
    operating_point: str
    weights: str
    bytes: int
    verified: bool | None
    latency_s: float | None
    records: int
    workloads: int
    created_at: float


class ArtifactPage(Page):
    """Artifacts of this machine, the newest first."""

    items: list[ArtifactInfo]


class RecordPage(Page):
    """Records, by board type and falling work."""

    items: list[RecordInfo]


class Waiting(Model):
    """A request for boards of `farm queue --json`: `has` are those that a campaign has of them already."""

    id: int
    owner: str
    kind: str
    purpose: str
    board_type: str
    boards: list[str]
    wanted: int
    priority: int
    requested_at: float
    waited_s: float
    campaign: str | None
    has: list[str]
    why: str


class Queued(Model):
    """A board of `farm queue --json`, who has it, and to whom it goes."""

    name: str
    board_type: str
    owner: str | None
    purpose: str | None
    kind: str | None
    acquired_at: float | None
    reserved_until: float | None
    goes_to: int | None


class Queue(Model):
    """`farm queue --json`."""

    requests: list[Waiting]
    boards: list[Queued]


class EventList(Model):
    """Events, the newest first; `next` is where the list goes on."""

    next: str | None
    items: list[Event]


class ResultInfo(Model):
    """An entry of `farm result list --json`; `document` is what the command printed."""

    id: int
    kind: str
    model: str
    board: str
    board_type: str
    simulated: bool
    device: str
    document: dict[str, Any]
    by: str
    recorded_at: float


class ResultPage(Page):
    """Kept results, the newest first."""

    items: list[ResultInfo]


class MetricSummary(Model):
    """A metric of a program's runs, in its `unit`; `better`: more or less. `per_unit_j`: J for what a rate counts."""

    name: str
    unit: str
    better: str
    summary: dict[str, float]
    per_unit_j: float | None


class ProgramBench(Model):
    """`farm program bench --json`.

    `latency_s` summarises the wall times, or those between --from and --until; `metrics` has the others. `files` are
    SHA-256 by name; `output` is the first and the last kilobyte of the last run.
    """

    board: dict[str, Any]
    command: list[str]
    files: dict[str, str]
    sha256: str
    exit_status: int
    output: str
    operating_point: str
    clocks: str
    threads: int
    latency_s: dict[str, float]
    metrics: list[MetricSummary]
    energy_j: float | None
    energy_ci_j: tuple[float, float] | None
    power_w: float | None
    power_ci_w: tuple[float, float] | None
    first_s: float | None
    peak_memory_bytes: int | None
    temperature_c: float | None
    doubt: str


class BoardOrder(Model):
    """What is done to a board, and why."""

    reason: str = pydantic.Field("", max_length=500)


class Reservation(Model):
    """For how long a board is reserved (s, up to 7 days), and why, on one line that others see."""

    for_s: float = pydantic.Field(gt=0, le=7 * 86400)
    why: str = pydantic.Field("", max_length=200)
