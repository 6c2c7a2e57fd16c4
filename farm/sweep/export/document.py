"""A sweep as one plain document, for `--json`, tables and reports, made from the store alone.

`adaptive.Planner` and `pick` evaluate the visits; here the results get names and units.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.special

from device_agent.protocol import CPU
from farm import units
from farm.errors import PermanentError, UsageError
from farm.inventory.board_types import describe_watts
from farm.points.values import Estimate, Goal, Grid, Merge, PointMeasurement, PointPrediction
from farm.programs.metrics import TIME
from farm.programs.order import ProgramOrder
from farm.store import Store
from farm.store.sweeps import StoredVisit
from farm.sweep import rows as sweep_rows
from farm.sweep import stored
from farm.sweep.fit.analysis import Analysis, Combined, MeasuredPoint
from farm.sweep.fit.pick import Pick, PickedPoint, Wall, estimate_objective, find_walls, front_rows, pick_point
from farm.sweep.plan.adaptive import PICK_LEFT, Planner, PlannerSettings, find_void
from farm.types import documents

# Smaller drifts are not mentioned.
_WORTH_SAYING = 0.005


def make_document(store: Store, sweep: int, goal: Goal | None = None) -> dict[str, Any]:
    """Return the whole sweep; picks are for `goal` or its own. Raises UsageError where there is none."""
    row = store.sweeps.require(sweep)
    rows = store.sweeps.fetch_points(sweep)
    grid, goal = _read_grid(row), goal or stored.goal_from_dict(row.goal)
    settings, summary = dict(row.settings), dict(row.summary or {})
    visits = stored.read_visits(rows)
    request = row.request
    wanted = PlannerSettings(request["exhaustive"], request["budget_points"], request["seed"])
    planner = Planner(grid, goal, wanted)
    released = settings.get("released_idle_w")
    idle = Estimate(**released) if released else None
    series = [_make_series(planner, key, made, _Aim.of(rows, key, goal, idle)) for key, made in visits.items()]
    finished_at = row.finished_at or max([each.recorded_at for each in rows], default=row.started_at)
    return {
        "sweep": row.id,
        "model": row.model,
        "state": row.state,
        "board": {
            "type": row.board_type,
            "names": sorted({each.board for each in rows}),
            "simulated": bool(row.simulated),
            "watts": describe_watts(row.board_type) if row.simulated else "",
            "device": request.get("device", CPU),
        },
        "started_at": row.started_at,
        "seconds": max(0.0, finished_at - row.started_at),
        "goal": stored.goal_to_dict(goal),
        "grid": {
            "points": len(grid),
            "measured": len({visit.key for made in visits.values() for visit in made if visit.is_valid}),
            "merged": [{**dataclasses.asdict(merge), "dropped": list(merge.dropped)} for merge in grid.merged],
        },
        "series": series,
        "schedules": summary.get("schedules", []),
        "reason": summary.get("reason", ""),
        "cost": summary.get("cost"),
        "notes": [*settings.get("notes", ()), *summary.get("notes", ()), *_note_boards(series), *_note_walls(series)],
        "programs": settings.get("programs", {}),
        "metrics": _list_metrics(request.get("program")),
        "environment": settings.get("environment", {}) | {"exhaustive": request["exhaustive"], "seed": request["seed"]},
    }


def _list_metrics(program: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the units of a program's metrics, and of its runs' time; none of a model."""
    found = ProgramOrder.from_dict(program).read_metrics() if program else ()
    return {metric.name: metric.unit for metric in (*found, TIME)} if found else {}


def find_failure(document: Mapping[str, Any], every: bool = False) -> PermanentError | None:
    """Return the error of a sweep: it was voided, or no series has a pick (`every`: one has none).

    None where it worked.
    """
    if document["state"] == "voided":
        return PermanentError(
            f"sweep {document['sweep']} is void: {document['reason']}", "Its visits are kept; see `farm sweep show`."
        )
    series = document["series"]
    missing = [each for each in series if not each["pick"]]
    if series and (not missing if every else len(missing) < len(series)):
        return None
    if not series:
        return PermanentError("nothing can be picked: nothing is measured yet")
    of = f" of {missing[0]['variant']} x{missing[0]['batch']}" if len(series) > 1 else ""
    return PermanentError(f"nothing{of} can be picked: {missing[0]['no_pick']}")


