"""Estimate a board's drift during a sweep from the anchor: one point that is visited repeatedly.

Slow drift (heat, supply, sensor) is removed from every visit; the remaining scatter of visits widens every interval.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import scipy.special

from farm.points.values import Z95
from farm.sweep.fit.terms import Floats

# A larger correction is a guess, so the sweep is void. Thermal throttling and a weak supply look like this.
MAX_DRIFT = 0.10
# Priors of a board's drift over a whole sweep, as standard deviations: mostly below 2 %, seldom more. And priors of the
# scatter of visits beyond their own intervals.
_DRIFTS = ((0.0, 0.15), (0.003, 0.25), (0.01, 0.35), (0.03, 0.2), (0.1, 0.05))
_VISITS = ((0.0005, 0.2), (0.0015, 0.35), (0.003, 0.32), (0.006, 0.12), (0.015, 0.01))
# A visit's own interval may be a bound: half a step of a power sensor covers the worst case, which is too wide where
# noise dithers the sensor. The share of it that is valid, estimated from the anchor's repeats.
EXACT = ((1.0, 1.0),)
BOUND = ((0.5, 0.35), (0.75, 0.35), (1.0, 0.3))
# Shapes of the drift: steady, or a random walk (0 and 1: share of the walk in the variance).
_WALKS = (0.05, 0.5)
# The time over which a random walk moves by these amounts, if a sweep is shorter.
_SHORTEST_S = 300.0
_VAGUE = 10.0
# With more than twice this many visits of the anchor, this many select the choices that all visits weigh; and the log
# odds at which a choice is dropped.
_TELLING, _RULED_OUT = 40, 12.0
# Drift, scatter of visits, the walk's share, the valid share of the visits' own intervals.
_Choice = tuple[tuple[float, float], tuple[float, float], float, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Drift:
    """The drift of one quantity, relative to the sweep's start, at each visit.

    `shift` is its logarithm at the requested visits, `sd` its uncertainty, `visit_sd` the scatter of visits beyond
    their own intervals, and `believed` the valid share of those. `tail` is the half width of the error's 95 % interval
    relative to 1.96 standard deviations: the error is a mixture, not normal.
    """

    shift: Floats
    sd: Floats
    visit_sd: float
    believed: float = 1.0
    tail: float = 1.0

    @property
    def largest(self) -> float:
        """The largest drift, relative; 0 without any visit."""
        return float(np.abs(self.shift).max(initial=0.0))

    @property
    def is_too_large(self) -> bool:
        """Whether the correction is too large to be valid."""
        return self.largest > MAX_DRIFT


def estimate_drift(
    anchor_s: Sequence[float],
    logs: Sequence[float],
    sds: Sequence[float],
    at_s: Floats,
    stated: Sequence[tuple[float, float]] = EXACT,
) -> Drift:
    """Estimate the drift of one quantity at the times `at_s`, from the anchor's visits: times in s, logarithms, their
    sds.

    `stated` gives the possible valid shares of those sds: `EXACT`, or `BOUND`. Every combination of share, amount and
    shape is weighted by its likelihood, so that few anchors give wide answers, not wrong ones.
    """
    if not anchor_s:
        return Drift(np.zeros(at_s.size), np.full(at_s.size, _prior_sd(_DRIFTS)), _prior_sd(_VISITS))
    times = np.asarray(anchor_s, dtype=np.float64)
    start_s = times[0]
    length_s = max(float(max(times.max(), at_s.max(initial=0.0)) - start_s), _SHORTEST_S)
    known, asked = (times - start_s) / length_s, (at_s - start_s) / length_s
    values = np.asarray(logs) - logs[0]
    own = np.asarray(sds) ** 2
    choices = list(itertools.product(_DRIFTS, _VISITS, _WALKS, stated))
    if known.size > 2 * _TELLING:
        # A few visits, spread over the whole time, drop choices that need not be weighed by all.
        some = np.linspace(0, known.size - 1, _TELLING).round().astype(int)
        choices, *_ = _weigh(choices, known[some], values[some], own[some])
    choices, scores, factors, half = _weigh(choices, known, values, own)
    cross = _scale(choices, lambda walk: _paths(known, asked, walk))
    ahead = _scale(choices, lambda walk: _spread(asked, walk))
    across = np.linalg.solve(factors, cross)
    visits, believed = _find_noise(choices)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    shifts = np.einsum("bnm,bn->bm", across, half)
    shift = weights @ shifts
    variances = np.maximum(ahead - (across**2).sum(axis=1), 0.0)
    variance = weights @ (variances + (shifts - shift) ** 2)
    tail = _find_tail(weights, (variances + (shifts - shift) ** 2).mean(axis=1) + believed * own.mean() + visits)
    visit_sd, share = float(np.sqrt(weights @ visits)), float(np.sqrt(weights @ believed))
    return Drift(shift, np.sqrt(variance), visit_sd, share, tail)


def _weigh(
    choices: Sequence[_Choice], known: Floats, values: Floats, own: Floats
) -> tuple[list[_Choice], Floats, Floats, Floats]:
    """Weigh the likely choices.

    Returns them with their log-likelihoods, priors included; the factors of their covariances; those applied to the
    values.
    """
    moves = _scale(choices, lambda walk: _paths(known, known, walk))
    priors = np.array([first * second * third for (_, first), (_, second), _, (_, third) in choices])
    visits, believed = _find_noise(choices)
    # The anchor's level is unknown, too: a constant with a vague prior.
    noise = np.eye(known.size) * (believed[:, None] * own[None] + visits[:, None])[:, :, None]
    factors = np.asarray(np.linalg.cholesky(moves + _VAGUE**2 + noise), np.float64)
    repeated = np.broadcast_to(values[:, None], (len(choices), known.size, 1))
    half = np.asarray(np.linalg.solve(factors, repeated)[..., 0], np.float64)
    sizes = np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(axis=1)
    scores = -0.5 * (half**2).sum(axis=1) - sizes + np.log(priors)
    left = np.flatnonzero(scores > scores.max() - _RULED_OUT)
    return [choices[int(index)] for index in left], scores[left], factors[left], half[left]


def _scale(choices: Sequence[_Choice], of_walk: Callable[[float], Floats]) -> Floats:
    """Scale each choice's drift by its walk share; there are few of those."""
    walks = {walk: of_walk(walk) for walk in _WALKS}
    return np.stack([sd**2 * walks[walk] for (sd, _), _, walk, _ in choices])


