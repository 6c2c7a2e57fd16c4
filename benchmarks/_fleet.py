"""Simulate a fleet in virtual time from a seed: searches, compilers, and boards that fail, leave and return.

It is the scheduler's worker, and keeps its own books, against which the scheduler's are checked.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from device_agent.protocol import FaultSide
from farm.campaign.scheduler import events
from farm.campaign.scheduler.fleet import FleetState
from farm.campaign.scheduler.scheduler import step
from farm.campaign.scheduler.state import (
    GOING,
    OVER,
    Assignment,
    CampaignEntry,
    Job,
    SchedulerSettings,
    SearchRequest,
    Task,
    TaskKey,
)
from farm.errors import InternalError
from farm.search.tuners.tasks import Candidate
from farm.values import DEFAULT_POINT


@dataclasses.dataclass(frozen=True)
class Chances:
    """The probability of each fault, per search, build or measurement.

    `leave` removes the board; `repeated` delivers a result twice.
    A `straggler` takes `straggler_times` as long as usual.
    """

    search_failed: float = 0.0
    build_failed: float = 0.0
    build_lost: float = 0.0
    candidate: float = 0.0
    board: float = 0.0
    leave: float = 0.0
    sample: float = 0.0
    farm: float = 0.0
    repeated: float = 0.0
    straggler: float = 0.0
    straggler_times: float = 20.0


@dataclasses.dataclass(frozen=True)
class SimulatedFleet:
    """Boards by type, and durations in seconds; single durations vary by `spread` (0.3: up to 30 %).

    A board that left returns after `away_s`. `space` is how many candidates a workload has; None: unlimited.
    """

    boards: Mapping[str, int]
    measure_s: float = 2.0
    search_s: float = 5.0
    build_s: float = 1.5
    switch_s: float = 2.0
    away_s: float = 60.0
    spread: float = 0.3
    chances: Chances = dataclasses.field(default_factory=Chances)
    space: int | None = None


@dataclasses.dataclass
class Books:
    """The results. Times are virtual seconds.

    `busy_s` and `present_s` are board time with work, and in all, while a campaign ran. `shares_s` is each owner's
    board time when the first campaign ended: until then all of them used the fleet.
    """

    proposed: int = 0
    counted: int = 0
    discarded: int = 0
    banned: int = 0
    doubled: int = 0
    switches: int = 0
    late: int = 0
    steps: int = 0
    busy_s: float = 0.0
    present_s: float = 0.0
    end_s: float = 0.0
    shares_s: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def utilisation(self) -> float:
        """The share of the boards' time with work."""
        return self.busy_s / self.present_s if self.present_s else 0.0

    @property
    def unfairness(self) -> float:
        """The largest relative deviation of an owner from an equal share."""
        if not self.shares_s:
            return 0.0
        equal = sum(self.shares_s.values()) / len(self.shares_s)
        return max(abs(share - equal) for share in self.shares_s.values()) / equal


@dataclasses.dataclass
class _Board:
    """A board's true state; `began_s` is when its measurement began."""

    board_type: str
    point: str = DEFAULT_POINT
    running: Assignment | None = None
    waiting: Assignment | None = None
    began_s: float = 0.0


