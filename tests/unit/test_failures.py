"""What the end of a run stands for: a command that got nothing of what it asked for does not end with exit code 0."""

from __future__ import annotations

from typing import Any

import pytest

from farm.campaign.tune import find_failure
from farm.sweep.export import document


@pytest.mark.parametrize(
    ("trials", "records", "said"),
    [
        ({"ok": 3, "candidate_faults": 1}, 2, ""),
        ({"ok": 0, "candidate_faults": 0}, 2, ""),
        ({"ok": 0, "candidate_faults": 0}, 0, "no trial was made"),
        ({"ok": 0, "candidate_faults": 7, "board_faults": 2}, 0, "all 9 trials failed; faults: candidate 7, board 2"),
        ({"ok": 0, "candidate_faults": 4}, 2, "all 4 trials failed"),
        ({"ok": 5, "candidate_faults": 4}, 0, "none of 5 good trials"),
    ],
)
def test_a_tuning_that_found_nothing(trials: dict[str, int], records: int, said: str) -> None:
    """Where every trial failed, or none that was good computes the right thing, the tuning failed."""
    error = find_failure(trials, records)
    assert (error.exit_code if error else 0) == (1 if said else 0)
    assert said in str(error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"state": "voided", "reason": "it drifted"}, "sweep 7 is void: it drifted"),
        ({"series": []}, "nothing can be picked"),
        ({"series": [{"pick": None, "no_pick": "no point keeps 7.5 W"}]}, "picked: no point keeps 7.5 W"),
        ({"series": [{"pick": None, "no_pick": "no"}, {"pick": {"key": "x"}, "no_pick": ""}]}, ""),
    ],
)
def test_a_sweep_without_a_pick(change: dict[str, Any], said: str) -> None:
    """A sweep that was voided, or has nothing to ship in any series, failed."""
    good = {"sweep": 7, "state": "finished", "reason": "", "series": [{"pick": {"key": "x"}, "no_pick": ""}]}
    error = document.find_failure(good | change)
    assert (error.exit_code if error else 0) == (1 if said else 0)
    assert said in str(error)
