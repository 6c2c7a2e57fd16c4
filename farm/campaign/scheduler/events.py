"""The effect of each event on a fleet's state: the bookkeeping of trials, faults, boards and budgets.

Every function takes one event and the fleet's state. `dispatch` and `scheduler` start new work.
"""

from __future__ import annotations

import dataclasses
import functools

from device_agent.protocol import FaultSide
from farm.campaign.scheduler import values as v
from farm.campaign.scheduler.fleet import AGAIN, BUILDING, ON_BOARD, READY, TO_BUILD, FleetState, expect_with, mean_with
from farm.campaign.scheduler.priority import WorkloadState
from farm.campaign.scheduler.state import (
    BoardEntry,
    CampaignEntry,
    JobEntry,
    LaneEntry,
    Pool,
    PoolKey,
    RequestEntry,
    TaskEntry,
)
from farm.campaign.scheduler.values import Status
from farm.errors import UsageError

# The order in which work is dropped when a budget shrinks: the cheapest first.
_GIVEN_BACK = (TO_BUILD, BUILDING, READY, AGAIN, ON_BOARD)
# A run of faults on this many boards counts against the campaign, not one board.
_SEVERAL_BOARDS = 3


@functools.singledispatch
def observe(event: object, fleet: FleetState) -> None:
    """Apply an event. Raises UsageError for an invalid request of a user."""
    raise TypeError(f"not an event of the fleet: {event!r}")


# Campaigns


@observe.register
def _(event: v.CampaignAdded, fleet: FleetState) -> None:
    spec = event.spec
    known = fleet.campaigns.get(spec.name)
    if known is not None and known.status not in v.OVER:
        raise UsageError(f"campaign {spec.name!r} is {known.status} already", "Give the new one another name.")
    parts = spec.parts
    if not parts or not all(part.workloads for part in parts):
        raise UsageError(
            f"campaign {spec.name!r} has nothing to do", "It needs workloads, board types and operating points."
        )
    done = {entry.task: entry for entry in event.done}
    keys = {v.TaskKey(spec.name, each.name, part.board_type, part.point) for part in parts for each in part.workloads}
    if foreign := [key for key in done if key not in keys]:
        raise UsageError(f"{foreign[0]} is no workload of campaign {spec.name!r}", "Was its file changed?")
    lanes = []
    for part in parts:
        number = fleet.new_number()
        tasks = []
        for workload in part.workloads:
            key = v.TaskKey(spec.name, workload.name, part.board_type, part.point)
            tasks.append(fleet.new_number())
            fleet.tasks[tasks[-1]] = _begin_task(tasks[-1], key, number, workload, done.get(key, v.Done(key, 0)))
        fleet.lanes[number] = LaneEntry(number, spec.name, part.board_type, part.point, tuple(tasks))
        lanes.append(number)
    campaign = fleet.campaigns[spec.name] = CampaignEntry(
        spec,
        spec.budget,
        Status.RUNNING,
        fleet.now_s - event.wall_clock_s,
        lanes=tuple(lanes),
        counted=sum(entry.counted for entry in event.done),
        board_s=event.board_s,
        energy_j=event.energy_j,
        since_best=min((entry.since_best for entry in event.done), default=0),
    )
    fleet.set_status(campaign, Status.RUNNING, "")


def _begin_task(number: int, key: v.TaskKey, lane: int, workload: v.CampaignWorkload, done: v.Done) -> TaskEntry:
    """Begin a task as earlier runs left it."""
    best = () if done.best_s is None else (done.best_s,)
    state = WorkloadState(workload.kind, workload.weight, workload.flop, asked=done.counted, best_s=best)
    return TaskEntry(
        number,
        key,
        lane,
        state,
        counted=done.counted,
        since_best=done.since_best,
        best_s=done.best_s,
        banned=done.banned,
    )


def _find_campaign(fleet: FleetState, name: str) -> CampaignEntry | None:
    """Return the campaign; None where it is over. Raises UsageError where there was none."""
    if name not in fleet.campaigns:
        raise UsageError(f"there is no campaign {name!r}")
    campaign = fleet.campaigns[name]
    return None if campaign.status in v.OVER else campaign


@observe.register
def _(event: v.BudgetChanged, fleet: FleetState) -> None:
    campaign = _find_campaign(fleet, event.campaign)
    if campaign is None:
        return
    campaign.budget, fleet.stale = event.budget, True
    for number in campaign.lanes:
        fleet.set_lane(number, dry=False)
    if event.budget.trials is not None:
        excess = campaign.counted + campaign.open - event.budget.trials
        _take_back(fleet, excess, [n for lane in campaign.lanes for n in fleet.lanes[lane].tasks])
    if event.budget.per_workload is not None:
        for lane in campaign.lanes:
            for number in fleet.lanes[lane].tasks:
                task = fleet.tasks[number]
                _take_back(fleet, task.counted + task.open - event.budget.per_workload, [number])
    if event.budget.board_s is not None:
        _free_boards(fleet, event.campaign, event.budget.board_s)