class Simulation:
    """One run: add events with `at`, then `run`. `state` and `books` may be read between steps."""

    def __init__(self, settings: SchedulerSettings, fleet: SimulatedFleet, seed: int = 0) -> None:
        self.state = FleetState(settings, self)
        self.now_s = 0.0
        self.books = Books()
        self._fleet = fleet
        self._random = random.Random(seed)
        self._coming: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._boards: dict[str, _Board] = {}
        self._open: set[tuple[TaskKey, str]] = set()
        self._made: dict[TaskKey, int] = {}
        self._counted: dict[TaskKey, int] = {}
        for board_type, count in fleet.boards.items():
            for number in range(count):
                self.at(0.0, self._arrive, f"{board_type}-{number:04}", board_type)

    def at(self, time_s: float, event: Callable[..., None], *values: Any) -> None:
        """Schedule a call (virtual seconds from the beginning)."""
        self._serial += 1
        heapq.heappush(self._coming, (time_s, self._serial, event, values))

    def run(self, steps: int | None = None) -> Books:
        """Simulate until nothing more can happen, or for this many steps."""
        while (steps is None or steps > 0) and self.step():
            steps = None if steps is None else steps - 1
        return self.books

    def step(self) -> bool:
        """Simulate the next event; False where there is none."""
        due_s = self._find_due_s()
        has_event = bool(self._coming) and (due_s is None or self._coming[0][0] <= due_s)
        time_s = self._coming[0][0] if has_event else due_s
        if time_s is None:
            return False
        if any(campaign.status not in OVER for campaign in self.state.campaigns.values()):
            self.books.present_s += len(self._boards) * (time_s - self.now_s)
            self.books.end_s = time_s
        self.state.now_s = self.now_s = time_s
        if has_event:
            _, _, event, values = heapq.heappop(self._coming)
            event(*values)
        step(self.state, self.now_s)
        self.books.steps += 1
        return True

    def _find_due_s(self) -> float | None:
        """Return when something is due without an event: a wall clock's end, or a straggler to double."""
        campaigns = self.state.campaigns.values()
        times = [each.ends_s for each in campaigns if each.status in GOING and each.ends_s is not None]
        times += [
            pool.straggler_check_s
            for pool in self.state.pools.values()
            if pool.idle and any(lane.campaign.on_board for lane in pool.lanes)
        ]
        return min(times, default=None)

    @property
    def open(self) -> int:
        """Count candidates that were proposed and have no result."""
        return len(self._open)

    # What happens

    def _arrive(self, name: str, board_type: str, point: str = DEFAULT_POINT) -> None:
        self._boards[name] = _Board(board_type, point)
        events.arrive(self.state, name, board_type, point)

    def _leave(self, name: str, assignment: Assignment) -> None:
        """A board leaves at the end of a measurement, if it still runs that."""
        board = self._boards.get(name)
        if board is None or board.running is not assignment:
            return
        self._stop(self._boards.pop(name))
        self.at(self.now_s + self._vary(self._fleet.away_s), self._arrive, name, board.board_type)
        events.leave(self.state, name)

    def _propose(self, number: int, candidates: list[Candidate], exhausted: bool) -> None:
        """Note a search's candidates when it proposes them, unless its answer is late."""
        request = self.state.requests.get(number)
        if request is None:
            self.books.late += 1
        else:
            self.books.proposed += len(candidates)
            self._open.update((request.task.key, candidate.hash) for candidate in candidates)
        events.proposed(self.state, number, candidates, exhausted)

    def _finish(self, number: int, side: FaultSide | None, board_s: float, latency_s: float | None) -> None:
        """End a board's measurement, and begin the waiting one."""
        assignment = self.state.assignments.get(number)
        if assignment is None:
            self.books.late += 1
        else:
            self._begin_next(self._boards[assignment.board.name])
        events.measured(self.state, number, side, board_s, latency_s)

    def _begin_next(self, board: _Board) -> None:
        self._stop(board)
        if board.waiting is not None:
            following, board.waiting = board.waiting, None
            self._begin(board, following)

    def _stop(self, board: _Board) -> None:
        if board.running is not None:
            self.books.busy_s += self.now_s - board.began_s
            board.running = None

    def _begin(self, board: _Board, assignment: Assignment) -> None:
        """Begin a measurement; its result is drawn now."""
        chances, board.running, board.began_s = self._fleet.chances, assignment, self.now_s
        task = assignment.job.task.key
        takes_s = self._vary(self._fleet.measure_s)
        if self._happens(chances.straggler):
            takes_s *= chances.straggler_times
        if board.point != task.point:
            board.point = task.point
            self.books.switches += 1
            takes_s += self._fleet.switch_s
        takes_s = min(takes_s, self.state.settings.measure_limit_s)
        end_s = self.now_s + takes_s
        if self._happens(chances.leave):
            self.at(end_s, self._leave, assignment.board.name, assignment)
            return
        side, latency_s = self._draw_side(), None
        if side is None:
            trials = self._counted.get(task, 0)
            latency_s = 1e-3 * (0.2 + self._random.expovariate(1.0)) / (1.0 + math.log1p(trials))
        self.at(end_s, self._finish, assignment.number, side, takes_s, latency_s)
        if self._happens(chances.repeated):
            self.at(end_s + self._vary(1.0), self._finish, assignment.number, side, takes_s, latency_s)

    def _draw_side(self) -> FaultSide | None:
        chances = self._fleet.chances
        for chance, side in (
            (chances.candidate, FaultSide.CANDIDATE),
            (chances.board, FaultSide.BOARD),
            (chances.sample, FaultSide.SAMPLE),
            (chances.farm, FaultSide.FARM),
        ):
            if self._happens(chance):
                return side
        return None

    # The scheduler's worker. Raises InternalError where a trial is counted twice, or was never proposed.

    def search(self, request: SearchRequest) -> None:
        end_s = self.now_s + self._vary(self._fleet.search_s)
        if self._happens(self._fleet.chances.search_failed):
            self.at(end_s, events.search_failed, self.state, request.number)
            return
        task, count = request.task.key, request.count
        made = self._made.get(task, 0)
        space = made + count if self._fleet.space is None else self._fleet.space
        last = min(space, made + count)
        self._made[task] = last
        candidates = [Candidate(task.workload, str(number), (), "", "") for number in range(made, last)]
        self.at(end_s, self._propose, request.number, candidates, last < made + count)

    def build(self, job: Job) -> None:
        side = None
        if self._happens(self._fleet.chances.build_failed):
            side = FaultSide.CANDIDATE
        elif self._happens(self._fleet.chances.build_lost):
            side = FaultSide.FARM
        self.at(self.now_s + self._vary(self._fleet.build_s), events.built, self.state, job.number, side)

    def measure(self, assignment: Assignment) -> None:
        board, waits = self._boards[assignment.board.name], assignment.started_s is None
        if (board.running is not None) is not waits or board.waiting is not None:
            raise InternalError(f"board {assignment.board.name} was given more than it can take")
        self.books.doubled += len(assignment.job.assignments) > 1
        if waits:
            board.waiting = assignment
        else:
            self._begin(board, assignment)

    def revoke(self, assignment: Assignment) -> None:
        board = self._boards.get(assignment.board.name)
        if board is not None and board.waiting is assignment:
            board.waiting = None
        elif board is not None and board.running is assignment:
            self._begin_next(board)

    def count(self, job: Job, latency_s: float | None) -> None:
        self.books.counted += 1
        self._counted[job.task.key] = self._counted.get(job.task.key, 0) + 1
        self._conclude(job.task, job.candidate)

    def drop(self, task: Task, candidate: Candidate, banned: str) -> None:
        if banned:
            self.books.banned += 1
        else:
            self.books.discarded += 1
        self._conclude(task, candidate)

    def change(self, campaign: CampaignEntry) -> None:
        if campaign.status in OVER and not self.books.shares_s:
            self.books.shares_s = dict(self.state.owner_board_s)

    def _conclude(self, task: Task, candidate: Candidate) -> None:
        if (task.key, candidate.hash) not in self._open:
            raise InternalError(f"candidate {candidate.hash} of {task.key} was concluded twice, or was never proposed")
        self._open.discard((task.key, candidate.hash))

    def _happens(self, chance: float) -> bool:
        return chance > 0.0 and self._random.random() < chance

    def _vary(self, time_s: float) -> float:
        return time_s * (1.0 + self._fleet.spread * (2.0 * self._random.random() - 1.0))