def find_series(document: Mapping[str, Any], named: str | None) -> list[dict[str, Any]]:
    """Return the series that `tuned`, `x4` or `tuned x4` names; None: all. Raises UsageError where there is none."""
    parts = re.fullmatch(r"(.*?)\s*(?:x(\d{1,9}))?", (named or "").strip())
    variant, batch = parts.groups() if parts else ("", None)
    exact = [each for each in document["series"] if each["variant"] == named]  # as `size=x4` of a program
    found = exact or [
        each for each in document["series"] if variant in ("", each["variant"]) and batch in (None, str(each["batch"]))
    ]
    if not found:
        there = ", ".join(f"{each['variant']} x{each['batch']}" for each in document["series"]) or "nothing yet"
        raise UsageError(f"sweep {document['sweep']} has no such series", f"It has {there}.")
    return found


def _read_grid(row: documents.StoredSweep) -> Grid:
    """Read the final grid: boards may have shown that two of its points are one."""
    grid = stored.grid_from_dict(row.grid)
    summary = row.summary or {}
    left = set(summary.get("points") or [point.key for point in grid.points])
    merged = [Merge(each["kept"], tuple(each["dropped"]), each["reason"]) for each in summary.get("merged") or ()]
    return Grid(tuple(p for p in grid.points if p.key in left) or grid.points, tuple(merged) or grid.merged)


@dataclasses.dataclass(frozen=True)
class _Aim:
    """A series' goal, the timed runs of each point in s, idle power with released clocks, and the boards' meters."""

    goal: Goal
    batch: int
    latency_s: Mapping[str, Sequence[float]]
    released: Estimate | None
    walls: Mapping[str, Wall] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[StoredVisit], series: tuple[str, int], goal: Goal, released: Estimate | None) -> _Aim:
        samples: dict[str, list[float]] = {}
        for row in rows:
            if (row.variant, row.batch) == series and not row.measurement["invalid"]:
                samples.setdefault(row.key, []).extend(row.outcome.get("latency_s", ()))
        return cls(goal.of_batch(series[1]), series[1], samples, released)

    def describe(self, shown: Combined | PointPrediction | None) -> dict[str, Any]:
        """Describe a point by the goal: its objective, and the power at the first board's meter, as all figures are.

        Over a period: mean power, J per input, hours, missed inputs. `missed` is the share of timed runs, scaled to the
        joined median, that took longer than the period; `most` the upper end of its one-sided 95 % interval (Clopper &
        Pearson 1934, Biometrika 26, 404-413).
        """
        there = next((wall.convert(shown) for wall in self.walls.values()), None) if shown else None
        figures = there if self.goal.wall and there else shown
        mean, period_s, period = estimate_objective(figures, self.goal) if figures else None, self.goal.period_s, None
        if shown is not None and period_s is not None and mean is not None:
            runs = np.array(self.latency_s.get(shown.key, ()))
            runs = runs * (shown.latency.value / np.median(runs)) if runs.size else runs
            late = int((runs > period_s).sum())
            most = float(scipy.special.betaincinv(late + 1, runs.size - late, 0.95)) if late < runs.size else 1.0
            released = dataclasses.replace(shown, idle=self.released)
            for wall in [*self.walls.values()][: self.goal.wall]:
                released = wall.convert(released)
            period = {
                "period_s": period_s,
                "mean_power_w": stored.estimate_to_dict(mean),
                "released_mean_power_w": stored.estimate_to_dict(estimate_objective(released, self.goal)),
                "input_j": mean.value * period_s / self.batch,
                "hours_50_wh": 50 / mean.value,
                "latency_p99_s": float(np.quantile(runs, 0.99)) if runs.size else None,
                "missed": {"runs": late, "of": int(runs.size), "most": most} if runs.size else None,
            }
        watts = stored.estimate_to_dict(there.power if there else None)
        return {"objective": mean and mean.value, "wall_power_w": watts, "period": period}


def _make_series(
    planner: Planner, key: tuple[str, int], visits: Sequence[PointMeasurement], aim: _Aim
) -> dict[str, Any]:
    goal, analysis = aim.goal, planner.analyse(visits)
    # A point's own visits joined with the fit: raw ones alone lose some of the front to noise (docs/sweeps.md).
    combined = analysis.combine()
    costs = [(each.latency.value, (each.energy or each.latency).value) for each in combined.values()]
    front = [[*combined][row] for row in front_rows(*np.transpose(costs))] if costs else []
    aim = dataclasses.replace(aim, walls=find_walls(analysis))
    picked, why = _find_pick(analysis, goal)
    rows = [_make_row(analysis, combined, row, front, visits, aim) for row in range(len(planner.grid))]
    pick = _describe_pick(planner.grid, picked, goal) if picked is not None and picked.best is not None else None
    if pick and goal.period_s is not None:
        pick["period"] = next(row["period"] for row in rows if row["key"] == pick["key"])
        if aim.released and (other := pick_point(analysis, goal, aim.released).best):
            watts = stored.estimate_to_dict(other.objective)
            pick["released"] = {"key": other.point.key, "idle_w": aim.released.value, "mean_power_w": watts}
        pick["text"] += f" {sweep_rows.describe_period(pick)}"
    return {
        "variant": key[0],
        "batch": key[1],
        "rows": rows,
        "front": front,
        "anchor": planner.find_anchor(visits),
        "drift": _describe_drift(analysis),
        "pick": pick,
        "no_pick": why,
        "wall": {board: wall.to_dict() for board, wall in aim.walls.items()},
        "unmeasured": _find_better(rows, planner.find_excluded(visits), goal, picked),
    }