def _find_noise(choices: Sequence[_Choice]) -> tuple[Floats, Floats]:
    """Return the choices' added variances of visits, and their valid shares of the visits' own."""
    visits = np.array([visit_sd**2 for _, (visit_sd, _), _, _ in choices])
    return visits, np.array([share**2 for *_, (share, _) in choices])


def _find_tail(weights: Floats, variances: Floats) -> float:
    """Return half the width of a mixture's central 95 %, relative to 1.96 of its standard deviations; one mean."""
    sds = np.sqrt(np.maximum(variances, 1e-16))
    whole = float(np.sqrt(weights @ sds**2))
    low, high = 0.0, 8.0 * whole
    for _ in range(40):
        middle = (low + high) / 2
        inside = float(weights @ scipy.special.erf(middle / sds / np.sqrt(2)))
        low, high = (middle, high) if inside < 0.95 else (low, middle)
    return high / (Z95 * whole)


def _paths(left: Floats, right: Floats, walk: float) -> Floats:
    """Return the covariance of a drift that is zero at the start: a steady one and a random walk."""
    left, right = np.maximum(left, 0.0), np.maximum(right, 0.0)
    steady = left[:, None] * right[None]
    return np.asarray((1 - walk) * steady + walk * np.minimum(left[:, None], right[None]))


def _spread(at: Floats, walk: float) -> Floats:
    """Return the diagonal of `_paths` alone: for two thousand visits the whole has four million entries."""
    at = np.maximum(at, 0.0)
    return np.asarray((1 - walk) * (at * at) + walk * at)


def _prior_sd(choices: Sequence[tuple[float, float]]) -> float:
    return float(np.sqrt(sum(weight * sd**2 for sd, weight in choices)))
