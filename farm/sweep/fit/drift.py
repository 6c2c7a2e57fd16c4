"""How a board moved during a sweep, from the anchor: one point that is visited again and again.

What moves slowly (heat, the supply, the sensor) is taken out of every visit; how far visits differ beyond that, and
beyond what each said of itself, goes into every interval.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import scipy.special

from farm.points.values import Z95
from farm.sweep.fit.terms import Floats, factor_many, halve_many

# Above this a correction is a guess: the sweep is voided. Thermal throttling and a weak supply look like this.
MAX_DRIFT = 0.10
# How far a board may have moved over a whole sweep, as a standard deviation, with what is known before anything is
# measured: mostly below 2 %, seldom more. And how far visits differ from each other beyond their own intervals.
_DRIFTS = ((0.0, 0.15), (0.003, 0.25), (0.01, 0.35), (0.03, 0.2), (0.1, 0.05))
_VISITS = ((0.0005, 0.2), (0.0015, 0.35), (0.003, 0.32), (0.006, 0.12), (0.015, 0.01))
# What a visit says of itself may be a bound: half a step of a power sensor covers the worst case, and is too wide where
# noise makes the sensor hit its steps by turns. So much of it is believed, as the anchor's repeats have it.
EXACT = ((1.0, 1.0),)
BOUND = ((0.5, 0.35), (0.75, 0.35), (1.0, 0.3))
# Shapes of the movement: steady, or a random walk (0 and 1: share of the walk in the variance).
_WALKS = (0.05, 0.5)
# A length of time over which a random walk moves by the amounts above when a sweep is shorter than that.
_SHORTEST_S = 300.0
_VAGUE = 10.0
# Of more than twice so many visits of the anchor so many choose what is weighed by all; and which odds, as a logarithm,
# are too long.
_TELLING, _RULED_OUT = 40, 12.0
# How far the board may move, how far visits differ, the walk's share, how much of the visits' own intervals is true.
_Choice = tuple[tuple[float, float], tuple[float, float], float, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Drift:
    """What the anchor tells of one quantity: at each visit how far the board had moved, relative to the sweep's start.

    `shift` is the movement's logarithm at the visits asked for, `sd` how uncertain that is, `visit_sd` how far visits
    differ beyond their own intervals, and `believed` how much of those counts. `anchors` counts visits of the anchor
    that were used. `tail` is how far out 95 % of the error lie, relative to 1.96 standard deviations: what may be is a
    mixture, whose tails are not those of a normal distribution.
    """

    shift: Floats
    sd: Floats
    visit_sd: float
    anchors: int
    believed: float = 1.0
    tail: float = 1.0

    @property
    def largest(self) -> float:
        """The largest movement seen, relative; 0 without any visit."""
        return float(np.abs(self.shift).max(initial=0.0))

    @property
    def is_too_large(self) -> bool:
        """Whether the correction cannot be believed any more."""
        return self.largest > MAX_DRIFT


def estimate_drift(
    anchor_s: Sequence[float],
    logs: Sequence[float],
    sds: Sequence[float],
    at_s: Floats,
    stated: Sequence[tuple[float, float]] = EXACT,
) -> Drift:
    """Drift of one quantity at the times `at_s`, from the anchor's visits: times in s, logarithms, their own sds.

    `stated` says how much of those sds may be true: `EXACT`, or `BOUND`. Every combination of that with how much and
    how the board may move is weighed by its likelihood, so that few anchors give wide answers, not wrong ones.
    """
    if not anchor_s:
        return Drift(np.zeros(at_s.size), np.full(at_s.size, _prior_sd(_DRIFTS)), _prior_sd(_VISITS), 0)
    times = np.asarray(anchor_s, dtype=np.float64)
    start_s = times[0]
    length_s = max(float(max(times.max(), at_s.max(initial=0.0)) - start_s), _SHORTEST_S)
    known, asked = (times - start_s) / length_s, (at_s - start_s) / length_s
    values = np.asarray(logs) - logs[0]
    own = np.asarray(sds) ** 2
    choices = list(itertools.product(_DRIFTS, _VISITS, _WALKS, stated))
    if known.size > 2 * _TELLING:
        # What a few of them, spread over the whole time, all but rule out is not worth weighing by all.
        some = np.linspace(0, known.size - 1, _TELLING).round().astype(int)
        choices, *_ = _weigh(choices, known[some], values[some], own[some])
    choices, scores, factors, half = _weigh(choices, known, values, own)
    cross = _scale(choices, lambda walk: _paths(known, asked, walk))
    ahead = _scale(choices, lambda walk: _spread(asked, walk))
    across = halve_many(factors, cross)
    visits, believed = _find_noise(choices)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    shifts = np.einsum("bnm,bn->bm", across, half)
    shift = weights @ shifts
    variances = np.maximum(ahead - (across**2).sum(axis=1), 0.0)
    variance = weights @ (variances + (shifts - shift) ** 2)
    tail = _find_tail(weights, (variances + (shifts - shift) ** 2).mean(axis=1) + believed * own.mean() + visits)
    visit_sd, share = float(np.sqrt(weights @ visits)), float(np.sqrt(weights @ believed))
    return Drift(shift, np.sqrt(variance), visit_sd, len(times), share, tail)


def _weigh(
    choices: Sequence[_Choice], known: Floats, values: Floats, own: Floats
) -> tuple[list[_Choice], Floats, Floats, Floats]:
    """The choices that are not all but ruled out.

    Besides: their log-likelihoods, priors included; the factors of their covariances; those applied to the values.
    """
    moves = _scale(choices, lambda walk: _paths(known, known, walk))
    priors = np.array([first * second * third for (_, first), (_, second), _, (_, third) in choices])
    visits, believed = _find_noise(choices)
    # The anchor's level is unknown, too: a constant with a vague prior.
    noise = np.eye(known.size) * (believed[:, None] * own[None] + visits[:, None])[:, :, None]
    factors = factor_many(moves + _VAGUE**2 + noise)
    half = halve_many(factors, np.broadcast_to(values[:, None], (len(choices), known.size, 1)))[..., 0]
    sizes = np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(axis=1)
    scores = -0.5 * (half**2).sum(axis=1) - sizes + np.log(priors)
    left = np.flatnonzero(scores > scores.max() - _RULED_OUT)
    return [choices[int(index)] for index in left], scores[left], factors[left], half[left]


def _scale(choices: Sequence[_Choice], of_walk: Callable[[float], Floats]) -> Floats:
    """What each choice's movement comes to, from what its walk does; of those there are few."""
    walks = {walk: of_walk(walk) for walk in _WALKS}
    return np.stack([sd**2 * walks[walk] for (sd, _), _, walk, _ in choices])


