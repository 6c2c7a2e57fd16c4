"""Latency and power over the clocks: fitted from few points, predicted everywhere, with intervals.

Latency is a sum of times that each clock bounds, or a p-norm of them where they overlap. Power is idle plus C V^2 f of
what switches, with a voltage knee per clock. Weights are not negative; what the fit lacks is `kriging.py`'s business.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import scipy.optimize

from farm.sweep.fit import kriging
from farm.sweep.fit.kriging import Fit, Posterior
from farm.sweep.fit.terms import Floats, Knee, Terms, latency_terms, power_terms

# How parts of the work overlap: 1 one after the other, more the closer to the slowest alone (roofline). And which share
# of the shortest latency overlaps with nothing (dispatch, copies), for those that overlap at all.
_NORMS = (1.0, 1.5, 2.5, 4.0, 8.0)
_ALONE = (0.0, 0.15, 0.4)
# Candidates of a voltage knee: where it is, and how far the voltage rises from there (Jetson tables: 10 to 45 %).
_KNEES_AT = (0.35, 0.5, 0.65, 0.8)
_RISES = (0.15, 0.3, 0.5)
_FLAT = Knee()
# Steps for the slope of the fit by a knee's two numbers, which are also how wrong they are taken to be.
_AT_STEP, _RISE_STEP = 0.1, 0.1
# So many of the best placements of all knees are kept: few points cannot tell them apart, and they differ in between.
_KEPT = 12
# Two rounds find what one leaves; a third changes nothing.
_ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Data:
    """Measurements of one quantity: grid rows, logarithms, their own standard deviations, and one that all share."""

    rows: tuple[int, ...]
    logs: Floats
    sds: Floats
    shared_sd: float = 0.0


@dataclasses.dataclass(frozen=True)
class ClockModel:
    """What is known of every grid point. `power` is None without a sensor."""

    latency: Posterior
    power: Posterior | None


def fit_model(terms: Terms, latency: Data, power: Data | None) -> ClockModel:
    """Fit both quantities to what was measured."""
    times = fit_latency(terms, latency)
    return ClockModel(times, None if power is None else fit_power(terms, power, np.exp(times.mean)))


def fit_latency(terms: Terms, data: Data) -> Posterior:
    """Every way of overlapping is fitted; the data say which of them count."""
    basis = latency_terms(terms)
    ways = [(norm, alone) for norm in _NORMS for alone in (_ALONE if norm > 1 else _ALONE[:1])]
    return kriging.condition([_fit_norm(basis, data, *way) for way in ways], terms.place, *_unpack(data))


def _fit_norm(basis: Floats, data: Data, norm: float, alone: float) -> Fit:
    """Constant + (sum of terms^norm)^(1/norm), with `alone` times the shortest latency for the constant."""
    constant = alone * float(np.exp(data.logs.min()))
    columns = basis**norm
    # The same relative error of the whole is a larger one of what is left of it without the constant.
    times = np.exp(data.logs)
    lever = times / (times - constant)
    weights = _solve(columns[list(data.rows)], norm * np.log(times - constant), norm * lever * data.sds)
    total = np.maximum(columns @ weights, 1e-300)
    overlapping = total ** (1 / norm)
    parts = _shares(columns, total) * (overlapping / (overlapping + constant))[:, None]
    return Fit(np.log(overlapping + constant), np.concatenate([parts, _constant_share(overlapping + constant)], axis=1))


def _constant_share(latency: Floats) -> Floats:
    return np.asarray((latency.min() / latency)[:, None])


def fit_power(terms: Terms, data: Data, latency: Floats) -> Posterior:
    """Knees are searched one clock after the other; what is left open of them becomes terms of the residual."""
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
    return kriging.condition([_fit_knees(terms, tried, latency, data) for tried in near], terms.place, *_unpack(data))


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
            shares.append((slope / kriging.TERM_SD)[:, None])
    return Fit(np.log(total), np.concatenate(shares, axis=1))


def _shares(columns: Floats, total: Floats) -> Floats:
    """What each term is of the whole, scaled to 1 where it is most of it."""
    parts = columns / total[:, None]
    return np.asarray(parts / np.maximum(parts.max(axis=0), 1e-300))


def _solve(columns: Floats, logs: Floats, sds: Floats) -> Floats:
    """Weights that are not negative, by least squares of relative errors; a point off by far counts less (Huber)."""
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


def _unpack(data: Data) -> tuple[tuple[int, ...], Floats, Floats, float]:
    return data.rows, data.logs, data.sds, data.shared_sd
