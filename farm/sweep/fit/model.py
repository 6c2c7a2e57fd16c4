"""Latency and power over the clocks: fitted from few points, predicted everywhere, with intervals.

Latency is a sum of times that each clock bounds, or a p-norm of them where they overlap. Power is idle plus C V^2 f of
what switches, with a voltage knee per clock. Weights are not negative; a Gaussian process models the residual.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import scipy.optimize

from farm.sweep.fit.terms import Floats, Indices, Knee, Terms, latency_terms, power_terms

# Prior of a term's correction: at the point where it matters most, a term may be wrong by this share of the whole.
TERM_SD = 0.6
# Relative amplitudes of the residual g, and its lengths of correlation (a whole axis is 1).
_AMPLITUDES = (0.003, 0.01, 0.03, 0.08)
_LENGTHS = (0.25, 0.6)
# The share of g's variance without correlation to neighbours: a memory clock that a CPU clock raises in steps, rounding
# in a driver. Only points nearer than this length share it. Without it predictions between points that fit well are too
# narrow.
_ROUGH_SHARE, _ROUGH_LENGTH = 0.1, 0.05
# Larger residuals are possible, not likely: the terms are physics.
_AMPLITUDE_PRIOR = (0.3, 0.3, 0.25, 0.15)
# Answers with less weight than this, relative to the likeliest, do not change any shown digit.
_LEAST_WEIGHT = 0.03
# How much the fit's leave-one-out errors may correct its intervals: as if this many more points fitted perfectly.
_TRUST = 12.0
# Nor may they make intervals much narrower than the priors do.
_LEAST_INFLATION = 0.7
# How parts of the work overlap: 1 one after the other, more the closer to the slowest alone (roofline). And the share
# of the shortest latency that overlaps with nothing (dispatch, copies), for those that overlap at all.
_NORMS = (1.0, 1.5, 2.5, 4.0, 8.0)
_ALONE = (0.0, 0.15, 0.4)
# Candidates of a voltage knee: where it is, and how far the voltage rises from there (Jetson tables: 10 to 45 %).
_KNEES_AT = (0.35, 0.5, 0.65, 0.8)
_RISES = (0.15, 0.3, 0.5)
_FLAT = Knee()
# The best placements of all knees that are kept: few points cannot distinguish them, and they differ in between.
_KEPT = 12
# Two rounds are enough; a third changes nothing.
_ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Data:
    """Measurements of one quantity: grid rows, logarithms, their own standard deviations, and a shared one."""

    rows: tuple[int, ...]
    logs: Floats
    sds: Floats
    shared_sd: float = 0.0


@dataclasses.dataclass(frozen=True)
class Fit:
    """A parametric fit: its logarithm over the grid, its terms as shares of it there, how many numbers were fitted."""

    log_mean: Floats
    shares: Floats
    fitted: int


@dataclasses.dataclass(frozen=True)
class _Answer:
    """One choice of fit, amplitude and length, solved."""

    fit: Fit
    amplitude: float
    length: float
    root: Floats  # inverse of the Cholesky factor of the measurements' covariance
    solved: Floats  # covariance^-1 residual
    inflation: float


class Posterior:
    """The posterior of one quantity's logarithm over the grid: a mixture of all likely answers."""

    def __init__(
        self, answers: Sequence[_Answer], weights: Floats, place: Floats, rows: Indices, shared_sd: float
    ) -> None:
        self._answers = answers
        self._weights = weights
        self._place = place
        self._rows = rows
        parts = [self._predict(answer, np.arange(place.shape[0])) for answer in answers]
        means = np.stack([mean for mean, _ in parts])
        variances = np.stack([variance for _, variance in parts])
        self.mean: Floats = (weights[:, None] * means).sum(axis=0)
        variance = (weights[:, None] * (variances + (means - self.mean) ** 2)).sum(axis=0)
        self.sd: Floats = np.sqrt(variance + shared_sd**2)

    def _predict(self, answer: _Answer, at: Indices) -> tuple[Floats, Floats]:
        cross = _covariance(answer, self._place, self._rows, at)
        mean = answer.fit.log_mean[at] + cross.T @ answer.solved
        half = answer.root @ cross
        prior = answer.amplitude**2 + TERM_SD**2 * (answer.fit.shares[at] ** 2).sum(axis=1)
        return mean, answer.inflation * np.maximum(prior - (half**2).sum(axis=0), 1e-12)

    def draw(self, at: Indices, count: int, rng: np.random.Generator) -> Floats:
        """Return `count` joint draws of the logarithm at the points, without the shared error: (count, points)."""
        shares = np.floor(self._weights * count).astype(np.int64)
        shares[0] += count - shares.sum()
        draws = []
        for answer, number in zip(self._answers, shares, strict=True):
            if not number:
                continue
            cross = _covariance(answer, self._place, self._rows, at)
            half = answer.root @ cross
            mean = answer.fit.log_mean[at] + cross.T @ answer.solved
            spread = answer.inflation * (_covariance(answer, self._place, at, at) - half.T @ half)
            draws.append(rng.multivariate_normal(mean, spread, int(number), check_valid="ignore", method="eigh"))
        return np.concatenate(draws)


