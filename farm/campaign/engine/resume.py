"""A campaign as the scheduler and the searches get it, from its order and the store.

This is how a campaign begins, and how it continues after its engine ended: there is no other memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from device_agent.protocol import EVERY_CLUSTER, OperatingPoint
from farm.campaign.scheduler import state
from farm.campaign.scheduler.state import CampaignEntry, Task, TaskKey
from farm.errors import UsageError
from farm.inventory.board_types import load_board_types
from farm.search.tuners.tasks import ForeignTrial, SearchTask, Traits, derive_traits
from farm.store import Store
from farm.store.campaign_rows import CandidateKey
from farm.store.totals import CountedTrial
from farm.types.campaigns import Budget, Order
from farm.values import Workload, operator_kind

# Replaying one trace takes some 10 ms, and a campaign begins with all of its tasks at once.
_TRIALS_PER_TASK = 200
_TRIALS_PER_SOURCE = 40
# Reading the files takes 50 ms, and every task and every foreign trial asks for one type.
_load_types = functools.cache(load_board_types)


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
