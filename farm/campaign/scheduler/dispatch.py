"""Assign built candidates to boards: fair shares, few clock changes, one prefetched per board, stragglers doubled.

Works on the fleet's state. `scheduler` requests candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from farm.campaign.scheduler.fleet import FleetState
from farm.campaign.scheduler.state import BoardEntry, JobEntry, LaneEntry, Pool, PoolKey
from farm.campaign.scheduler.values import Phase, Status


def may_prepare(fleet: FleetState) -> bool:
    """Whether the host may search and build now."""
    return fleet.phase is not Phase.MEASURING and not fleet.reserved


def plan_queues(fleet: FleetState) -> dict[int, int]:
    """Return how many candidates to build for each lane before the host measures them, for lanes whose board is the
    host.

    The first phase ends with the first candidate, so that a first result is seen soon.
    """
    queue = 1 if fleet.phase is Phase.FIRST else 2 * fleet.settings.batch
    hosts = (pool for pool in fleet.pools.values() if pool.is_host and pool.boards)
    return {number: queue for pool in hosts for number in pool.lanes}


def end_measuring(fleet: FleetState) -> None:
    """Resume search and build once everything built for the host has been measured."""
    if fleet.phase is Phase.MEASURING and not _is_measuring(fleet) and not _has_any_work(fleet):
        fleet.phase = Phase.PREPARING


def begin_measuring(fleet: FleetState) -> bool:
    """Begin to measure on the host once it neither searches nor builds; return whether it begins now.

    Call it after searches and builds were started: the host rests only if none is under way then.
    """
    if not may_prepare(fleet) or fleet.requests or fleet.building or not _has_any_work(fleet):
        return False
    fleet.phase = Phase.MEASURING
    return True


def _is_measuring(fleet: FleetState) -> bool:
    return any(pool.is_host and sum(map(len, pool.idle.values())) < pool.boards for pool in fleet.pools.values())


def _has_any_work(fleet: FleetState) -> bool:
    return any(
        (lane.ready or lane.again)
        and fleet.campaigns[lane.campaign].status is Status.RUNNING
        and fleet.campaigns[lane.campaign].may_measure(fleet.settings.measure_limit_s)
        for pool in fleet.pools.values()
        if pool.is_host and pool.boards
        for lane in (fleet.lanes[number] for number in pool.lanes)
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


def dispatch(fleet: FleetState) -> None:
    """Assign jobs to idle boards, then prefetch one per busy board; idle boards without a job help others.

    A host that searches and builds gets none (`begin_measuring`).
    """
    pools = [key for key, pool in fleet.pools.items() if not pool.is_host or fleet.phase is Phase.MEASURING]
    for kind in ("idle", "room"):
        # Boards that keep their clocks choose first: otherwise, with more boards than jobs, one would change its clocks
        # for a job that another could run as it is.
        for stays in (True, False):
            for key in pools:
                if getattr(fleet.pools[key], kind) and _has_work(fleet, fleet.pools[key]):
                    for point in list(getattr(fleet.pools[key], kind)):
                        _fill(fleet, key, kind, point, stays)
        for key in pools:
            # Before the second round, which prefetches for the boards that a job is taken from.
            if kind == "idle" and fleet.pools[key].idle:
                _take_waiting(fleet, key)
    for key in pools:
        if fleet.pools[key].idle:
            _double_stragglers(fleet, key)


def _has_work(fleet: FleetState, pool: Pool) -> bool:
    return any(fleet.lanes[number].ready or fleet.lanes[number].again for number in pool.lanes)


def _fill(fleet: FleetState, key: PoolKey, kind: str, point: str, stays: bool) -> None:
    """Assign jobs to a group's boards while there are any."""
    while names := getattr(fleet.pools[key], kind).get(point, ()):
        # A job avoids fewer boards than `max_attempts`, so if none of that many boards may have it, no board of the
        # group may.
        for name in names[: fleet.settings.max_attempts]:
            pick = _find_pick(fleet, key, name, point)
            if pick is not None and (pick.stays or not stays):
                fleet.assign(pick.job, name, pick.used)
                break
        else:
            return


def _find_pick(fleet: FleetState, key: PoolKey, name: str, point: str) -> _Pick | None:
    """Pick a board's next job: by the shares of owners, then campaigns, then lanes."""
    pool = fleet.pools[key]
    options = []
    for number in pool.lanes:
        lane = fleet.lanes[number]
        if lane.ready or lane.again:
            campaign = fleet.campaigns[lane.campaign]
            if (
                campaign.status is Status.RUNNING
                and campaign.may_measure(fleet.settings.measure_limit_s)
                and _find_job(fleet, lane, name) is not None
            ):
                options.append(_Option(campaign.spec.owner, lane.campaign, number, lane.point == point))
    if not options:
        return None
    owner, owner_used = _least(fleet, pool, [(o.owner, o.stays) for o in options], pool.owner_used)
    options = [o for o in options if o.owner == owner]
    campaign_name, campaign_used = _least(fleet, pool, [(o.campaign, o.stays) for o in options], pool.campaign_used)
    options = [o for o in options if o.campaign == campaign_name]
    number, lane_used = _least(fleet, pool, [(o.lane, o.stays) for o in options], pool.lane_used)
    lane = fleet.lanes[number]
    job = _find_job(fleet, lane, name)
    return None if job is None else _Pick(job, lane.point == point, (owner_used, campaign_used, lane_used))


