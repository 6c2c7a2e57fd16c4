"""Assign built candidates to boards: fair shares, few clock changes, one prefetched per board, stragglers doubled.

Works on a draft. `scheduler` requests candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from farm.campaign.scheduler.edit import Draft
from farm.campaign.scheduler.state import BoardEntry, JobEntry, LaneEntry, Pool, PoolKey
from farm.campaign.scheduler.values import Phase, Status


def may_prepare(draft: Draft) -> bool:
    """Whether the host may search and build now."""
    return draft.phase is not Phase.MEASURING and not draft.reserved


def plan_queues(draft: Draft) -> dict[int, int]:
    """Return how many candidates to build for each lane before the host measures them, for lanes whose board is the
    host.

    The first phase ends with the first candidate, so that a first result is seen soon.
    """
    queue = 1 if draft.phase is Phase.FIRST else 2 * draft.settings.batch
    hosts = (pool for pool in draft.pools.values() if pool.is_host and pool.boards)
    return {number: queue for pool in hosts for number in pool.lanes}


def end_measuring(draft: Draft) -> None:
    """Resume search and build once everything built for the host has been measured."""
    if draft.phase is Phase.MEASURING and not _is_measuring(draft) and not _has_any_work(draft):
        draft.phase = Phase.PREPARING


def begin_measuring(draft: Draft) -> bool:
    """Begin to measure on the host once it neither searches nor builds; return whether it begins now.

    Call it after searches and builds were started: the host rests only if none is under way then.
    """
    if not may_prepare(draft) or draft.requests or draft.building or not _has_any_work(draft):
        return False
    draft.phase = Phase.MEASURING
    return True


def _is_measuring(draft: Draft) -> bool:
    return any(pool.is_host and sum(map(len, pool.idle.values())) < pool.boards for pool in draft.pools.values())


def _has_any_work(draft: Draft) -> bool:
    return any(
        (lane.ready or lane.again)
        and draft.campaigns[lane.campaign].status is Status.RUNNING
        and draft.campaigns[lane.campaign].may_measure(draft.settings.measure_limit_s)
        for pool in draft.pools.values()
        if pool.is_host and pool.boards
        for lane in (draft.lanes[number] for number in pool.lanes)
    )


Key = TypeVar("Key", int, str)


class _Option(NamedTuple):
    """A lane with work for a board. `stays`: the board keeps its clocks."""

    owner: str
    campaign: str
    lane: int
    stays: bool


class _Pick(NamedTuple):
    job: int
    stays: bool
    used: tuple[float, float, float]


def dispatch(draft: Draft) -> None:
    """Assign jobs to idle boards, then prefetch one per busy board; idle boards without a job help others.

    A host that searches and builds gets none (`begin_measuring`).
    """
    pools = [key for key, pool in draft.pools.items() if not pool.is_host or draft.phase is Phase.MEASURING]
    for kind in ("idle", "room"):
        # Boards that keep their clocks choose first: otherwise, with more boards than jobs, one would change its clocks
        # for a job that another could run as it is.
        for stays in (True, False):
            for key in pools:
                if getattr(draft.pools[key], kind) and _has_work(draft, draft.pools[key]):
                    for point in list(getattr(draft.pools[key], kind)):
                        _fill(draft, key, kind, point, stays)
        for key in pools:
            # Before the second round, which prefetches for the boards that a job is taken from.
            if kind == "idle" and draft.pools[key].idle:
                _take_waiting(draft, key)
    for key in pools:
        if draft.pools[key].idle:
            _double_stragglers(draft, key)


def _has_work(draft: Draft, pool: Pool) -> bool:
    return any(draft.lanes[number].ready or draft.lanes[number].again for number in pool.lanes)


def _fill(draft: Draft, key: PoolKey, kind: str, point: str, stays: bool) -> None:
    """Assign jobs to a group's boards while there are any."""
    while names := getattr(draft.pools[key], kind).get(point, ()):
        # A job avoids fewer boards than `max_attempts`, so if none of that many boards may have it, no board of the
        # group may.
        for name in names[: draft.settings.max_attempts]:
            pick = _find_pick(draft, key, name, point)
            if pick is not None and (pick.stays or not stays):
                draft.assign(pick.job, name, pick.used)
                break
        else:
            return


def _find_pick(draft: Draft, key: PoolKey, name: str, point: str) -> _Pick | None:
    """Pick a board's next job: by the shares of owners, then campaigns, then lanes."""
    pool = draft.pools[key]
    options = []
    for number in pool.lanes:
        lane = draft.lanes[number]
        if lane.ready or lane.again:
            campaign = draft.campaigns[lane.campaign]
            if (
                campaign.status is Status.RUNNING
                and campaign.may_measure(draft.settings.measure_limit_s)
                and _find_job(draft, lane, name) is not None
            ):
                options.append(_Option(campaign.spec.owner, lane.campaign, number, lane.point == point))
    if not options:
        return None
    owner, owner_used = _least(draft, pool, [(o.owner, o.stays) for o in options], pool.owner_used)
    options = [o for o in options if o.owner == owner]
    campaign_name, campaign_used = _least(draft, pool, [(o.campaign, o.stays) for o in options], pool.campaign_used)
    options = [o for o in options if o.campaign == campaign_name]
    number, lane_used = _least(draft, pool, [(o.lane, o.stays) for o in options], pool.lane_used)
    lane = draft.lanes[number]
    job = _find_job(draft, lane, name)
    return None if job is None else _Pick(job, lane.point == point, (owner_used, campaign_used, lane_used))


