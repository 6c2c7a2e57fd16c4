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

    What a round has measured is noted when the next one is dealt, board by board. Thread-safe.
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

    def next(self, board: str, timeout_s: float) -> VisitTask | None:
        """See `Conductor.next`; TimeoutError while another board has not asked yet."""
        with self._changed:
            self._members.add(board)  # one that was found in another's place
            if board not in self._dealt:  # else the round was dealt since it asked last
                self._asking.add(board)
            while board not in self._dealt:
                if self._asking >= self._members:
                    self._deal()
                elif not self._changed.wait(timeout_s):
                    raise TimeoutError
            return self._dealt.pop(board)

    def add(self, series: Series, measurement: PointMeasurement) -> None:
        """Note a visit, of which nobody hears before the next round."""
        with self._changed:
            self._arrived.append((series, measurement))

    def leave(self, board: str) -> None:
        """Nobody waits for this board any more."""
        with self._changed:
            self._members.discard(board)
            self._asking.discard(board)
            self._dealt.pop(board, None)
            self._pending.pop(board, None)
            if not self._members:
                self._note_arrived()
            self._changed.notify_all()

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
        self._changed.notify_all()