def condition(fits: Sequence[Fit], place: Floats, data: Data) -> Posterior:
    """Condition the whole grid on measurements.

    Their `shared_sd` is an error that all have in common: it widens every interval, and no comparison.
    """
    index = np.asarray(data.rows, dtype=np.int64)
    shapes = [_shape(place[index], place[index], length) for length in _LENGTHS]
    noise = np.diag(data.sds**2 + 1e-12)
    tried = [(fit, amplitude, length) for fit in fits for length in _LENGTHS for amplitude in _AMPLITUDES]
    covariances, residuals, priors, telling = [], [], [], []
    for fit in fits:
        basis = TERM_SD**2 * fit.shares[index] @ fit.shares[index].T + noise
        for shape in shapes:
            for amplitude, prior in zip(_AMPLITUDES, _AMPLITUDE_PRIOR, strict=True):
                covariances.append(basis + amplitude**2 * shape)
                residuals.append(data.logs - fit.log_mean[index])
                priors.append(prior)
                telling.append(max(index.size - fit.fitted, 0) / index.size)
    factors = np.linalg.cholesky(np.stack(covariances))
    halves = np.linalg.solve(factors, np.stack(residuals)[..., None])[..., 0]
    sizes = np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(axis=1)
    # A fit leaves no residual in as many points as it has numbers: only the others tell how large residuals are, and a
    # few points leave all amplitudes and overlaps as likely as they were.
    scores = np.array(telling) * (-0.5 * (halves**2).sum(axis=1) - sizes) + np.log(priors)
    weights = np.exp(scores - scores.max())
    order = [int(i) for i in np.argsort(-weights) if weights[i] >= _LEAST_WEIGHT]
    kept = weights[order] / weights[order].sum()
    roots = np.linalg.inv(factors[order])
    answers = [_settle(*tried[i], root, halves[i]) for i, root in zip(order, roots, strict=True)]
    return Posterior(answers, kept, place, index, data.shared_sd)


def _settle(fit: Fit, amplitude: float, length: float, root: Floats, half: Floats) -> _Answer:
    """Solve one choice, and correct its intervals by its leave-one-out errors."""
    solved = root.T @ half
    # Leave-one-out errors (Rasmussen & Williams, sec. 5.4.2).
    misses = solved**2 / (root**2).sum(axis=0)
    inflation = (_TRUST + float(misses.sum())) / (_TRUST + half.size)
    return _Answer(fit, amplitude, length, root, solved, max(inflation, _LEAST_INFLATION))


def _covariance(answer: _Answer, place: Floats, left: Indices, right: Indices) -> Floats:
    basis = TERM_SD**2 * answer.fit.shares[left] @ answer.fit.shares[right].T
    return np.asarray(basis + answer.amplitude**2 * _shape(place[left], place[right], answer.length))


def _shape(left: Floats, right: Floats, length: float) -> Floats:
    """Return Matern 5/2, twice differentiable, plus a small part of short range."""
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None] - 2 * left @ right.T
    apart = np.sqrt(5 * np.maximum(squares, 0.0))
    reached = (apart / length, apart / _ROUGH_LENGTH)
    smooth, rough = ((1 + far + far**2 / 3) * np.exp(-far) for far in reached)
    return np.asarray((1 - _ROUGH_SHARE) * smooth + _ROUGH_SHARE * rough)


# Steps for the slope of the fit by a knee's two numbers, and their assumed errors.
_AT_STEP, _RISE_STEP = 0.1, 0.1


@dataclasses.dataclass(frozen=True)
class ClockModel:
    """The posterior of every grid point. `power` is None without a sensor."""

    latency: Posterior
    power: Posterior | None


def fit_model(terms: Terms, latency: Data, power: Data | None) -> ClockModel:
    """Fit both quantities to the measurements."""
    times = fit_latency(terms, latency)
    return ClockModel(times, None if power is None else fit_power(terms, power, np.exp(times.mean)))


def fit_latency(terms: Terms, data: Data) -> Posterior:
    """Fit every way of overlapping; the data weigh them.

    On a TX2's GPU and memory clocks norms of 2.5 to 4 hold within 1.4 % (median, four networks).
    """
    basis = latency_terms(terms)
    ways = [(norm, alone) for norm in _NORMS for alone in (_ALONE if norm > 1 else _ALONE[:1])]
    return condition([_fit_norm(basis, data, *way) for way in ways], terms.place, data)


