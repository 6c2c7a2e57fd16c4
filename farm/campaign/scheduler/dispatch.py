"""Assign built candidates to boards: fair shares, few clock changes, one prefetched per board, stragglers doubled.

Works on the fleet's state. `scheduler` requests candidates.
"""

from __future__ import annotations

from farm.campaign.scheduler.fleet import FleetState
from farm.campaign.scheduler.state import Account, BoardEntry, Job, Lane, Phase, Pool, Status


def may_prepare(fleet: FleetState) -> bool:
    """Whether the host may search and build now."""
    return fleet.phase is not Phase.MEASURING and not fleet.reserved


def plan_queues(fleet: FleetState) -> dict[Lane, int]:
    """Return how many candidates to build for each lane before the host measures them, for lanes whose board is the
    host.

    The first phase ends with the first candidate, so that a first result is seen soon.
    """
    queue = 1 if fleet.phase is Phase.FIRST else 2 * fleet.settings.batch
    hosts = (pool for pool in fleet.pools.values() if pool.is_host and pool.boards)
    return {lane: queue for pool in hosts for lane in pool.lanes}


def end_measuring(fleet: FleetState) -> None:
    """Resume search and build once everything built for the host has been measured."""
    hosts = [pool for pool in fleet.pools.values() if pool.is_host]
    is_measuring = any(sum(map(len, pool.idle.values())) < pool.boards for pool in hosts)
    if fleet.phase is Phase.MEASURING and not is_measuring and not _has_any_work(fleet):
        fleet.phase = Phase.PREPARING


def begin_measuring(fleet: FleetState) -> bool:
    """Begin to measure on the host once it neither searches nor builds; return whether it begins now.

    Call it after searches and builds were started: the host rests only if none is under way then.
    """
    if not may_prepare(fleet) or fleet.requests or fleet.building or not _has_any_work(fleet):
        return False
    fleet.phase = Phase.MEASURING
    return True


def _has_any_work(fleet: FleetState) -> bool:
    return any(
        (lane.ready or lane.again) and fleet.may_measure(lane.campaign)
        for pool in fleet.pools.values()
        if pool.is_host and pool.boards
        for lane in pool.lanes
    )


def dispatch(fleet: FleetState) -> None:
    """Assign jobs to idle boards, then prefetch one per busy board; idle boards without a job help others.

    A host that searches and builds gets none (`begin_measuring`).
    """
    pools = [pool for pool in fleet.pools.values() if not pool.is_host or fleet.phase is Phase.MEASURING]
    for kind in ("idle", "room"):
        # Boards that keep their clocks choose first: otherwise, with more boards than jobs, one would change its clocks
        # for a job that another could run as it is.
        for stays in (True, False):
            for pool in pools:
                groups: dict[str, list[BoardEntry]] = getattr(pool, kind)
                if groups and any(lane.ready or lane.again for lane in pool.lanes):
                    for point in list(groups):
                        _fill(fleet, pool, groups, point, stays)
        for pool in pools:
            # Before the second round, which prefetches for the boards that a job is taken from.
            if kind == "idle" and pool.idle:
                _take_waiting(fleet, pool)
    for pool in pools:
        if pool.idle:
            _double_stragglers(fleet, pool)


def _fill(fleet: FleetState, pool: Pool, groups: dict[str, list[BoardEntry]], point: str, stays: bool) -> None:
    """Assign jobs to a group's boards while there are any."""
    while boards := groups.get(point, ()):
        # A job avoids fewer boards than `max_attempts`, so if none of that many boards may have it, no board of the
        # group may.
        for board in boards[: fleet.settings.max_attempts]:
            pick = _find_pick(fleet, pool, board, point)
            if pick is not None and (pick[0].task.lane.point == point or not stays):
                fleet.assign(pick[0], board, pick[1])
                break
        else:
            return


def _find_pick(fleet: FleetState, pool: Pool, board: BoardEntry, point: str) -> tuple[Job, list[float]] | None:
    """Pick a board's next job by the shares of owners, then campaigns, then lanes; return their use of the pool too."""
    lanes = [
        lane
        for lane in pool.lanes
        if (lane.ready or lane.again) and fleet.may_measure(lane.campaign) and _find_job(fleet, lane, board)
    ]
    if not lanes:
        return None
    used = []
    for level in range(3):
        account, used_s = _find_least(fleet, pool, point, lanes, level)
        lanes = [lane for lane in lanes if lane.accounts[level] == account]
        used.append(used_s)
    job = _find_job(fleet, lanes[0], board)
    return None if job is None else (job, used)


