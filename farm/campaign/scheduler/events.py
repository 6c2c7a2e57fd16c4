"""The effect of each event on a fleet's state: the bookkeeping of trials, faults, boards and budgets.

Every function takes a draft and one event. `dispatch` and `supply` start new work.
"""

from __future__ import annotations

import functools

from device_agent.protocol import FaultSide
from farm.campaign.scheduler import values as v
from farm.campaign.scheduler.edit import AGAIN, BUILDING, ON_BOARD, READY, TO_BUILD, Draft, expect_with, mean_with
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
    change,
)
from farm.campaign.scheduler.values import Status
from farm.errors import UsageError

# The order in which work is dropped when a budget shrinks: the cheapest first.
_GIVEN_BACK = (TO_BUILD, BUILDING, READY, AGAIN, ON_BOARD)
# A run of faults on this many boards counts against the campaign, not one board.
_SEVERAL_BOARDS = 3


@functools.singledispatch
def observe(event: object, draft: Draft) -> None:
    """Apply an event. Raises UsageError for an invalid request of a user."""
    raise TypeError(f"not an event of the fleet: {event!r}")


# Campaigns


@observe.register
def _(event: v.CampaignAdded, draft: Draft) -> None:
    spec = event.spec
    known = draft.campaigns.get(spec.name)
    if known is not None and known.status not in v.OVER:
        raise UsageError(f"campaign {spec.name!r} is {known.status} already", "Give the new one another name.")
    parts = spec.all_parts
    if not parts or not all(part.workloads for part in parts):
        raise UsageError(
            f"campaign {spec.name!r} has nothing to do", "It needs workloads, board types and operating points."
        )
    done = {entry.task: entry for entry in event.done}
    lanes = []
    for part in parts:
        number = draft.new_number()
        tasks = []
        for workload in part.workloads:
            key = v.TaskKey(spec.name, workload.name, part.board_type, part.point)
            tasks.append(draft.new_number())
            draft.tasks[tasks[-1]] = _begin_task(tasks[-1], key, number, workload, done.pop(key, v.Done(key, 0)))
        draft.lanes[number] = LaneEntry(number, spec.name, part.board_type, part.point, tuple(tasks))
        lanes.append(number)
    if done:
        raise UsageError(f"{next(iter(done))} is no workload of campaign {spec.name!r}", "Was its file changed?")
    draft.campaigns[spec.name] = CampaignEntry(
        spec,
        spec.budget,
        Status.RUNNING,
        draft.now_s - event.wall_clock_s,
        lanes=tuple(lanes),
        counted=sum(entry.counted for entry in event.done),
        board_s=event.board_s,
        energy_j=event.energy_j,
        since_best=min((entry.since_best for entry in event.done), default=0),
    )
    draft.set_status(spec.name, Status.RUNNING, "")


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


def _find_campaign(draft: Draft, name: str) -> CampaignEntry | None:
    """Return the campaign; None where it is over. Raises UsageError where there was none."""
    if name not in draft.campaigns:
        raise UsageError(f"there is no campaign {name!r}")
    campaign = draft.campaigns[name]
    return None if campaign.status in v.OVER else campaign


@observe.register
def _(event: v.BudgetChanged, draft: Draft) -> None:
    campaign = _find_campaign(draft, event.campaign)
    if campaign is None:
        return
    draft.set_campaign(event.campaign, budget=event.budget)
    draft.stale = True
    for number in campaign.lanes:
        draft.set_lane(number, dry=False)
    if event.budget.trials is not None:
        excess = campaign.counted + campaign.open - event.budget.trials
        _take_back(draft, excess, [n for lane in campaign.lanes for n in draft.lanes[lane].tasks])
    if event.budget.per_workload is not None:
        for lane in campaign.lanes:
            for number in draft.lanes[lane].tasks:
                task = draft.tasks[number]
                _take_back(draft, task.counted + task.open - event.budget.per_workload, [number])
    if event.budget.board_s is not None:
        _free_boards(draft, event.campaign, event.budget.board_s)


@observe.register
def _(event: v.PriorityChanged, draft: Draft) -> None:
    campaign = _find_campaign(draft, event.campaign)
    if campaign is not None:
        draft.set_campaign(event.campaign, spec=change(campaign.spec, priority=event.priority))
        draft.stale = True


def _take_back(draft: Draft, excess: int, task_numbers: list[int]) -> None:
    """Take back open trials of these tasks: candidates not proposed yet first, running measurements last."""
    if excess <= 0:
        return
    tasks = set(task_numbers)
    for request in draft.requests.values():
        if request.task in tasks and excess > 0:
            fewer = min(excess, request.count)
            excess -= fewer
            draft.requests[request.number] = change(request, count=request.count - fewer)
            lane = draft.tasks[request.task].lane
            draft.set_lane(lane, searching=draft.lanes[lane].searching - fewer)
            draft.give_back(request.task, fewer)
    jobs = [job for job in draft.jobs.values() if job.task in tasks]
    for job in sorted(jobs, key=lambda job: (_GIVEN_BACK.index(job.stage), -job.number))[: max(0, excess)]:
        draft.discard(job.number, "the budget is smaller now")


