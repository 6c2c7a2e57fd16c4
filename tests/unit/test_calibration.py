"""Factors of boards against their type, and drift against their own past, on times whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.crew.calibration import (
    DRIFT_TOLERANCE,
    MIN_SAMPLES,
    TYPE_TOLERANCE,
    Factor,
    compare_with_history,
    find_drift,
    fit_factor,
)


def runs(speed: float, count: int = 30, seed: int = 0, spread: float = 0.01) -> list[float]:
    """Medians of so many runs of a kernel that takes 1 ms times `speed`, in seconds, skewed as times are."""
    rng = np.random.default_rng(seed)
    return list(1e-3 * speed * (1 + rng.gamma(2.0, spread / 2, count)))


def fleet(*speeds: float) -> dict[str, list[float]]:
    return {f"b{index}": runs(speed, seed=index) for index, speed in enumerate(speeds)}


def test_a_factor_is_a_ratio_to_the_types_median() -> None:
    """A board 5 % slower than the board in the middle has the factor 1.05, and its interval holds it. So the ratio of
    two boards' factors is the ratio of their medians. The type's time is over boards, not over runs. The bootstrap's
    seed is fixed.
    """
    factor = fit_factor("b4", fleet(0.98, 0.99, 1.0, 1.01, 1.05))
    assert factor.ratio == pytest.approx(1.05, rel=0.005)
    assert factor.ci_low < 1.05 < factor.ci_high
    assert (factor.samples, factor.boards) == (30, 5)
    medians = fleet(0.9, 1.0, 1.2)
    first, last = fit_factor("b0", medians), fit_factor("b2", medians)
    assert last.ratio / first.ratio == pytest.approx(np.median(medians["b2"]) / np.median(medians["b0"]))
    medians = fleet(1.0, 1.0, 1.0, 1.2) | {"b3": runs(1.2, count=900)}
    factor = fit_factor("b0", medians)
    assert factor.ratio == pytest.approx(1.0, abs=0.01)
    assert fit_factor("b1", fleet(1.0, 1.1, 1.2)) == fit_factor("b1", fleet(1.0, 1.1, 1.2))


@pytest.mark.parametrize(
    "medians",
    [
        {"b": runs(1.0)},
        {"b": runs(1.0), "other": runs(1.0, count=MIN_SAMPLES - 1)},
        {"b": runs(1.0, count=MIN_SAMPLES - 1), "other": runs(1.0), "third": runs(1.0)},
        {"other": runs(1.0), "third": runs(1.0)},
    ],
    ids=["alone", "the other has too few", "itself has too few", "unknown"],
)
def test_too_little_says_nothing(medians: dict[str, list[float]]) -> None:
    """No factor is better than one that rests on nothing."""
    assert fit_factor("b", medians) is None


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Of 100 fleets of equal boards the interval of a factor holds 1 in at least 90 %, nominally 95 %."""
    held = 0
    for trial in range(100):
        medians = {f"b{board}": runs(1.0, count=20, seed=1000 * trial + board) for board in range(4)}
        factor = fit_factor("b0", medians)
        assert factor is not None
        held += factor.ci_low <= 1.0 <= factor.ci_high
    assert held >= 90


def test_outliers_exceed_the_tolerance_either_way() -> None:
    """Beyond the tolerance, slower or faster; a board within it is not. A factor and its inverse are equally far from
    1.
    """
    medians = fleet(1.0, 1.0, 1.0, 1.2, 0.8, 1.04)
    slow, fast, good = (fit_factor(name, medians) for name in ("b3", "b4", "b5"))
    assert slow is not None
    assert fast is not None
    assert good is not None
    assert (slow.boards, fast.percent[0]) == (6, "-")
    assert [each.exceeds(TYPE_TOLERANCE) for each in (slow, fast, good)] == [True, True, False]
    assert Factor(1.05, 1.04, 1.06, 5, 1).exceeds(DRIFT_TOLERANCE)
    assert Factor(1 / 1.05, 1 / 1.06, 1 / 1.04, 5, 1).exceeds(DRIFT_TOLERANCE)
    assert not Factor(1.05, 1.02, 1.08, 5, 1).exceeds(DRIFT_TOLERANCE)


@pytest.mark.parametrize("change", [1.08, 1 / 1.08])
def test_drift_is_seen_in_the_newest_runs(change: float) -> None:
    """A board that became slower, or faster, than it was: something about it changed."""
    text = find_drift([*runs(1.0, 100), *runs(change, MIN_SAMPLES, seed=1)])
    assert "against its own history" in text
    assert f"{(change - 1) * 100:+.0f}"[:2] in text


@pytest.mark.parametrize("change", [1.0, 1.01, 1.02])
def test_small_changes_are_no_drift(change: float) -> None:
    """However many runs show them: a certain difference below the tolerance does not matter."""
    history, recent = runs(1.0, 500), runs(change, 500, seed=1)
    assert find_drift([*history, *recent], recent=500) == ""


def test_too_little_is_no_drift() -> None:
    """A median does not follow one value. Of 100 boards that did not change, at most one is taken for drifting. The
    first runs of a board cannot have drifted.
    """
    assert find_drift([*runs(1.0, 100), *runs(1.0, MIN_SAMPLES - 1, seed=1), 5e-3]) == ""
    alarms = sum(bool(find_drift(runs(1.0, 60, seed=seed))) for seed in range(100))
    assert alarms <= 1
    assert find_drift([]) == ""
    assert find_drift(runs(1.0, MIN_SAMPLES)) == ""
    assert compare_with_history(runs(1.0, MIN_SAMPLES), runs(1.0, MIN_SAMPLES - 1)) is None


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(wrong: float) -> None:
    """A time that is no positive number never becomes a factor."""
    with pytest.raises(ValueError, match="positive"):
        fit_factor("b0", fleet(1.0, 1.0) | {"b1": [*runs(1.0), wrong]})


@given(st.floats(1e-6, 1e3), st.lists(st.floats(0.5, 2.0), min_size=MIN_SAMPLES, max_size=12))
def test_a_factor_has_no_unit(scale: float, times: list[float]) -> None:
    """Scaling all times changes nothing, and the ratio lies within its interval's reach of the samples."""
    medians = {"a": times, "b": [1.0] * MIN_SAMPLES}
    factor = fit_factor("a", medians)
    scaled = fit_factor("a", {name: [value * scale for value in values] for name, values in medians.items()})
    assert scaled.ratio == pytest.approx(factor.ratio)
    assert scaled.ci_low == pytest.approx(factor.ci_low)
    assert factor.ci_low <= factor.ci_high
