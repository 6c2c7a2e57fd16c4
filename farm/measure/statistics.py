"""Summaries of latency samples. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class SampleSummary:
    """Samples in one unit: `ci_low` and `ci_high` bound the median with 95 % confidence; `std` is of the samples."""

    count: int
    median: float
    mean: float
    min: float
    max: float
    std: float
    ci_low: float
    ci_high: float
    # Nearest-rank percentiles: with few samples the largest two.
    p90: float = 0.0
    p99: float = 0.0


def summarise(samples: Sequence[float]) -> SampleSummary:
    """Summarise one or more samples; the interval is the percentile bootstrap's, in closed form."""
    values = np.sort(np.asarray(samples, dtype=np.float64))
    if values.size == 0:
        raise ValueError("no samples to summarise")
    p90, p99 = (float(each) for each in np.quantile(values, (0.9, 0.99)))
    low, high = (float(values[list(ranks)].mean()) for ranks in _find_interval(values.size))
    return SampleSummary(
        count=int(values.size),
        median=float(np.median(values)),
        mean=float(values.mean()),
        min=float(values.min()),
        max=float(values.max()),
        std=float(values.std(ddof=1)) if values.size > 1 else 0.0,
        ci_low=low,
        ci_high=high,
        p90=p90,
        p99=p99,
    )


@functools.lru_cache(maxsize=4096)
def _find_interval(count: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the ranks of `count` sorted samples that bound the bootstrap's medians: two for each bound, from 0.

    A resample's m-th smallest value is at most the k-th of the samples with the probability I(k/n; m, n - m + 1), I the
    regularised incomplete beta function (Efron 1979, Annals of Statistics 7, p. 5); even counts have two middle values.
    """
    from scipy import special  # it takes a tenth of a second, which most commands need not spend

    tail = (1 - CONFIDENCE) / 2
    shares = np.arange(1, count + 1) / count
    middles = ((count + 1) // 2, count // 2 + 1)
    reached = [special.betainc(middle, count - middle + 1, shares) for middle in middles]
    low, high = (tuple(int(np.searchsorted(each, at)) for each in reached) for at in (tail, 1 - tail))
    return (low[0], low[1]), (high[0], high[1])