def _free_boards(draft: Draft, name: str, board_s: float) -> None:
    """Revoke a campaign's youngest measurements until the others certainly fit into its board time."""
    numbers = sorted(number for job in draft.jobs_of(name) for number in job.assignments)
    while numbers:
        campaign = draft.campaigns[name]
        if campaign.board_s + campaign.on_board * draft.settings.measure_limit_s <= board_s:
            return
        draft.requeue(draft.revoke(numbers.pop(), "the budget is smaller now").job)


@observe.register
def _(event: v.CampaignPaused, draft: Draft) -> None:
    campaign = _find_campaign(draft, event.campaign)
    if campaign is not None and campaign.status is not Status.PAUSED:
        _pause(draft, event.campaign, "an operator paused it")


def _pause(draft: Draft, name: str, reason: str) -> None:
    """Stop a campaign's new work; running measurements end as usual."""
    draft.set_campaign(name, pause_began_s=draft.now_s)
    draft.set_status(name, Status.PAUSED, reason)
    for job in draft.jobs_of(name):
        for number in job.assignments:
            if draft.assignments[number].started_s is None:
                draft.revoke(number, "the campaign is paused")
        if job.assignments:
            draft.requeue(job.number)


@observe.register
def _(event: v.CampaignResumed, draft: Draft) -> None:
    campaign = _find_campaign(draft, event.campaign)
    if campaign is None or campaign.status is not Status.PAUSED:
        return
    pauses_s = campaign.pauses_s + draft.now_s - campaign.pause_began_s
    draft.set_campaign(event.campaign, pauses_s=pauses_s, faults_in_a_row=0, faulty=frozenset())
    draft.set_status(event.campaign, Status.RUNNING, "")


@observe.register
def _(event: v.CampaignCancelled, draft: Draft) -> None:
    if _find_campaign(draft, event.campaign) is not None:
        draft.end_campaign(event.campaign, Status.CANCELLED, "an operator cancelled it")


# Boards


@observe.register
def _(event: v.BoardArrived, draft: Draft) -> None:
    if event.board in draft.boards:
        _leave(draft, event.board, lost=False)
    key = PoolKey(event.board_type, tuple(sorted(event.labels)))
    pool = draft.pools.get(key, Pool())
    draft.pools[key] = change(pool, boards=pool.boards + 1, is_host=event.is_host)
    draft.put_board(BoardEntry(event.board, key, event.point))
    draft.stale = True


@observe.register
def _(event: v.BoardLeft, draft: Draft) -> None:
    if event.board in draft.boards:
        _leave(draft, event.board, event.lost)


@observe.register
def _(event: v.BoardYields, draft: Draft) -> None:
    board = draft.boards.find(event.board)
    if board is None or board.yields:
        return
    draft.put_board(change(board, yields=True))
    if board.waiting is not None:
        draft.requeue(draft.revoke(board.waiting, "another user of the queue gets the board").job)


def _leave(draft: Draft, name: str, lost: bool) -> None:
    """Remove a board. Its waiting job is requeued without blame; so is its running job, unless it was `lost`."""
    board = draft.boards[name]
    at_board = [n for n in (board.waiting, board.running) if n is not None]
    jobs = [draft.revoke(number, "the board left").job for number in at_board]
    draft.take_board(name)
    pool = draft.pools[board.pool]
    draft.pools[board.pool] = change(pool, boards=pool.boards - 1)
    draft.stale = True
    for job, number in zip(jobs, at_board, strict=True):
        if lost and number == board.running:
            _try_again(draft, job, FaultSide.BOARD, name)
        else:
            draft.requeue(job)


# Work


@observe.register
def _(event: v.Proposed, draft: Draft) -> None:
    if event.request not in draft.requests:
        return
    request = _end_request(draft, event.request)
    task = draft.tasks[request.task]
    # A search without candidates counts as exhausted: asking it for ever would keep the campaign from ending.
    exhausted = event.exhausted or not event.candidates
    taken = 0
    for candidate in event.candidates:
        if taken >= request.count or task.closed or candidate in task.banned:
            draft.decisions.append(v.Discard(None, task.key, candidate, "it is not needed"))
            continue
        taken += 1
        number = draft.new_number()
        draft.jobs[number] = JobEntry(number, request.task, candidate, ON_BOARD, draft.now_s)
        draft.queue(number, TO_BUILD)
    draft.give_back(request.task, request.count - taken)
    draft.set_task(request.task, search_losses=0)
    if exhausted and not task.ended:
        draft.end_search(request.task, "all tried")
    lane = draft.lanes[task.lane]
    draft.set_lane(task.lane, search_s=expect_with(lane.search_s, draft.now_s - request.asked_s))


