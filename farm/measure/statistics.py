"""Summaries of latency samples. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

# Resamples of the bootstrap; the interval's own error is then below 2 % of its width (Efron & Tibshirani 1993, ch. 13).
_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of samples in one unit: `ci_low` and `ci_high` bound the median with 95 % confidence; `std` is of the samples."""

    count: int
    median: float
    mean: float
    min: float
    max: float
    std: float
    ci_low: float
    ci_high: float

    def scaled(self, factor: float) -> dict[str, float | int]:
        """All of it times `factor`, as a plain mapping; the count stays."""
        values = dataclasses.asdict(self)
        return {name: value if name == "count" else value * factor for name, value in values.items()}


def summarise(samples: Sequence[float]) -> Summary:
    """Summarise one or more samples; the interval is a percentile bootstrap with a fixed seed."""
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("no samples to summarise")
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, size=(_RESAMPLES, values.size)), axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Summary(
        count=int(values.size),
        median=float(np.median(values)),
        mean=float(values.mean()),
        min=float(values.min()),
        max=float(values.max()),
        std=float(values.std(ddof=1)) if values.size > 1 else 0.0,
        ci_low=float(low),
        ci_high=float(high),
    )
