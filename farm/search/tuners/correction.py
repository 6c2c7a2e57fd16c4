"""Correct a core's predictions by its trials: a model of the prediction error over all workloads.

Gaussian process regression of log2(measured / predicted) on the facets of a plan. Its mean is zero without data, so it
then keeps the predicted order. Deterministic.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Standard deviations of log2(measured / predicted): per family and per function, which change no order; along each
# facet (linear); local, over a family and within a function; measurement noise.
_FAMILY, _FUNCTION = 1.0, 0.7
_ALONG = 0.25
_NEAR, _NEAR_OWN = 0.5, 0.5
_NOISE = 0.05
# Length scales of the local terms; facets are in octaves or shares of the whole.
_REACH, _REACH_OWN = 2.5, 1.5
# Exploration: standard deviations subtracted from a plan's expected time.
_EXPLORATION = 0.7
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
