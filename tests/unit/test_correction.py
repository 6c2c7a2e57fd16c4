"""What trials say of predictions: carried to plans and functions that were not measured, and nothing without trials."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from farm.search.tuners.cost_model import MOST_OWN, MOST_TAUGHT, Correction, Lesson, Plans

NAMES = ("vectors", "pixels", "pad=1")


def make_plans(seed: int, family: str = "dense") -> Plans:
    rng = np.random.default_rng(seed)
    facets = np.array([*itertools.product((0.0, 1, 2, 3), (0.0, 1, 2, 3), (0.0, 1.5))])
    log_s = -14 + 0.3 * rng.standard_normal(len(facets))
    order = np.argsort(log_s)
    return Plans(family, NAMES, facets[order], log_s[order])


def take_s(plans: Plans) -> np.ndarray:
    """What the plans take on a core where long vectors are dear and padding is cheap, which the prediction misses."""
    return plans.log_s + 1 + 0.5 * plans.facets[:, 0] - 0.6 * plans.facets[:, 2]


def make_lesson(function: str, plans: Plans, rows: list[int]) -> Lesson:
    return Lesson(function, plans, tuple(rows), tuple(take_s(plans)[rows]))


def test_without_trials_the_prediction_stands() -> None:
    """So it does with trials of another family, or of facets that these plans have none of."""
    plans, other = make_plans(0), make_plans(1, family="depthwise")
    for lessons in ([], [make_lesson("other", other, [1, 2, 3])]):
        correction = Correction(lessons, "mine", plans)
        assert correction.count == 0
        assert np.array_equal(correction.expect(), plans.log_s)


def test_trials_of_other_functions_correct_what_was_never_measured() -> None:
    """The best of a function is found at once where others have shown what its prediction misses."""
    plans, others = make_plans(0), [make_plans(seed) for seed in (1, 2, 3)]
    taught = Correction(
        [make_lesson(f"f{at}", each, list(range(at, 32, 3))) for at, each in enumerate(others)], "mine", plans
    )
    truth = take_s(plans)
    assert truth[0] > truth.min() + 0.5
    assert truth[taught.expect().argmin()] <= truth.min() + np.log2(1.05)


def test_a_wrong_prediction_is_searched_to_within_a_twentieth_in_sixteen_trials() -> None:
    """With nothing but the function's own results, a batch of four at a time."""
    for seed in range(8):
        plans = make_plans(seed)
        truth, rows = take_s(plans), [0]
        while len(rows) < 16 and truth[rows].min() > truth.min() + np.log2(1.05):
            order = Correction([make_lesson("mine", plans, rows)], "mine", plans).order(known=rows)
            rows += itertools.islice(order, 4)
        assert truth[rows].min() <= truth.min() + np.log2(1.05), seed
        assert len(set(rows)) == len(rows)


def test_what_is_under_way_is_not_asked_twice_and_makes_the_next_ones_differ() -> None:
    """A plan under way counts as if it were known; the batch as a whole is what one after the other would be."""
    plans = make_plans(0)
    correction = Correction([make_lesson("mine", plans, [0, 5])], "mine", plans)
    batch = list(itertools.islice(correction.order(known=[0, 5]), 6))
    assert list(itertools.islice(correction.order([0, 5], batch[:3]), 3)) == batch[3:]
    assert sorted(correction.order(known=[0, 5], under_way=[7])) == sorted({*range(32)} - {0, 5, 7})


def test_a_long_history_of_its_own_leaves_room_for_others() -> None:
    """As many teach as are paid for in milliseconds: at most a half of its own, the fastest of each are among them."""
    plans, other = make_plans(0), make_plans(1)
    own = make_lesson("mine", plans, [*range(32)] * 9)
    others = [make_lesson(f"f{at}", other, [*range(32)] * 2) for at in range(20)]
    assert Correction([own], "mine", plans).count == MOST_OWN
    assert Correction([own, others[0]], "mine", plans).count == MOST_OWN + 64
    assert Correction([*others, own], "mine", plans).count == MOST_TAUGHT
    few = Correction([*others, make_lesson("mine", plans, [*range(8)])], "mine", plans)
    assert few.count == MOST_TAUGHT
    assert few.expect()[:8] == pytest.approx(take_s(plans)[:8], abs=0.05)
