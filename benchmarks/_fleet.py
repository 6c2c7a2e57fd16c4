"""Simulate a fleet in virtual time from a seed: searches, compilers, and boards that fail, leave and return.

It drives `scheduler` as an engine would, and keeps its own books, against which the scheduler's are checked.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Mapping

from device_agent.protocol import FaultSide
from farm.campaign.scheduler import values as v
from farm.campaign.scheduler.fleet import FleetState
from farm.campaign.scheduler.scheduler import step
from farm.errors import InternalError


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
    changes: list[v.Changed] = dataclasses.field(default_factory=list)

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

    arrival: v.BoardArrived
    point: str
    running: v.Measure | None = None
    waiting: v.Measure | None = None
    began_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Gone:
    """A board leaves at the end of a measurement, if it still runs that."""

    board: str
    assignment: int


class Simulation:
    """One run: add events with `at`, then `run`. `state` and `books` may be read between steps."""

    def __init__(self, settings: v.SchedulerSettings, fleet: SimulatedFleet, seed: int = 0) -> None:
        self.state = FleetState(settings)
        self.now_s = 0.0
        self.books = Books()
        self._fleet = fleet
        self._random = random.Random(seed)
        self._coming: list[tuple[float, int, v.Event | _Gone]] = []
        self._serial = 0
        self._wake_s: float | None = None
        self._boards: dict[str, _Board] = {}
        self._open: set[tuple[v.TaskKey, str]] = set()
        self._made: dict[v.TaskKey, int] = {}
        self._counted: dict[v.TaskKey, int] = {}
        for board_type, count in fleet.boards.items():
            for number in range(count):
                self.at(0.0, v.BoardArrived(f"{board_type}-{number:04}", board_type))

    def at(self, time_s: float, event: v.Event | _Gone) -> None:
        """Schedule an event (virtual seconds from the beginning)."""
        self._serial += 1
        heapq.heappush(self._coming, (time_s, self._serial, event))

    def run(self, steps: int | None = None) -> Books:
        """Simulate until nothing more can happen, or for this many steps."""
        while (steps is None or steps > 0) and self.step():
            steps = None if steps is None else steps - 1
        return self.books

    def step(self) -> bool:
        """Simulate the next event; False where there is none."""
        event = None
        if self._coming and (self._wake_s is None or self._coming[0][0] <= self._wake_s):
            time_s, _, event = heapq.heappop(self._coming)
        elif self._wake_s is not None:
            time_s = self._wake_s
        else:
            return False
        if any(campaign.status not in v.OVER for campaign in self.state.campaigns.values()):
            self.books.present_s += len(self._boards) * (time_s - self.now_s)
            self.books.end_s = time_s
        self.now_s = time_s
        events = [] if event is None else self._happen(event)
        decided = step(self.state, events, self.now_s)
        self._wake_s = decided.wake_s
        self.books.steps += 1
        for decision in decided.decisions:
            self._carry_out(decision)
        return True

    @property
    def open(self) -> int:
        """Count candidates that were proposed and have no result."""
        return len(self._open)

    # What happens

    def _happen(self, event: v.Event | _Gone) -> list[v.Event]:
        """Apply an event to the fleet; return the scheduler's events."""
        if isinstance(event, v.BoardArrived):
            self._boards[event.board] = _Board(event, event.point)
        elif isinstance(event, v.BoardLeft):
            self._leave(event.board)
        elif isinstance(event, _Gone):
            board = self._boards.get(event.board)
            if board is None or board.running is None or board.running.assignment != event.assignment:
                return []
            self._leave(event.board)
            self.at(self.now_s + self._vary(self._fleet.away_s), board.arrival)
            return [v.BoardLeft(event.board)]
        elif isinstance(event, v.Measured):
            self._finish(event.assignment)
        elif isinstance(event, v.Proposed):
            return [self._propose(event)]
        return [event]

    def _propose(self, event: v.Proposed) -> v.Event:
        """Note a search's candidates when it proposes them, even if its answer is late."""
        known = event.request in self.state.requests
        if not known:
            self.books.late += 1
            return event
        task = self.state.tasks[self.state.requests[event.request].task].key
        self.books.proposed += len(event.candidates)
        self._open.update((task, candidate) for candidate in event.candidates)
        return event

    def _finish(self, assignment: int) -> None:
        """End a board's measurement, and begin the waiting one."""
        if assignment not in self.state.assignments:
            self.books.late += 1
            return
        board = self._boards[self.state.assignments[assignment].board]
        self._stop(board)
        if board.waiting is not None:
            following, board.waiting = board.waiting, None
            self._begin(board, following)

    def _stop(self, board: _Board) -> None:
        if board.running is not None:
            self.books.busy_s += self.now_s - board.began_s
            board.running = None

    def _leave(self, name: str) -> None:
        board = self._boards.pop(name, None)
        if board is not None:
            self._stop(board)

    def _begin(self, board: _Board, measure: v.Measure) -> None:
        """Begin a measurement; its result is drawn now."""
        chances, board.running, board.began_s = self._fleet.chances, measure, self.now_s
        takes_s = self._vary(self._fleet.measure_s)
        if self._happens(chances.straggler):
            takes_s *= chances.straggler_times
        if board.point != measure.task.point:
            board.point = measure.task.point
            self.books.switches += 1
            takes_s += self._fleet.switch_s
        takes_s = min(takes_s, self.state.settings.measure_limit_s)
        end_s = self.now_s + takes_s
        if self._happens(chances.leave):
            self.at(end_s, _Gone(measure.board, measure.assignment))
            return
        side, latency_s = self._draw_side(), None
        if side is None:
            trials = self._counted.get(measure.task, 0)
            latency_s = 1e-3 * (0.2 + self._random.expovariate(1.0)) / (1.0 + math.log1p(trials))
        result = v.Measured(measure.assignment, side, takes_s, latency_s)
        self.at(end_s, result)
        if self._happens(chances.repeated):
            self.at(end_s + self._vary(1.0), result)

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

    # What was decided

    def _carry_out(self, decision: v.Decision) -> None:
        """Execute a decision. Raises InternalError where a trial is counted twice, or was never proposed."""
        if isinstance(decision, v.Measure):
            self._measure(decision)
        elif isinstance(decision, v.Build):
            self._build(decision)
        elif isinstance(decision, v.Search):
            self._search(decision)
        elif isinstance(decision, v.Revoke):
            self._revoke(decision)
        elif isinstance(decision, v.Count):
            self.books.counted += 1
            self._counted[decision.task] = self._counted.get(decision.task, 0) + 1
            self._conclude(decision.task, decision.candidate)
        elif isinstance(decision, v.Discard):
            self.books.discarded += 1
            self._conclude(decision.task, decision.candidate)
        elif isinstance(decision, v.Ban):
            self.books.banned += 1
            self._conclude(decision.task, decision.candidate)
        elif isinstance(decision, v.Changed):
            self.books.changes.append(decision)
            if decision.status in v.OVER and not self.books.shares_s:
                self.books.shares_s = dict(self.state.owner_board_s)

    def _conclude(self, task: v.TaskKey, candidate: str) -> None:
        if (task, candidate) not in self._open:
            raise InternalError(f"candidate {candidate} of {task} was concluded twice, or was never proposed")
        self._open.discard((task, candidate))

    def _measure(self, decision: v.Measure) -> None:
        board = self._boards[decision.board]
        if (board.running is not None) is not decision.waits or board.waiting is not None:
            raise InternalError(f"board {decision.board} was given more than it can take")
        self.books.doubled += len(self.state.jobs[decision.job].assignments) > 1
        if decision.waits:
            board.waiting = decision
        else:
            self._begin(board, decision)

    def _revoke(self, decision: v.Revoke) -> None:
        board = self._boards.get(decision.board)
        if board is None:
            return
        if board.waiting is not None and board.waiting.assignment == decision.assignment:
            board.waiting = None
        elif board.running is not None and board.running.assignment == decision.assignment:
            self._stop(board)
            if board.waiting is not None:
                following, board.waiting = board.waiting, None
                self._begin(board, following)

    def _build(self, decision: v.Build) -> None:
        side = None
        if self._happens(self._fleet.chances.build_failed):
            side = FaultSide.CANDIDATE
        elif self._happens(self._fleet.chances.build_lost):
            side = FaultSide.FARM
        self.at(self.now_s + self._vary(self._fleet.build_s), v.Built(decision.job, side))

    def _search(self, decision: v.Search) -> None:
        end_s = self.now_s + self._vary(self._fleet.search_s)
        if self._happens(self._fleet.chances.search_failed):
            self.at(end_s, v.SearchFailed(decision.request))
            return
        made = self._made.get(decision.task, 0)
        space = made + decision.count if self._fleet.space is None else self._fleet.space
        last = min(space, made + decision.count)
        self._made[decision.task] = last
        candidates = tuple(str(number) for number in range(made, last))
        self.at(end_s, v.Proposed(decision.request, candidates, exhausted=last < made + decision.count))

    def _happens(self, chance: float) -> bool:
        return chance > 0.0 and self._random.random() < chance

    def _vary(self, time_s: float) -> float:
        return time_s * (1.0 + self._fleet.spread * (2.0 * self._random.random() - 1.0))
