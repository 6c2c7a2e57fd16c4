"""Distribute the planners' points over all series and boards of one sweep.

A series is a variant and batch. A pinned point measures all series, since pinning and cooling cost more than another
run. `adaptive.Planner` decides what is next in one series.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from device_agent.protocol import OperatingPoint
from farm.points.grid import leave_out, merge_reached
from farm.points.values import Estimate, Goal, Grid, GridPoint, PointMeasurement
from farm.sweep.plan.adaptive import Planner, PlannerSettings, Step

Series = tuple[str, int]

# Stands for a visit in progress on another board; its figures are never read.
_NOBODY = Estimate(1.0, 1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class VisitTask:
    """A point to pin and the series to measure there, the first one for `reason`."""

    point: GridPoint
    series: tuple[Series, ...]
    reason: str


class Conductor:
    """The state of one running sweep. `visits` are earlier ones, by series."""

    def __init__(
        self,
        grid: Grid,
        goal: Goal,
        settings: PlannerSettings,
        series: Sequence[Series],
        visits: Mapping[Series, Sequence[PointMeasurement]] | None = None,
    ) -> None:
        self._goal, self._settings = goal, settings
        self.series = tuple(series)
        self.visits = {each: list((visits or {}).get(each, ())) for each in series}
        self.grid = grid
        self._planners = self._plan_all(grid)
        self._pending: dict[str, str] = {}  # board -> key
        self._turn = 0
        # Changes of the planners' inputs, and the change at which a board asked without result; planning takes some
        # milliseconds.
        self._changes, self._in_vain = 0, dict[str, int]()
        self.void = ""
        self.reason = ""  # why the sweep has ended
        self.notes: list[str] = []  # messages about the grid

    def find_next(self, board: str) -> tuple[VisitTask | None] | None:
        """Return the next task of a board, in a tuple: None in it where nothing is left for it.

        None where that depends on other boards' results.
        """
        if not self.void and self._in_vain.get(board) == self._changes:
            return None
        task = None if self.void else self._plan(board)
        if task is None:
            self._in_vain[board] = self._changes
            return (None,) if self.void or not any(other != board for other in self._pending) else None
        self._pending[board] = task.point.key
        return (task,)

    def add(self, series: Series, measurement: PointMeasurement) -> None:
        self.visits[series].append(measurement)
        self._changes += 1

    def done(self, board: str) -> None:
        """End the board's task, with any result."""
        self._pending.pop(board, None)
        self._changes += 1

    def leave(self, board: str) -> None:
        """The board takes no part in the sweep any more; `done` has been called."""

    def merge(self, point: GridPoint, reached: OperatingPoint) -> bool:
        """Whether the board reached another point of the grid instead; then this one is merged."""
        return self._take_grid(merge_reached(self.grid, point.key, reached))

    def refuse(self, point: GridPoint, reason: str) -> bool:
        """Leave out a point that a board refuses, and others of its power mode; False where none would remain."""
        before = len(self.grid)
        if not self._take_grid(leave_out(self.grid, point.key)):
            return False
        gone = before - len(self.grid)
        self.notes.append(f"{point.key} is left out{f' with {gone - 1} more' if gone > 1 else ''}: {reason}")
        return True

    def _take_grid(self, grid: Grid) -> bool:
        if grid is self.grid:
            return False
        self.grid = grid
        self._planners = self._plan_all(grid)
        self._changes += 1
        return True

    def _plan_all(self, grid: Grid) -> dict[int, Planner]:
        """Return a planner for each batch size: a period counts inputs."""
        goals = {batch: self._goal.of_batch(batch) for _, batch in self.series}
        return {batch: Planner(grid, goal, self._settings) for batch, goal in goals.items()}

    def known_latencies(self, series: Series) -> list[tuple[GridPoint, float]]:
        """Return the points at which a series was timed, with its latency in s."""
        points = {point.key: point for point in self.grid.points}
        return [(points[v.key], v.latency.value) for v in self.visits[series] if v.key in points]

    @property
    def anchor(self) -> GridPoint:
        """The repeated point, which is measured first."""
        first = self.series[0]
        point = self.grid.find(self._planners[first[1]].find_anchor(self.visits[first]))
        assert point is not None  # it is one of the grid's
        return point

    def _plan(self, board: str) -> VisitTask | None:
        busy = {key for other, key in self._pending.items() if other != board}
        for offset in range(len(self.series)):
            series = self.series[(self._turn + offset) % len(self.series)]
            visits, planner = self.visits[series], self._planners[series[1]]
            anchor = planner.find_anchor(visits)
            decision = planner.decide_next([*visits, *_stand_ins(busy - {anchor}, board, visits)], board)
            if decision.step is Step.VOID and not busy:
                self.void = decision.reason
                return None
            if decision.step is not Step.MEASURE:
                self.reason = decision.reason
                continue
            self._turn = (self._turn + offset + 1) % len(self.series)
            point = self.grid.find(decision.key)
            assert point is not None  # a planner decides within its grid
            return VisitTask(point, (series, *self._companions(series, decision.key, anchor)), decision.reason)
        return None

    def _companions(self, leader: Series, key: str, anchor: str) -> list[Series]:
        """Return the other series to measure at the point: those that lack it, and at the anchor all."""
        found = []
        for series in self.series:
            visits = self.visits[series]
            excluded = self._planners[series[1]].find_excluded(visits)
            lacks = not any(v.key == key and v.is_valid for v in visits) and key not in excluded
            if series != leader and (key == anchor or lacks):
                found.append(series)
        return found


