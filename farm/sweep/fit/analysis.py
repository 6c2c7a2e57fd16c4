"""Evaluate all visits of a sweep: correct drift, combine per point, fit over the whole grid."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.special

from farm.points.values import Z95, Estimate, Grid, PointMeasurement, PointPrediction
from farm.sweep.fit import drift as drifts
from farm.sweep.fit.drift import Drift
from farm.sweep.fit.model import ClockModel, Data, Posterior, fit_model, fit_power
from farm.sweep.fit.terms import Floats, Terms

# Boards of one type differ by more than one factor: the rest at other points than the anchor (our choice).
BOARD_SD = 0.01
# The fewest points for a fit.
MIN_POINTS = 3
# A fit to more points costs more time, with the third power, than it gains (2,028 points: minutes). Further measured
# points stand for themselves, and predictions use this many points, spread over all.
MAX_FITTED = 400
# The parameters behind a prediction's width: level, slope, amplitude and roughness of the residual.
_FITTED, _LEAST_FREEDOM = 4, 2

_Figures = tuple[Estimate, Estimate | None, Estimate | None, Estimate | None]


@dataclasses.dataclass(frozen=True)
class MeasuredPoint:
    """A grid point as measured: drift removed, repeated visits combined, intervals that cover both.

    `latency_p95_s` is the visits' mean, corrected alike; `visits` the valid ones. `own_log_sd` is the point's own part
    of the intervals of latency and power: the board's drift is uncertain for all points alike.
    """

    key: str
    latency: Estimate
    power: Estimate | None
    energy: Estimate | None
    latency_p95_s: float | None
    visits: tuple[PointMeasurement, ...]
    own_log_sd: tuple[float, float]
    idle: Estimate | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The medians of a program's metrics, in their own units."""
        names = dict.fromkeys(name for visit in self.visits for name in visit.metrics)
        return {name: statistics.median(v.metrics[name] for v in self.visits if name in v.metrics) for name in names}


@dataclasses.dataclass(frozen=True)
class Combined:
    """The best estimate of a measured point: its own visits joined with the fit of its neighbours.

    By visits alone the luckiest point would always win.
    """

    key: str
    latency: Estimate
    power: Estimate | None
    energy: Estimate | None
    idle: Estimate | None = None


@dataclasses.dataclass(frozen=True)
class BoardDrift:
    """One board's drift; `offset` is its latency relative to the first board's at the anchor."""

    latency: Drift
    power: Drift | None
    offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The evaluation of a grid. `measured` by key; `drift` by board; `model` is None before it can be fitted.

    `per_call` is the energy of a call over its median latency times power, at a typical point: slow calls, and pauses
    between calls, cost energy as well.
    """

    grid: Grid
    measured: Mapping[str, MeasuredPoint]
    drift: Mapping[str, BoardDrift]
    model: ClockModel | None
    per_call: float = 1.0
    terms: Terms | None = None

    @property
    def has_power(self) -> bool:
        return bool(self.measured) and all(point.energy is not None for point in self.measured.values())

    @property
    def has_idle(self) -> bool:
        return any(point.idle is not None for point in self.measured.values())

    @functools.cached_property
    def idle(self) -> Posterior | None:
        """The idle power over the grid, fitted like power; None where too few points have one.

        Fitted when it is first asked for: only one objective needs it.
        """
        known = {key: (point, point.idle) for key, point in self.measured.items() if point.idle}
        if self.model is None or self.terms is None or len(known) < MIN_POINTS:
            return None
        at = tuple(row for row, point in enumerate(self.grid.points) if point.key in known)
        both = [known[self.grid.points[row].key] for row in at]
        # The part of the drift is that of power.
        owns = [i.log_sd**2 - (p.power.log_sd**2 - p.own_log_sd[1] ** 2 if p.power else 0.0) for p, i in both]
        data = _to_data(at, [idle for _, idle in both], np.sqrt(np.maximum(owns, 1e-8)).tolist())
        return fit_power(self.terms, data, np.exp(self.model.latency.mean))

    def combine(self) -> dict[str, Combined]:
        """Return the best estimate of every measured point, by key; without a fit, and in large grids, its visits'."""
        if self.model is None or len(self.measured) > MAX_FITTED:
            return {key: Combined(key, p.latency, p.power, p.energy, p.idle) for key, p in self.measured.items()}
        return {
            point.key: Combined(point.key, *self._estimate(row))
            for row, point in enumerate(self.grid.points)
            if point.key in self.measured
        }

    def predict(self, row: int) -> PointPrediction | None:
        """Predict a grid row; None before a fit."""
        if self.model is None:
            return None
        # The residual's roughness is known from a few points only: Student's t instead of the normal.
        freedom = max(len(self.measured) - _FITTED, _LEAST_FREEDOM)
        wider = float(scipy.special.stdtrit(freedom, 0.975)) / Z95
        return PointPrediction(self.grid.points[row].key, *self._estimate(row, wider))

    def _estimate(self, row: int, wider: float = 1.0) -> _Figures:
        """Return the fit's latency, power, energy and idle power, with intervals `wider` than normal ones."""
        assert self.model is not None
        latency, power = self.model.latency, self.model.power
        time = Estimate.of_log(latency.mean[row], wider * latency.sd[row])
        if power is None:
            return time, None, None, None
        spread = wider * float(np.hypot(latency.sd[row], power.sd[row]))
        watt = Estimate.of_log(power.mean[row], wider * power.sd[row])
        middle = float(latency.mean[row] + power.mean[row] + np.log(self.per_call))
        idle = Estimate.of_log(self.idle.mean[row], wider * self.idle.sd[row]) if self.idle else None
        return time, watt, Estimate.of_log(middle, spread), idle


