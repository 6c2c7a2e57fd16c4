"""The fleet scheduler's state: boards, campaigns and their work, and the changes that keep all of it in step.

`events` says what a change follows from, `dispatch` and `scheduler` what is begun.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from farm.campaign.scheduler.state import (
    OVER,
    Account,
    Assignment,
    BoardEntry,
    CampaignEntry,
    Job,
    Lane,
    Phase,
    Pool,
    SchedulerSettings,
    SearchRequest,
    Status,
    Task,
    Worker,
)

# The assumed cost of a measurement before any is known; corrected when it ends.
_FIRST_GUESS_S = 1.0
# The weight of the newest value in a running mean.
_NEWEST = 0.1

# Before search and build times are known: one candidate at each board, one waiting.
_FIRST_DEPTH = 2.0

# Where a job is.
TO_BUILD, BUILDING, READY, AGAIN, ON_BOARD = "to_build", "building", "ready", "again", "board"


def mean_with(old: float | None, value: float) -> float:
    """Return the running mean after one more value."""
    return value if old is None else old + _NEWEST * (value - old)


def expect_with(old: float | None, value: float) -> float:
    """Return the expected value after one more: it rises at once, and falls with the running mean.

    Random searches are quick and evolving ones slow: a queue for the mean of both would run dry.
    """
    return max(value, mean_with(old, value))


def plan_ahead(lane: Lane, settings: SchedulerSettings) -> int:
    """Return the number of queued candidates below which a lane's searches are asked for more; a host's lanes have
    `plan_queues`.

    It covers what its share of the boards measures during one search and build, plus one per board. Waiting for a
    compiler is left out: a slow host would get longer queues instead of nothing.
    """
    depth = _FIRST_DEPTH
    if lane.measure_s and lane.search_s is not None:
        depth = max(depth, 1.0 + (lane.search_s + (lane.build_s or 0.0)) / lane.measure_s)
    most = max(settings.batch, math.ceil(lane.boards * settings.max_ahead))
    return math.ceil(min(most, lane.boards * depth))  # a depth may be infinite


@dataclasses.dataclass(eq=False)
class FleetState:
    """Everything that a decision depends on, and who carries it out. Begin with `FleetState(settings, worker)`.

    `lanes` are those of campaigns that are not over. `phase` is what a host that is a board itself does (`dispatch`);
    `reserved`: verification measures on it. `now_s` is the present time on any monotonic clock. Work is numbered in
    ascending order.
    """

    settings: SchedulerSettings
    worker: Worker
    boards: dict[str, BoardEntry] = dataclasses.field(default_factory=dict)
    pools: dict[tuple[str, frozenset[str]], Pool] = dataclasses.field(default_factory=dict)
    campaigns: dict[str, CampaignEntry] = dataclasses.field(default_factory=dict)
    lanes: list[Lane] = dataclasses.field(default_factory=list)
    requests: dict[int, SearchRequest] = dataclasses.field(default_factory=dict)
    jobs: dict[int, Job] = dataclasses.field(default_factory=dict)
    assignments: dict[int, Assignment] = dataclasses.field(default_factory=dict)
    owner_board_s: dict[str, float] = dataclasses.field(default_factory=dict)
    building: int = 0
    next_number: int = 1
    stale: bool = False
    phase: Phase = Phase.FIRST
    reserved: bool = False
    now_s: float = 0.0

    def new_number(self) -> int:
        """Return an unused number."""
        self.next_number += 1
        return self.next_number - 1

    def replan(self, lane: Lane) -> None:
        """Bring a lane's plan up to its fields."""
        lane.planned = plan_ahead(lane, self.settings)
        lane.wants = not lane.dry and lane.ahead < lane.planned

    def charge(self, campaign: CampaignEntry, board_s: float, energy_j: float = 0.0) -> None:
        """Charge board time and energy to a campaign and its owner."""
        campaign.board_s += board_s
        campaign.energy_j += energy_j
        self.owner_board_s[campaign.owner] = self.owner_board_s.get(campaign.owner, 0.0) + board_s

    def may_measure(self, campaign: CampaignEntry) -> bool:
        """Whether a campaign may begin one more measurement."""
        return campaign.status is Status.RUNNING and campaign.has_board_time(self.settings.measure_limit_s)

    # Boards

    def add_board(self, board: BoardEntry) -> None:
        self.boards[board.name] = board
        self._group(board, add=True)

    def set_board(self, board: BoardEntry, **changes: Any) -> None:
        """Change fields of a board, and its place among idle boards or those with room."""
        self._group(board, add=False)
        for name, value in changes.items():
            setattr(board, name, value)
        self._group(board, add=True)

    def take_board(self, board: BoardEntry) -> None:
        """Remove a board without work."""
        self._group(board, add=False)
        del self.boards[board.name]

    def _group(self, board: BoardEntry, add: bool) -> None:
        if board.yields or board.waiting is not None:
            return
        groups = board.pool.idle if board.running is None else board.pool.room
        if add:
            groups.setdefault(board.point, []).append(board)
        else:
            groups[board.point].remove(board)
            if not groups[board.point]:
                del groups[board.point]

    # Jobs at boards

    def assign(self, job: Job, board: BoardEntry, used: Iterable[float]) -> None:
        """Assign a built job to a board, to run at once or after the running one.

        `used` is the use of the board's pool by the lane's accounts; this measurement is added to it.
        """
        self.unqueue(job)
        lane = job.task.lane
        waits = board.running is not None
        charged_s = (lane.measure_s or _FIRST_GUESS_S) + (self.settings.switch_s if board.point != lane.point else 0.0)
        assignment = Assignment(self.new_number(), job, board, charged_s, None if waits else self.now_s)
        self.assignments[assignment.number] = assignment
        job.stage = ON_BOARD
        job.assignments.append(assignment)
        if waits:
            self.set_board(board, waiting=assignment)
            lane.waiting += 1
        else:
            self.set_board(board, running=assignment, point=lane.point)
        lane.campaign.on_board += 1
        self._use(board.pool, lane, used, charged_s)
        self.worker.measure(assignment)

    def _use(self, pool: Pool, lane: Lane, used: Iterable[float], board_s: float) -> None:
        weights = (1.0, lane.campaign.weight, 1.0)
        for account, used_s, weight in zip(lane.accounts, used, weights, strict=True):
            pool.used[account] = used_s + board_s / weight

    def release(self, assignment: Assignment, board_s: float | None = None) -> Job:
        """Take a job from its board and charge `board_s`, or the time since its start."""
        del self.assignments[assignment.number]
        job, board = assignment.job, assignment.board
        lane = job.task.lane
        job.assignments.remove(assignment)
        if assignment.started_s is None:
            lane.waiting -= 1
        if board_s is None:
            board_s = 0.0 if assignment.started_s is None else self.now_s - assignment.started_s
        if board.waiting is assignment:
            self.set_board(board, waiting=None)
        elif board.waiting is None:
            self.set_board(board, running=None)
        else:
            self._promote(board, board.waiting)
        self.charge(lane.campaign, board_s)
        lane.campaign.on_board -= 1
        used = [board.pool.used.get(account, 0.0) for account in lane.accounts]
        self._use(board.pool, lane, used, board_s - assignment.charged_s)
        return job

    def _promote(self, board: BoardEntry, assignment: Assignment) -> None:
        """Start the job that waits at a board."""
        assignment.started_s = self.now_s
        lane = assignment.job.task.lane
        lane.waiting -= 1
        self.set_board(board, running=assignment, waiting=None, point=lane.point)

    def revoke(self, assignment: Assignment) -> Job:
        """Take a job from its board before its result."""
        self.worker.revoke(assignment)
        return self.release(assignment)

    def unqueue(self, job: Job) -> None:
        """Take a job out of its queue or build."""
        lane = job.task.lane
        if job.stage == BUILDING:
            self.building -= 1
            lane.building -= 1
        elif job.stage != ON_BOARD:
            getattr(lane, job.stage).remove(job)
        self.replan(lane)

    # Jobs

    def queue(self, job: Job, stage: str) -> None:
        """Put a job into a queue of its lane; it must be in none. A job of an ended workload is discarded."""
        if job.task.closed:
            job.stage = ON_BOARD
            self.discard(job)
            return
        lane = job.task.lane
        job.stage, job.since_s = stage, self.now_s
        getattr(lane, stage).append(job)
        self.replan(lane)

    def requeue(self, job: Job) -> None:
        """Queue a job that a board did not finish, unless another board has it."""
        if not job.assignments:
            self.queue(job, AGAIN)

    def discard(self, job: Job, banned: str = "") -> None:
        """Drop a job in any stage; its trial returns to the budget. A `banned` candidate is not accepted again."""
        self._close(job)
        if banned:
            job.task.banned |= {job.candidate.hash}
        self.worker.drop(job.task, job.candidate, banned)
        self.give_back(job.task, 1)

    def _close(self, job: Job) -> None:
        for assignment in list(job.assignments):
            self.revoke(assignment)
        self.unqueue(job)
        del self.jobs[job.number]

    def give_back(self, task: Task, count: int) -> None:
        """Return trials that were requested and not made."""
        if not count:
            return
        campaign = task.lane.campaign
        task.asked -= count
        campaign.open -= count
        self.may_ask_again(campaign)

    def may_ask_again(self, campaign: CampaignEntry) -> None:
        """Let a campaign's lanes request candidates again."""
        for lane in campaign.lanes:
            if lane.dry:
                lane.dry = False
                self.replan(lane)

    # Trials

    def count(self, job: Job, latency_s: float | None) -> None:
        """Count a trial once; other boards with the job drop it."""
        self._close(job)
        self.worker.count(job, latency_s)
        task = job.task
        campaign = task.lane.campaign
        better = latency_s is not None and (task.best_s is None or latency_s < task.best_s)
        if better:
            task.best_s = latency_s
        task.in_round += 1
        if task.in_round >= self.settings.batch or (not task.rounds_s and task.best_s is not None):
            task.in_round = 0
            if task.best_s is not None:
                # The priorities read the last two rounds only, and state must not grow with trials.
                task.rounds_s = (*task.rounds_s[-1:], task.best_s)
        for entry in (task, campaign):
            entry.since_best = 0 if better else entry.since_best + 1
            entry.counted += 1
        campaign.open -= 1
        campaign.faults_in_a_row, campaign.faulty = 0, frozenset()
        patience = campaign.order.search.early_stopping
        if patience is not None and task.since_best >= patience and not task.ended:
            self.end_task(task, f"no better one in {task.since_best} trials")

    # Ends

    def end_search(self, task: Task, reason: str) -> None:
        """Search a workload no further; proposed candidates are still measured."""
        task.ended, task.exhausted = reason, True
        # Its reserved trials are free for other workloads.
        self.may_ask_again(task.lane.campaign)
        self.stale = True

    def end_task(self, task: Task, reason: str) -> None:
        """End a workload. Running measurements still count; everything else is discarded."""
        self.end_search(task, reason)
        task.closed = True
        for job in list(self.jobs.values()):
            running = any(assignment.started_s is not None for assignment in job.assignments)
            # A running build cannot be stopped; its job is discarded at its end.
            if job.task is task and not running and job.stage != BUILDING:
                self.discard(job)

    def set_status(self, campaign: CampaignEntry, status: Status, reason: str) -> None:
        """Change a campaign's status and report it."""
        campaign.status, campaign.reason = status, reason
        self.stale = True
        self.worker.change(campaign)

    def jobs_of(self, campaign: CampaignEntry) -> list[Job]:
        """Return a campaign's jobs, oldest first. Scans all jobs: not for every event."""
        return [job for job in self.jobs.values() if job.task.lane.campaign is campaign]

    def end_campaign(self, campaign: CampaignEntry, status: Status, reason: str) -> None:
        """End a campaign: discard its jobs and revoke its measurements; answers of its searches will be late."""
        for job in self.jobs_of(campaign):
            self.discard(job)
        for request in [each for each in self.requests.values() if each.task.lane.campaign is campaign]:
            del self.requests[request.number]
        self.lanes = [lane for lane in self.lanes if lane.campaign is not campaign]
        accounts: list[Account] = [campaign, *campaign.lanes]
        others = [each for each in self.campaigns.values() if each is not campaign and each.status not in OVER]
        if all(each.owner != campaign.owner for each in others):
            accounts.append(campaign.owner)
        for pool in self.pools.values():
            pool.lanes = [lane for lane in pool.lanes if lane.campaign is not campaign]
            for account in accounts:
                pool.used.pop(account, None)
        campaign.open = 0
        self.set_status(campaign, status, reason)
