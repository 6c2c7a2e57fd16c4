"""Which options of a plan mattered: the cost model's trees fitted to one workload's trials. Loads no compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from farm.search.families.family import Plan
from farm.search.tuners.cost_model import Features, Floats, SampleGroup, Trees

# Fewer trials, or a fit that explains less, tell nothing about options.
LEAST_TRIALS, LEAST_EXPLAINED = 24, 0.2
_FOLDS, _SHUFFLES = 5, 16
# The trees predict speed relative to the best; less than this counts as this.
_LEAST_SPEED = 1 / 64


@dataclasses.dataclass(frozen=True)
class Importance:
    """Shares of the variance of log latency over `trials`.

    `explained` is the share that the fit predicts of trials that it has not seen. `options` has by option, the largest
    first, its total effect with all interactions, so that their sum may exceed 1.
    """

    trials: int
    explained: float
    options: Mapping[str, float]


def rate_options(plans: Sequence[Plan], latency_s: Sequence[float]) -> Importance | None:
    """Rate the options of measured plans of one family; None where too few trials tell too little. Deterministic.

    Total effects by Jansen's estimator (Saltelli et al. 2010, Computer Physics Communications 181): the mean square
    change of the prediction where one option is drawn anew, over twice the variance.
    """
    varied = [name for name in (plans[0] if plans else {}) if len({plan[name] for plan in plans}) > 1]
    log_s = np.log2(np.array(latency_s, float))
    if len(plans) < LEAST_TRIALS or not varied or log_s.std() < 1e-3:
        return None
    rows = np.array([[plan[name] for name in varied] for plan in plans], np.float32)
    rng = np.random.default_rng(0)
    fold = rng.permutation(len(rows)) % _FOLDS
    missed = np.zeros(len(rows))
    for each in range(_FOLDS):
        seen = fold != each
        missed[~seen] = log_s[~seen] - _fit(rows[seen], log_s[seen])(rows[~seen])
    explained = float(1 - (missed**2).mean() / log_s.var())
    if explained < LEAST_EXPLAINED:
        return None
    predict = _fit(rows, log_s)
    before, effects = predict(rows), {}
    for at, name in enumerate(varied):
        changes = []
        for _ in range(_SHUFFLES):
            drawn = rows.copy()
            drawn[:, at] = rng.permutation(rows[:, at])
            changes.append(((predict(drawn) - before) ** 2).mean())
        effects[name] = float(np.mean(changes) / 2 / log_s.var())
    ranked = sorted(effects.items(), key=lambda item: -item[1])
    return Importance(len(plans), explained, dict(ranked))


def _fit(rows: Features, log_s: Floats) -> Callable[[Features], Floats]:
    """Return a function that predicts log2 of the latency (s) of rows of options."""
    trees = Trees([SampleGroup([row[None] for row in rows], list(2.0**log_s))], "reg", 0, 1)
    best = log_s.min()
    return lambda given: best - np.log2(np.maximum(trees.score([row[None] for row in given]), _LEAST_SPEED))