def analyse(grid: Grid, terms: Terms, visits: Sequence[PointMeasurement], anchor: str) -> Analysis:
    """Correct, combine and fit; `terms` are the grid's (`terms.build_terms`), `anchor` the key of the repeated point.

    Invalid visits, and those of points outside the grid, are ignored.
    """
    valid, by_power = _choose_valid(grid, visits)
    drift, shifts = _correct(valid, anchor, by_power)
    measured: dict[str, MeasuredPoint] = {}
    by_key: dict[str, list[int]] = {}
    for index, visit in enumerate(valid):
        by_key.setdefault(visit.key, []).append(index)
    for key, indices in by_key.items():
        measured[key] = _combine(key, [valid[i] for i in indices], [shifts[i] for i in indices], by_power)
    model = None
    if len(measured) >= MIN_POINTS and (len(measured) <= MAX_FITTED or len(measured) < len(grid)):
        # Evenly in the order of measurement, which is spread out.
        chosen = np.linspace(0, len(measured) - 1, min(len(measured), MAX_FITTED)).round().astype(int)
        items = list(measured.items())
        model = fit_measured(grid, terms, dict(items[index] for index in chosen), by_power)
    # The median: one spoilt latency must not change every energy.
    points = measured.values()
    ratios = [p.energy.value / (p.latency.value * p.power.value) for p in points if p.energy and p.power]
    return Analysis(grid, measured, drift, model, float(np.median(ratios)) if ratios else 1.0, terms)


def find_drift(grid: Grid, visits: Sequence[PointMeasurement], anchor: str) -> Mapping[str, BoardDrift]:
    """Return the drift that `analyse` finds, without combining and fitting."""
    valid, by_power = _choose_valid(grid, visits)
    return _correct(valid, anchor, by_power)[0]


def _choose_valid(grid: Grid, visits: Sequence[PointMeasurement]) -> tuple[list[PointMeasurement], bool]:
    """Return the valid visits, and whether all of them have power."""
    keys = {point.key for point in grid.points}
    valid = [visit for visit in visits if visit.is_valid and visit.key in keys]
    return valid, bool(valid) and all(visit.power is not None and visit.energy is not None for visit in valid)


def fit_measured(grid: Grid, terms: Terms, measured: Mapping[str, MeasuredPoint], by_power: bool) -> ClockModel:
    """Fit measured points."""
    rows = {point.key: row for row, point in enumerate(grid.points)}
    at = tuple(rows[key] for key in measured)
    points = list(measured.values())
    latency = _to_data(at, [point.latency for point in points], [point.own_log_sd[0] for point in points])
    power = None
    if by_power:
        power = _to_data(at, [p.power for p in points if p.power], [point.own_log_sd[1] for point in points])
    return fit_model(terms, latency, power)


@dataclasses.dataclass(frozen=True)
class _Shift:
    """To subtract from one visit's logarithm; the variances to add: of the visit, and of the drift. See `Drift`."""

    log: float
    variance: float
    drift: float = 0.0
    tail: float = 1.0
    believed: float = 1.0

    @classmethod
    def of(cls, drift: Drift | None, place: int, offset: float, between: float) -> _Shift:
        if drift is None:
            return cls(offset, between)
        variance, moved = drift.visit_sd**2 + between, float(drift.sd[place] ** 2)
        return cls(drift.shift[place] + offset, variance, moved, drift.tail, drift.believed)