def _stand_ins(keys: set[str], board: str, visits: Sequence[PointMeasurement]) -> list[PointMeasurement]:
    """Return placeholder visits, which exclude points that other boards are at; never of `board` itself."""
    at_s = visits[-1].at_s if visits else 0.0
    # The boards' own last visits must stay the last ones: hence an unused board name.
    return [
        PointMeasurement(key, _NOBODY, at_s, invalid="another board is at it", board=f"not {board}")
        for key in sorted(keys)
    ]


class RoundConductor(Conductor):
    """A `Conductor` in rounds: each is dealt in the order of names, once every board has asked for it.

    Results count when the next round is dealt, board by board, so that the order of arrival has no effect.
    """

    def __init__(
        self,
        grid: Grid,
        goal: Goal,
        settings: PlannerSettings,
        series: Sequence[Series],
        visits: Mapping[Series, Sequence[PointMeasurement]] | None,
        boards: Sequence[str],
    ) -> None:
        super().__init__(grid, goal, settings, series, visits)
        self._members = set(boards)
        self._asking: set[str] = set()
        self._dealt: dict[str, VisitTask | None] = {}
        self._arrived: list[tuple[Series, PointMeasurement]] = []

    def find_next(self, board: str) -> tuple[VisitTask | None] | None:
        """See `Conductor.find_next`; None while another board has not asked yet."""
        self._members.add(board)  # a replacement board
        if board not in self._dealt:  # else the round was dealt since it asked last
            self._asking.add(board)
            if self._asking >= self._members:
                self._deal()
        return (self._dealt.pop(board),) if board in self._dealt else None

    def add(self, series: Series, measurement: PointMeasurement) -> None:
        """Keep a visit for the next round."""
        self._arrived.append((series, measurement))

    def leave(self, board: str) -> None:
        self._members.discard(board)
        self._asking.discard(board)
        self._dealt.pop(board, None)
        self._pending.pop(board, None)
        if not self._members:
            self._note_arrived()

    def _note_arrived(self) -> None:
        # Stable: a board's own visits stay in their order.
        for series, measurement in sorted(self._arrived, key=lambda each: each[1].board):
            self.visits[series].append(measurement)
        self._arrived.clear()

    def _deal(self) -> None:
        self._note_arrived()
        tasks: dict[str, VisitTask | None] = {}
        for board in sorted(self._members):
            task = None if self.void else self._plan(board)
            if task is not None:
                self._pending[board] = task.point.key
                tasks[board] = task
        # A board without a task waits for the others' results; if no board has one, all is done.
        self._dealt.update(tasks or dict.fromkeys(self._members))
        self._asking = self._members - self._dealt.keys()
