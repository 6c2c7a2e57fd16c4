"""Summaries of latency samples against known values and against a seeded simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.measure import statistics


def test_known_values() -> None:
    """Median, mean, extremes and the sample standard deviation are the textbook's. A single sample is its own median,
    with an interval of no width and a deviation of zero. No samples is the caller's mistake.
    """
    summary = statistics.summarise([4.0, 1.0, 3.0, 2.0])
    assert (summary.count, summary.median, summary.mean) == (4, 2.5, 2.5)
    assert (summary.min, summary.max) == (1.0, 4.0)
    assert summary.std == pytest.approx(np.sqrt(5 / 3))
    summary = statistics.summarise([0.5])
    assert (summary.median, summary.ci_low, summary.ci_high, summary.std) == (0.5, 0.5, 0.5, 0.0)
    with pytest.raises(ValueError, match="no samples"):
        statistics.summarise([])


@settings(max_examples=25)
@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40))
def test_the_interval_holds_the_median_within_the_extremes(samples: list[float]) -> None:
    """Min <= ci_low <= median <= ci_high <= max, for any samples; twice the same for the same samples."""
    summary = statistics.summarise(samples)
    tolerance = 1e-12 * summary.max
    assert summary.min - tolerance <= summary.ci_low <= summary.median + tolerance
    assert summary.median - tolerance <= summary.ci_high <= summary.max + tolerance
    assert statistics.summarise(samples) == summary


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("count", [5, 51, 501])
def test_the_interval_is_the_bootstraps(count: int, share: float) -> None:
    """Drawing 4,000 resamples and taking their quantiles' 2.5 and 97.5 % quantiles gives the same interval."""
    rng = np.random.default_rng(count)
    samples = rng.lognormal(size=count)
    quantiles = np.quantile(rng.choice(samples, size=(4_000, count)), share, axis=1)
    found = statistics.bound_quantile(samples, share)
    places = np.searchsorted(np.sort(samples), found)
    assert np.abs(places - np.searchsorted(np.sort(samples), statistics.bound_drawn(quantiles))).max() <= 1
    summary = statistics.summarise(samples.tolist())
    assert statistics.bound_quantile(samples, 0.5) == (summary.ci_low, summary.ci_high)


def test_the_interval_covers_the_true_median() -> None:
    """Over 300 seeded experiments of 40 skewed latencies, 95 % intervals hold the true median in 91 to 99 % of them."""
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(300):
        summary = statistics.summarise(1e-3 * rng.lognormal(mean=0.0, sigma=0.3, size=40))
        hits += summary.ci_low <= 1e-3 <= summary.ci_high
    assert 0.91 <= hits / 300 <= 0.99
