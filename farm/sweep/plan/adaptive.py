"""Choose the next point of a sweep, and when to stop: a pure function of grid, goal and visits so far.

So a sweep resumes from its visits alone, and the same visits always give the same decision. The caller measures, stores
and sets clocks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from device_agent.protocol import StrEnum
from farm.points.values import Goal, Grid, PointMeasurement
from farm.sweep.fit.analysis import MIN_POINTS, Analysis, BoardDrift, analyse, find_drift, fit_measured
from farm.sweep.fit.drift import MAX_DRIFT
from farm.sweep.fit.terms import build_terms
from farm.sweep.fit.worth import weigh

# Visits of other points between two of the anchor: limited by the drift of half a minute to a minute.
ANCHOR_EVERY = 7
# Retries of a point whose visit another client spoilt.
MAX_RETRIES = 2
# The gain that may be left when a sweep stops: of the front's hypervolume, of the pick's objective. The fit
# overestimates the front's gain: stopping at 0.6 % took a fifth more points of a Nano's grid for 0.4 % of the front.
FRONT_LEFT, PICK_LEFT = 0.016, 0.003
# In a grid up to this size each point is much of its front, and each visit much of the sweep. So the front counts as
# known where the fit predicts it: the sd of its hypervolume may be this. This gain of the pick is not worth a visit.
_SMALL_GRID, _SMALL_FRONT_DOUBT, _SMALL_PICK_LEFT = 60, 0.03, 0.01
# Every so many points one is spent where the fit is least certain, regardless of gains: a fit of its favourites alone
# is wrong elsewhere without knowing it.
EXPLORE_EVERY = 3
# The fit may stop the sweep once it predicted this many points (of few: half of all but two) to within this many
# standard deviations. Of ten normal figures one lies farther out in 12 % of cases.
_FORESEEN, _FAR = 5, 2.5


class Step(StrEnum):
    """What to do next."""

    MEASURE = "measure"
    STOP = "stop"
    VOID = "void"  # the measurements are invalid


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """The next step and, for people, why. `key` is the point to measure."""

    step: Step
    reason: str
    key: str = ""


@dataclasses.dataclass(frozen=True)
class PlannerSettings:
    """A sweep's settings. `budget_points` limits different points measured, anchors' repeats not counted."""

    exhaustive: bool = False
    budget_points: int | None = None
    seed: int = 0
    anchor_every: int = ANCHOR_EVERY


class Planner:
    """Decides for one grid and goal. Its state follows from them alone; `visits` are in the order of time."""

    def __init__(self, grid: Grid, goal: Goal | None = None, settings: PlannerSettings | None = None) -> None:
        if not grid.points:
            raise ValueError("a grid without points cannot be swept")
        self.grid = grid
        self.goal = goal or Goal()
        self.settings = settings or PlannerSettings()
        self.terms = build_terms(grid.points)
        self._middle = self._sort_from_middle()
        self._first = self._choose_first()
        self._order = self._spread_out()

    def analyse(self, visits: Sequence[PointMeasurement]) -> Analysis:
        """Evaluate the visits."""
        return analyse(self.grid, self.terms, visits, self.find_anchor(visits))

    def find_anchor(self, visits: Sequence[PointMeasurement]) -> str:
        """Return the repeated point: the first that was measured; before, the nearest to the middle that can be.

        Sweeps of other versions began elsewhere.
        """
        excluded = self.find_excluded(visits)
        keys = [self.grid.points[row].key for row in self._middle]
        begun = (visit.key for visit in visits if visit.is_valid and visit.key in keys)
        return next(begun, None) or next((key for key in keys if key not in excluded), keys[0])

    def find_excluded(self, visits: Sequence[PointMeasurement]) -> frozenset[str]:
        """Return points that cannot be measured here: throttled, or spoilt too often. One that was valid once stays."""
        valid = {visit.key for visit in visits if visit.is_valid}
        spoilt = [visit for visit in visits if not visit.is_valid and visit.key not in valid]
        final = {visit.key for visit in spoilt if not visit.retry}
        often = {key for key in {v.key for v in spoilt} if sum(v.key == key for v in spoilt) > MAX_RETRIES}
        return frozenset(final | often)

    def decide_next(self, visits: Sequence[PointMeasurement], board: str = "") -> PlannedStep:
        """Return the next point for `board`. Deterministic: equal visits, equal answers."""
        excluded = self.find_excluded(visits)
        anchor = self.find_anchor(visits)
        if len(excluded) == len(self.grid):
            return PlannedStep(Step.VOID, "no point of the grid could be measured; the last: " + visits[-1].invalid)
        own = [visit for visit in visits if visit.board == board or not board]
        if own and not own[-1].is_valid and own[-1].retry and own[-1].key not in excluded:
            if sum(not visit.is_valid for visit in own[-MAX_RETRIES - 1 :]) > MAX_RETRIES:
                return PlannedStep(
                    Step.VOID, f"{own[-1].key} was spoilt {MAX_RETRIES + 1} times in a row: {own[-1].invalid}"
                )
            return PlannedStep(Step.MEASURE, f"again: {own[-1].invalid}", own[-1].key)
        if len(self.grid) == 1:
            return self._stop("the grid has one point") if own else PlannedStep(Step.MEASURE, "the only point", anchor)
        # The visits since the anchor's last valid one.
        places = [index for index, visit in enumerate(own) if visit.key == anchor and visit.is_valid]
        since = len(own) - 1 - places[-1] if places else None
        if since is None:
            return PlannedStep(Step.MEASURE, "the anchor: every other point is compared with it", anchor)
        # Only the anchor shows drift: it is checked there, and of many visits only at intervals.
        telling = [visit for visit in visits if visit.key == anchor] if self.settings.exhaustive else visits
        looks = not self.settings.exhaustive or (since == 0 and _is_look_due(len(telling)))
        if looks and (reason := find_void(find_drift(self.grid, telling, anchor))):
            return PlannedStep(Step.VOID, reason)
        if since >= self.settings.anchor_every:
            return PlannedStep(Step.MEASURE, "the anchor again, against drift", anchor)
        measured = {visit.key for visit in visits if visit.is_valid}
        left = [key for key in self._order if key not in measured and key not in excluded]
        wanted = self._decide_point(visits, left, excluded)
        # The last visits need a drift measurement after them.
        if wanted.step is Step.STOP and since > 0:
            return dataclasses.replace(
                wanted, step=Step.MEASURE, reason="the anchor once more, to end with", key=anchor
            )
        return wanted

    def _decide_point(
        self, visits: Sequence[PointMeasurement], left: Sequence[str], excluded: Collection[str]
    ) -> PlannedStep:
        if not left:
            return self._stop("every point is measured")
        if self.settings.exhaustive:  # no fit is needed: of two thousand points one takes a second
            return PlannedStep(Step.MEASURE, f"{len(left)} points are left", left[0])
        analysis = self.analyse(visits)
        count = len(analysis.measured)
        if self.settings.budget_points is not None and count >= max(self.settings.budget_points, 1):
            return self._stop(f"the budget of {self.settings.budget_points} points is spent")
        if count < max(len(self._first), MIN_POINTS) or analysis.model is None:
            return PlannedStep(Step.MEASURE, "spread over the grid, for the first fit", left[0])
        # The seed changes with every point, so that no unlucky draw is repeated.
        seed = self.settings.seed * 1_000_003 + count
        small = len(self.grid) <= _SMALL_GRID
        enough, near = (_SMALL_FRONT_DOUBT, _SMALL_PICK_LEFT) if small else (FRONT_LEFT, PICK_LEFT)
        worth = weigh(analysis, self.goal, excluded, (enough, near), seed)
        front_left, pick_left = worth.front_doubt if small else 1 - worth.front_share, worth.pick_gain
        done = front_left <= enough and pick_left <= near
        best = self.grid.points[worth.rows[0]].key if worth.rows else ""
        foreseen, missed = self._foresee(analysis) if done else (False, 0.0)
        if foreseen:
            front = f"change the front by {front_left:.1%}" if small else f"add {front_left:.1%} to the front"
            return self._stop(
                f"the fit predicted the last points to within {missed:.1%}; what is unmeasured is expected to {front} "
                f"and to add {pick_left:.1%} to the pick"
            )
        if done:
            key = self._least_known(analysis, left)
            return PlannedStep(Step.MEASURE, "the fit did not foresee the last points", key)
        if not small and count % EXPLORE_EVERY == EXPLORE_EVERY - 1:
            return PlannedStep(Step.MEASURE, "the fit is least certain there", self._least_known(analysis, left))
        why = "the pick" if pick_left / near > front_left / enough else "the front"
        return PlannedStep(Step.MEASURE, f"may change {why} most", best)

    def _least_known(self, analysis: Analysis, left: Sequence[str]) -> str:
        """Return the point with the widest interval; the first of `left` where several are."""
        assert analysis.model is not None
        latency, power = analysis.model.latency.sd, analysis.model.power
        spread = latency if power is None else np.hypot(latency, power.sd)
        rows = {point.key: row for row, point in enumerate(self.grid.points)}
        return max(left, key=lambda key: float(spread[rows[key]]))

    def _foresee(self, analysis: Analysis) -> tuple[bool, float]:
        """Whether the fit without the newest points predicted them, and its largest error, relative.

        Where it did not, its expectation may not stop the sweep.
        """
        count = len(analysis.measured)
        newest = list(analysis.measured)[-min(_FORESEEN, max(count // 2 - 1, 1)) :]
        rest = {key: point for key, point in analysis.measured.items() if key not in newest}
        if len(rest) < MIN_POINTS:
            return False, 0.0
        before = fit_measured(self.grid, self.terms, rest, analysis.has_power)
        rows = {point.key: row for row, point in enumerate(self.grid.points)}
        pairs = [
            (abs(posterior.mean[rows[key]] - estimate.log), np.hypot(posterior.sd[rows[key]], estimate.log_sd))
            for key in newest
            for posterior, estimate in (
                (before.latency, analysis.measured[key].latency),
                (before.power, analysis.measured[key].power),
            )
            if posterior is not None and estimate is not None
        ]
        return all(error <= _FAR * sd for error, sd in pairs), float(max(error for error, _ in pairs))

    def _stop(self, reason: str) -> PlannedStep:
        return PlannedStep(Step.STOP, reason)

    def _choose_first(self) -> list[int]:
        """Return the rows for the first fit: the middle, and what tells the parts of latency and power apart.

        That is all clocks at their highest, and each clock at its lowest beside the highest of the others.
        """
        speeds = [np.where(domain.speed > 0, domain.speed, 1.0) for domain in self.terms.domains]
        if not speeds:
            return self._middle[:1]
        whole = np.sum(speeds, axis=0)
        lows = [0 * whole, *speeds]
        if sum(domain.held for domain in self.terms.domains) == 1:
            # Others only follow it, so no point tells what its lowest clock does but that itself.
            lows.append(whole)
        return list(dict.fromkeys([self._middle[0], *(int(np.argmax(whole - 2 * low)) for low in lows)]))

    def _spread_out(self) -> tuple[str, ...]:
        """Order all points for an exhaustive sweep; the first ones also start an adaptive one.

        The others are shuffled: no clock goes steadily up or down while time passes.
        """
        rest = np.setdiff1d(np.arange(len(self.grid)), self._first)
        np.random.default_rng(self.settings.seed).shuffle(rest)
        return tuple(self.grid.points[int(row)].key for row in [*self._first, *rest])

    def _sort_from_middle(self) -> list[int]:
        """Return all rows, those first whose clocks and cores are nearest to the middle of their ranges.

        In Hz: the middle of the periods is so slow that it is seldom near the front.
        """
        columns = [column for domain in self.terms.domains for column in (domain.speed, domain.units) if np.ptp(column)]
        far = np.zeros(len(self.grid))
        for column in columns:
            far += np.abs(column - (column.max() + column.min()) / 2) / np.ptp(column)
        return [int(row) for row in np.argsort(far, kind="stable")]


def find_void(drifts: Mapping[str, BoardDrift]) -> str:
    """Explain why a sweep is void, by each board's drift; "" where it is valid."""
    for board, drift in drifts.items():
        for what, moved in (("latency", drift.latency), ("power", drift.power)):
            if moved is not None and moved.is_too_large:
                whose = f" of {board}" if board else ""
                return (
                    f"the anchor's {what}{whose} moved by {moved.largest:.0%}, more than {MAX_DRIFT:.0%}: "
                    "the board throttles, heats up or is used by another client"
                )
    return ""


def _is_look_due(anchors: int) -> bool:
    """Whether visits of the anchor grew by a fifth since the last check, whose cost grows faster."""
    return anchors <= 20 or math.floor(math.log(anchors, 1.2)) > math.floor(math.log(anchors - 1, 1.2))