def _fit_norm(basis: Floats, data: Data, norm: float, alone: float) -> Fit:
    """Fit constant + (sum of terms^norm)^(1/norm), with `alone` times the shortest latency for the constant."""
    constant = alone * float(np.exp(data.logs.min()))
    columns = basis**norm
    # The same relative error of the whole is a larger one of the rest without the constant.
    times = np.exp(data.logs)
    lever = times / (times - constant)
    weights = _solve(columns[list(data.rows)], norm * np.log(times - constant), norm * lever * data.sds)
    total = np.maximum(columns @ weights, 1e-300)
    overlapping = total ** (1 / norm)
    latency = overlapping + constant
    constant_share = (latency.min() / latency)[:, None]
    parts = _shares(columns, total) * (overlapping / (overlapping + constant))[:, None]
    return Fit(np.log(latency), np.concatenate([parts, constant_share], axis=1), int(np.count_nonzero(weights)))


def fit_power(terms: Terms, data: Data, latency: Floats) -> Posterior:
    """Search knees one clock after the other; their remaining uncertainty becomes terms of the residual."""
    knees = [_FLAT for _ in terms.domains]
    scores: dict[tuple[Knee, ...], float] = {}
    choices = [_FLAT, *(Knee(at, rise) for at, rise in itertools.product(_KNEES_AT, _RISES))]
    latency = latency / latency.min()
    rows = list(data.rows)
    measured, times = terms.take(rows), latency[rows]

    def score(candidate: Sequence[Knee]) -> float:
        key = tuple(candidate)
        if key not in scores:
            scores[key] = _misfit(power_terms(measured, candidate, times), data)
        return scores[key]

    for _ in range(_ROUNDS):
        for index, domain in enumerate(terms.domains):
            if np.unique(domain.speed[rows]).size > 2 and domain.name != "memory":
                tried = [[*knees[:index], choice, *knees[index + 1 :]] for choice in choices]
                knees = min(tried, key=score)
    near = sorted(scores, key=lambda tried: scores[tried])[:_KEPT] or [tuple(knees)]
    return condition([_fit_knees(terms, tried, latency, data) for tried in near], terms.place, data)


def _fit_knees(terms: Terms, knees: Sequence[Knee], latency: Floats, data: Data) -> Fit:
    rows = list(data.rows)
    columns = power_terms(terms, knees, latency)
    weights = _solve(columns[rows], data.logs, data.sds)
    total = columns @ weights
    shares = [_shares(columns, total)]
    for index, (domain, knee) in enumerate(zip(terms.domains, knees, strict=True)):
        if domain.name == "memory":
            continue
        start = knee if knee.at < 1 else Knee(0.6, 0.0)
        for moved in (Knee(max(start.at - _AT_STEP, 0.1), start.rise), Knee(start.at, start.rise + _RISE_STEP)):
            other = power_terms(terms, [*knees[:index], moved, *knees[index + 1 :]], latency)
            slope = np.log(np.maximum(other @ weights, 1e-300) / total)
            shares.append((slope / TERM_SD)[:, None])
    fitted = int(np.count_nonzero(weights)) + 2 * sum(knee.at < 1 for knee in knees)
    return Fit(np.log(total), np.concatenate(shares, axis=1), fitted)


def _shares(columns: Floats, total: Floats) -> Floats:
    """Return each term's share of the whole, scaled to 1 where it is largest."""
    parts = columns / total[:, None]
    return np.asarray(parts / np.maximum(parts.max(axis=0), 1e-300))


def _solve(columns: Floats, logs: Floats, sds: Floats) -> Floats:
    """Solve for non-negative weights by least squares of relative errors, with less weight for outliers (Huber)."""
    values = np.exp(logs)
    scale = np.maximum(sds, 0.003)
    trust = np.ones(logs.size)
    weights = np.zeros(columns.shape[1])
    for _ in range(2):
        rows = trust / scale
        weights, _ = scipy.optimize.nnls(columns / values[:, None] * rows[:, None], rows, maxiter=50 * columns.shape[1])
        misses = np.abs(columns @ weights / values - 1)
        limit = 3 * max(float(np.median(misses)), 0.01)
        trust = np.sqrt(np.minimum(1.0, limit / np.maximum(misses, 1e-12)))
    if not np.all(columns @ weights > 0):
        weights = weights + 1e-6 * values.mean() / columns.shape[1]
    return np.asarray(weights)


def _misfit(columns: Floats, data: Data) -> float:
    scale = np.maximum(data.sds, 0.003)
    _, rest = scipy.optimize.nnls(columns / (np.exp(data.logs) * scale)[:, None], 1 / scale)
    return float(rest)
