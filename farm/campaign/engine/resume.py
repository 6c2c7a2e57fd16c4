"""A campaign as the scheduler and the searches are told of it, from its order and from what the store holds.

This is how a campaign begins, and how it goes on after whatever ended its engine: there is no other memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from farm.campaign.order import Order
from farm.campaign.scheduler.values import (
    Budget,
    CampaignAdded,
    CampaignWorkload,
    Done,
    Part,
    ScheduledCampaign,
    TaskKey,
)


def to_spec(order: Order, budget: Budget) -> ScheduledCampaign:
    """The campaign for the scheduler; workloads are called by their hashes."""
    parts = tuple(
        Part(each.board_type, point, tuple(CampaignWorkload(w.hash, w.kind, w.weight, w.flop) for w in each.workloads))
        for each in order.types
        for point in each.points
        if each.workloads
    )
    return ScheduledCampaign(
        order.name,
        order.owner,
        workloads=(),
        board_types=(),
        budget=budget,
        labels=to_labels(order.labels) | to_names(order.boards),
        priority=order.priority,
        early_stopping=order.search.early_stopping,
        early_stopping_all=order.search.early_stopping_all,
        parts=parts,
    )


def to_labels(labels: Mapping[str, str]) -> frozenset[str]:
    """Labels as the scheduler compares them."""
    return frozenset(f"{name}={value}" for name, value in labels.items())


def to_names(boards: Iterable[str]) -> frozenset[str]:
    """Names of boards as the scheduler compares them: as labels without a name of their own, which no other has."""
    names = ",".join(sorted(boards))
    return frozenset({f"={names}"} if names else ())


def to_added(
    order: Order,
    budget: Budget,
    counted: Iterable[Mapping[str, Any]],
    board_s: float,
    wall_clock_s: float,
    breakers: Iterable[Mapping[str, Any]] = (),
) -> CampaignAdded:
    """The event that begins a campaign, or continues it from its counted trials (`Store.fetch_course`).

    `breakers` are candidates that boards are no longer risked for (`Store.fetch_board_breakers`).
    """
    done: dict[TaskKey, Done] = {}
    for row in counted:
        key = to_task(order.name, row)
        before = done.get(key, Done(key, 0))
        latency_s = row["median_s"]
        better = latency_s is not None and (before.best_s is None or latency_s < before.best_s)
        done[key] = Done(
            key, before.counted + 1, latency_s if better else before.best_s, 0 if better else before.since_best + 1
        )
    for row in breakers:
        key = to_task(order.name, row)
        before = done.get(key, Done(key, 0))
        done[key] = dataclasses.replace(before, banned=before.banned | {row["candidate"]})
    return CampaignAdded(to_spec(order, budget), tuple(done.values()), board_s, wall_clock_s)


def to_task(campaign: str, row: Mapping[str, Any]) -> TaskKey:
    """The task that a trial's row belongs to."""
    return TaskKey(campaign, row["workload"], row["board_type"], row["operating_point"])


def list_tasks(order: Order) -> list[TaskKey]:
    """Every workload on every board type at every operating point."""
    return [
        TaskKey(order.name, workload.hash, each.board_type, point)
        for each in order.types
        for point in each.points
        for workload in each.workloads
    ]