@observe.register
def _(event: v.SearchFailed, draft: Draft) -> None:
    if event.request not in draft.requests:
        return
    request = _end_request(draft, event.request)
    draft.give_back(request.task, request.count)
    losses = draft.tasks[request.task].search_losses + 1
    draft.set_task(request.task, search_losses=losses)
    if losses >= draft.settings.max_search_losses and not draft.tasks[request.task].ended:
        why = f": {event.reason}" if event.reason else ""
        draft.end_search(request.task, f"its search failed {losses} times{why}")


def _end_request(draft: Draft, number: int) -> RequestEntry:
    request = draft.requests.pop(number)
    task = draft.tasks[request.task]
    state = change(task.state, exhausted=bool(task.ended))
    draft.tasks[request.task] = change(task, state=state)
    lane = draft.lanes[task.lane]
    draft.set_lane(task.lane, searching=lane.searching - request.count, dry=False)
    return request


@observe.register
def _(event: v.Built, draft: Draft) -> None:
    job = draft.jobs.find(event.job)
    if job is None or job.stage != BUILDING:
        return
    draft.unqueue(event.job)
    draft.jobs[event.job] = change(job, stage=ON_BOARD)
    if event.side is None:
        lane = draft.lane_of(job)
        draft.set_lane(lane.number, build_s=mean_with(lane.build_s, draft.now_s - job.since_s))
        draft.queue(event.job, READY)
    elif event.side is FaultSide.CANDIDATE:
        draft.count(event.job, None, None)
    else:
        _try_again(draft, event.job, event.side, None)


@observe.register
def _(event: v.Measured, draft: Draft) -> None:
    if event.assignment not in draft.assignments:
        return
    assignment = draft.release(event.assignment, event.board_s)
    job = draft.jobs[assignment.job]
    draft.charge(draft.lane_of(job).campaign, 0.0, event.energy_j)
    if event.side is None:
        lane = draft.lane_of(job)
        draft.set_lane(lane.number, measure_s=mean_with(lane.measure_s, event.board_s))
        draft.count(job.number, event.assignment, event.latency_s)
    elif event.side is FaultSide.CANDIDATE:
        draft.count(job.number, event.assignment, None)
    else:
        _try_again(draft, job.number, event.side, assignment.board)


@observe.register
def _(event: v.FinalistMeasured, draft: Draft) -> None:
    if event.campaign in draft.campaigns:
        draft.charge(event.campaign, event.board_s, event.energy_j)


@observe.register
def _(event: v.HostReserved, draft: Draft) -> None:
    draft.reserved = event.reserved


def _try_again(draft: Draft, job_number: int, side: FaultSide, board: str | None) -> None:
    """Retry a job that failed by no proven fault of its candidate, elsewhere if the board may be to blame.

    `board` None: its build failed.
    """
    settings = draft.settings
    job = draft.jobs[job_number]
    job = change(job, attempts=job.attempts + 1)
    if side is FaultSide.BOARD and board is not None:
        job = change(job, lost_on=(*job.lost_on, board))
    if side in (FaultSide.BOARD, FaultSide.SAMPLE) and board is not None and board not in job.avoid:
        # A hot board spoils all its samples: three there would cost a good candidate its place.
        job = change(job, avoid=(*job.avoid, board))
    draft.jobs[job_number] = job
    campaign = draft.campaign_of(draft.tasks[job.task])
    name = campaign.spec.name
    faulty = campaign.faulty if board is None else campaign.faulty | {board}
    draft.set_campaign(name, faults_in_a_row=campaign.faults_in_a_row + 1, faulty=faulty)
    if len(job.lost_on) >= settings.max_losses:
        draft.ban(job_number, f"{len(job.lost_on)} boards were lost under it: {', '.join(sorted(set(job.lost_on)))}")
    elif job.attempts >= settings.max_attempts:
        draft.discard(job_number, f"{job.attempts} attempts failed, the last by the {side}'s fault")
    elif board is None:
        draft.queue(job_number, TO_BUILD)
    else:
        draft.requeue(job_number)
    _pause_if_nothing_works(draft, name)


def _pause_if_nothing_works(draft: Draft, name: str) -> None:
    campaign = draft.campaigns[name]
    faults = campaign.faults_in_a_row
    if campaign.status not in (Status.RUNNING, Status.WAITING) or faults < draft.settings.max_faults_in_a_row:
        return
    here = sum(pool.boards for pool in draft.pools.values() if set(pool.lanes) & set(campaign.lanes))
    if campaign.faulty and len(campaign.faulty) < min(_SEVERAL_BOARDS, here):
        return
    _pause(draft, name, f"{faults} trials in a row failed through no fault of their candidates")
