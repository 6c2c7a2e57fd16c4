"""Phases of a host that is a board itself: it searches and builds, or it measures, never both at a time.

Works on a draft. Boards elsewhere go on measuring in every phase, with what has been built for them.
"""

from __future__ import annotations

from farm.campaign.scheduler.draft import Draft
from farm.campaign.scheduler.values import Phase, Status


def may_prepare(draft: Draft) -> bool:
    """Whether the host may search and build now."""
    return draft.phase is not Phase.MEASURING and not draft.reserved


def plan_queues(draft: Draft) -> dict[int, int]:
    """How many candidates are to lie ahead of a lane before the host measures them, for lanes whose board is the host.

    The first phase ends with the first candidate, so that a trial is seen soon.
    """
    queue = 1 if draft.phase is Phase.FIRST else 2 * draft.settings.batch
    hosts = (pool for pool in draft.pools.values() if pool.is_host and pool.boards)
    return {number: queue for pool in hosts for number in pool.lanes}


def end_measuring(draft: Draft) -> None:
    """Search and build again once everything that was built for the host has been measured."""
    if draft.phase is Phase.MEASURING and not _is_measuring(draft) and not _has_work(draft):
        draft.phase = Phase.PREPARING


def begin_measuring(draft: Draft) -> bool:
    """Measure what was built for the host once it neither searches nor builds; says whether that begins now.

    To be asked after searches and builds were given out: what is not under way then is not wanted yet.
    """
    if not may_prepare(draft) or draft.requests or draft.building or not _has_work(draft):
        return False
    draft.phase = Phase.MEASURING
    return True


def _is_measuring(draft: Draft) -> bool:
    return any(pool.is_host and sum(map(len, pool.idle.values())) < pool.boards for pool in draft.pools.values())


def _has_work(draft: Draft) -> bool:
    """Whether something built waits for a host that is here and may have it now."""
    return any(
        (lane.ready or lane.again)
        and draft.campaigns[lane.campaign].status is Status.RUNNING
        and draft.campaigns[lane.campaign].may_measure(draft.settings.measure_limit_s)
        for pool in draft.pools.values()
        if pool.is_host and pool.boards
        for lane in (draft.lanes[number] for number in pool.lanes)
    )
