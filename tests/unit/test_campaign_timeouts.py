"""How long the parts of a measurement may take."""

from __future__ import annotations

import pytest

from farm.campaign.engine.active import RUN_FLOOR_S, SLOWER, plan_run_timeout_s


def test_a_runs_limit_follows_the_best() -> None:
    """The first candidates of a workload may be as slow as they like. Every sample of it in full, and the calls beside.
    Time-outs fall as a search goes on.
    """
    assert plan_run_timeout_s(None, 3, 0.1, 10.0) == 10.0
    best_s = 0.05
    assert plan_run_timeout_s(best_s, 3, 0.0, 60.0) == pytest.approx(RUN_FLOOR_S + 3 * 2 * SLOWER * best_s)
    # Samples that would be too short are made longer, in a second round.
    short_s = plan_run_timeout_s(0.01, 3, 1.0, 60.0)
    assert short_s >= 3 * 1.2 * 1.0 + 3 * SLOWER * 0.01
    spans = [plan_run_timeout_s(best_s, 3, 0.05, 1e6) for best_s in (1.0, 0.1, 0.03, 0.01)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > 10 * spans[-1]


@pytest.mark.parametrize("best_s", [1e-6, 1e-4, 1e-2, 0.3, 5.0])
def test_a_run_is_never_below_the_floor_nor_above_the_limit(best_s: float) -> None:
    """A fast kernel still has threads to start; a slow one does not get more than the campaign grants."""
    assert RUN_FLOOR_S <= plan_run_timeout_s(best_s, 3, 0.1, 10.0) <= 10.0
    assert plan_run_timeout_s(best_s, 3, 0.1, 1.0) == 1.0
