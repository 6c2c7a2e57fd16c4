"""What the shared values say of themselves."""

from __future__ import annotations

import dataclasses

import pytest

from device_agent.protocol import Outcome, Status
from farm.search import gpus
from farm.search.graph.pipelines import PIPELINES
from farm.values import DEFAULT_POINT, Board, Trial, is_for_gpu


def trial(status: Status, samples: tuple[float, ...]) -> Trial:
    return Trial(1, "w", "c", DEFAULT_POINT, 1, Outcome(status, latency_s=samples), trace_json="[]")


@pytest.mark.parametrize(("samples", "median"), [((3.0,), 3.0), ((3.0, 1.0, 2.0), 2.0), ((4.0, 1.0, 2.0, 3.0), 2.5)])
def test_the_median_of_a_good_trial(samples: tuple[float, ...], median: float) -> None:
    """The middle sample, or the mean of the middle two."""
    assert trial(Status.OK, samples).median_s == median


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_a_failed_trial_has_no_median(status: Status) -> None:
    """A failed trial says nothing about speed, even with samples."""
    assert trial(status, (1.0, 2.0)).median_s is None


def test_good_trials_alone_have_medians_and_facts_stay() -> None:
    """No number is made up. A fact stays as it was written. The tracker knows a board as type/name. A board type as its
    GPU's has a pipeline that says so, and no other one does.
    """
    assert trial(Status.OK, ()).median_s is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        trial(Status.OK, (1.0,)).attempt = 2  # type: ignore[misc]
    assert Board("rack-3", "jetson-nano", simulated=False).key == "jetson-nano/rack-3"
    for name in PIPELINES:
        assert is_for_gpu(name) == (name.partition("-")[0] == gpus.PIPELINE)