def _find_least(fleet: FleetState, pool: Pool, point: str, lanes: list[Lane], level: int) -> tuple[Account, float]:
    """Return the least served of the lanes' accounts at a level, and its use of the pool (s, weighted).

    An account that needs other clocks waits until it is behind by the cost of changing them on every board: within that
    band boards keep their clocks, outside of it shares decide. An account that had nothing to measure is behind by the
    credit at most.
    """
    credit = fleet.settings.credit_s * pool.boards
    band = min(fleet.settings.switch_s * pool.boards, credit / 2)
    used = [pool.used.get(lane.accounts[level], 0.0) for lane in lanes]
    floor = max(used) - credit
    least_s, best_s, best = float("inf"), 0.0, lanes[0]
    for lane, used_s in zip(lanes, used, strict=True):
        used_s = max(used_s, floor)
        cost_s = used_s if lane.point == point else used_s + band
        if cost_s < least_s:
            least_s, best_s, best = cost_s, used_s, lane
    return best.accounts[level], best_s


def _find_job(fleet: FleetState, lane: Lane, board: BoardEntry) -> Job | None:
    """Return the first job of a lane that a board may have; retried ones come first."""
    for job in lane.again:
        if _may_have(fleet, job, board):
            return job
    return lane.ready[0] if lane.ready else None


def _may_have(fleet: FleetState, job: Job, board: BoardEntry) -> bool:
    """Whether a job may go to a board: not where it failed, unless it failed on all boards."""
    if board.name not in job.avoid:
        return True
    lane = job.task.lane
    here = sum(pool.boards for pool in fleet.pools.values() if lane in pool.lanes)
    return here <= sum(name in fleet.boards and lane in fleet.boards[name].pool.lanes for name in job.avoid)


def _take_waiting(fleet: FleetState, pool: Pool) -> None:
    """Move jobs that wait at busy boards to idle ones. Scans all boards, if anything waits."""
    lanes = [lane for lane in pool.lanes if lane.waiting and lane.campaign.status is Status.RUNNING]
    if not lanes:
        return
    boards = [board for _, board in sorted(fleet.boards.items())]
    waiting = [each.waiting for each in boards if each.waiting is not None and each.waiting.job.task.lane in lanes]
    for assignment in sorted(waiting, key=lambda each: lanes.index(each.job.task.lane)):
        job, idle = assignment.job, _list_idle(pool)
        if not idle:
            return
        board = next((each for each in idle if _may_have(fleet, job, each)), None)
        if board is not None:
            fleet.requeue(fleet.revoke(assignment))
            fleet.assign(job, board, _list_used(pool, job))


def _double_stragglers(fleet: FleetState, pool: Pool) -> None:
    """Run stragglers a second time on idle boards; the first result counts.

    Scans all boards, so it notes when to look again: a job that begins later cannot be late before that.
    """
    if fleet.now_s < pool.straggler_check_s:
        return
    settings = fleet.settings
    soonest_s = fleet.now_s + settings.straggler_min_s
    late = []
    for _, board in sorted(fleet.boards.items()):
        assignment = board.running
        if assignment is None or assignment.started_s is None:
            continue
        job, lane = assignment.job, assignment.job.task.lane
        if len(job.assignments) > 1 or lane not in pool.lanes:
            continue
        usual_s = max(settings.straggler_min_s, settings.straggler_factor * (lane.measure_s or 0.0))
        late_s = assignment.started_s + usual_s
        if late_s <= fleet.now_s:
            late.append((assignment.started_s, job.number, assignment))
        else:
            soonest_s = min(soonest_s, late_s)
    pool.straggler_check_s = soonest_s
    for _, _, assignment in sorted(late):
        job = assignment.job
        fit = [each for each in _list_idle(pool) if each is not assignment.board and each.name not in job.avoid]
        if fit and fleet.may_measure(job.task.lane.campaign):
            fleet.assign(job, fit[0], _list_used(pool, job))


def _list_idle(pool: Pool) -> list[BoardEntry]:
    return [board for boards in pool.idle.values() for board in boards]


def _list_used(pool: Pool, job: Job) -> list[float]:
    return [pool.used.get(account, 0.0) for account in job.task.lane.accounts]