def _make_row(
    analysis: Analysis,
    combined: Mapping[str, Combined],
    row: int,
    front: Sequence[str],
    visits: Sequence[PointMeasurement],
    aim: _Aim,
) -> dict[str, Any]:
    """Make a point's row from the joined estimate; `visits_alone` has the estimate from its own visits."""
    point = analysis.grid.points[row]
    own = [visit for visit in visits if visit.key == point.key]
    found = analysis.measured.get(point.key)
    shown = combined.get(point.key) or analysis.predict(row)
    seen = found.visits if found else tuple(own)
    spoilt = own[-1].invalid if own and not found else ""
    energy = shown.energy if shown else None
    rails = dict.fromkeys(rail for visit in seen for rail in visit.rail_power_w) if found else {}
    p95_s = found.latency_p95_s if found else None
    if found and p95_s:  # scaled to the joined median
        p95_s *= combined[point.key].latency.value / found.latency.value
    return {
        "key": point.key,
        "point": point.point.to_dict(),
        "domains": [dataclasses.asdict(domain) for domain in point.domains],
        "measured": found is not None,
        "predicted": found is None and shown is not None,
        "latency_s": stored.estimate_to_dict(shown.latency) if shown else None,
        "latency_p95_s": p95_s,
        "power_w": stored.estimate_to_dict(shown.power) if shown else None,
        "rail_power_w": {r: statistics.fmean(v.rail_power_w[r] for v in seen if r in v.rail_power_w) for r in rails},
        "energy_j": stored.estimate_to_dict(energy),
        "idle_power_w": stored.estimate_to_dict(shown.idle) if shown else None,
        **aim.describe(shown),
        "energy_above_idle_j": stored.estimate_to_dict(_mean([v.energy_above_idle for v in seen])) if found else None,
        "metrics": found.metrics if found else {},
        "temperature_c": max((v.temperature_c for v in seen if v.temperature_c is not None), default=None),
        "throttled": any(visit.throttled for visit in own) and not found,
        "invalid": spoilt,
        "inferences_per_joule": 1 / energy.value if energy else None,
        "on_front": point.key in front,
        "visits": len(own),
        "visits_alone": _describe_visits(found),
        "board": ", ".join(dict.fromkeys(visit.board for visit in seen)),
    }


def _describe_visits(found: MeasuredPoint | None) -> dict[str, Any] | None:
    """Describe a point's own visits without drift and without its neighbours; None where it was not measured."""
    if found is None:
        return None
    known = {"latency_s": found.latency, "power_w": found.power, "energy_j": found.energy}
    return {name: stored.estimate_to_dict(estimate) for name, estimate in known.items()}


def _mean(estimates: Sequence[Estimate | None]) -> Estimate | None:
    """Average repeated visits; the interval stays as wide, since their errors have one cause (the idle baseline's)."""
    known = [estimate for estimate in estimates if estimate is not None]
    if not known:
        return None
    values, lows, highs = zip(*((each.value, each.low, each.high) for each in known), strict=True)
    return Estimate(statistics.fmean(values), statistics.fmean(lows), statistics.fmean(highs))


def _describe_drift(analysis: Analysis) -> dict[str, Any]:
    moved, words = 0.0, []
    for board, drift in analysis.drift.items():
        kinds = [("latency", drift.latency), *([("power", drift.power)] if drift.power else [])]
        for what, found in kinds:
            moved = max(moved, found.largest)
            if found.largest >= _WORTH_SAYING:
                words.append(f"{what} of {board} moved by {found.largest:.1%}")
    void = find_void(analysis.drift)
    text = void or ("; ".join(words) + ": taken out of every figure" if words else "none worth correcting")
    return {"percent": 100 * moved, "corrected": bool(words) and not void, "void": bool(void), "text": text}


