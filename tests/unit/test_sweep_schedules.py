"""Which schedules are tried again at an operating point."""

from __future__ import annotations

import pytest

from farm.errors import UsageError
from farm.store.trials import KnownCandidate
from farm.sweep.plan.order import SweepOrder
from farm.sweep.run.refit import choose_candidates, choose_workloads

ROWS = [
    KnownCandidate(name, "[]", "b", time_s)
    for name, time_s in (("a", 3e-3), ("b", 1e-3), ("failed", None), ("c", 2e-3), ("d", 4e-3))
]


def test_schedules_worth_trying_are_chosen() -> None:
    """It comes first, since all others are compared with it; failed ones are never tried. One schedule, or none that
    the record knows. What makes up the last twentieth of the model's time cannot pay for a board's.
    """
    assert [each.candidate for each in choose_candidates(ROWS, "c", 3)] == ["c", "b", "a"]
    assert [each.candidate for each in choose_candidates(ROWS, "b", 9)] == ["b", "c", "a", "d"]
    assert choose_candidates(ROWS[:1], "a", 3) == []
    assert choose_candidates(ROWS, "gone", 3) == []
    assert choose_candidates(ROWS, "a", 1) == []
    assert choose_workloads({"big": 0.9, "middle": 0.08, "small": 0.02}) == {"big", "middle"}


def test_other_schedules_need_tuned_code() -> None:
    """Said before anything is begun, as is a number that makes no sense."""
    with pytest.raises(UsageError, match="--variants"):
        SweepOrder("m", variants=("untuned",), top_k=3)
    with pytest.raises(UsageError, match="1 to 16"):
        SweepOrder("m", variants=("tuned",), top_k=0)
    with pytest.raises(UsageError, match="code for processors"):
        SweepOrder("m", variants=("tuned",), top_k=3, device="gpu")
    assert SweepOrder("m", variants=("tuned",), top_k=3).top_k == 3
