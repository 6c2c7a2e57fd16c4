"""Connect verification with the engine: lend it boards, and carry out what it asks for.

`farm.campaign.verify` verifies; the roster decides which boards can be lent.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from device_agent.protocol import MeasureSpec, OperatingPoint, RunSpec
from farm.campaign.engine import boards, builds
from farm.campaign.engine.active import Active
from farm.campaign.engine.roster import Roster
from farm.campaign.engine.searches import Searches
from farm.campaign.plan_estimate import CHECK_S
from farm.campaign.scheduler import events
from farm.campaign.scheduler.fleet import FleetState
from farm.campaign.scheduler.state import Status, TaskKey
from farm.campaign.verify.programs import RecordKey, Replay
from farm.campaign.verify.verification import LentBoard, Verification
from farm.crew.held_board import Ended
from farm.errors import FarmError
from farm.processes.calls import Calls
from farm.processes.jobs import TIMEOUT_S, JobProcess, ProcessEndedError, take
from farm.search import tvm_env
from farm.search.codegen.build_pool import BuildResult
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Order

# Finalists are compared on two boards.
_LEAST_LENT = 2
# How long finalists wait for evidence that no board drifts.
_SETTLE_S = 90.0


class ModelCompiles:
    """Jobs for the compiler process, one at a time, each for a campaign. Not thread-safe."""

    def __init__(self) -> None:
        self._process: JobProcess | None = None
        self._waiting: deque[_Compile] = deque()
        self._running: Calls[_Compile] = Calls()

    def prepare(self) -> None:
        """Start the process, which takes seconds, for an expected job."""
        if self._process is None:
            self.submit("", _load, "the compiler was not started")
            self.poll()

    def submit(self, campaign: str, job: Callable[[], Any], what: str) -> Future[Any]:
        """Queue a job; return its answer: a result, or the FarmError that it raised."""
        self._waiting.append(each := _Compile(campaign, job, what, Future()))
        return each.answer

    def poll(self) -> None:
        """Answer what ended, and begin the next."""
        for each, call in self._running.take():
            try:
                each.answer.set_result(take(call, 0.0, each.what))
            except FarmError as error:
                each.answer.set_exception(error)
                if not call.done() or isinstance(call.exception(), ProcessEndedError):
                    self._end()
        if not self._running and self._waiting:
            each = self._waiting.popleft()
            try:
                self._process = self._process or JobProcess()
                self._running.add(self._process.give(each.job), each, TIMEOUT_S)
            except FarmError as error:  # no memory for a process
                each.answer.set_exception(error)

    def forget(self, campaign: str) -> None:
        self._waiting = deque(each for each in self._waiting if each.campaign != campaign)
        if self._running.drop(lambda each: each.campaign == campaign):
            self._end()

    def close(self) -> None:
        self._waiting.clear()
        self._end()

    def _end(self) -> None:
        self._running.drop(lambda _: True)
        process, self._process = self._process, None
        if process is not None:
            process.close()


class _Compile(NamedTuple):
    campaign: str
    job: Callable[[], Any]
    what: str
    answer: Future[Any]


def _load() -> None:
    tvm_env.load_compiler()


class _Open:
    """A campaign's verification with what it has been lent, and its worker."""

    def __init__(self, active: Active, of: Verifying) -> None:
        self.active, self._of = active, of
        self.settle_by_s: float | None = None
        self.verification: Verification

    # The worker; a board that has left answers nothing

    def replay(self, key: RecordKey, trace_json: str) -> Future[Replay]:
        task = TaskKey(self.active.name, key.workload, key.board_type, key.point)
        return self._of.searches.replay(task, trace_json)

    def build(self, module_json: str, target: Mapping[str, Any], standalone: bool) -> Future[BuildResult]:
        return self._of.compilers.submit(module_json, target, standalone)

    def run(
        self, board: str, point: OperatingPoint, spec: RunSpec, program: bytes, inputs: Mapping[str, Any]
    ) -> Future[Ended]:
        if board not in self.verification.boards:
            return Future()
        return self._of.engine_boards.run(board, point, spec, program, inputs)

    def measure(self, board: str, point: OperatingPoint, spec: MeasureSpec, library: bytes) -> Future[Ended]:
        if board not in self.verification.boards:
            return Future()
        measured = self._of.engine_boards.measure(board, point, spec, library)
        measured.add_done_callback(lambda ended: self._of.measured.append((self.active, board, ended)))
        return measured

    def compile(self, job: Callable[[], Any], what: str) -> Future[Any]:
        return self._of.models.submit(self.active.name, job, what)


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
    ) -> None:
        self._settings, self._store, self._roster, self.fleet = settings, store, roster, fleet
        self.engine_boards, self.compilers, self.searches = engine_boards, compilers, searches
        self.models = ModelCompiles()
        # Measurements of finalists that ended, to be charged in `poll`, where errors are not lost.
        self.measured: deque[tuple[Active, str, Future[Ended]]] = deque()
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
        self._open[active.name] = each = _Open(active, self)
        each.verification = Verification(
            active.id,
            active.order,
            self._store,
            self._settings,
            each,
            trials=trials,
            rests=rests,
            count_fault=active.count_fault,
        )
        if not rests:  # it loads while finalists are measured
            self.models.prepare()

    def stop(self, name: str) -> None:
        """Drop a campaign's verification; its records stay."""
        self.models.forget(name)
        if name in self._open:
            each = self._open.pop(name)
            self._return(each, *each.verification.boards)

    def close(self) -> None:
        self.models.close()

    def poll(self) -> None:
        """Take answers, charge what was measured, and pause search and build while their machine measures finalists."""
        self.models.poll()
        while self.measured:
            active, board, measured = self.measured.popleft()
            ended = measured.result()
            energy_j = active.find_energy_j(board, ended.result, ended.board_s)
            events.finalist_measured(self.fleet, active.name, ended.board_s, energy_j)
        self.fleet.reserved = any(each.verification.rests for each in self._open.values())

    def step(self) -> None:
        """Lend boards, let verifications go on, end those that are done."""
        for name, each in list(self._open.items()):
            if not self._is_settled(each):
                continue
            verification = each.verification
            if verification.rests and (self.fleet.requests or self.fleet.building):
                continue  # what is under way ends first; nothing new begins
            self._lend(each)
            verification.step(time.monotonic())
            for board in verification.spare():
                self._return_surplus(each, board)
            if verification.done:
                self._open.pop(name)
                self._ended[name] = verification.verdict
                self._return(each, *verification.boards)

    def take_ended(self) -> set[str]:
        """Return campaigns whose verification is done. `to_verdict` describes them until the next call."""
        return set(self._ended)

    def is_open(self, name: str) -> bool:
        return name in self._open

    def to_verdict(self, active: Active) -> dict[str, Any] | None:
        if active.name in self._ended:
            return self._ended.pop(active.name)
        each = self._open.get(active.name)
        return None if each is None else each.verification.verdict

    def to_progress(self, active: Active) -> dict[str, Any] | None:
        """Return the progress of verification and finals, and the time to their end (s).

        Until the first measurement, the estimate is how long a trial of the search held a board.
        """
        each = self._open.get(active.name)
        if each is None:
            return None
        verification = each.verification
        usual, most = verification.left
        mean_s = verification.measured_s / verification.measured if verification.measured else active.trial_s
        rest_s = verification.unchecked * CHECK_S + verification.finals.left_s
        timed, models = verification.finals.count
        return {
            "measured": verification.measured,
            "at_most": verification.measured + most,
            "eta_s": None if mean_s is None else usual * mean_s / max(1, len(verification.boards)) + rest_s,
            "timed": timed,
            "models": models,
            "timing": verification.finals.is_begun,
        }

    def take(self, gone: Collection[str]) -> None:
        """Take back boards that are gone or leave, all at once; their requests are planned anew."""
        for each in self._open.values():
            each.verification.take(*gone)

    def _is_settled(self, each: _Open) -> bool:
        """Whether boards have just run their reference kernels, so that finalists can be chosen by their results."""
        types = {of.board_type for of in each.active.order.types}
        if each.settle_by_s is None:
            each.settle_by_s = time.monotonic() + _SETTLE_S
            self.engine_boards.ask_reference_kernels(types)
        return time.monotonic() > each.settle_by_s or not self.engine_boards.is_settling(types)

    def _return_surplus(self, each: _Open, board: LentBoard) -> None:
        """Return an idle board, if this verification has no use for it, or an earlier one has.

        Of two that hold one board each, and each wait for a second one, the later gives way.
        """
        kind, earlier = board.board_type, list(self._open.values())
        earlier = [
            other for other in earlier[: earlier.index(each)] if self._roster.suits(board.name, other.active.order)
        ]
        if _count_missing(each, kind) < 0 or any(_count_missing(other, kind) > 0 for other in earlier):
            self._return(each, board.name)

    def _lend(self, each: _Open) -> None:
        order, verification = each.active.order, each.verification
        verification.expect({of.board_type: self._roster.count(order, of.board_type) for of in order.types})
        for board_type, count in verification.wants().items():
            wanted = min(count, self._find_most(order, board_type)) - len(verification.find_names(board_type))
            for about in self._roster.lend(order, board_type, max(0, wanted)):
                verification.give(about.board, board_type, bool(about.description.get("simulated")))

    def _find_most(self, order: Order, board_type: str) -> int:
        """Limit how many boards of a type are lent: all, or half of them while searches have work for them."""
        here = self._roster.count(order, board_type)
        searched = any(
            lane.board_type == board_type and lane.campaign.status is Status.RUNNING for lane in self.fleet.lanes
        )
        return max(_LEAST_LENT, here // 2) if searched else here

    def _return(self, each: _Open, *boards: str) -> None:
        each.verification.take(*boards)
        for board in boards:
            self._roster.take_back(board)


def _count_missing(each: _Open, board_type: str) -> int:
    """Return how many boards of a type a verification could use beyond those that it has."""
    return each.verification.wants().get(board_type, 0) - len(each.verification.find_names(board_type))