def _find_pick(analysis: Analysis, goal: Goal) -> tuple[Pick | None, str]:
    if not analysis.measured:
        return None, "nothing is measured yet"
    if void := find_void(analysis.drift):
        return None, f"the sweep is void: {void}"
    picked = pick_point(analysis, goal)
    return picked, picked.reason


def _describe_pick(grid: Grid, picked: Pick, goal: Goal) -> dict[str, Any]:
    best = picked.best
    assert best is not None  # the caller checked
    point = grid.find(best.point.key)
    assert point is not None  # picks are points of the grid
    ratios = {"latency": 1 + best.slower, "energy": None if best.saves is None else 1 - best.saves}
    return {
        "key": best.point.key,
        "point": point.point.to_dict(),
        "text": _say_pick(best, picked, goal),
        "certainty": picked.confidence,
        "close": picked.close,
        "against_fastest": ratios,
        "runners_up": [{"key": each.point.key, "text": _say_choice(each, goal)} for each in picked.runners_up],
    }


def _say_pick(best: PickedPoint, picked: Pick, goal: Goal) -> str:
    words = f"Set {best.point.key}: {_say_choice(best, goal)}"
    if best.slower > 0:
        words += f"; {best.slower * 100:.0f} % slower than the fastest point"
        if best.saves is not None:
            words += f", with {abs(best.saves) * 100:.0f} % {'less' if best.saves >= 0 else 'more'} energy"
    else:
        words += "; nothing measured is faster"
    return f"{words}. It is the best measured with {units.format_share(picked.confidence)} confidence."


def _say_choice(choice: PickedPoint, goal: Goal) -> str:
    point = choice.figures
    metric = goal.metric
    rate = f"{metric.name} {metric.format(point.latency.value)}"
    words = [rate if metric.counted else _with_interval(point.latency, "ms")]
    if point.power is not None:
        words.append(f"{point.power.value:.3g} W")
    if point.energy is not None:
        words.append(f"{_with_interval(point.energy, 'mJ')} per {metric.per}")
    if goal.period_s is not None:
        words.append(f"{_with_interval(choice.objective, 'mW')} over the period")
    return ", ".join(words)


def _with_interval(estimate: Estimate, unit: str) -> str:
    factor, unit = (1.0, unit.removeprefix("m")) if estimate.value >= 1 else (1e3, unit)
    half = max(estimate.high - estimate.value, estimate.value - estimate.low) * factor
    return f"{estimate.value * factor:.4g} ± {half:.2g} {unit}"


def _find_better(
    rows: Sequence[Mapping[str, Any]], excluded: Collection[str], goal: Goal, picked: Pick | None
) -> list[dict[str, Any]]:
    """List unmeasured points that the fit expects to be better for the goal than the pick; predictions."""
    if picked is None:
        return []
    # A sweep stops with this much left to gain, so less is not mentioned.
    bound = picked.best.objective.value * (1 - PICK_LEFT) if picked.best else float("inf")
    found = []
    for row in rows:
        value, power = row["objective"], row["wall_power_w" if goal.wall else "power_w"]
        if not row["predicted"] or row["key"] in excluded or value is None or value >= bound:
            continue
        if goal.latest_s is not None and row["latency_s"]["value"] > goal.latest_s:
            continue
        if goal.max_power_w is None or (power is not None and power["value"] <= goal.max_power_w):
            gain = f"{1 - value / bound:.1%} less than the pick" if picked.best else "which would keep the limits"
            text = f"{row['key']} is predicted to have a better {goal.objective}, {gain}; not measured"
            found.append((value, {"key": row["key"], "text": text}))
    return [described for _, described in sorted(found, key=lambda each: each[0])[:3]]


def _note_boards(series: Sequence[Mapping[str, Any]]) -> list[str]:
    names = {name for each in series for row in each["rows"] for name in str(row["board"]).split(", ") if name}
    if len(names) < 2:
        return []
    return [
        f"points are spread over {len(names)} boards ({', '.join(sorted(names))}); each measured the anchor, and "
        "figures are scaled by that to the first board's"
    ]


def _note_walls(series: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what an external meter reads beside the rails."""
    walls: Mapping[str, Mapping[str, float]] = next((each["wall"] for each in series if each["wall"]), {})
    return [
        f"{board}: wall power is {wall['slope']:.3f} ± {wall['slope_half']:.2g} times the rails' total + "
        f"{wall['offset_w']:.3g} ± {wall['offset_half_w']:.2g} W (95 %, {wall['visits']} visits)"
        for board, wall in walls.items()
    ]