def _correct(
    valid: Sequence[PointMeasurement], anchor: str, by_power: bool
) -> tuple[dict[str, BoardDrift], list[tuple[_Shift, _Shift]]]:
    """Return each board's drift, and the shifts of each visit's latency and power."""
    boards = list(dict.fromkeys(visit.board for visit in valid))
    drift: dict[str, BoardDrift] = {}
    shifts: dict[int, tuple[_Shift, _Shift]] = {}
    levels: list[tuple[float, float]] = []
    for board in boards:
        indices = [index for index, visit in enumerate(valid) if visit.board == board]
        own = [valid[index] for index in indices]
        anchors = [visit for visit in own if visit.key == anchor]
        times, watts = [visit.latency for visit in anchors], [visit.power for visit in anchors if visit.power]
        latency = _estimate(times, anchors, own)
        power = _estimate(watts, anchors, own, drifts.BOUND) if by_power else None
        level = (_level(times, anchors, own, latency), _level(watts, anchors, own, power) if power else 0.0)
        levels.append(level)
        offset = (level[0] - levels[0][0], level[1] - levels[0][1])
        between = BOARD_SD**2 if board != boards[0] else 0.0
        drift[board] = BoardDrift(latency, power, float(np.expm1(offset[0])))
        for place, index in enumerate(indices):
            both = (_Shift.of(latency, place, offset[0], between), _Shift.of(power, place, offset[1], between))
            shifts[index] = both
    return drift, [shifts[index] for index in range(len(valid))]


def _estimate(
    estimates: Sequence[Estimate],
    anchors: Sequence[PointMeasurement],
    own: Sequence[PointMeasurement],
    stated: Sequence[tuple[float, float]] = drifts.EXACT,
) -> Drift:
    return drifts.estimate_drift(
        [visit.at_s for visit in anchors],
        [estimate.log for estimate in estimates],
        [estimate.log_sd for estimate in estimates],
        np.array([visit.at_s for visit in own]),
        stated,
    )


def _level(
    estimates: Sequence[Estimate], anchors: Sequence[PointMeasurement], own: Sequence[PointMeasurement], drift: Drift
) -> float:
    """Return the anchor's logarithm on this board at its start, 0 where it was never visited there."""
    if not anchors:
        return 0.0
    places = [index for index, visit in enumerate(own) if any(visit is anchor for anchor in anchors)]
    return float(np.mean([estimate.log - drift.shift[at] for estimate, at in zip(estimates, places, strict=True)]))


def _combine(
    key: str, visits: Sequence[PointMeasurement], shifts: Sequence[tuple[_Shift, _Shift]], by_power: bool
) -> MeasuredPoint:
    latency, own_latency = _mean([visit.latency for visit in visits], [shift for shift, _ in shifts])
    power = energy = idle = None
    own_power = 0.0
    if by_power:
        power, own_power = _mean([visit.power for visit in visits if visit.power], [shift for _, shift in shifts])
        both = [
            _Shift(a.log + b.log, a.variance + b.variance, a.drift + b.drift, (a.tail + b.tail) / 2, b.believed)
            for a, b in shifts
        ]
        energy, _ = _mean([visit.energy for visit in visits if visit.energy], both)
        if idles := [(v.idle_power, shift) for v, (_, shift) in zip(visits, shifts, strict=True) if v.idle_power]:
            idle, _ = _mean(*zip(*idles, strict=True))
    tails = [v.latency_p95_s * np.exp(-s.log) for v, (s, _) in zip(visits, shifts, strict=True) if v.latency_p95_s]
    p95_s = float(np.mean(tails)) if tails else None
    return MeasuredPoint(key, latency, power, energy, p95_s, tuple(visits), (own_latency, own_power), idle)


def _mean(estimates: Sequence[Estimate], shifts: Sequence[_Shift]) -> tuple[Estimate, float]:
    """Return visits weighted by precision, and the sd without the drift's, which repeating does not reduce."""
    pairs = list(zip(estimates, shifts, strict=True))
    variances = np.array([(shift.believed * estimate.log_sd) ** 2 + shift.variance for estimate, shift in pairs])
    logs = np.array([estimate.log - shift.log for estimate, shift in pairs])
    shared = float(np.mean([shift.drift for shift in shifts]))
    tail = float(np.mean([shift.tail for shift in shifts]))
    weights = 1 / np.maximum(variances, 1e-12)
    own = float(1 / weights.sum())
    sd = tail * float(np.sqrt(own + shared))
    return Estimate.of_log(float(weights @ logs / weights.sum()), sd), tail * float(np.sqrt(own))


def _to_data(rows: tuple[int, ...], estimates: Sequence[Estimate], own: Sequence[float]) -> Data:
    logs: Floats = np.array([estimate.log for estimate in estimates])
    totals: Floats = np.array([estimate.log_sd for estimate in estimates])
    sds: Floats = np.array(own)
    shared = np.sqrt(np.maximum(totals**2 - sds**2, 0.0).mean())
    return Data(rows, logs, sds, float(shared))
