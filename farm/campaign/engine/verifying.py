"""Connect verification with the engine: lend it boards, execute its requests, return the answers.

`farm.campaign.verify` verifies; the roster decides which boards can be lent.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from farm.campaign.engine import boards, builds
from farm.campaign.engine.active import Active
from farm.campaign.engine.roster import Roster
from farm.campaign.engine.searches import Replayed, Searches
from farm.campaign.plan_estimate import CHECK_S
from farm.campaign.scheduler import events
from farm.campaign.scheduler import values as v
from farm.campaign.scheduler.fleet import FleetState
from farm.campaign.verify.programs import (
    BuildWanted,
    MeasureWanted,
    ModelWanted,
    ReplayWanted,
    Request,
    RunWanted,
)
from farm.campaign.verify.verification import Verification
from farm.errors import FarmError
from farm.processes.calls import Calls
from farm.processes.jobs import TIMEOUT_S, JobProcess, ProcessEndedError, take
from farm.search import tvm_env
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Order


class ModelCompiles:
    """Jobs for the compiler process, one at a time, each with the caller's key. Not thread-safe."""

    def __init__(self) -> None:
        self._process: JobProcess | None = None
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._running: Calls[tuple[Any, Any]] = Calls()

    def prepare(self) -> None:
        """Start the process, which takes seconds, for an expected job."""
        if self._process is None:
            self._begin(_load)

    def submit(self, key: Any, request: Any) -> None:
        """Queue `request.job`; `poll` returns the answer."""
        self._waiting.append((key, request))

    def poll(self) -> list[tuple[Any, Any]]:
        """Return finished requests, each with its result or the FarmError that it raised."""
        done: list[tuple[Any, Any]] = []
        for (_, request), call in self._running.take():
            try:
                answer = take(call, 0.0, request.what if request else "the compiler was not started")
            except FarmError as error:
                answer = error
                if not call.done() or isinstance(call.exception(), ProcessEndedError):
                    self._end()
            if request is not None:
                done.append((request, answer))
        if not self._running and self._waiting:
            key, request = self._waiting.popleft()
            try:
                self._begin(request.job, key, request)
            except FarmError as error:  # no memory for a process
                done.append((request, error))
        return done

    def forget(self, key: Any) -> None:
        self._waiting = deque(each for each in self._waiting if each[0] != key)
        if self._running.drop(lambda each: each[0] == key):
            self._end()

    def close(self) -> None:
        self._waiting.clear()
        self._end()

    def _begin(self, job: Callable[[], Any], key: Any = None, request: Any = None) -> None:
        if self._process is None:
            self._process = JobProcess()
        self._running.add(self._process.give(job), (key, request), TIMEOUT_S)

    def _end(self) -> None:
        self._running.drop(lambda _: True)
        process, self._process = self._process, None
        if process is not None:
            process.close()


def _load() -> None:
    tvm_env.load_compiler()


# Finalists are compared on two boards.
_LEAST_LENT = 2
# How long finalists wait for evidence that no board drifts.
_SETTLE_S = 90.0


class _Job(NamedTuple):
    """A request of verification, on its way to execution and back."""

    campaign: str
    request: Request


@dataclasses.dataclass(eq=False)
class _Open:
    active: Active
    verification: Verification
    boards: set[str] = dataclasses.field(default_factory=set)
    settle_by_s: float | None = None

    @property
    def has_host(self) -> bool:
        """Whether its board is the machine that searches and builds, which then rest."""
        return self.verification.rests


