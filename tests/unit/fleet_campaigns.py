"""Small campaigns, and a fleet that answers by hand, for tests of the fleet's scheduler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from device_agent.protocol import FaultSide, OperatingPoint
from farm.campaign.scheduler import events
from farm.campaign.scheduler.fleet import FleetState
from farm.campaign.scheduler.scheduler import step
from farm.campaign.scheduler.state import (
    Assignment,
    CampaignEntry,
    Job,
    SchedulerSettings,
    SearchRequest,
    Status,
    Task,
    TaskKey,
    to_campaign,
)
from farm.search.tuners.decisions import Candidate
from farm.types.campaigns import WorkloadOrder
from tests.unit.campaign_orders import SEARCH, make_order, make_type


def workload(name: str, kind: str = "conv2d", weight: float = 1.0, flop: float = 1e8) -> WorkloadOrder:
    return WorkloadOrder(hash=name, name=name, kind=kind, weight=weight, flop=flop, models=(), calls=())


def campaign(name: str = "vision", **fields: Any) -> CampaignEntry:
    workloads = tuple(workload(f"{name}-w{n}", weight=1.0 + n) for n in range(fields.pop("workloads", 2)))
    points = dict.fromkeys(fields.pop("points", ("default",)), OperatingPoint())
    types = [make_type(each, workloads, points=points) for each in fields.pop("board_types", ("nano",))]
    stopping = {each: fields.pop(each, None) for each in ("early_stopping", "early_stopping_all")}
    fields = {"owner": f"owner of {name}", "types": tuple(types)} | fields
    order = make_order(name, search=SEARCH.model_copy(update=stopping), **fields)
    return to_campaign(order, order.budget)


def name_candidates(*names: str) -> list[Candidate]:
    return [Candidate("", name, (), "", "") for name in names]


class Act(NamedTuple):
    """What a worker was asked for, as it was then."""

    kind: str
    task: TaskKey | None = None
    job: int = 0
    candidate: str = ""
    request: int = 0
    count: int = 0
    assignment: int = 0
    board: str = ""
    waits: bool = False
    latency_s: float | None = None
    banned: str = ""


class Recorder:
    """A worker that keeps what it is asked for."""

    def __init__(self) -> None:
        self.acts: list[Act] = []

    def search(self, request: SearchRequest) -> None:
        self.acts.append(Act("search", request.task.key, request=request.number, count=request.count))

    def drop(self, task: Task, candidate: Candidate, banned: str) -> None:
        self.acts.append(Act("drop", task.key, candidate=candidate.hash, banned=banned))

    def change(self, campaign: CampaignEntry) -> None:
        self.acts.append(Act("change"))

    def _note(self, kind: str, job: Job, latency_s: float | None = None, **at: Any) -> None:
        self.acts.append(Act(kind, job.task.key, job.number, job.candidate.hash, latency_s=latency_s, **at))

    def _note_at(self, kind: str, assignment: Assignment) -> None:
        waits, board = assignment.started_s is None, assignment.board.name
        self._note(kind, assignment.job, assignment=assignment.number, board=board, waits=waits)

    build, count = functools.partialmethod(_note, "build"), functools.partialmethod(_note, "count")
    measure, revoke = functools.partialmethod(_note_at, "measure"), functools.partialmethod(_note_at, "revoke")


class Hands:
    """A fleet whose answers a test gives itself. It keeps what is asked and not yet answered, oldest first."""

    def __init__(self, *boards: str, **settings: Any) -> None:
        values: dict[str, Any] = {"batch": 4, "warmup": 4, "builders": 8}
        self.worker = Recorder()
        self.state = FleetState(SchedulerSettings(**(values | settings)), self.worker)
        self.now_s = 0.0
        self.seen: list[Act] = []
        self.searches: dict[int, Act] = {}
        self.builds: dict[int, Act] = {}
        self.measures: dict[int, Act] = {}
        self._made = 0
        self.boards(*boards)

    def tell(self, event: Callable[..., None] | None = None, *given: Any, after_s: float = 0.0) -> list[Act]:
        """Let an event happen after a while, or time pass; return what is done then."""
        self.now_s += after_s
        self.state.now_s = self.now_s
        if event is not None:
            event(self.state, *given)
        step(self.state, self.now_s)
        acts, self.worker.acts = self.worker.acts, []
        for act in acts:
            if act.kind == "search":
                self.searches[act.request] = act
            elif act.kind == "build":
                self.builds[act.job] = act
            elif act.kind == "measure":
                self.measures[act.assignment] = act
        self.measures = {n: act for n, act in self.measures.items() if n in self.state.assignments}
        self.builds = {job: act for job, act in self.builds.items() if job in self.state.jobs}
        self.seen += acts
        return acts

    def add(self, *names: str, **fields: Any) -> Hands:
        self.tell(events.add_campaign, campaign(*names, **fields))
        return self

    def boards(self, *names: str, board_type: str = "nano", **fields: Any) -> None:
        for name in names:
            events.arrive(self.state, name, board_type, **fields)
        self.tell()

    def propose(self, request: int, count: int | None = None, exhausted: bool = False) -> list[Act]:
        search = self.searches.pop(request)
        count = search.count if count is None else count
        self._made += count
        names = map(str, range(self._made - count, self._made))
        return self.tell(events.proposed, request, name_candidates(*names), exhausted)

    def build(self, job: int, side: FaultSide | None = None) -> list[Act]:
        self.builds.pop(job)
        return self.tell(events.built, job, side)

    def measure(
        self, assignment: int, side: FaultSide | None = None, latency_s: float = 1e-3, board_s: float = 2.0
    ) -> list[Act]:
        self.measures.pop(assignment)
        measured_s = latency_s if side is None else None
        return self.tell(events.measured, assignment, side, board_s, measured_s, after_s=board_s)

    def supply(self) -> None:
        while self.searches or self.builds:
            for request in list(self.searches):
                self.propose(request)
            for job in list(self.builds):
                self.build(job)

    def running(self) -> list[Act]:
        at_boards = self.state.assignments
        return [m for number, m in self.measures.items() if at_boards[number].started_s is not None]

    def finish(self, most: int = 10_000, board_s: float = 2.0) -> int:
        """Go on until nothing runs, or for so many measurements; returns how many trials have counted."""
        self.supply()
        while self.running() and most:
            self.measure(self.running()[0].assignment, board_s=board_s)
            self.supply()
            most -= 1
        return len(self.of("count"))

    def of(self, kind: str) -> list[Act]:
        return [act for act in self.seen if act.kind == kind]

    def status(self, name: str = "vision") -> Status:
        """A campaign's status."""
        return self.state.campaigns[name].status

    def ended(self, name: str = "vision") -> list[str]:
        """Why workloads of a campaign were searched no further."""
        return [task.ended for task in self.state.campaigns[name].tasks if task.ended]
