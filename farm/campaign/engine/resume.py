"""A campaign as the scheduler and the searches get it, from its order and the store.

This is how a campaign begins, and how it continues after its engine ended: there is no other memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from device_agent.protocol import EVERY_CLUSTER, OperatingPoint
from farm.campaign.engine.active import Active
from farm.campaign.scheduler.values import CampaignAdded, CampaignWorkload, Done, Part, ScheduledCampaign, TaskKey
from farm.inventory.board_types import load_board_types
from farm.search.tuners import campaign_search
from farm.search.tuners.cost_model import Traits, derive_traits
from farm.store import Store
from farm.store.totals import CountedTrial
from farm.store.trials import CandidateKey
from farm.types.campaigns import Budget, Order, TypeOrder
from farm.values import Workload, operator_kind

# Replaying one trace takes some 10 ms, and a campaign begins with all of its tasks at once.
_TRIALS_PER_TASK = 200
_TRIALS_PER_SOURCE = 40
# Reading the files takes 50 ms, and every task and every foreign trial asks for one type.
_load_types = functools.cache(load_board_types)


def to_search_task(workload: Workload, task: TaskKey, of_type: TypeOrder) -> campaign_search.SearchTask:
    """Build a task from its workload."""
    traits = find_traits(task.board_type, of_type.target, of_type.threads, of_type.points.get(task.point))
    return campaign_search.SearchTask(workload, task.board_type, task.point, traits)


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


def fetch_foreign(store: Store, active: Active, task: TaskKey) -> list[campaign_search.ForeignTrial]:
    """Return good trials of workloads of the same operator kind at other tasks.

    For real boards, trials of simulated boards with the same core fill the places that are left.
    """
    of_type = active.type_of(task.board_type)
    kind = active.workload_of(task).kind
    hashes = [each for each, name in store.workloads.fetch_names() if operator_kind(name) == kind]
    rows = store.trials.fetch_similar(
        hashes,
        exclude=(task.workload, task.board_type, task.point),
        simulated=of_type.simulated,
        limit=_TRIALS_PER_TASK,
        per_task=_TRIALS_PER_SOURCE,
    )
    if not of_type.simulated and not of_type.is_host and len(rows) < _TRIALS_PER_TASK:
        priced = store.trials.fetch_similar(
            hashes, simulated=True, limit=_TRIALS_PER_TASK - len(rows), per_task=_TRIALS_PER_SOURCE
        )
        rows += [row for row in priced if row.workload.target.get("mtriple") == of_type.target.get("mtriple")]
    points = {key: point for each in active.order.types for key, point in each.points.items()}
    return [
        campaign_search.ForeignTrial(
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


def to_spec(order: Order, budget: Budget) -> ScheduledCampaign:
    """Build the scheduler's campaign; workloads are named by their hashes."""
    parts = tuple(
        Part(each.board_type, point, tuple(CampaignWorkload(w.hash, w.kind, w.weight, w.flop) for w in each.workloads))
        for each in order.types
        for point in each.points
        if each.workloads
    )
    return ScheduledCampaign(
        order.name,
        order.owner,
        parts,
        budget,
        labels=to_labels(order.labels) | to_names(order.boards),
        priority=order.priority,
        early_stopping=order.search.early_stopping,
        early_stopping_all=order.search.early_stopping_all,
    )


def to_labels(labels: Mapping[str, str]) -> frozenset[str]:
    """Format labels as the scheduler compares them."""
    return frozenset(f"{name}={value}" for name, value in labels.items())


def to_names(boards: Iterable[str]) -> frozenset[str]:
    """Return board names as labels with an empty name, which no real label has."""
    names = ",".join(sorted(boards))
    return frozenset({f"={names}"} if names else ())


def to_added(
    order: Order,
    budget: Budget,
    counted: Iterable[CountedTrial],
    board_s: float,
    wall_clock_s: float,
    breakers: Iterable[CandidateKey] = (),
    energy_j: float = 0.0,
) -> CampaignAdded:
    """Build the event that begins a campaign, or continues it from its counted trials (`store.totals.fetch_course`).

    `breakers` are candidates that lost too many boards to be tried again (`store.trials.fetch_board_breakers`).
    """
    done: dict[TaskKey, Done] = {}
    for row in counted:
        key = TaskKey(order.name, row.workload, row.board_type, row.operating_point)
        before = done.get(key, Done(key, 0))
        latency_s = row.median_s
        better = latency_s is not None and (before.best_s is None or latency_s < before.best_s)
        done[key] = Done(
            key, before.counted + 1, latency_s if better else before.best_s, 0 if better else before.since_best + 1
        )
    for each in breakers:
        key = TaskKey(order.name, each.workload, each.board_type, each.operating_point)
        before = done.get(key, Done(key, 0))
        done[key] = dataclasses.replace(before, banned=before.banned | {each.candidate})
    return CampaignAdded(to_spec(order, budget), tuple(done.values()), board_s, wall_clock_s, energy_j)


def list_tasks(order: Order) -> list[TaskKey]:
    """List every workload on every board type at every operating point."""
    return [
        TaskKey(order.name, workload.hash, each.board_type, point)
        for each in order.types
        for point in each.points
        for workload in each.workloads
    ]
