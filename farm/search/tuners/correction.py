"""What trials on a core say of its predictions: a small model of how far those are off, learned over all workloads.

Gaussian process regression of log2(measured / predicted) on what a plan is made of. Its mean is zero where nothing was
measured, so that it leaves the order as the core's file has it; no TVM, no search, nothing random.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from scipy.linalg import solve_triangular

Floats = npt.NDArray[np.float64]

# Standard deviations of log2(measured / predicted), by what is to blame. For all plans of a family together, and those
# of one function, neither of which changes any order; along each facet (linear); near by, in all functions of the
# family and in one; and of a measurement.
_FAMILY, _FUNCTION = 1.0, 0.7
_ALONG = 0.25
_NEAR, _NEAR_OWN = 0.5, 0.5
_NOISE = 0.05
# How far apart plans are that have little to say of each other: facets are in octaves, or shares of the whole.
_REACH, _REACH_OWN = 2.5, 1.5
# So many deviations are in a plan's favour: what is not known may be good.
_HOPE = 0.7
# So many trials teach; of the function's own at most so many, so that a long search still hears what others show.
MOST_TAUGHT, MOST_OWN = 256, 128


@dataclasses.dataclass(frozen=True)
class Plans:
    """Plans of one function as predicted: a row of `facets` each, named by `names`, and log2 of seconds.

    Only plans of one `family` say anything of each other.
    """

    family: str
    names: tuple[str, ...]
    facets: Floats
    log_s: Floats


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What was measured of a function: rows of its `plans`, and log2 of the seconds that they took.

    `function` tells it from others, of the same code at another operating point too.
    """

    function: str
    plans: Plans
    rows: tuple[int, ...]
    log_s: tuple[float, ...]


class Correction:
    """How far off predictions are, from lessons of functions on the same core."""

    def __init__(self, lessons: Sequence[Lesson], function: str, plans: Plans) -> None:
        """For one function's plans: lessons of its family teach, up to `MOST_TAUGHT` trials of them.

        Equal lessons in equal order give the same.
        """
        useful = [each for each in lessons if each.plans.family == plans.family and each.rows]
        own = _choose([each for each in useful if each.function == function], MOST_OWN)
        left = MOST_TAUGHT - sum(len(each.rows) for each in own)
        taught = [*own, *_choose([each for each in useful if each.function != function], left)]
        # How many measured plans teach.
        self.count = sum(len(each.rows) for each in taught)
        numbers = {name: at for at, name in enumerate(dict.fromkeys([function, *(each.function for each in taught)]))}
        self._plans = plans
        self._all = _Points(plans.facets, np.zeros(len(plans.log_s), np.int64))
        known = _Points(
            np.concatenate([plans.facets[:0], *(_align(each, plans.names) for each in taught)]),
            np.array([numbers[each.function] for each in taught for _ in each.rows], np.int64),
        )
        off = np.concatenate([plans.log_s[:0], *(_miss(each) for each in taught)])
        root = np.asarray(np.linalg.cholesky(_covariance(known, known) + _NOISE**2 * np.eye(self.count)), np.float64)
        # What the lessons tell of each plan, a row for each as if they were told one after the other.
        self._told = _solve(root, _covariance(known, self._all))
        self._off = np.asarray(self._told.T @ _solve(root, off))

    def expect(self) -> Floats:
        """log2 of the seconds that each plan is expected to take."""
        return self._plans.log_s + self._off

    def order(self, known: Collection[int] = (), under_way: Collection[int] = ()) -> Iterator[int]:
        """All plans that are neither known nor under way, the most promising first.

        Each is chosen as if those before it were under way, so that one batch does not ask the same thing twice.
        """
        expected = self.expect()
        # What counts is what is not known of the difference to the best.
        best = int(np.argmin(expected))
        told = np.empty((self.count + len(expected), len(expected)))  # most of it is never touched
        told[: self.count] = self._told
        left = _variance(self._all.facets) - (self._told**2).sum(axis=0)
        beside = self._row(best) - self._told[:, best] @ self._told
        closed = np.zeros(len(expected), bool)
        closed[[*known, *under_way]] = True
        for count, given in enumerate(itertools.chain(under_way, itertools.repeat(None)), self.count):
            at = given
            if at is None:
                if closed.all():
                    return
                apart = np.maximum(left + left[best] - 2 * beside, 0.0)
                at = int(np.argmin(np.where(closed, np.inf, expected - _HOPE * np.sqrt(apart))))
                closed[at] = True
                yield at
            row = (self._row(at) - told[:count, at] @ told[:count]) / np.sqrt(max(left[at], 0.0) + _NOISE**2)
            told[count] = row
            left -= row**2
            beside -= row[best] * row

    def _row(self, at: int) -> Floats:
        """What one plan and all of them have in common."""
        return np.asarray(_covariance(_Points(self._all.facets[[at]], self._all.functions[:1]), self._all)[0])


@dataclasses.dataclass(frozen=True)
class _Points:
    """Plans of any functions: facets, and whose each is."""

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


def _solve(root: Floats, values: Floats) -> Floats:
    return np.asarray(solve_triangular(root, values, lower=True, check_finite=False)) if len(root) else values


def _align(lesson: Lesson, names: tuple[str, ...]) -> Floats:
    """The facets named of what was measured, zero where its function has none such."""
    rows, known = list(lesson.rows), lesson.plans.names
    columns = [lesson.plans.facets[rows, known.index(name)] if name in known else np.zeros(len(rows)) for name in names]
    return np.stack(columns, axis=1)


def _miss(lesson: Lesson) -> Floats:
    """log2 of measured over predicted."""
    return np.asarray(np.array(lesson.log_s) - lesson.plans.log_s[list(lesson.rows)])


def _choose(lessons: Sequence[Lesson], most: int) -> list[Lesson]:
    """So many trials, the same share of each lesson: its fastest, and others evenly spread over its latencies."""
    chosen = []
    # The smallest first: what they leave of their share goes to the larger ones.
    ordered = sorted(lessons, key=lambda each: len(each.rows))
    for at, lesson in enumerate(ordered):
        share = min(len(lesson.rows), most // (len(ordered) - at))
        most -= share
        ranked = np.argsort(lesson.log_s, kind="stable")
        places = np.sort(ranked[np.linspace(0, len(ranked) - 1, share).round().astype(int)])
        rows, log_s = [lesson.rows[place] for place in places], [lesson.log_s[place] for place in places]
        chosen.append(Lesson(lesson.function, lesson.plans, tuple(rows), tuple(log_s)))
    return chosen
