"""A conductor that deals points to boards in rounds: which board gets which does not depend on who is ready first.

For simulated boards, whose figures depend on what they were asked and on nothing else: a sweep over several of them is
then the same again to the digit. Boards whose time is not this machine's lose little by waiting for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farm.points.values import Goal, Grid, PointMeasurement
from farm.sweep.plan.adaptive import PlannerSettings
from farm.sweep.plan.conductor import Conductor, Series, VisitTask


class RoundConductor(Conductor):
    """As `Conductor`, for these boards. A round is dealt in the order of names once every board has asked for it.

    What a round has measured is noted when the next one is dealt, board by board.
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
        self._members.add(board)  # one that was found in another's place
        if board not in self._dealt:  # else the round was dealt since it asked last
            self._asking.add(board)
            if self._asking >= self._members:
                self._deal()
        return (self._dealt.pop(board),) if board in self._dealt else None

    def add(self, series: Series, measurement: PointMeasurement) -> None:
        """Note a visit, of which nobody hears before the next round."""
        self._arrived.append((series, measurement))

    def leave(self, board: str) -> None:
        """Nobody waits for this board any more."""
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
        # A board that gets nothing waits for what the others find; where nobody gets anything, all is done.
        self._dealt.update(tasks or dict.fromkeys(self._members))
        self._asking = self._members - self._dealt.keys()
