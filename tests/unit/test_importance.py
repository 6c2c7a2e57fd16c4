"""Which options of a plan mattered, by trials whose cause is known."""

from __future__ import annotations

import itertools
import random

from farm.search.tuners import cost_model

PLANS = [
    {"lanes": lanes, "pixels": pixels, "order": order, "pad": 0}
    for lanes, pixels, order in itertools.product((1, 2, 4), (1, 2, 4, 8), (0, 1, 2, 3))
]


def test_the_option_that_decides_has_the_largest_share() -> None:
    """Wide vectors are fast, large tiles a little slow, the order is nothing; a fixed option is none."""
    latency_s = [1e-3 / plan["lanes"] * (1.0 + 0.02 * plan["pixels"]) for plan in PLANS]
    found = cost_model.rate_options(PLANS, latency_s)
    assert found is not None
    assert found.trials == len(PLANS)
    assert list(found.options) == ["lanes", "pixels", "order"]
    assert found.options["lanes"] > 0.8
    assert found.options["order"] < 0.02
    assert found.explained > 0.8
    assert found == cost_model.rate_options(PLANS, latency_s)


def test_few_trials_and_noise_tell_nothing() -> None:
    """Below the least number of trials, without differences and where nothing can be predicted there is no answer."""
    latency_s = [1e-3 / plan["lanes"] for plan in PLANS]
    few = cost_model.LEAST_TRIALS - 1
    assert cost_model.rate_options(PLANS[:few], latency_s[:few]) is None
    assert cost_model.rate_options(PLANS, [1e-3] * len(PLANS)) is None
    rng = random.Random(0)
    assert cost_model.rate_options(PLANS, [1e-3 * rng.uniform(1, 2) for _ in PLANS]) is None
    assert cost_model.rate_options([], []) is None
