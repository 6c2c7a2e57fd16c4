"""A campaign from the store and back: as the scheduler and the searches get it, and its progress as a plain document.

So a campaign begins, and continues after its engine ended: there is no other memory.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from device_agent.protocol import EVERY_CLUSTER, OperatingPoint
from farm.campaign.engine.active import Active
from farm.campaign.plan_estimate import CHECK_S, count_tasks, list_final_s, plan_allowance
from farm.campaign.scheduler import state
from farm.campaign.scheduler.state import CampaignEntry, Task, TaskKey
from farm.errors import UsageError
from farm.inventory.board_types import load_board_types
from farm.search.tuners.decisions import ForeignTrial, SearchTask, Traits, derive_traits
from farm.selection.tie import LOOKS
from farm.store import Store
from farm.store.campaign_rows import CandidateKey
from farm.store.totals import CountedTrial
from farm.types.campaigns import Budget, FleetCampaign, Order
from farm.types.states import CampaignState
from farm.values import DEFAULT_POINT, SEARCH_TRIAL, Workload, operator_kind

# Replaying one trace takes some 10 ms, and a campaign begins with all of its tasks at once.
_TRIALS_PER_TASK = 200
_TRIALS_PER_SOURCE = 40
# Reading the files takes 50 ms, and every task and every foreign trial asks for one type.
_load_types = functools.cache(load_board_types)
# The fewest trials that show a pace.
_LEAST_PACE = 4


def to_search_task(workload: Workload, task: Task) -> SearchTask:
    """Build a search's task from its workload."""
    key, of_type = task.key, task.lane.of_type
    traits = find_traits(key.board_type, of_type.target, of_type.threads, of_type.points.get(key.point))
    return SearchTask(workload, key.board_type, key.point, traits)


def find_traits(board_type: str, target: Mapping[str, Any], threads: int, point: OperatingPoint | None) -> Traits:
    """Describe a type's CPU at a point, as far as its file and the point say."""
    about = _load_types().get(board_type)
    clusters = about.clusters if about else ()
    highest = max((hz for cluster in clusters for hz in cluster.freqs_hz), default=0)
    set_hz = dict(point.cpu_freq_hz) if point else {}
    cpu_hz = set_hz.get(EVERY_CLUSTER) or max(set_hz.values(), default=0) or highest
    memory = max(about.memory.freqs_hz, default=0) if about and about.memory else 0
    config = about.target.to_tvm() if about and about.target else target
    memory_hz = (point.memory_freq_hz if point else None) or memory
    return derive_traits(config, threads, float(cpu_hz), float(memory_hz))


def fetch_foreign(store: Store, task: Task) -> list[ForeignTrial]:
    """Return good trials of workloads of the same operator kind at other tasks.

    For real boards, trials of simulated boards with the same core fill the places that are left.
    """
    of_type, key = task.lane.of_type, task.key
    hashes = [each for each, name in store.workloads.fetch_names() if operator_kind(name) == task.workload.kind]
    rows = store.trials.fetch_similar(
        hashes,
        exclude=(key.workload, key.board_type, key.point),
        simulated=of_type.simulated,
        limit=_TRIALS_PER_TASK,
        per_task=_TRIALS_PER_SOURCE,
    )
    if not of_type.simulated and not of_type.is_host and len(rows) < _TRIALS_PER_TASK:
        priced = store.trials.fetch_similar(
            hashes, simulated=True, limit=_TRIALS_PER_TASK - len(rows), per_task=_TRIALS_PER_SOURCE
        )
        rows += [row for row in priced if row.workload.target.get("mtriple") == of_type.target.get("mtriple")]
    points = {text: point for each in task.lane.campaign.order.types for text, point in each.points.items()}
    return [
        ForeignTrial(
            row.workload,
            row.board_type,
            row.operating_point,
            find_traits(
                row.board_type,
                row.workload.target,
                int(row.workload.target.get("num-cores", 0)),
                points.get(row.operating_point),
            ),
            row.candidate,
            row.trace_json,
            row.median_s,
        )
        for row in rows
    ]


def to_campaign(
    order: Order,
    budget: Budget,
    counted: Iterable[CountedTrial],
    board_s: float = 0.0,
    breakers: Iterable[CandidateKey] = (),
    energy_j: float = 0.0,
) -> CampaignEntry:
    """Build the scheduler's campaign as its counted trials (`store.totals.fetch_course`) left it.

    `breakers` are candidates that lost too many boards to be tried again (`store.trials.fetch_board_breakers`). Raises
    UsageError where a trial is of another campaign.
    """
    campaign = state.to_campaign(order, budget)
    campaign.board_s, campaign.energy_j = board_s, energy_j
    tasks = {task.key: task for task in campaign.tasks}
    tried = set()

    def find_task(row: CountedTrial | CandidateKey) -> Task:
        key = TaskKey(order.name, row.workload, row.board_type, row.operating_point)
        if key not in tasks:
            raise UsageError(f"{key} is no workload of campaign {order.name!r}", "Was its file changed?")
        tried.add(tasks[key])
        return tasks[key]

    for row in counted:
        task = find_task(row)
        better = row.median_s is not None and (task.best_s is None or row.median_s < task.best_s)
        task.best_s = row.median_s if better else task.best_s
        task.since_best = 0 if better else task.since_best + 1
        task.counted += 1
        campaign.counted += 1
    for each in breakers:
        find_task(each).banned |= {each.candidate}
    for task in campaign.tasks:
        task.asked = task.counted
        task.rounds_s = () if task.best_s is None else (task.best_s,)
    campaign.since_best = min((task.since_best for task in tried), default=0)
    return campaign


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
    tasks = to_rows(to_campaign(order, campaign.budget, store.totals.fetch_course(campaign.id)))
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
        for point, model in itertools.product(each.points, order.models):
            mine = [workload for workload in each.workloads if model.name in workload.models]
            if not mine:
                continue
            tasks = [by_key[each.board_type, point, workload.hash] for workload in mine]
            calls = [workload.calls[workload.models.index(model.name)] for workload in mine]
            times = [task.get("predicted_s") if task["best_s"] is None else task["best_s"] for task in tasks]
            known = [count * time_s for count, time_s in zip(calls, times, strict=True) if time_s is not None]
            rows.append(
                {
                    "name": model.name,
                    "board_type": each.board_type,
                    "point": point,
                    "latency_s": sum(known) if len(known) == len(mine) else None,
                    "predicted": sum(task["best_s"] is None for task in tasks),
                    "workloads": len(mine),
                }
            )
    return rows


def sum_latencies(tasks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
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
