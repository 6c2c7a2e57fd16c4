"""Whether another schedule is better at an operating point: which points and schedules to try, and what came of it.

The best schedule at one clock need not be the best at another: memory is as fast as it was, or slower still. Pure;
building schedules is `rivals.py`'s business, measuring them `refit.py`'s.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from farm.points.values import Goal
from farm.sweep.fit.analysis import Analysis
from farm.sweep.fit.pareto import FrontCandidate, find_front
from farm.sweep.fit.pick import pick_point

MAX_TOP_K = 16
# Student's t for 95 %, by degrees of freedom: rounds are few.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
# Workloads beyond this share of the model's time are not worth a board's.
_SHARE = 0.95
# A gain below this is nothing that a user would see, however sure it is.
_LEAST_GAIN = 0.005


@dataclasses.dataclass(frozen=True)
class ScheduleVerdict:
    """Which of several candidates is best at a point, against the `default` one. `ratio` is best over default."""

    default: str
    best: str
    default_s: float
    best_s: float
    ratio: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether another candidate is better, by more than chance."""
        return self.best != self.default


def choose_points(analysis: Analysis, goal: Goal) -> tuple[str, ...]:
    """Where other schedules are tried: at the pick and at both ends of the front."""
    if not analysis.measured:
        return ()
    combined = analysis.combine()
    candidates = [FrontCandidate(key, p.latency, p.energy or p.latency) for key, p in combined.items()]
    front = [point.key for point in find_front(candidates) if point.on_front]
    picked = pick_point(analysis, goal)
    keys = ([picked.best.point.key] if picked.best else []) + [front[0], front[-1]]
    return tuple(dict.fromkeys(keys))


def choose_candidates(rows: Sequence[Mapping[str, Any]], recorded: str, top_k: int) -> list[Mapping[str, Any]]:
    """The record's candidate and the fastest others, `top_k` in all; none where there is nothing to choose from.

    `rows` are what `Store.fetch_known_candidates` returns.
    """
    good = sorted((row for row in rows if row["median_s"]), key=lambda row: float(row["median_s"]))
    first = [row for row in good if row["candidate"] == recorded]
    others = [row for row in good if row["candidate"] != recorded]
    return [*first, *others[: top_k - 1]] if first and others and top_k > 1 else []


def choose_workloads(times_s: Mapping[str, float]) -> set[str]:
    """Those that make up most of the model's time. `times_s` is each one's, as often as it occurs."""
    whole, sofar, chosen = sum(times_s.values()), 0.0, set()
    for name, time_s in sorted(times_s.items(), key=lambda item: -item[1]):
        if sofar >= _SHARE * whole:
            break
        chosen.add(name)
        sofar += time_s
    return chosen


def judge(rounds: Sequence[Mapping[str, float]], default: str) -> ScheduleVerdict | None:
    """Which candidate is best; each round maps candidates to seconds, measured one right after the other.

    Rounds without the default count for nothing, candidates that lack a round are out. None where the default was not
    measured twice.
    """
    whole = [each for each in rounds if default in each]
    if len(whole) < 2:
        return None
    default_s = statistics.median(each[default] for each in whole)
    best = ScheduleVerdict(default, default, default_s, default_s, 1.0, 1.0, 1.0)
    for name in dict.fromkeys(name for each in whole for name in each):
        if name == default or any(name not in each for each in whole):
            continue
        # In pairs: what slowed a whole round down says nothing of its candidates.
        logs = [math.log(each[name] / each[default]) for each in whole]
        middle = statistics.fmean(logs)
        half = _T95[min(len(logs) - 1, len(_T95)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
        if math.exp(middle + half) <= 1 - _LEAST_GAIN and math.exp(middle) < best.ratio:
            time_s = statistics.median(each[name] for each in whole)
            ratio, low, high = (math.exp(value) for value in (middle, middle - half, middle + half))
            best = ScheduleVerdict(default, name, default_s, time_s, ratio, low, high)
    return best