def _least(draft: Draft, pool: Pool, options: list[tuple[Key, bool]], used: Mapping[Key, float]) -> tuple[Key, float]:
    """Return the least served account and its use of the pool (s, weighted).

    An account that needs other clocks waits until it is behind by the cost of changing them on every board: within that
    band boards keep their clocks, outside of it shares decide. An account that had nothing to measure is behind by the
    credit at most.
    """
    credit = draft.settings.credit_s * pool.boards
    floor = max(used.get(key, 0.0) for key, _ in options) - credit
    band = min(draft.settings.switch_s * pool.boards, credit / 2)
    costs = [(max(used.get(key, 0.0), floor), stays, key) for key, stays in options]
    effective, _, key = min(costs, key=lambda cost: (cost[0] + (0.0 if cost[1] else band), cost[2]))
    return key, effective


def _find_job(draft: Draft, lane: LaneEntry, name: str) -> int | None:
    """Return the first job of a lane that a board may have; retried ones come first."""
    for number in lane.again:
        if _may_have(draft, lane, draft.jobs[number], name):
            return number
    return lane.ready[0] if lane.ready else None


def _may_have(draft: Draft, lane: LaneEntry, job: JobEntry, name: str) -> bool:
    """Whether a job may go to a board: not where it failed, unless it failed on all boards."""
    if name not in job.avoid:
        return True
    here = sum(pool.boards for pool in draft.pools.values() if lane.number in pool.lanes)
    return here <= sum(board in draft.boards and _serves(draft, draft.boards[board], lane) for board in job.avoid)


def _serves(draft: Draft, board: BoardEntry, lane: LaneEntry) -> bool:
    return lane.number in draft.pools[board.pool].lanes


def _take_waiting(draft: Draft, key: PoolKey) -> None:
    """Move jobs that wait at busy boards to idle ones. Scans all boards, if anything waits."""
    waiting: dict[int, list[int]] = {
        number: []
        for number in draft.pools[key].lanes
        if draft.lanes[number].waiting and draft.campaigns[draft.lanes[number].campaign].status is Status.RUNNING
    }
    if not waiting:
        return
    for board in draft.boards.values():
        if board.waiting is not None:
            lane = draft.lane_of(draft.jobs[draft.assignments[board.waiting].job])
            if lane.number in waiting:
                waiting[lane.number].append(board.waiting)
    for number, assignments in waiting.items():
        for assignment in assignments:
            names = _idle(draft, key)
            if not names:
                return
            lane, job = draft.lanes[number], draft.jobs[draft.assignments[assignment].job]
            name = next((n for n in names if _may_have(draft, lane, job, n)), None)
            if name is not None:
                draft.requeue(draft.revoke(assignment, "an idle board takes it").job)
                draft.assign(job.number, name, _used(draft, draft.pools[key], lane))


def _double_stragglers(draft: Draft, key: PoolKey) -> None:
    """Run stragglers a second time on idle boards; the first result counts.

    Scans all boards, so it returns when to look again: a job that begins later cannot be late before that.
    """
    if draft.now_s < draft.pools[key].straggler_check_s:
        return
    settings = draft.settings
    soonest_s = draft.now_s + settings.straggler_min_s
    late = []
    for board in draft.boards.values():
        if board.running is None:
            continue
        assignment = draft.assignments[board.running]
        job = draft.jobs[assignment.job]
        lane = draft.lane_of(job)
        if len(job.assignments) > 1 or assignment.started_s is None or lane.number not in draft.pools[key].lanes:
            continue
        usual_s = max(settings.straggler_min_s, settings.straggler_factor * (lane.measure_s or 0.0))
        late_s = assignment.started_s + usual_s
        if late_s <= draft.now_s:
            late.append((assignment.started_s, job.number))
        else:
            soonest_s = min(soonest_s, late_s)
    draft.set_pool(key, straggler_check_s=soonest_s)
    for _, number in sorted(late):
        job = draft.jobs[number]
        lane = draft.lane_of(job)
        campaign = draft.campaigns[lane.campaign]
        has_it = draft.assignments[job.assignments[0]].board
        name = next((n for n in _idle(draft, key) if n != has_it and n not in job.avoid), None)
        if name is None or campaign.status is not Status.RUNNING or not campaign.may_measure(settings.measure_limit_s):
            continue
        draft.assign(number, name, _used(draft, draft.pools[key], lane))


def _idle(draft: Draft, key: PoolKey) -> list[str]:
    return [name for names in draft.pools[key].idle.values() for name in names]


def _used(draft: Draft, pool: Pool, lane: LaneEntry) -> tuple[float, float, float]:
    owner = draft.campaigns[lane.campaign].spec.owner
    return (
        pool.owner_used.get(owner, 0.0),
        pool.campaign_used.get(lane.campaign, 0.0),
        pool.lane_used.get(lane.number, 0.0),
    )
