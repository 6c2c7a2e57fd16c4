"""Between the engine and the winners of its campaigns: lends them boards, passes on what they ask and what is answered.

`farm.campaign.verify` finds winners; the roster says which boards can be lent.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from farm.campaign.after_trials import CHECK_S
from farm.campaign.engine import boards, builds
from farm.campaign.engine.active import Active
from farm.campaign.engine.roster import Roster
from farm.campaign.engine.searches import Replayed, Searches
from farm.campaign.order import Order
from farm.campaign.scheduler import values as v
from farm.campaign.scheduler.state import FleetState
from farm.campaign.verify.programs import (
    BuildWanted,
    MeasureWanted,
    ModelWanted,
    Replay,
    ReplayWanted,
    Request,
    RunWanted,
)
from farm.campaign.verify.remeasurement import Verification
from farm.errors import FarmError
from farm.processes.compile_subprocess import TIMEOUT_S, Apart
from farm.search import tvm_env
from farm.settings import Settings
from farm.store import Store


class ModelCompiles:
    """Jobs for the process, each with what the caller knows it by. Not thread-safe."""

    def __init__(self) -> None:
        self._apart: Apart | None = None
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._running: tuple[Any, Any, float] | None = None

    def prepare(self) -> None:
        """Start the process, which takes seconds: a job is expected."""
        if self._apart is None:
            self._apart = Apart([_load])
            self._running = (None, None, time.monotonic() + TIMEOUT_S)

    def submit(self, key: Any, request: Any) -> None:
        """Have `request.job` done; `poll` gives the answer."""
        self._waiting.append((key, request))

    def poll(self) -> list[tuple[Any, Any]]:
        """Requests that were done, each with what it returned or the FarmError that it raised."""
        done = []
        if self._running is not None and self._apart is not None:
            _, request, until_s = self._running
            late = time.monotonic() > until_s
            if late or self._apart.has_answer():
                self._running = None
                try:
                    answer = self._apart.take(0.0, request.what if request else "the compiler was not started")
                except FarmError as error:
                    answer = error
                    if late or not self._apart.is_alive():
                        self._end()
                if request is not None:
                    done.append((request, answer))
        if self._running is None and self._waiting:
            key, request = self._waiting.popleft()
            try:
                self._begin(key, request)
            except FarmError as error:  # no room for a process
                done.append((request, error))
        return done

    def forget(self, key: Any) -> None:
        """Nobody waits for a key's jobs any more."""
        self._waiting = deque(each for each in self._waiting if each[0] != key)
        if self._running is not None and self._running[0] == key:
            self._end()

    def close(self) -> None:
        """End the process."""
        self._waiting.clear()
        self._end()

    def _begin(self, key: Any, request: Any) -> None:
        if self._apart is None:
            self._apart = Apart([request.job])
        else:
            self._apart.give(request.job)
        self._running = (key, request, time.monotonic() + TIMEOUT_S)

    def _end(self) -> None:
        self._running = None
        apart, self._apart = self._apart, None
        if apart is not None:
            apart.__exit__()


def _load() -> None:
    """Load TVM's compiler."""
    tvm_env.load_compiler()


# Winners are told apart on two boards.
_LEAST_LENT = 2
# How long winners wait until it is clear that no board has lied about them.
_SETTLE_S = 90.0


class _Job(NamedTuple):
    """What a campaign's winners asked for, as it goes to whoever does it and comes back."""

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
        """Whether its boards are the machine that searches and builds, which then rests."""
        return self.verification.rests