class Verifying:
    """The running verifications. Not thread-safe; never waits."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        fleet: FleetState,
        roster: Roster,
        engine_boards: boards.EngineBoards,
        compilers: builds.BuildFarm,
        searches: Searches,
        note: Callable[[str, str, str], None],
    ) -> None:
        self._settings, self._store, self._fleet, self._roster = settings, store, fleet, roster
        self._boards, self._compilers, self._searches, self._note = engine_boards, compilers, searches, note
        self._models = ModelCompiles()
        self._open: dict[str, _Open] = {}
        self._ended: dict[str, dict[str, Any]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._open or self._ended)

    def begin(self, active: Active) -> None:
        """Begin the verification of a campaign whose search is over, with a share of its budget."""
        campaign = active.campaign
        trials = max(active.order.budget.trials or 0, campaign.counted) / max(1, len(campaign.tasks))
        rests = self._settings.isolation == "exclusive" and any(of.is_host for of in active.order.types)
        verification = Verification(
            active.id,
            active.order,
            self._store,
            self._settings,
            trials=trials,
            rests=rests,
            count_fault=active.count_fault,
        )
        self._open[active.name] = _Open(active, verification)
        if not rests:  # it loads while finalists are measured
            self._models.prepare()

    def stop(self, name: str) -> None:
        """Drop a campaign's verification; its records stay."""
        self._models.forget(name)
        if name in self._open:
            self._give_boards_back(self._open.pop(name))

    def close(self) -> None:
        self._models.close()

    def poll(self) -> None:
        """Take answers, and pause search and build while the machine that they run on measures finalists."""
        for request, answer in self._models.poll():
            request.answer = answer
        self._fleet.reserved = any(each.has_host for each in self._open.values())

    def step(self) -> None:
        """Lend boards, start requests, end verifications that are done."""
        for name, each in list(self._open.items()):
            if not self._is_settled(each):
                continue
            verification = each.verification
            if each.has_host and (self._fleet.requests or self._fleet.building):
                continue  # what is under way ends first; nothing new begins
            self._lend(each)
            for request in verification.step(time.monotonic()):
                self._ask(each, request)
            for board in verification.spare():
                self._return_surplus(each, board)
            if verification.done:
                self._open.pop(name)
                self._ended[name] = verification.verdict.to_document()
                self._give_boards_back(each)

    def take_ended(self) -> set[str]:
        """Return campaigns whose verification is done. `to_verdict` describes them until the next call."""
        return set(self._ended)

    def is_open(self, name: str) -> bool:
        return name in self._open

    def to_verdict(self, active: Active) -> dict[str, Any] | None:
        if active.name in self._ended:
            return self._ended.pop(active.name)
        each = self._open.get(active.name)
        return None if each is None else each.verification.verdict.to_document()

    def to_progress(self, active: Active, trial_s: float | None) -> dict[str, Any] | None:
        """Return the progress of verification and finals, and the time to their end (s).

        `trial_s` is how long a trial of the search held a board: the estimate until the first measurement.
        """
        each = self._open.get(active.name)
        if each is None:
            return None
        verification = each.verification
        usual, most = verification.left
        mean_s = verification.measured_s / verification.measured if verification.measured else trial_s
        rest_s = verification.unchecked * CHECK_S + verification.finals.left_s
        timed, models = verification.finals.count
        return {
            "measured": verification.measured,
            "at_most": verification.measured + most,
            "eta_s": None if mean_s is None else usual * mean_s / max(1, len(each.boards)) + rest_s,
            "timed": timed,
            "models": models,
            "timing": verification.finals.is_begun,
        }

    # Answers; each method returns whether the request was its own

    def on_built(self, built: builds.BuildAnswer) -> bool:
        return self._answer(built.job, built.result)

    def on_replayed(self, answer: Replayed) -> None:
        self._answer(answer.job, answer.replay)

    def on_ran(self, report: boards.Ran) -> None:
        self._answer(report.job, (report.outcome, report.outputs))

    def on_measured(self, report: boards.TrialMeasured) -> bool:
        if not self._answer(report.assignment, (report.outcome, report.board_s)):
            return False
        name = report.assignment.campaign
        energy_j = self._open[name].active.find_energy_j(report) if name in self._open else 0.0
        events.finalist_measured(self._fleet, name, report.board_s, energy_j)
        return True

    def _answer(self, job: Any, answer: Any) -> bool:
        """Pass on the answer of a request of ours; a late one is dropped."""
        if isinstance(job, _Job):
            job.request.answer = answer
        return isinstance(job, _Job)

    def take(self, report: boards.Left | boards.AskedBack) -> None:
        """Take back a board that is gone or leaves; its requests are planned anew."""
        for each in self._open.values():
            if report.board in each.boards:
                each.boards.discard(report.board)
                each.verification.take(report.board)

    def _is_settled(self, each: _Open) -> bool:
        """Whether boards have just run their reference kernels, so that finalists can be chosen by their results."""
        types = {of.board_type for of in each.active.order.types}
        if each.settle_by_s is None:
            each.settle_by_s = time.monotonic() + _SETTLE_S
            self._boards.ask_reference_kernels(types)
        return time.monotonic() > each.settle_by_s or not self._boards.is_settling(types)

    def _return_surplus(self, each: _Open, board: str) -> None:
        """Return an idle board, if this verification has no use for it, or an earlier one has.

        Of two that hold one board each, and each wait for a second one, the later gives way.
        """
        about = self._roster.find(board)
        if about is None:
            return
        kind, earlier = about.board_type, list(self._open.values())
        earlier = [other for other in earlier[: earlier.index(each)] if other.active.order.may_use(board, about.labels)]
        if self._count_missing(each, kind) < 0 or any(self._count_missing(other, kind) > 0 for other in earlier):
            self._return(each, board)

    def _count_missing(self, each: _Open, board_type: str) -> int:
        """Return how many boards of a type a verification could use beyond those that it has."""
        have = sum(self._roster.is_of(name, board_type) for name in each.boards)
        return each.verification.wants().get(board_type, 0) - have

    def _lend(self, each: _Open) -> None:
        order = each.active.order
        each.verification.expect({of.board_type: self._roster.count(order, of.board_type) for of in order.types})
        for board_type, count in each.verification.wants().items():
            have = sum(self._roster.is_of(name, board_type) for name in each.boards)
            most = self._find_most(order, board_type)
            for name in self._roster.lend(order, board_type, max(0, min(count, most) - have)):
                each.boards.add(name)
                about = self._roster.find(name)
                each.verification.give(name, board_type, bool(about and about.description.get("simulated")))

    def _find_most(self, order: Order, board_type: str) -> int:
        """Limit how many boards of a type are lent: all, or half of them while searches have work for them."""
        here = self._roster.count(order, board_type)
        searched = any(
            lane.board_type == board_type and lane.campaign.status is v.Status.RUNNING for lane in self._fleet.lanes
        )
        return max(_LEAST_LENT, here // 2) if searched else here

    def _ask(self, each: _Open, request: Request) -> None:
        job = _Job(each.active.name, request)
        match request:
            case ReplayWanted(key=key):
                task = v.TaskKey(each.active.name, key.workload, key.board_type, key.point)
                self._searches.replay(job, task, request.trace_json)
            case BuildWanted():
                self._compilers.submit(job, request.module_json, request.target, request.standalone)
            case RunWanted():
                self._boards.run(job, request.board, request.point, request.spec, request.program, request.inputs)
            case MeasureWanted():
                self._boards.measure(job, request.board, request.point, request.spec, request.library)
            case ModelWanted():
                self._models.submit(each.active.name, request)

    def _return(self, each: _Open, board: str) -> None:
        each.boards.discard(board)
        each.verification.take(board)
        self._roster.take_back(board)

    def _give_boards_back(self, each: _Open) -> None:
        for board in list(each.boards):
            self._return(each, board)
