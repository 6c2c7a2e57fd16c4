"""Which schedules are tried again at an operating point, and when another one counts as better."""

from __future__ import annotations

import pytest

from farm.errors import UsageError
from farm.sweep.plan.order import SweepOrder
from farm.sweep.plan.schedules import choose_candidates, choose_workloads, judge

ROWS = [
    {"candidate": name, "median_s": time_s, "trace_json": "[]"}
    for name, time_s in (("a", 3e-3), ("b", 1e-3), ("failed", None), ("c", 2e-3), ("d", 4e-3))
]


def test_the_records_schedule_is_tried_beside_the_fastest_others() -> None:
    """It comes first, since all others are compared with it; failed ones are never tried."""
    assert [row["candidate"] for row in choose_candidates(ROWS, "c", 3)] == ["c", "b", "a"]
    assert [row["candidate"] for row in choose_candidates(ROWS, "b", 9)] == ["b", "c", "a", "d"]


def test_where_there_is_nothing_to_choose_from_nothing_is_tried() -> None:
    """One schedule, or none that the record knows."""
    assert choose_candidates(ROWS[:1], "a", 3) == []
    assert choose_candidates(ROWS, "gone", 3) == []
    assert choose_candidates(ROWS, "a", 1) == []


def test_workloads_that_take_no_time_are_left_alone() -> None:
    """What makes up the last twentieth of the model's time cannot pay for a board's."""
    assert choose_workloads({"big": 0.9, "middle": 0.08, "small": 0.02}) == {"big", "middle"}


def test_another_schedule_wins_only_by_more_than_chance() -> None:
    """Rounds are compared in pairs, so a board that slows down between them changes nothing."""
    slower = [1.0, 1.2, 1.5, 2.0]
    rounds = [{"old": 10 * by, "new": 9 * by * (1 + 0.002 * n)} for n, by in enumerate(slower)]
    verdict = judge(rounds, "old")
    assert verdict is not None
    assert verdict.best == "new"
    assert verdict.high < 0.95
    assert verdict.low <= 0.9 <= verdict.ratio
    noisy = [{"old": 10.0, "new": value} for value in (8.0, 11.0, 8.5, 10.5)]
    same = judge(noisy, "old")
    assert same is not None
    assert not same.differs
    assert same.ratio == 1


def test_schedules_that_failed_once_are_out() -> None:
    """And without the record's own there is no verdict."""
    rounds = [{"old": 10.0, "new": 5.0}, {"old": 10.1}, {"old": 10.0, "new": 5.0}]
    verdict = judge(rounds, "old")
    assert verdict is not None
    assert not verdict.differs
    assert judge([{"new": 5.0}, {"new": 5.0}], "old") is None


def test_other_schedules_need_tuned_code() -> None:
    """Said before anything is begun, as is a number that makes no sense."""
    with pytest.raises(UsageError, match="--variants"):
        SweepOrder("m", top_k=3)
    with pytest.raises(UsageError, match="1 to 16"):
        SweepOrder("m", variants=("tuned",), top_k=0)
    with pytest.raises(UsageError, match="code for processors"):
        SweepOrder("m", variants=("tuned",), top_k=3, device="gpu")
    assert SweepOrder("m", variants=("tuned",), top_k=3).top_k == 3