def _least(
    fleet: FleetState, pool: Pool, options: list[tuple[Key, bool]], used: Mapping[Key, float]
) -> tuple[Key, float]:
    """Return the least served account and its use of the pool (s, weighted).

    An account that needs other clocks waits until it is behind by the cost of changing them on every board: within that
    band boards keep their clocks, outside of it shares decide. An account that had nothing to measure is behind by the
    credit at most.
    """
    credit = fleet.settings.credit_s * pool.boards
    floor = max(used.get(key, 0.0) for key, _ in options) - credit
    band = min(fleet.settings.switch_s * pool.boards, credit / 2)
    costs = [(max(used.get(key, 0.0), floor), stays, key) for key, stays in options]
    effective, _, key = min(costs, key=lambda cost: (cost[0] + (0.0 if cost[1] else band), cost[2]))
    return key, effective


def _find_job(fleet: FleetState, lane: LaneEntry, name: str) -> int | None:
    """Return the first job of a lane that a board may have; retried ones come first."""
    for number in lane.again:
        if _may_have(fleet, lane, fleet.jobs[number], name):
            return number
    return lane.ready[0] if lane.ready else None


def _may_have(fleet: FleetState, lane: LaneEntry, job: JobEntry, name: str) -> bool:
    """Whether a job may go to a board: not where it failed, unless it failed on all boards."""
    if name not in job.avoid:
        return True
    here = sum(pool.boards for pool in fleet.pools.values() if lane.number in pool.lanes)
    return here <= sum(board in fleet.boards and _serves(fleet, fleet.boards[board], lane) for board in job.avoid)


def _serves(fleet: FleetState, board: BoardEntry, lane: LaneEntry) -> bool:
    return lane.number in fleet.pools[board.pool].lanes


def _take_waiting(fleet: FleetState, key: PoolKey) -> None:
    """Move jobs that wait at busy boards to idle ones. Scans all boards, if anything waits."""
    waiting: dict[int, list[int]] = {
        number: []
        for number in fleet.pools[key].lanes
        if fleet.lanes[number].waiting and fleet.campaigns[fleet.lanes[number].campaign].status is Status.RUNNING
    }
    if not waiting:
        return
    for _, board in sorted(fleet.boards.items()):
        if board.waiting is not None:
            lane = fleet.lane_of(fleet.jobs[fleet.assignments[board.waiting].job])
            if lane.number in waiting:
                waiting[lane.number].append(board.waiting)
    for number, assignments in waiting.items():
        for assignment in assignments:
            names = _idle(fleet, key)
            if not names:
                return
            lane, job = fleet.lanes[number], fleet.jobs[fleet.assignments[assignment].job]
            name = next((n for n in names if _may_have(fleet, lane, job, n)), None)
            if name is not None:
                fleet.requeue(fleet.revoke(assignment, "an idle board takes it").job)
                fleet.assign(job.number, name, _used(fleet, fleet.pools[key], lane))


def _double_stragglers(fleet: FleetState, key: PoolKey) -> None:
    """Run stragglers a second time on idle boards; the first result counts.

    Scans all boards, so it returns when to look again: a job that begins later cannot be late before that.
    """
    if fleet.now_s < fleet.pools[key].straggler_check_s:
        return
    settings = fleet.settings
    soonest_s = fleet.now_s + settings.straggler_min_s
    late = []
    for _, board in sorted(fleet.boards.items()):
        if board.running is None:
            continue
        assignment = fleet.assignments[board.running]
        job = fleet.jobs[assignment.job]
        lane = fleet.lane_of(job)
        if len(job.assignments) > 1 or assignment.started_s is None or lane.number not in fleet.pools[key].lanes:
            continue
        usual_s = max(settings.straggler_min_s, settings.straggler_factor * (lane.measure_s or 0.0))
        late_s = assignment.started_s + usual_s
        if late_s <= fleet.now_s:
            late.append((assignment.started_s, job.number))
        else:
            soonest_s = min(soonest_s, late_s)
    fleet.pools[key].straggler_check_s = soonest_s
    for _, number in sorted(late):
        job = fleet.jobs[number]
        lane = fleet.lane_of(job)
        campaign = fleet.campaigns[lane.campaign]
        has_it = fleet.assignments[job.assignments[0]].board
        name = next((n for n in _idle(fleet, key) if n != has_it and n not in job.avoid), None)
        if name is None or campaign.status is not Status.RUNNING or not campaign.may_measure(settings.measure_limit_s):
            continue
        fleet.assign(number, name, _used(fleet, fleet.pools[key], lane))


def _idle(fleet: FleetState, key: PoolKey) -> list[str]:
    return [name for names in fleet.pools[key].idle.values() for name in names]


def _used(fleet: FleetState, pool: Pool, lane: LaneEntry) -> tuple[float, float, float]:
    owner = fleet.campaigns[lane.campaign].spec.owner
    return (
        pool.owner_used.get(owner, 0.0),
        pool.campaign_used.get(lane.campaign, 0.0),
        pool.lane_used.get(lane.number, 0.0),
    )
