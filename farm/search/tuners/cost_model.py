"""A cost model that ranks candidates: gradient-boosted trees over MetaSchedule's per-store features.

It learns from measurements only: board and farm faults never reach it, and a failed candidate has speed zero. Its trees
also rate which options of a plan mattered. Loads no compiler.

`Correction` corrects a core's predictions by its trials: Gaussian process regression of log2(measured / predicted) on
the facets of a plan, over all workloads. Its mean is zero without data, so it then keeps the predicted order.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
_Objective = Callable[[Floats], tuple[Floats, Floats]]
# The trees predict speed relative to the best; less than this counts as this.
_LEAST_SPEED = 1 / 64
_ALONG = 0.25
_NOISE = 0.05
# Exploration: standard deviations subtracted from a plan's expected time.
_EXPLORATION = 0.7


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


# Standard deviations of log2(measured / predicted): per family and per function, which change no order; along each
# facet (linear); local, over a family and within a function; measurement noise.
_FAMILY, _FUNCTION = 1.0, 0.7
_NEAR, _NEAR_OWN = 0.5, 0.5
# Length scales of the local terms; facets are in octaves or shares of the whole.
_REACH, _REACH_OWN = 2.5, 1.5
# Most trials used; the function's own are limited so that a long search still uses others.
MOST_TAUGHT, MOST_OWN = 256, 128


@dataclasses.dataclass(frozen=True)
class Plans:
    """Predicted plans of one function: a row of `facets` each, named by `names`, and log2 of seconds.

    Only plans of one `family` are comparable.
    """

    family: str
    names: tuple[str, ...]
    facets: Floats
    log_s: Floats


@dataclasses.dataclass(frozen=True)
class Lesson:
    """Measurements of a function: rows of its `plans`, and log2 of the measured seconds.

    `function` identifies it, including its operating point.
    """

    function: str
    plans: Plans
    rows: tuple[int, ...]
    log_s: tuple[float, ...]


class Correction:
    """The expected prediction error, from lessons of functions on the same core."""

    def __init__(self, lessons: Sequence[Lesson], function: str, plans: Plans) -> None:
        """Fit one function's plans to lessons of its family, up to `MOST_TAUGHT` trials. Deterministic."""
        useful = [each for each in lessons if each.plans.family == plans.family and each.rows]
        own = _choose([each for each in useful if each.function == function], MOST_OWN)
        left = MOST_TAUGHT - sum(len(each.rows) for each in own)
        taught = [*own, *_choose([each for each in useful if each.function != function], left)]
        # The number of trials used.
        self.count = sum(len(each.rows) for each in taught)
        numbers = {name: at for at, name in enumerate(dict.fromkeys([function, *(each.function for each in taught)]))}
        self._plans = plans
        self._all = _Points(plans.facets, np.zeros(len(plans.log_s), np.int64))
        known = _Points(
            np.concatenate([plans.facets[:0], *(_align(each, plans.names) for each in taught)]),
            np.array([numbers[each.function] for each in taught for _ in each.rows], np.int64),
        )
        off = np.concatenate([plans.log_s[:0], *(_log_error(each) for each in taught)])
        root = np.linalg.cholesky(_covariance(known, known) + _NOISE**2 * np.eye(self.count))
        # Whitened covariance of each plan with the trials.
        self._whitened = np.linalg.solve(root, _covariance(known, self._all))
        self._off: Floats = self._whitened.T @ np.linalg.solve(root, off)

    def expect(self) -> Floats:
        """Return log2 of the expected seconds of each plan."""
        return self._plans.log_s + self._off

    def order(self, known: Collection[int] = (), under_way: Collection[int] = ()) -> Iterator[int]:
        """Yield all plans that are neither known nor under way, the most promising first.

        Each is chosen as if those before it were under way, so that a batch is diverse.
        """
        expected = self.expect()
        # Explore by the uncertainty of the difference to the best.
        best = int(np.argmin(expected))
        whitened = np.empty((self.count + len(expected), len(expected)))  # mostly never touched
        whitened[: self.count] = self._whitened
        left = _variance(self._all.facets) - (self._whitened**2).sum(axis=0)
        beside = self._row(best) - self._whitened[:, best] @ self._whitened
        closed = np.zeros(len(expected), bool)
        closed[[*known, *under_way]] = True
        for count, given in enumerate(itertools.chain(under_way, itertools.repeat(None)), self.count):
            at = given
            if at is None:
                if closed.all():
                    return
                apart = np.maximum(left + left[best] - 2 * beside, 0.0)
                at = int(np.argmin(np.where(closed, np.inf, expected - _EXPLORATION * np.sqrt(apart))))
                closed[at] = True
                yield at
            row = (self._row(at) - whitened[:count, at] @ whitened[:count]) / np.sqrt(max(left[at], 0.0) + _NOISE**2)
            whitened[count] = row
            left -= row**2
            beside -= row[best] * row

    def _row(self, at: int) -> Floats:
        """Return the covariance of one plan with all."""
        return np.asarray(_covariance(_Points(self._all.facets[[at]], self._all.functions[:1]), self._all)[0])


@dataclasses.dataclass(frozen=True)
class _Points:
    """Plans of several functions: facets, and the index of the function."""

    facets: Floats
    functions: npt.NDArray[np.int64]


def _covariance(left: _Points, right: _Points) -> Floats:
    product = left.facets @ right.facets.T
    squares = (left.facets**2).sum(axis=1)[:, None] + (right.facets**2).sum(axis=1)[None]
    apart = np.maximum(squares - 2 * product, 0.0)
    found = np.asarray(_FAMILY**2 + _ALONG**2 * product + _NEAR**2 * np.exp(apart / (-2 * _REACH**2)))
    for each in np.intersect1d(left.functions, right.functions):
        block = np.ix_(left.functions == each, right.functions == each)
        found[block] += _FUNCTION**2 + _NEAR_OWN**2 * np.exp(apart[block] / (-2 * _REACH_OWN**2))
    return found


def _variance(facets: Floats) -> Floats:
    fixed = _FAMILY**2 + _FUNCTION**2 + _NEAR**2 + _NEAR_OWN**2
    return np.asarray(fixed + _ALONG**2 * (facets**2).sum(axis=1))


def _align(lesson: Lesson, names: tuple[str, ...]) -> Floats:
    """Return the named facets of the measured plans, zero where the function lacks one."""
    rows, known = list(lesson.rows), lesson.plans.names
    columns = [lesson.plans.facets[rows, known.index(name)] if name in known else np.zeros(len(rows)) for name in names]
    return np.stack(columns, axis=1)


def _log_error(lesson: Lesson) -> Floats:
    """Return log2 of measured over predicted."""
    return np.asarray(np.array(lesson.log_s) - lesson.plans.log_s[list(lesson.rows)])


def _choose(lessons: Sequence[Lesson], most: int) -> list[Lesson]:
    """Choose `most` trials, equally from each lesson: its fastest, and others spread evenly over its latencies."""
    chosen = []
    # The smallest first: larger ones get what they leave.
    ordered = sorted(lessons, key=lambda each: len(each.rows))
    for at, lesson in enumerate(ordered):
        share = min(len(lesson.rows), most // (len(ordered) - at))
        most -= share
        ranked = np.argsort(lesson.log_s, kind="stable")
        places = np.sort(ranked[np.linspace(0, len(ranked) - 1, share).round().astype(int)])
        rows, log_s = [lesson.rows[place] for place in places], [lesson.log_s[place] for place in places]
        chosen.append(Lesson(lesson.function, lesson.plans, tuple(rows), tuple(log_s)))
    return chosen
