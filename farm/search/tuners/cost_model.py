"""A cost model that ranks candidates: gradient-boosted trees over MetaSchedule's per-store features.

It learns from measurements only: board and farm faults never reach it, and a failed candidate has speed zero. Its trees
also rate which options of a plan mattered. Loads no compiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xgboost

from farm.search.families.family import Plan

# After MetaSchedule's XGBModel, but shallower and with 60 trees instead of up to 10,000 with early stopping: training
# takes about 0.1 s on two cores and can follow every batch.
_PARAMETERS = {
    "max_depth": 8,
    "gamma": 0.001,
    "min_child_weight": 0,
    "eta": 0.2,
    "verbosity": 0,
    "tree_method": "hist",
    "disable_default_eval_metric": 1,
}
_ROUNDS = 60
# Below this, more threads are slower, especially while compilers share the cores: 64 candidates took 0.7-1.5 s with two
# threads and 0.2 s with one; 1024 took 0.9 s and 1.5 s.
_ROWS_WORTH_THREADS = 4096

Features = npt.NDArray[np.float32]  # [stores of one candidate, features]
Floats = npt.NDArray[np.float64]

# Positions in MetaSchedule's per-store features (per_store_feature.cc): counts of float arithmetic, and the length of
# the longest vectorised loop.
_FLOAT_OPS, _VECTOR_LENGTH = slice(0, 7), 18

LOSSES = ("reg", "rank", "rank-binary")
# `rank-binary` counts a candidate as fast from this fraction of the best speed.
_FAST = 0.7


@dataclasses.dataclass(frozen=True)
class SampleGroup:
    """Comparable measured candidates; infinite latency: failed by its own fault.

    `weight` is relative to other groups. Every candidate must have stores.
    """

    features: Sequence[Features]
    latency_s: Sequence[float]
    weight: float = 1.0


def measure_vectors(features: Features) -> float:
    """Return log2 of the vector length of the store that computes most; 0 without stores.

    A prior without measurements: over random schedules of three workloads its rank correlation with speed is 0.35 to
    0.70 (benchmarks/search_efficiency.py, "vectors").
    """
    if not len(features):
        return 0.0
    busiest = features[:, _FLOAT_OPS].sum(axis=1).argmax()
    return float(features[busiest, _VECTOR_LENGTH])


class Trees:
    """A trained model. With one thread, equal groups in equal order give bit-identical scores."""

    def __init__(
        self, groups: Sequence[SampleGroup], loss: str, seed: int, threads: int, *, resampled: bool = False
    ) -> None:
        """Fit terms per store whose sum over a candidate's stores ranks it under `loss` (of LOSSES).

        `resampled` draws random weights per candidate, a Bayesian bootstrap: models of several seeds then differ where
        data is scarce.
        """
        stacked, owner = _stack([matrix for group in groups for matrix in group.features])
        speeds = [_relative_speed(np.array(group.latency_s)) for group in groups]
        # On a busy machine, contending threads take twenty times as long to copy some hundred rows.
        used = threads if len(stacked) >= _ROWS_WORTH_THREADS else 1
        data = xgboost.DMatrix(stacked, nthread=used)
        parameters = {**_PARAMETERS, "seed": seed, "nthread": used}
        rng = np.random.default_rng(seed)
        weights = [
            group.weight * (rng.exponential(size=len(group.latency_s)) if resampled else np.ones(len(group.latency_s)))
            for group in groups
        ]
        objective = _squares(speeds, weights) if loss == "reg" else _pairs(speeds, weights, loss == "rank-binary")

        def gradient(prediction: Any, _: xgboost.DMatrix) -> tuple[Any, Any]:
            slope, curvature = objective(np.bincount(owner, weights=prediction).astype(np.float64))
            return slope[owner], curvature[owner]

        self._booster = xgboost.train(parameters, data, num_boost_round=_ROUNDS, obj=gradient)

    def score(self, features: Sequence[Features]) -> Floats:
        """Return one score per candidate, higher is faster; 0 for one without stores."""
        filled = [index for index, matrix in enumerate(features) if len(matrix)]
        scores = np.zeros(len(features))
        if filled:
            stacked, owner = _stack([features[index] for index in filled])
            per_store = self._booster.inplace_predict(stacked, predict_type="margin")
            scores[filled] = np.bincount(owner, weights=per_store, minlength=len(filled))
        return scores


_Objective = Callable[[Floats], tuple[Floats, Floats]]


def _squares(speeds: Sequence[Floats], weights: Sequence[Floats]) -> _Objective:
    """Return the gradient and curvature of the squared error of relative speed, per candidate."""
    speed = np.concatenate(speeds)
    # Errors are weighted by speed, as in Ansor; the floor keeps slow candidates relevant.
    weight = np.maximum(speed, 0.05) * np.concatenate(weights)
    return lambda total: ((total - speed) * weight, weight)


def _pairs(speeds: Sequence[Floats], weights: Sequence[Floats], binary: bool) -> _Objective:
    """Return LambdaRank's logistic loss over misordered pairs, weighted by their distance."""
    apart = []
    for speed, weight in zip(speeds, weights, strict=True):
        label = (speed >= _FAST).astype(float) if binary else speed
        gap = np.maximum(label[:, None] - label[None, :], 0)
        # Normalised so that a candidate has equal weight in groups of any size.
        apart.append(gap * np.sqrt(weight[:, None] * weight[None, :]) / max(1.0, float(gap.sum()) / len(speed)))
    starts = np.cumsum([0, *[len(each) for each in speeds]])

    def objective(total: Floats) -> tuple[Floats, Floats]:
        slope, curvature = np.zeros(len(total)), np.zeros(len(total))
        for gap, start, end in zip(apart, starts, starts[1:], strict=False):
            score = total[start:end]
            wrong = 1 / (1 + np.exp(np.clip(score[:, None] - score[None, :], -30, 30)))
            push, bend = gap * wrong, gap * wrong * (1 - wrong)
            slope[start:end] = push.sum(axis=0) - push.sum(axis=1)
            curvature[start:end] = bend.sum(axis=0) + bend.sum(axis=1)
        return slope, np.maximum(curvature, 1e-6)

    return objective


def _relative_speed(latency_s: Floats) -> Floats:
    best = latency_s.min()
    return np.zeros_like(latency_s) if not np.isfinite(best) else best / latency_s


def _stack(matrices: Sequence[Features]) -> tuple[Features, npt.NDArray[np.int64]]:
    """Concatenate all rows; also return the index of each row's matrix."""
    lengths = [len(matrix) for matrix in matrices]
    return np.concatenate(matrices), np.repeat(np.arange(len(matrices)), lengths)


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