@observe.register
def _(event: v.PriorityChanged, fleet: FleetState) -> None:
    campaign = _find_campaign(fleet, event.campaign)
    if campaign is not None:
        campaign.spec, fleet.stale = dataclasses.replace(campaign.spec, priority=event.priority), True


def _take_back(fleet: FleetState, excess: int, task_numbers: list[int]) -> None:
    """Take back open trials of these tasks: candidates not proposed yet first, running measurements last."""
    if excess <= 0:
        return
    tasks = set(task_numbers)
    for request in fleet.requests.values():
        if request.task in tasks and excess > 0:
            fewer = min(excess, request.count)
            excess -= fewer
            request.count -= fewer
            lane = fleet.tasks[request.task].lane
            fleet.set_lane(lane, searching=fleet.lanes[lane].searching - fewer)
            fleet.give_back(request.task, fewer)
    jobs = [job for job in fleet.jobs.values() if job.task in tasks]
    for job in sorted(jobs, key=lambda job: (_GIVEN_BACK.index(job.stage), -job.number))[: max(0, excess)]:
        fleet.discard(job.number, "the budget is smaller now")


def _free_boards(fleet: FleetState, name: str, board_s: float) -> None:
    """Revoke a campaign's youngest measurements until the others certainly fit into its board time."""
    numbers = sorted(number for job in fleet.jobs_of(name) for number in job.assignments)
    while numbers:
        campaign = fleet.campaigns[name]
        if campaign.board_s + campaign.on_board * fleet.settings.measure_limit_s <= board_s:
            return
        fleet.requeue(fleet.revoke(numbers.pop(), "the budget is smaller now").job)


@observe.register
def _(event: v.CampaignPaused, fleet: FleetState) -> None:
    campaign = _find_campaign(fleet, event.campaign)
    if campaign is not None and campaign.status is not Status.PAUSED:
        _pause(fleet, campaign, "an operator paused it")


def _pause(fleet: FleetState, campaign: CampaignEntry, reason: str) -> None:
    """Stop a campaign's new work; running measurements end as usual."""
    campaign.pause_began_s = fleet.now_s
    fleet.set_status(campaign, Status.PAUSED, reason)
    for job in fleet.jobs_of(campaign.spec.name):
        for number in job.assignments:
            if fleet.assignments[number].started_s is None:
                fleet.revoke(number, "the campaign is paused")
        if job.stage == ON_BOARD:
            fleet.requeue(job.number)


@observe.register
def _(event: v.CampaignResumed, fleet: FleetState) -> None:
    campaign = _find_campaign(fleet, event.campaign)
    if campaign is None or campaign.status is not Status.PAUSED:
        return
    campaign.pauses_s += fleet.now_s - campaign.pause_began_s
    campaign.faults_in_a_row, campaign.faulty = 0, frozenset()
    fleet.set_status(campaign, Status.RUNNING, "")


@observe.register
def _(event: v.CampaignCancelled, fleet: FleetState) -> None:
    if _find_campaign(fleet, event.campaign) is not None:
        fleet.end_campaign(event.campaign, Status.CANCELLED, "an operator cancelled it")


# Boards


@observe.register
def _(event: v.BoardArrived, fleet: FleetState) -> None:
    if event.board in fleet.boards:
        _leave(fleet, event.board)
    key = PoolKey(event.board_type, tuple(sorted(event.labels)))
    pool = fleet.pools.setdefault(key, Pool())
    pool.boards, pool.is_host = pool.boards + 1, event.is_host
    fleet.add_board(BoardEntry(event.board, key, event.point))
    fleet.stale = True


@observe.register
def _(event: v.BoardLeft, fleet: FleetState) -> None:
    if event.board in fleet.boards:
        _leave(fleet, event.board)


@observe.register
def _(event: v.BoardYields, fleet: FleetState) -> None:
    board = fleet.boards.get(event.board)
    if board is None or board.yields:
        return
    fleet.set_board(board, yields=True)
    if board.waiting is not None:
        fleet.requeue(fleet.revoke(board.waiting, "another user of the queue gets the board").job)


def _leave(fleet: FleetState, name: str) -> None:
    """Remove a board. Its jobs are requeued without blame."""
    board = fleet.boards[name]
    at_board = [n for n in (board.waiting, board.running) if n is not None]
    jobs = [fleet.revoke(number, "the board left").job for number in at_board]
    fleet.take_board(board)
    fleet.pools[board.pool].boards -= 1
    fleet.stale = True
    for job in jobs:
        fleet.requeue(job)


# Work


@observe.register
def _(event: v.Proposed, fleet: FleetState) -> None:
    if event.request not in fleet.requests:
        return
    request = _end_request(fleet, event.request)
    task = fleet.tasks[request.task]
    # A search without candidates counts as exhausted: asking it for ever would keep the campaign from ending.
    exhausted = event.exhausted or not event.candidates
    taken = 0
    for candidate in event.candidates:
        if taken >= request.count or task.closed or candidate in task.banned:
            fleet.decisions.append(v.Discard(None, task.key, candidate, "it is not needed"))
            continue
        taken += 1
        number = fleet.new_number()
        fleet.jobs[number] = JobEntry(number, request.task, candidate, ON_BOARD, fleet.now_s)
        fleet.queue(number, TO_BUILD)
    fleet.give_back(request.task, request.count - taken)
    task.search_losses = 0
    if exhausted and not task.ended:
        fleet.end_search(request.task, "all tried")
    lane = fleet.lanes[task.lane]
    fleet.set_lane(task.lane, search_s=expect_with(lane.search_s, fleet.now_s - request.asked_s))


