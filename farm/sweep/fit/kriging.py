"""The residual of a parametric fit as a Gaussian process, so that a prediction's interval covers what the fit lacks.

Universal kriging: log y = log fit(x) + B(x) d + g(x) + noise, where B are the fit's own terms as shares, d their
corrections with a wide prior, and g a smooth function (Rasmussen & Williams 2006, Gaussian Processes for Machine
Learning, sec. 2.7). How rough and how large g is nobody knows: all of a small grid of answers are kept and weighed by
their likelihood.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from farm.sweep.fit.linear import factor_many, halve_many
from farm.sweep.fit.terms import Floats, Indices

# Prior of a term's correction: at the point where it matters most, a term may be wrong by this share of the whole.
TERM_SD = 0.6
# Amplitudes of g, relative, and how far apart points are before they tell nothing of each other (a whole axis is 1).
_AMPLITUDES = (0.003, 0.01, 0.03, 0.08)
_LENGTHS = (0.25, 0.6)
# Of g's variance, what no neighbour tells: a memory clock that a CPU clock raises in steps, rounding in a driver. Only
# points nearer than this tell of it. Without it predictions between points that fit well are too sure of themselves.
_ROUGH_SHARE, _ROUGH_LENGTH = 0.1, 0.05
# Larger residuals are possible, not likely: what the terms say is physics.
_AMPLITUDE_PRIOR = (0.3, 0.3, 0.25, 0.15)
# Answers with less weight than this change nothing that is shown.
_LEAST_WEIGHT = 0.03
# How much the fit's own misses (leave one out) may correct its intervals: as if so many more points fitted perfectly.
_TRUST = 12.0
# Waves that a drawn function is made of; its covariance is then right to within some percent.
_WAVES = 256
# Nor may they make intervals much narrower than the priors have them.
_LEAST_INFLATION = 0.7


@dataclasses.dataclass(frozen=True)
class Fit:
    """A parametric fit: its logarithm over the grid, and its terms as shares of it there."""

    log_mean: Floats
    shares: Floats


@dataclasses.dataclass(frozen=True)
class _Answer:
    """One choice of fit, amplitude and length, solved."""

    fit: Fit
    amplitude: float
    length: float
    root: Floats  # inverse of the Cholesky factor of the covariance of what was measured
    solved: Floats  # covariance^-1 residual
    inflation: float


class Posterior:
    """What is known of one quantity's logarithm over the grid. Mixes all answers that the measurements allow."""

    def __init__(
        self,
        answers: Sequence[_Answer],
        weights: Floats,
        place: Floats,
        rows: Indices,
        sds: Floats,
        shared_sd: float,
    ) -> None:
        self._sds = sds
        self._shared_sd = shared_sd
        self._answers = answers
        self._weights = weights
        self._place = place
        self._rows = rows
        self.mean, self.sd = self._mix()

    def _mix(self) -> tuple[Floats, Floats]:
        parts = [self._predict(answer, np.arange(self._place.shape[0])) for answer in self._answers]
        means = np.stack([mean for mean, _ in parts])
        variances = np.stack([variance for _, variance in parts])
        weights = self._weights[:, None]
        mean = (weights * means).sum(axis=0)
        variance = (weights * (variances + (means - mean) ** 2)).sum(axis=0)
        return mean, np.sqrt(variance + self._shared_sd**2)

    def _predict(self, answer: _Answer, at: Indices) -> tuple[Floats, Floats]:
        cross = _covariance(answer, self._place, self._rows, at)
        mean = answer.fit.log_mean[at] + cross.T @ answer.solved
        half = answer.root @ cross
        prior = answer.amplitude**2 + TERM_SD**2 * (answer.fit.shares[at] ** 2).sum(axis=1)
        return mean, answer.inflation * np.maximum(prior - (half**2).sum(axis=0), 1e-12)

    def draw(self, at: Indices, count: int, rng: np.random.Generator) -> Floats:
        """`count` joint draws of the logarithm at the points `at`, without what all share; shape (count, points).

        A draw of the prior is corrected by how far it misses the measurements (Matheron's rule; Wilson et al. 2020,
        Efficiently sampling functions from Gaussian process posteriors), which needs no factor of a large matrix.
        """
        shares = np.floor(self._weights * count).astype(np.int64)
        shares[0] += count - shares.sum()
        rows = np.concatenate([at, self._rows])
        draws = []
        for answer, number in zip(self._answers, shares, strict=True):
            if not number:
                continue
            prior = answer.amplitude * _draw_residual(self._place[rows], answer.length, int(number), rng)
            prior += TERM_SD * rng.standard_normal((number, answer.fit.shares.shape[1])) @ answer.fit.shares[rows].T
            noise = self._sds * rng.standard_normal((number, self._rows.size))
            cross = _covariance(answer, self._place, self._rows, at)
            misses = (prior[:, at.size :] + noise) @ answer.root.T @ answer.root
            mean = answer.fit.log_mean[at] + cross.T @ answer.solved
            draws.append(mean + np.sqrt(answer.inflation) * (prior[:, : at.size] - misses @ cross))
        return np.concatenate(draws)