def _find_noise(choices: Sequence[_Choice]) -> tuple[Floats, Floats]:
    """Variances that the choices add to visits, and how much of the visits' own they believe."""
    visits = np.array([visit_sd**2 for _, (visit_sd, _), _, _ in choices])
    return visits, np.array([share**2 for *_, (share, _) in choices])


def _find_tail(weights: Floats, variances: Floats) -> float:
    """Half the width of a mixture's central 95 %, relative to 1.96 of its standard deviations; one mean."""
    sds = np.sqrt(np.maximum(variances, 1e-16))
    whole = float(np.sqrt(weights @ sds**2))
    low, high = 0.0, 8.0 * whole
    for _ in range(40):
        middle = (low + high) / 2
        inside = float(weights @ scipy.special.erf(middle / sds / np.sqrt(2)))
        low, high = (middle, high) if inside < 0.95 else (low, middle)
    return high / (Z95 * whole)


def _paths(left: Floats, right: Floats, walk: float) -> Floats:
    """Covariance of a movement that is zero at the start: a steady one and a random walk."""
    left, right = np.maximum(left, 0.0), np.maximum(right, 0.0)
    steady = left[:, None] * right[None]
    return np.asarray((1 - walk) * steady + walk * np.minimum(left[:, None], right[None]))


def _spread(at: Floats, walk: float) -> Floats:
    """The diagonal of `_paths` alone: of two thousand visits the whole would be four million entries."""
    at = np.maximum(at, 0.0)
    return np.asarray((1 - walk) * (at * at) + walk * at)


def _prior_sd(choices: Sequence[tuple[float, float]]) -> float:
    return float(np.sqrt(sum(weight * sd**2 for sd, weight in choices)))
