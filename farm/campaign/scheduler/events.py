"""What happens to a fleet, and its effect on the state: trials, faults, boards and budgets.

An event that names something that is over is late, and changes nothing. `scheduler.step` starts what follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from device_agent.protocol import FaultSide
from farm.campaign.scheduler.fleet import AGAIN, BUILDING, ON_BOARD, READY, TO_BUILD, FleetState, expect_with, mean_with
from farm.campaign.scheduler.state import GOING, OVER, BoardEntry, CampaignEntry, Job, Pool, SearchRequest, Status, Task
from farm.types.campaigns import Budget
from farm.values import DEFAULT_POINT

if TYPE_CHECKING:
    from farm.search.tuners.decisions import Candidate

# The order in which work is dropped when a budget shrinks: the cheapest first.
_GIVEN_BACK = (TO_BUILD, BUILDING, READY, AGAIN, ON_BOARD)
# A run of faults on this many boards counts against the campaign, not one board.
_SEVERAL_BOARDS = 3


# Campaigns


def add_campaign(fleet: FleetState, campaign: CampaignEntry, wall_clock_s: float = 0.0) -> None:
    """Begin a campaign, or continue it after a restart; `wall_clock_s` is what earlier runs used."""
    campaign.began_s = fleet.now_s - wall_clock_s
    fleet.campaigns[campaign.name] = campaign
    fleet.lanes += campaign.lanes
    fleet.set_status(campaign, Status.RUNNING, "")


def _find_campaign(fleet: FleetState, name: str) -> CampaignEntry | None:
    """Return the campaign; None where it is over."""
    campaign = fleet.campaigns[name]
    return None if campaign.status in OVER else campaign


def change_budget(fleet: FleetState, name: str, budget: Budget) -> None:
    """Change a campaign's budget. Work that no longer fits is dropped."""
    campaign = _find_campaign(fleet, name)
    if campaign is None:
        return
    campaign.budget, fleet.stale = budget, True
    fleet.may_ask_again(campaign)
    if budget.trials is not None:
        _take_back(fleet, campaign.counted + campaign.open - budget.trials, campaign.tasks)
    if budget.per_workload is not None:
        for task in campaign.tasks:
            _take_back(fleet, task.asked - budget.per_workload, [task])
    if budget.board_s is not None:
        _free_boards(fleet, campaign, budget.board_s)


def change_priority(fleet: FleetState, name: str, priority: int) -> None:
    """Change a campaign's priority among its owner's."""
    campaign = _find_campaign(fleet, name)
    if campaign is not None:
        campaign.priority, fleet.stale = priority, True


def _take_back(fleet: FleetState, excess: int, tasks: Sequence[Task]) -> None:
    """Take back open trials of these tasks: candidates not proposed yet first, running measurements last."""
    if excess <= 0:
        return
    for request in fleet.requests.values():
        if request.task in tasks and excess > 0:
            fewer = min(excess, request.count)
            excess -= fewer
            request.count -= fewer
            request.task.lane.searching -= fewer
            fleet.replan(request.task.lane)
            fleet.give_back(request.task, fewer)
    jobs = [job for job in fleet.jobs.values() if job.task in tasks]
    for job in sorted(jobs, key=lambda job: (_GIVEN_BACK.index(job.stage), -job.number))[: max(0, excess)]:
        fleet.discard(job)


def _free_boards(fleet: FleetState, campaign: CampaignEntry, board_s: float) -> None:
    """Revoke a campaign's youngest measurements until the others certainly fit into its board time."""
    assignments = [each for job in fleet.jobs_of(campaign) for each in job.assignments]
    for assignment in sorted(assignments, key=lambda each: -each.number):
        if campaign.board_s + campaign.on_board * fleet.settings.measure_limit_s <= board_s:
            return
        fleet.requeue(fleet.revoke(assignment))


def pause(fleet: FleetState, name: str) -> None:
    """Begin no new work for a campaign; running measurements end as usual."""
    campaign = _find_campaign(fleet, name)
    if campaign is not None and campaign.status is not Status.PAUSED:
        _pause(fleet, campaign, "an operator paused it")


