"""Summaries of latency samples. Pure."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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
    low, high = bound_quantile(values, 0.5)
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


def bound_quantile(samples: Sequence[float] | npt.NDArray[np.float64], share: float) -> tuple[float, float]:
    """Return the interval of a quantile: the percentile bootstrap's, in closed form."""
    values = np.sort(np.asarray(samples, dtype=np.float64))
    ranks, weight = _find_ranks(values.size, share)
    low, high = ((1 - weight) * values[below] + weight * values[above] for below, above in ranks)
    return float(low), float(high)


def bound_drawn(drawn: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the interval of a figure from its values in resamples: the percentile bootstrap's."""
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


@functools.lru_cache(maxsize=4096)
def _find_ranks(count: int, share: float) -> tuple[tuple[tuple[int, int], tuple[int, int]], float]:
    """Return the ranks of `count` sorted samples that bound the bootstrap's quantiles, from 0: two for each bound, and
    the weight of the second.

    A resample's m-th smallest value is at most the k-th of the samples with the probability I(k/n; m, n - m + 1), I the
    regularised incomplete beta function (Efron 1979, Annals of Statistics 7, p. 5); a quantile lies between two values.
    """
    from scipy import special  # it takes a tenth of a second, which most commands need not spend

    tail = (1 - CONFIDENCE) / 2
    shares = np.arange(1, count + 1) / count
    place = share * (count - 1)
    reached = [
        special.betainc(rank, count - rank + 1, shares) for rank in (math.floor(place) + 1, math.ceil(place) + 1)
    ]
    below, above = ([int(np.searchsorted(each, at)) for at in (tail, 1 - tail)] for each in reached)
    return ((below[0], above[0]), (below[1], above[1])), place % 1
