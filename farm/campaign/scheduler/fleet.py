"""The fleet scheduler's state: boards, campaigns and their work, and the changes that keep all of it in step.

`events` says what a change follows from, `dispatch` and `scheduler` what is begun.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from farm.campaign.scheduler.state import (
    Assignment,
    BoardEntry,
    CampaignEntry,
    JobEntry,
    LaneEntry,
    Pool,
    PoolKey,
    RequestEntry,
    TaskEntry,
)
from farm.campaign.scheduler.values import (
    OVER,
    Ban,
    Changed,
    Count,
    Decision,
    Discard,
    Measure,
    Phase,
    Revoke,
    SchedulerSettings,
    Status,
    TaskEnded,
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


def plan_ahead(lane: LaneEntry, settings: SchedulerSettings) -> int:
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


@dataclasses.dataclass
class FleetState:
    """Everything that a decision depends on. Begin with `FleetState(SchedulerSettings(...))`.

    `phase` is what a host that is a board itself does (`dispatch`); `reserved`: verification measures on it.
    `decisions` are those of the present step, at `now_s`. Work is numbered in ascending order.
    """

    settings: SchedulerSettings
    boards: dict[str, BoardEntry] = dataclasses.field(default_factory=dict)
    pools: dict[PoolKey, Pool] = dataclasses.field(default_factory=dict)
    campaigns: dict[str, CampaignEntry] = dataclasses.field(default_factory=dict)
    lanes: dict[int, LaneEntry] = dataclasses.field(default_factory=dict)
    tasks: dict[int, TaskEntry] = dataclasses.field(default_factory=dict)
    requests: dict[int, RequestEntry] = dataclasses.field(default_factory=dict)
    jobs: dict[int, JobEntry] = dataclasses.field(default_factory=dict)
    assignments: dict[int, Assignment] = dataclasses.field(default_factory=dict)
    owner_board_s: dict[str, float] = dataclasses.field(default_factory=dict)
    building: int = 0
    next_number: int = 1
    stale: bool = False
    phase: Phase = Phase.FIRST
    reserved: bool = False
    decisions: list[Decision] = dataclasses.field(default_factory=list)
    now_s: float = 0.0

    def new_number(self) -> int:
        """Return an unused number."""
        self.next_number += 1
        return self.next_number - 1

    def set_lane(self, number: int, **changes: Any) -> None:
        """Change fields of a lane and derived fields."""
        lane = self.lanes[number]
        for name, value in changes.items():
            setattr(lane, name, value)
        lane.planned = plan_ahead(lane, self.settings)
        lane.wants = not lane.dry and lane.ahead < lane.planned

    def charge(self, campaign: CampaignEntry, board_s: float, energy_j: float = 0.0) -> None:
        """Charge board time and energy to a campaign and its owner."""
        campaign.board_s += board_s
        campaign.energy_j += energy_j
        owner = campaign.spec.owner
        self.owner_board_s[owner] = self.owner_board_s.get(owner, 0.0) + board_s

    def lane_of(self, job: JobEntry) -> LaneEntry:
        return self.lanes[self.tasks[job.task].lane]

    def campaign_of(self, task: TaskEntry) -> CampaignEntry:
        return self.campaigns[task.key.campaign]

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
        pool = self.pools[board.pool]
        groups = pool.idle if board.running is None else pool.room
        if add:
            groups.setdefault(board.point, []).append(board.name)
        else:
            groups[board.point].remove(board.name)
            if not groups[board.point]:
                del groups[board.point]

    # Jobs at boards

    def assign(self, job_number: int, board_name: str, used: tuple[float, float, float]) -> None:
        """Assign a built job to a board, to run at once or after the running one.

        `used` is the use of the board's pool by owner, campaign and lane; this measurement is added to it.
        """
        self.unqueue(job_number)
        job, board = self.jobs[job_number], self.boards[board_name]
        lane = self.lane_of(job)
        task, campaign = self.tasks[job.task], self.campaigns[lane.campaign]
        waits = board.running is not None
        number = self.new_number()
        charged_s = (lane.measure_s or _FIRST_GUESS_S) + (self.settings.switch_s if board.point != lane.point else 0.0)
        self.assignments[number] = Assignment(number, job_number, board_name, charged_s, None if waits else self.now_s)
        job.stage, job.assignments = ON_BOARD, (*job.assignments, number)
        if waits:
            self.set_board(board, waiting=number)
            lane.waiting += 1
        else:
            self.set_board(board, running=number, point=lane.point)
        campaign.on_board += 1
        pool = self.pools[board.pool]
        pool.owner_used[campaign.spec.owner] = used[0] + charged_s
        pool.campaign_used[lane.campaign] = used[1] + charged_s / campaign.weight
        pool.lane_used[lane.number] = used[2] + charged_s
        self.decisions.append(Measure(number, job_number, task.key, job.candidate, board_name, waits))

    def release(self, number: int, board_s: float | None = None) -> Assignment:
        """Take a job from its board and charge `board_s`, or the time since its start."""
        assignment = self.assignments.pop(number)
        job, board = self.jobs[assignment.job], self.boards[assignment.board]
        lane = self.lane_of(job)
        job.assignments = tuple(n for n in job.assignments if n != number)
        if assignment.started_s is None:
            lane.waiting -= 1
        if board_s is None:
            board_s = 0.0 if assignment.started_s is None else self.now_s - assignment.started_s
        if board.waiting == number:
            self.set_board(board, waiting=None)
        elif board.waiting is None:
            self.set_board(board, running=None)
        else:
            self._promote(board, board.waiting)
        campaign, pool = self.campaigns[lane.campaign], self.pools[board.pool]
        self.charge(campaign, board_s)
        campaign.on_board -= 1
        more_s, owner = board_s - assignment.charged_s, campaign.spec.owner
        pool.owner_used[owner] = pool.owner_used.get(owner, 0.0) + more_s
        pool.campaign_used[lane.campaign] = pool.campaign_used.get(lane.campaign, 0.0) + more_s / campaign.weight
        pool.lane_used[lane.number] = pool.lane_used.get(lane.number, 0.0) + more_s
        return assignment

    def _promote(self, board: BoardEntry, number: int) -> None:
        """Start the job that waits at a board."""
        assignment = self.assignments[number]
        assignment.started_s = self.now_s
        lane = self.lane_of(self.jobs[assignment.job])
        lane.waiting -= 1
        self.set_board(board, running=number, waiting=None, point=lane.point)

    def revoke(self, number: int, reason: str) -> Assignment:
        """Take a job from its board before its result."""
        self.decisions.append(Revoke(number, self.assignments[number].board, reason))
        return self.release(number)

    def unqueue(self, job_number: int) -> None:
        """Take a job out of its queue or build."""
        job = self.jobs[job_number]
        lane = self.lane_of(job)
        if job.stage == BUILDING:
            self.building -= 1
            self.set_lane(lane.number, building=lane.building - 1)
        elif job.stage != ON_BOARD:
            getattr(lane, job.stage).remove(job_number)
            self.set_lane(lane.number)

    # Jobs

    def queue(self, job_number: int, stage: str) -> None:
        """Put a job into a queue of its lane; it must be in none. A job of an ended workload is discarded."""
        job = self.jobs[job_number]
        if self.tasks[job.task].closed:
            job.stage = ON_BOARD
            self.discard(job_number, "its workload ended")
            return
        lane = self.lane_of(job)
        job.stage, job.since_s = stage, self.now_s
        getattr(lane, stage).append(job_number)
        self.set_lane(lane.number)

    def requeue(self, job_number: int) -> None:
        """Queue a job that a board did not finish, unless another board has it."""
        if not self.jobs[job_number].assignments:
            self.queue(job_number, AGAIN)

    def discard(self, job_number: int, reason: str) -> None:
        """Drop a job in any stage; its trial returns to the budget."""
        job = self._close(job_number, reason)
        self.decisions.append(Discard(job_number, self.tasks[job.task].key, job.candidate, reason))
        self.give_back(job.task, 1)

    def ban(self, job_number: int, reason: str) -> None:
        """Drop a job for good: its candidate is not accepted again."""
        job = self._close(job_number, reason)
        task = self.tasks[job.task]
        task.banned |= {job.candidate}
        self.decisions.append(Ban(job_number, task.key, job.candidate, reason))
        self.give_back(job.task, 1)

    def _close(self, job_number: int, reason: str) -> JobEntry:
        for number in self.jobs[job_number].assignments:
            self.revoke(number, reason)
        self.unqueue(job_number)
        return self.jobs.pop(job_number)

    def give_back(self, task_number: int, count: int) -> None:
        """Return trials that were requested and not made."""
        if not count:
            return
        task = self.tasks[task_number]
        campaign = self.campaign_of(task)
        task.state.asked -= count
        task.open -= count
        campaign.open -= count
        self.may_ask_again(campaign)

    def may_ask_again(self, campaign: CampaignEntry) -> None:
        """Let a campaign's lanes request candidates again."""
        for number in campaign.lanes:
            if self.lanes[number].dry:
                self.set_lane(number, dry=False)

    # Trials

    def count(self, job_number: int, assignment: int | None, latency_s: float | None) -> None:
        """Count a trial once; other boards with the job drop it."""
        job = self._close(job_number, "another board was first")
        task = self.tasks[job.task]
        campaign, state = self.campaign_of(task), task.state
        self.decisions.append(Count(job_number, assignment, task.key, job.candidate, latency_s))
        better = latency_s is not None and (task.best_s is None or latency_s < task.best_s)
        if better:
            task.best_s = latency_s
        task.in_round += 1
        if task.in_round >= self.settings.batch or (not state.best_s and task.best_s is not None):
            task.in_round = 0
            if task.best_s is not None:
                # The priorities read the last two rounds only, and state must not grow with trials.
                state.best_s = (*state.best_s[-1:], task.best_s)
        task.since_best = 0 if better else task.since_best + 1
        campaign.since_best = 0 if better else campaign.since_best + 1
        for entry in (task, campaign):
            entry.counted += 1
            entry.open -= 1
        campaign.faults_in_a_row, campaign.faulty = 0, frozenset()
        patience = campaign.spec.early_stopping
        if patience is not None and task.since_best >= patience and not task.ended:
            self.end_task(job.task, f"no better one in {task.since_best} trials")

    # Ends

    def end_search(self, task_number: int, reason: str) -> None:
        """Search a workload no further; proposed candidates are still measured."""
        task = self.tasks[task_number]
        task.ended, task.state.exhausted = reason, True
        self.decisions.append(TaskEnded(task.key, reason))
        # Its reserved trials are free for other workloads.
        self.may_ask_again(self.campaign_of(task))
        self.stale = True

    def end_task(self, task_number: int, reason: str) -> None:
        """End a workload. Running measurements still count; everything else is discarded."""
        self.end_search(task_number, reason)
        self.tasks[task_number].closed = True
        for job in list(self.jobs.values()):
            running = any(self.assignments[number].started_s is not None for number in job.assignments)
            # A running build cannot be stopped; its job is discarded at its end.
            if job.task == task_number and not running and job.stage != BUILDING:
                self.discard(job.number, "its workload ended")

    def set_status(self, campaign: CampaignEntry, status: Status, reason: str) -> None:
        """Change a campaign's status and report it."""
        campaign.status, campaign.reason = status, reason
        self.decisions.append(Changed(campaign.spec.name, status, reason))
        self.stale = True

    def jobs_of(self, name: str) -> list[JobEntry]:
        """Return a campaign's jobs, oldest first. Scans all jobs: not for every event."""
        return [job for job in self.jobs.values() if self.tasks[job.task].key.campaign == name]

    def end_campaign(self, name: str, status: Status, reason: str) -> None:
        """End a campaign: discard its jobs and revoke its measurements; answers of its searches will be late."""
        for job in self.jobs_of(name):
            self.discard(job.number, f"the campaign ended: {reason}")
        campaign = self.campaigns[name]
        for number in campaign.lanes:
            for task_number in self.lanes.pop(number).tasks:
                del self.tasks[task_number]
        for request in list(self.requests.values()):
            if request.task not in self.tasks:
                del self.requests[request.number]
        for pool in self.pools.values():
            self._close_accounts(pool, campaign)
        campaign.lanes, campaign.open = (), 0
        self.set_status(campaign, status, reason)

    def _close_accounts(self, pool: Pool, campaign: CampaignEntry) -> None:
        """Drop a pool's accounts of an ended campaign, and of its owner if that was the last one."""
        owner, name = campaign.spec.owner, campaign.spec.name
        pool.lanes = tuple(n for n in pool.lanes if n not in campaign.lanes)
        if not any(
            other.spec.owner == owner and other.spec.name != name and other.status not in OVER
            for other in self.campaigns.values()
        ):
            pool.owner_used.pop(owner, None)
        pool.campaign_used.pop(name, None)
        for number in campaign.lanes:
            pool.lane_used.pop(number, None)