@observe.register
def _(event: v.SearchFailed, fleet: FleetState) -> None:
    if event.request not in fleet.requests:
        return
    request = _end_request(fleet, event.request)
    fleet.give_back(request.task, request.count)
    task = fleet.tasks[request.task]
    task.search_losses += 1
    if task.search_losses >= fleet.settings.max_search_losses and not task.ended:
        why = f": {event.reason}" if event.reason else ""
        fleet.end_search(request.task, f"its search failed {task.search_losses} times{why}")


def _end_request(fleet: FleetState, number: int) -> RequestEntry:
    request = fleet.requests.pop(number)
    task = fleet.tasks[request.task]
    task.state.exhausted = bool(task.ended)
    lane = fleet.lanes[task.lane]
    fleet.set_lane(task.lane, searching=lane.searching - request.count, dry=False)
    return request


@observe.register
def _(event: v.Built, fleet: FleetState) -> None:
    job = fleet.jobs.get(event.job)
    if job is None or job.stage != BUILDING:
        return
    fleet.unqueue(event.job)
    job.stage = ON_BOARD
    if event.side is None:
        lane = fleet.lane_of(job)
        fleet.set_lane(lane.number, build_s=mean_with(lane.build_s, fleet.now_s - job.since_s))
        fleet.queue(event.job, READY)
    elif event.side is FaultSide.CANDIDATE:
        fleet.count(event.job, None, None)
    else:
        _try_again(fleet, event.job, event.side, None)


@observe.register
def _(event: v.Measured, fleet: FleetState) -> None:
    if event.assignment not in fleet.assignments:
        return
    assignment = fleet.release(event.assignment, event.board_s)
    job = fleet.jobs[assignment.job]
    fleet.charge(fleet.campaigns[fleet.lane_of(job).campaign], 0.0, event.energy_j)
    if event.side is None:
        lane = fleet.lane_of(job)
        fleet.set_lane(lane.number, measure_s=mean_with(lane.measure_s, event.board_s))
        fleet.count(job.number, event.assignment, event.latency_s)
    elif event.side is FaultSide.CANDIDATE:
        fleet.count(job.number, event.assignment, None)
    else:
        _try_again(fleet, job.number, event.side, assignment.board)


@observe.register
def _(event: v.FinalistMeasured, fleet: FleetState) -> None:
    if event.campaign in fleet.campaigns:
        fleet.charge(fleet.campaigns[event.campaign], event.board_s, event.energy_j)


@observe.register
def _(event: v.HostReserved, fleet: FleetState) -> None:
    fleet.reserved = event.reserved


def _try_again(fleet: FleetState, job_number: int, side: FaultSide, board: str | None) -> None:
    """Retry a job that failed by no proven fault of its candidate, elsewhere if the board may be to blame.

    `board` None: its build failed.
    """
    settings = fleet.settings
    job = fleet.jobs[job_number]
    job.attempts += 1
    if side is FaultSide.BOARD and board is not None:
        job.lost_on = (*job.lost_on, board)
    if side in (FaultSide.BOARD, FaultSide.SAMPLE) and board is not None and board not in job.avoid:
        # A hot board spoils all its samples: three there would cost a good candidate its place.
        job.avoid = (*job.avoid, board)
    campaign = fleet.campaign_of(fleet.tasks[job.task])
    campaign.faults_in_a_row += 1
    campaign.faulty = campaign.faulty if board is None else campaign.faulty | {board}
    if len(job.lost_on) >= settings.max_losses:
        fleet.ban(job_number, f"{len(job.lost_on)} boards were lost under it: {', '.join(sorted(set(job.lost_on)))}")
    elif job.attempts >= settings.max_attempts:
        fleet.discard(job_number, f"{job.attempts} attempts failed, the last by the {side}'s fault")
    elif board is None:
        fleet.queue(job_number, TO_BUILD)
    else:
        fleet.requeue(job_number)
    _pause_if_nothing_works(fleet, campaign)


def _pause_if_nothing_works(fleet: FleetState, campaign: CampaignEntry) -> None:
    faults = campaign.faults_in_a_row
    if campaign.status not in (Status.RUNNING, Status.WAITING) or faults < fleet.settings.max_faults_in_a_row:
        return
    here = sum(pool.boards for pool in fleet.pools.values() if set(pool.lanes) & set(campaign.lanes))
    if campaign.faulty and len(campaign.faulty) < min(_SEVERAL_BOARDS, here):
        return
    _pause(fleet, campaign, f"{faults} trials in a row failed through no fault of their candidates")