def _pause(fleet: FleetState, campaign: CampaignEntry, reason: str) -> None:
    campaign.pause_began_s = fleet.now_s
    fleet.set_status(campaign, Status.PAUSED, reason)
    for job in fleet.jobs_of(campaign):
        for assignment in list(job.assignments):
            if assignment.started_s is None:
                fleet.revoke(assignment)
        if job.stage == ON_BOARD:
            fleet.requeue(job)


def resume(fleet: FleetState, name: str) -> None:
    """Resume a paused campaign."""
    campaign = _find_campaign(fleet, name)
    if campaign is None or campaign.status is not Status.PAUSED:
        return
    campaign.pauses_s += fleet.now_s - campaign.pause_began_s
    campaign.faults_in_a_row, campaign.faulty = 0, frozenset()
    fleet.set_status(campaign, Status.RUNNING, "")


def cancel(fleet: FleetState, name: str) -> None:
    """End a campaign at once."""
    campaign = _find_campaign(fleet, name)
    if campaign is not None:
        fleet.end_campaign(campaign, Status.CANCELLED, "an operator cancelled it")


def finalist_measured(fleet: FleetState, name: str, board_s: float, energy_j: float = 0.0) -> None:
    """Charge a finalist's measurement on a lent board to its campaign, whose searches may be over."""
    if name in fleet.campaigns:
        fleet.charge(fleet.campaigns[name], board_s, energy_j)


# Boards


def arrive(
    fleet: FleetState,
    name: str,
    board_type: str,
    point: str = DEFAULT_POINT,
    labels: frozenset[str] = frozenset(),
    is_host: bool = False,
) -> None:
    """Add a board; its clocks are at `point`.

    `labels` hold at least what campaigns ask for: boards that differ in them form separate pools. `is_host`: it is the
    machine that searches and builds, which rests while it measures; so are all boards of its type.
    """
    leave(fleet, name)
    pool = fleet.pools.setdefault((board_type, labels), Pool(board_type, labels))
    pool.boards, pool.is_host = pool.boards + 1, is_host
    fleet.add_board(BoardEntry(name, pool, point))
    fleet.stale = True


def leave(fleet: FleetState, name: str) -> None:
    """Remove a board. Its jobs are requeued without blame."""
    board = fleet.boards.get(name)
    if board is None:
        return
    jobs = [fleet.revoke(each) for each in (board.waiting, board.running) if each is not None]
    fleet.take_board(board)
    board.pool.boards -= 1
    fleet.stale = True
    for job in jobs:
        fleet.requeue(job)


def yield_board(fleet: FleetState, name: str) -> None:
    """Let a board finish its measurement and get no more: another user gets it next."""
    board = fleet.boards.get(name)
    if board is None or board.yields:
        return
    fleet.set_board(board, yields=True)
    if board.waiting is not None:
        fleet.requeue(fleet.revoke(board.waiting))


# Work


def proposed(fleet: FleetState, number: int, candidates: Sequence[Candidate], exhausted: bool = False) -> None:
    """Take a search's answer: as many candidates as requested, or fewer. `exhausted`: it will never have more."""
    request = _end_request(fleet, number)
    if request is None:
        return
    task = request.task
    taken = 0
    for candidate in candidates:
        if taken >= request.count or task.closed or candidate.hash in task.banned:
            fleet.worker.drop(task, candidate, "")
            continue
        taken += 1
        job = Job(fleet.new_number(), task, candidate, ON_BOARD, fleet.now_s)
        fleet.jobs[job.number] = job
        fleet.queue(job, TO_BUILD)
    fleet.give_back(task, request.count - taken)
    task.search_losses = 0
    # A search without candidates counts as exhausted: asking it for ever would keep the campaign from ending.
    if (exhausted or not candidates) and not task.ended:
        fleet.end_search(task, "all tried")
    task.lane.search_s = expect_with(task.lane.search_s, fleet.now_s - request.asked_s)
    fleet.replan(task.lane)