def condition(
    fits: Sequence[Fit], place: Floats, rows: Sequence[int], logs: Floats, sds: Floats, shared_sd: float
) -> Posterior:
    """What measurements `logs` with standard deviations `sds` at the grid's `rows` tell of the whole grid.

    `shared_sd` is an error that all measurements have in common: it widens every interval, and no comparison.
    """
    index = np.asarray(rows, dtype=np.int64)
    shapes = [_shape(place[index], place[index], length) for length in _LENGTHS]
    noise = np.diag(sds**2 + 1e-12)
    tried = [(fit, amplitude, length) for fit in fits for length in _LENGTHS for amplitude in _AMPLITUDES]
    covariances, residuals, priors = [], [], []
    for fit in fits:
        basis = TERM_SD**2 * fit.shares[index] @ fit.shares[index].T + noise
        for shape in shapes:
            for amplitude, prior in zip(_AMPLITUDES, _AMPLITUDE_PRIOR, strict=True):
                covariances.append(basis + amplitude**2 * shape)
                residuals.append(logs - fit.log_mean[index])
                priors.append(prior)
    factors = factor_many(np.stack(covariances))
    halves = halve_many(factors, np.stack(residuals)[..., None])[..., 0]
    sizes = np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(axis=1)
    scores = -0.5 * (halves**2).sum(axis=1) - sizes + np.log(priors)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    order = [int(i) for i in np.argsort(-weights) if weights[i] >= _LEAST_WEIGHT] or [int(np.argmax(weights))]
    kept = weights[order] / weights[order].sum()
    roots = halve_many(factors[order], np.broadcast_to(np.eye(logs.size), (len(order), logs.size, logs.size)))
    answers = [_settle(*tried[i], root, halves[i]) for i, root in zip(order, roots, strict=True)]
    return Posterior(answers, kept, place, index, sds, shared_sd)


def _settle(fit: Fit, amplitude: float, length: float, root: Floats, half: Floats) -> _Answer:
    """Solve one choice, and let its own misses correct its intervals."""
    solved = root.T @ half
    # Misses of each point when it is left out (Rasmussen & Williams, sec. 5.4.2).
    misses = solved**2 / (root**2).sum(axis=0)
    inflation = (_TRUST + float(misses.sum())) / (_TRUST + half.size)
    return _Answer(fit, amplitude, length, root, solved, max(inflation, _LEAST_INFLATION))


def _covariance(answer: _Answer, place: Floats, left: Indices, right: Indices) -> Floats:
    basis = TERM_SD**2 * answer.fit.shares[left] @ answer.fit.shares[right].T
    return np.asarray(basis + answer.amplitude**2 * _shape(place[left], place[right], answer.length))


def _shape(left: Floats, right: Floats, length: float) -> Floats:
    """Matern 5/2: twice differentiable; and a small rest of it that hardly reaches the next point."""
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None] - 2 * left @ right.T
    apart = np.sqrt(5 * np.maximum(squares, 0.0))
    smooth, rough = (_decay(apart / reach) for reach in (length, _ROUGH_LENGTH))
    return np.asarray((1 - _ROUGH_SHARE) * smooth + _ROUGH_SHARE * rough)


def _decay(distance: Floats) -> Floats:
    return np.asarray((1 + distance + distance**2 / 3) * np.exp(-distance))


def _draw_residual(place: Floats, length: float, count: int, rng: np.random.Generator) -> Floats:
    """Draws of a function with the covariance `_shape`; shape (count, points)."""
    smooth = _draw_waves(place, length, count, rng)
    rough = _draw_waves(place, _ROUGH_LENGTH, count, rng)
    return np.asarray(np.sqrt(1 - _ROUGH_SHARE) * smooth + np.sqrt(_ROUGH_SHARE) * rough)


def _draw_waves(place: Floats, length: float, count: int, rng: np.random.Generator) -> Floats:
    """Draws of a function with a Matern 5/2 covariance, from random waves (Rahimi & Recht 2007).

    The frequencies of a Matern 5/2 follow Student's t with 5 degrees of freedom.
    """
    stretch = np.sqrt(5 / rng.chisquare(5, _WAVES))
    waves = rng.standard_normal((place.shape[1], _WAVES)) * stretch / length
    phases = rng.uniform(0, 2 * np.pi, _WAVES)
    return np.asarray(rng.standard_normal((count, _WAVES)) @ np.cos(place @ waves + phases).T * np.sqrt(2 / _WAVES))
