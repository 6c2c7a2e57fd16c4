"""Schedules timed again at a point, on made-up boards: the same standard for a record as a campaign's winners have."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, Status
from farm.crew.crew import Crew
from farm.errors import BoardLostError
from farm.selection.decision import Conclusion
from farm.settings import Settings
from farm.sweep.run.refit import _decide, _describe
from farm.sweep.run.retrials import RULE, Retrials, Rival, TriedWorkload
from tests.stored_workloads import make_workload

POINT = OperatingPoint(cpu_freq_hz={"a57": 403_200_000})
RECORDED, OTHER = "the record's", "another"


class Board:
    """A board on which a schedule takes as long as its code says, but for noise; it is lost after `lasts`."""

    def __init__(self, name: str, noise: float, lasts: int = 10_000) -> None:
        self.name, self.pinned, self.measured = name, OperatingPoint(), 0
        self._noise, self._lasts, self._random = noise, lasts, random.Random(name)

    async def pin(self, point: OperatingPoint) -> None:
        self.pinned = point

    async def measure(self, _: MeasureSpec, library: bytes) -> Outcome:
        if self.measured >= self._lasts:
            raise BoardLostError(f"{self.name} is gone")
        assert self.pinned == POINT
        self.measured += 1
        seconds = float(library) * self._random.lognormvariate(0.0, self._noise)
        return Outcome(Status.OK, latency_s=(seconds,) * 3)


def play(boards: list[Board], latencies_s: Mapping[str, float]) -> tuple[Conclusion | None, dict[str, Any]]:
    """The end of one workload's contest, and what the sweep's document says of it."""
    rivals = tuple(Rival(name, seconds, "[]", "", str(seconds).encode()) for name, seconds in latencies_s.items())
    tried = TriedWorkload(make_workload(), rivals)
    with tempfile.TemporaryDirectory() as home, Crew(Settings(home=home), print) as crew:
        crew.boards = boards  # type: ignore[assignment]
        retrials = Retrials(crew, [tried], POINT, lambda rival: SimpleNamespace(), 0, print)  # type: ignore[arg-type,return-value]
        retrials.play()
    end = _decide(retrials.contests["w"], tried, None)
    return end, _describe(tried, retrials.contests["w"], end, {"w"})


def test_a_clearly_faster_schedule_wins_on_two_boards() -> None:
    """Its record has the evidence of a campaign's winner: boards, rivals, intervals, and the rule that was applied."""
    boards = [Board("a", 0.01), Board("b", 0.01)]
    end, line = play(boards, {RECORDED: 1e-3, OTHER: 8e-4})
    assert end is not None
    assert (end.winner, end.tied, line["differs"]) == (OTHER, False, True)
    assert end.evidence["boards"].keys() == {"a", "b"}
    assert (end.evidence["decided"], end.evidence["confidence"]) == ("parted", RULE.confidence)
    [rival] = end.evidence["rivals"]
    assert (rival["candidate"], rival["verdict"]) == (RECORDED, "slower")
    assert line["low"] <= 0.8 <= line["high"] < 1
    assert boards[0].measured + boards[1].measured == 2 * RULE.looks[0], "the first look decides"


def test_a_little_faster_is_not_enough() -> None:
    """What is compiled without a record of the point stays, as what was tried first does in a campaign."""
    end, line = play([Board("a", 0.001)], {RECORDED: 1e-3, OTHER: 0.97e-3})
    assert end is not None
    assert (end.winner, end.evidence["decided"], end.evidence["leader"]) == (RECORDED, "kept", OTHER)
    assert not line["differs"]


@pytest.mark.parametrize("others", [3, 7])
def test_the_best_of_many_equals_is_nobodys_record(others: int) -> None:
    """Noise alone, and several looks at several rivals, make no winner."""
    names = [RECORDED, *(f"other {n}" for n in range(others))]
    end, _ = play([Board("a", 0.03), Board("b", 0.03)], dict.fromkeys(names, 1e-3))
    assert end is not None
    assert end.winner == RECORDED


def test_a_board_that_is_lost_costs_a_round() -> None:
    """The other one goes on alone; where there is none, the loss is raised."""
    end, _ = play([Board("a", 0.01, lasts=3), Board("b", 0.01)], {RECORDED: 1e-3, OTHER: 8e-4})
    assert end is not None
    assert end.winner == OTHER
    with pytest.raises(BoardLostError):
        play([Board("a", 0.01, lasts=3)], {RECORDED: 1e-3, OTHER: 8e-4})