def search_failed(fleet: FleetState, number: int, reason: str = "") -> None:
    """A search died or missed its deadline, for `reason`."""
    request = _end_request(fleet, number)
    if request is None:
        return
    task = request.task
    fleet.give_back(task, request.count)
    task.search_losses += 1
    if task.search_losses >= fleet.settings.max_search_losses and not task.ended:
        why = f": {reason}" if reason else ""
        fleet.end_search(task, f"its search failed {task.search_losses} times{why}")


def _end_request(fleet: FleetState, number: int) -> SearchRequest | None:
    request = fleet.requests.pop(number, None)
    if request is not None:
        task = request.task
        task.exhausted = bool(task.ended)
        task.lane.searching -= request.count
        task.lane.dry = False
        fleet.replan(task.lane)
    return request


def built(fleet: FleetState, number: int, side: FaultSide | None = None) -> None:
    """A build ended: well (`side` None), by the candidate's fault, or by the farm's."""
    job = fleet.jobs.get(number)
    if job is None or job.stage != BUILDING:
        return
    fleet.unqueue(job)
    job.stage = ON_BOARD
    if side is None:
        lane = job.task.lane
        lane.build_s = mean_with(lane.build_s, fleet.now_s - job.since_s)
        fleet.queue(job, READY)
    elif side is FaultSide.CANDIDATE:
        fleet.count(job, None)
    else:
        _try_again(fleet, job, side, None)


def measured(
    fleet: FleetState,
    number: int,
    side: FaultSide | None,
    board_s: float,
    latency_s: float | None = None,
    energy_j: float = 0.0,
) -> None:
    """A measurement ended: well (`side` None, with its latency) or by a fault. It took `board_s` and `energy_j`."""
    assignment = fleet.assignments.get(number)
    if assignment is None:
        return
    job = fleet.release(assignment, board_s)
    lane = job.task.lane
    fleet.charge(lane.campaign, 0.0, energy_j)
    if side is None:
        lane.measure_s = mean_with(lane.measure_s, board_s)
        fleet.count(job, latency_s)
    elif side is FaultSide.CANDIDATE:
        fleet.count(job, None)
    else:
        _try_again(fleet, job, side, assignment.board.name)


def _try_again(fleet: FleetState, job: Job, side: FaultSide, board: str | None) -> None:
    """Retry a job that failed by no proven fault of its candidate, elsewhere if the board may be to blame.

    `board` None: its build failed.
    """
    settings = fleet.settings
    job.attempts += 1
    if side is FaultSide.BOARD and board is not None:
        job.lost_on = (*job.lost_on, board)
    if side in (FaultSide.BOARD, FaultSide.SAMPLE) and board is not None and board not in job.avoid:
        # A hot board spoils all its samples: three there would cost a good candidate its place.
        job.avoid = (*job.avoid, board)
    campaign = job.task.lane.campaign
    campaign.faults_in_a_row += 1
    campaign.faulty = campaign.faulty if board is None else campaign.faulty | {board}
    if len(job.lost_on) >= settings.max_losses:
        names = ", ".join(sorted(set(job.lost_on)))
        fleet.discard(job, banned=f"{len(job.lost_on)} boards were lost under it: {names}")
    elif job.attempts >= settings.max_attempts:
        fleet.discard(job)
    elif board is None:
        fleet.queue(job, TO_BUILD)
    else:
        fleet.requeue(job)
    _pause_if_nothing_works(fleet, campaign)


def _pause_if_nothing_works(fleet: FleetState, campaign: CampaignEntry) -> None:
    faults = campaign.faults_in_a_row
    if campaign.status not in GOING or faults < fleet.settings.max_faults_in_a_row:
        return
    here = sum(pool.boards for pool in fleet.pools.values() if any(lane in pool.lanes for lane in campaign.lanes))
    if campaign.faulty and len(campaign.faulty) < min(_SEVERAL_BOARDS, here):
        return
    _pause(fleet, campaign, f"{faults} trials in a row failed through no fault of their candidates")
