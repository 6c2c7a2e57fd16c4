"""A campaign's progress as one plain document, for commands and reports.

Pure, but for `recount` and `fetch_recorded`, which read the store.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from farm.campaign.engine import resume
from farm.campaign.engine.active import Active
from farm.campaign.plan_estimate import CHECK_S, count_tasks, list_final_s, plan_allowance
from farm.campaign.scheduler.state import CampaignEntry
from farm.selection.tie import LOOKS
from farm.store import Store
from farm.types.campaigns import FleetCampaign, Order
from farm.types.states import CampaignState
from farm.values import DEFAULT_POINT, SEARCH_TRIAL

# The fewest trials that show a pace.
_LEAST_PACE = 4


def to_progress(
    active: Active,
    boards: Sequence[Mapping[str, str]],
    phase: str,
    now_s: float,
    winners: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the progress document. `boards` are those that the campaign may use, with their state; `now_s` is
    monotonic, `winners` what `Verifying.to_progress` returns.
    """
    campaign = active.campaign
    tasks = to_rows(campaign)
    fill_in(tasks, active.recorded, decided=active.decided)
    for row in tasks:
        row["clocks"] = active.clocks.get((row["board_type"], row["point"]), "")
    wall_clock_s = campaign.get_wall_clock_s(now_s)
    if campaign.counted:
        active.trial_s = campaign.board_s / campaign.counted if campaign.board_s else None
        active.pace_from = active.pace_from or (campaign.counted, wall_clock_s)
    return {
        "at": time.time(),
        "phase": phase,
        "counted": campaign.counted,
        "faults": dict(active.faults),
        "board_s": campaign.board_s,
        "energy_j": campaign.energy_j,
        "wall_clock_s": wall_clock_s,
        "trials_end_s": campaign.budget.wall_clock_s if winners is None else None,
        "eta_s": _find_eta_s(active, wall_clock_s, len(boards)) if winners is None else winners["eta_s"],
        "winners": None if winners is None else {key: value for key, value in winners.items() if key != "eta_s"},
        "boards": [dict(each) for each in boards],
        "tasks": tasks,
        "models": find_latencies(active.order, tasks),
        "history": [[number, dict(sums)] for number, sums in active.history],
        "warm_start": dict(active.warm),
        "verdict": None,
    }


def recount(store: Store, campaign: FleetCampaign) -> dict[str, Any]:
    """Return the document of a campaign without an engine, from its trials."""
    order = campaign.order
    tasks = to_rows(resume.to_campaign(order, campaign.budget, store.totals.fetch_course(campaign.id)))
    fill_in(tasks, fetch_recorded(store, order), decided=campaign.state is CampaignState.FINISHED)
    counts = store.trials.count(campaign.id, purpose=SEARCH_TRIAL)
    fresh = {
        "at": time.time(),
        "phase": str(campaign.state),
        "counted": sum(task["counted"] for task in tasks),
        "faults": merge_faults(counts, campaign.progress or {}),
        "board_s": store.trials.fetch_board_seconds(campaign.id),
        "eta_s": None,
        "boards": [],
        "tasks": tasks,
        "models": find_latencies(order, tasks),
    }
    empty = {"wall_clock_s": 0.0, "history": [], "warm_start": {}, "verdict": None}
    return empty | dict(campaign.progress or {}) | fresh


def merge_faults(trials: Mapping[str, int], progress: Mapping[str, Any]) -> dict[str, int]:
    """Count failures by side, of the search's `trials` or, where higher, of the last `progress`."""
    before = progress.get("faults", {})
    return {side: max(count, before.get(side, 0)) for side, count in trials.items() if side != "ok"}


def to_rows(campaign: CampaignEntry) -> list[dict[str, Any]]:
    """Return every task of a campaign with its result so far."""
    return [
        {
            "workload": task.workload.hash,
            "name": task.workload.name,
            "kind": task.workload.kind,
            "board_type": task.key.board_type,
            "point": task.key.point,
            "threads": task.lane.of_type.threads,
            "weight": task.workload.weight,
            "flop": task.workload.flop,
            "counted": task.counted,
            "best_s": task.best_s,
            # It is made for the clocks that the type's boards have when none are set.
            "predicted_s": task.workload.predicted_s if task.key.point == DEFAULT_POINT else None,
            "ended": task.ended,
        }
        for task in campaign.tasks
    ]


