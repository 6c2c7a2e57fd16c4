"""Select the operating points and schedules for `--top-k`: the best schedule depends on the clocks.

At another clock memory is relatively faster or slower. Pure: `farm.sweep.run.retrials` builds and measures schedules,
`farm.selection` decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farm.points.values import Goal
from farm.sweep.fit.analysis import Analysis
from farm.sweep.fit.pareto import FrontCandidate, find_front
from farm.sweep.fit.pick import pick_point

MAX_TOP_K = 16
# Workloads beyond this share of the model's time are left out.
_SHARE = 0.95


def choose_points(analysis: Analysis, goal: Goal) -> tuple[str, ...]:
    """Return the points for other schedules: the pick and both ends of the front."""
    if not analysis.measured:
        return ()
    combined = analysis.combine()
    candidates = [FrontCandidate(key, p.latency, p.energy or p.latency) for key, p in combined.items()]
    front = [point.key for point in find_front(candidates) if point.on_front]
    picked = pick_point(analysis, goal)
    keys = ([picked.best.point.key] if picked.best else []) + [front[0], front[-1]]
    return tuple(dict.fromkeys(keys))


def choose_candidates(rows: Sequence[Mapping[str, Any]], recorded: str, top_k: int) -> list[Mapping[str, Any]]:
    """Return the record's candidate and the fastest others, `top_k` in all; none where there is no choice.

    `rows` are what `Store.fetch_known_candidates` returns.
    """
    good = sorted((row for row in rows if row["median_s"]), key=lambda row: float(row["median_s"]))
    first = [row for row in good if row["candidate"] == recorded]
    others = [row for row in good if row["candidate"] != recorded]
    return [*first, *others[: top_k - 1]] if first and others and top_k > 1 else []


def choose_workloads(times_s: Mapping[str, float]) -> set[str]:
    """Return those that make up most of the model's time. `times_s` is each one's, as often as it occurs."""
    whole, sofar, chosen = sum(times_s.values()), 0.0, set()
    for name, time_s in sorted(times_s.items(), key=lambda item: -item[1]):
        if sofar >= _SHARE * whole:
            break
        chosen.add(name)
        sofar += time_s
    return chosen