class Verifying:
    """The verifications under way. Not thread-safe; never waits."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        crew: boards.BoardCrew,
        compilers: builds.BuildFarm,
        searches: Searches,
        note: Callable[[str, str, str], None],
    ) -> None:
        self._settings, self._store = settings, store
        self._crew, self._compilers, self._searches, self._note = crew, compilers, searches, note
        self._models = ModelCompiles()
        self._open: dict[str, _Open] = {}
        self._ended: dict[str, dict[str, Any]] = {}
        self._events: list[v.Event] = []

    @property
    def busy(self) -> bool:
        """Whether winners are being looked for."""
        return bool(self._open or self._ended or self._events)

    def begin(self, active: Active) -> None:
        """Find the winners of a campaign whose search is over, with a share of what that had."""
        counted = sum(int(task["counted"]) for task in active.tasks)
        trials = max(active.order.budget.trials or 0, counted) / max(1, len(active.tasks))
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
        if not rests:  # it loads while winners are measured
            self._models.prepare()
        self._reserve()

    def stop(self, name: str) -> None:
        """Give up a campaign's winners; records that were written stay."""
        self._models.forget(name)
        if name in self._open:
            self._give_boards_back(self._open.pop(name))
            self._reserve()

    def close(self) -> None:
        """End what runs beside the engine."""
        self._models.close()

    def poll(self) -> list[v.Event]:
        """What the scheduler has to hear: boards that were lent, what they did, and those that are back."""
        for request, answer in self._models.poll():
            request.answer = answer
        events, self._events = self._events, []
        return events

    def step(self, state: FleetState, roster: Roster) -> None:
        """Lend boards, ask for what is wanted, end what is done."""
        self._roster = roster
        for name, each in list(self._open.items()):
            if not self._is_settled(each):
                continue
            verification = each.verification
            if each.has_host and (state.requests or state.building):
                continue  # what is under way ends first; nothing new begins
            self._lend(each, state)
            for request in verification.step(time.monotonic()):
                self._ask(each, request)
            for board in verification.spare():
                self._return_surplus(each, board)
            if verification.done:
                self._open.pop(name)
                self._ended[name] = verification.verdict.to_document()
                self._give_boards_back(each)
                self._reserve()

    def take_ended(self) -> set[str]:
        """The campaigns whose winners are found. `to_verdict` says what came of them until they are asked for again."""
        return set(self._ended)

    def is_open(self, name: str) -> bool:
        """Whether a campaign's winners are being looked for."""
        return name in self._open

    def to_verdict(self, active: Active) -> dict[str, Any] | None:
        """What came of a campaign's winners so far."""
        if active.name in self._ended:
            return self._ended.pop(active.name)
        each = self._open.get(active.name)
        return None if each is None else each.verification.verdict.to_document()

    def to_winners(self, active: Active, trial_s: float | None) -> dict[str, Any] | None:
        """How far a campaign's winners and finals are, and how long the rest takes (s).

        `trial_s` is how long a trial of its search held a board: so long a measurement takes until there is one.
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

    # Answers; those that say whether it was theirs

    def on_built(self, built: builds.BuildAnswer) -> bool:
        """A build ended."""
        return self._answer(built.job, built.result)

    def on_replayed(self, answer: Replayed) -> None:
        """A trace was replayed, or could not be."""
        self._answer(answer.job, Replay(answer.module_json or None, answer.reason, answer.lost))

    def on_ran(self, report: boards.Ran) -> None:
        """A run ended."""
        self._answer(report.job, (report.outcome, report.outputs))

    def on_measured(self, report: boards.TrialMeasured) -> bool:
        """A measurement ended."""
        if not self._answer(report.assignment, (report.outcome, report.board_s)):
            return False
        self._events.append(v.WinnerMeasured(report.assignment.campaign, report.board_s))
        return True

    def _answer(self, job: Any, answer: Any) -> bool:
        """Whether a job was asked for here. It may be late: then nobody waits for the answer."""
        if isinstance(job, _Job):
            job.request.answer = answer
        return isinstance(job, _Job)

    def take(self, report: boards.Left | boards.AskedBack) -> None:
        """A board is gone, or about to go: what it is asked now is planned anew."""
        for each in self._open.values():
            if report.board in each.boards:
                each.boards.discard(report.board)
                each.verification.take(report.board)

    def _reserve(self) -> None:
        """Have search and build rest while winners are measured on the machine that they run on."""
        self._events.append(v.HostReserved(any(each.has_host for each in self._open.values())))

    def _is_settled(self, each: _Open) -> bool:
        """Whether boards have shown once more that they can be believed, before winners are chosen by their word."""
        types = {of.board_type for of in each.active.order.types}
        if each.settle_by_s is None:
            each.settle_by_s = time.monotonic() + _SETTLE_S
            self._crew.ask_anchors(types)
        return time.monotonic() > each.settle_by_s or not self._crew.is_settling(types)

    def _return_surplus(self, each: _Open, board: str) -> None:
        about = self._roster.find(board)
        if about is None:
            return
        have = sum(self._roster.is_of(name, about.board_type) for name in each.boards)
        if have > each.verification.wants().get(about.board_type, 0):
            self._return(each, board)

    def _lend(self, each: _Open, state: FleetState) -> None:
        order = each.active.order
        each.verification.expect({of.board_type: self._roster.count(order, of.board_type) for of in order.types})
        for board_type, count in each.verification.wants().items():
            have = sum(self._roster.is_of(name, board_type) for name in each.boards)
            most = self._find_most(order, board_type, state)
            for name in self._roster.lend(order, board_type, max(0, min(count, most) - have), state):
                each.boards.add(name)
                self._events.append(v.BoardLeft(name))
                about = self._roster.find(name)
                each.verification.give(name, board_type, bool(about and about.description.get("simulated")))

    def _find_most(self, order: Order, board_type: str, state: FleetState) -> int:
        """How many boards of a type may be lent: all, or half of them while searches have work for them too."""
        here = self._roster.count(order, board_type)
        searched = any(
            lane.board_type == board_type and state.campaigns[lane.campaign].status is v.Status.RUNNING
            for lane in state.lanes.values()
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
                self._crew.run(job, request.board, request.point, request.spec, request.program, request.inputs)
            case MeasureWanted():
                self._crew.measure(job, request.board, request.point, request.spec, request.library)
            case ModelWanted():
                self._models.submit(each.active.name, request)

    def _return(self, each: _Open, board: str) -> None:
        each.boards.discard(board)
        each.verification.take(board)
        self._events += self._roster.take_back(board)

    def _give_boards_back(self, each: _Open) -> None:
        for board in list(each.boards):
            self._return(each, board)