def fetch_recorded(store: Store, order: Order) -> dict[tuple[str, str, str], float]:
    """Return the latencies (s) of the records of an order's tasks, by board type, point and workload."""
    found = {}
    for each in order.types:
        hashes = [workload.hash for workload in each.workloads]
        for record in store.records.fetch(workloads=hashes, board_type=each.board_type, simulated=each.simulated):
            found[each.board_type, record.operating_point, record.workload] = record.median_s
    return found


def fill_in(rows: Iterable[dict[str, Any]], recorded: Mapping[tuple[str, str, str], float], *, decided: bool) -> None:
    """Use the record's latency for a task without a good trial, and for all tasks once verification has `decided`.

    Verification is more reliable than the one best trial. `from` names the source.
    """
    for row in rows:
        known = recorded.get((row["board_type"], row["point"], row["workload"]))
        is_recorded = known is not None and (decided or row["best_s"] is None)
        row["best_s"] = known if is_recorded else row["best_s"]
        row["from"] = "record" if is_recorded else "trial"


def find_latencies(order: Order, tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sum the best latencies of each model on each type at each point.

    `predicted` of `workloads` have only a prediction. None while a workload has no record, good trial or prediction.
    """
    by_key = {(task["board_type"], task["point"], task["workload"]): task for task in tasks}
    rows = []
    for each in order.types:
        for point in each.points:
            for model in order.models:
                mine = [workload for workload in each.workloads if model.name in workload.models]
                if not mine:
                    continue
                parts = [
                    (dict(zip(w.models, w.calls, strict=True))[model.name], by_key[each.board_type, point, w.hash])
                    for w in mine
                ]
                times = [task.get("predicted_s") if task["best_s"] is None else task["best_s"] for _, task in parts]
                known = [calls * time_s for (calls, _), time_s in zip(parts, times, strict=True) if time_s is not None]
                rows.append(
                    {
                        "name": model.name,
                        "board_type": each.board_type,
                        "point": point,
                        "latency_s": sum(known) if len(known) == len(parts) else None,
                        "predicted": sum(task["best_s"] is None for _, task in parts),
                        "workloads": len(parts),
                    }
                )
    return rows


def sum_latencies(active: Active, tasks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the weighted sum over all workloads (s) by type and point; left out while one has no good trial."""
    sums: dict[str, float] = {}
    missing = set()
    for task in tasks:
        key = f"{task['board_type']}@{task['point']}"
        if task["best_s"] is None:
            missing.add(key)
        else:
            sums[key] = sums.get(key, 0.0) + task["weight"] * task["best_s"]
    return {key: value for key, value in sums.items() if key not in missing}


def _find_eta_s(active: Active, used_s: float, boards: int) -> float | None:
    """Estimate the time to the end, at the pace so far: trials or wall clock, then verification, then whole models.

    None while there is no pace.
    """
    campaign, counted = active.campaign, active.campaign.counted
    budget = campaign.budget
    times = [] if budget.wall_clock_s is None else [max(0.0, budget.wall_clock_s - used_s)]
    since, since_s = active.pace_from or (0, 0.0)
    if counted - since < _LEAST_PACE:
        since, since_s = 0, 0.0
    if budget.trials is not None and counted:
        times.append((budget.trials - counted) * (used_s - since_s) / (counted - since))
    if budget.board_s is not None and campaign.board_s:
        times.append((budget.board_s - campaign.board_s) * used_s / campaign.board_s)
    if not times:
        return None
    search_s, order = max(0.0, min(times)), active.order
    tasks = count_tasks(order)
    rest_s = tasks * CHECK_S + sum(list_final_s(order))
    if not counted or not tasks:
        return search_s + rest_s
    expected = counted * (1 + search_s / used_s) if used_s else counted
    usual = plan_allowance(expected / tasks, order.measure.verify_top, LOOKS).usual
    return search_s + tasks * usual * campaign.board_s / counted / max(1, boards) + rest_s
