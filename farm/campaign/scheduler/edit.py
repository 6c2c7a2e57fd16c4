"""A fleet's state during one call of the scheduler.

`Edit` changes tables, boards and the jobs on them; `Draft` adds jobs, trials and campaigns. Other modules use `Draft`.
"""

from __future__ import annotations

import math

from farm.campaign.scheduler.state import (
    Assignment,
    BoardEntry,
    CampaignEntry,
    FleetState,
    JobEntry,
    LaneEntry,
    Pool,
    PoolKey,
    TaskEntry,
    change,
)
from farm.campaign.scheduler.values import (
    OVER,
    Ban,
    Changed,
    Count,
    Decision,
    Discard,
    Measure,
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
# The inputs of `plan_ahead`.
_PLANNED_BY = frozenset({"boards", "search_s", "build_s", "measure_s"})

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


class Edit:
    """The part of a draft that knows no trials."""

    def __init__(self, state: FleetState, now_s: float) -> None:
        self._state = state
        self.now_s = now_s
        self.settings = state.settings
        self.boards = state.boards.edit()
        self.pools = dict(state.pools)
        self.campaigns = dict(state.campaigns)
        self.lanes = dict(state.lanes)
        self.tasks = state.tasks.edit()
        self.requests = state.requests.edit()
        self.jobs = state.jobs.edit()
        self.assignments = state.assignments.edit()
        self.owner_board_s = dict(state.owner_board_s)
        self.building = state.building
        self.stale = state.stale
        self.phase, self.reserved = state.phase, state.reserved
        self.decisions: list[Decision] = list(state.pending)
        self._next_number = state.next_number

    def freeze(self, pending: tuple[Decision, ...] = ()) -> FleetState:
        """Return the new state. This edit must not be used afterwards."""
        return FleetState(
            settings=self.settings,
            boards=self.boards.freeze(),
            pools=self.pools,
            campaigns=self.campaigns,
            lanes=self.lanes,
            tasks=self.tasks.freeze(),
            requests=self.requests.freeze(),
            jobs=self.jobs.freeze(),
            assignments=self.assignments.freeze(),
            owner_board_s=self.owner_board_s,
            building=self.building,
            next_number=self._next_number,
            stale=self.stale,
            phase=self.phase,
            reserved=self.reserved,
            pending=pending,
        )

    def new_number(self) -> int:
        """Return an unused number."""
        self._next_number += 1
        return self._next_number - 1

    def set_lane(self, number: int, **changes: object) -> None:
        """Change fields of a lane and derived fields."""
        lane = change(self.lanes[number], **changes)
        if not changes.keys().isdisjoint(_PLANNED_BY):
            lane = change(lane, planned=plan_ahead(lane, self.settings))
        self.lanes[number] = change(lane, wants=not lane.dry and lane.ahead < lane.planned)

    def set_task(self, number: int, **changes: object) -> None:
        self.tasks[number] = change(self.tasks[number], **changes)

    def set_campaign(self, name: str, **changes: object) -> None:
        self.campaigns[name] = change(self.campaigns[name], **changes)

    def charge(self, name: str, board_s: float, energy_j: float = 0.0, **changes: object) -> None:
        """Charge board time and energy to a campaign and its owner; other fields of the campaign change besides."""
        campaign = self.campaigns[name]
        owner = campaign.spec.owner
        self.campaigns[name] = change(
            campaign, board_s=campaign.board_s + board_s, energy_j=campaign.energy_j + energy_j, **changes
        )
        self.owner_board_s[owner] = self.owner_board_s.get(owner, 0.0) + board_s

    def set_pool(self, key: PoolKey, **changes: object) -> None:
        self.pools[key] = change(self.pools[key], **changes)

    def lane_of(self, job: JobEntry) -> LaneEntry:
        return self.lanes[self.tasks[job.task].lane]

    def campaign_of(self, task: TaskEntry) -> CampaignEntry:
        return self.campaigns[task.key.campaign]

    # Boards

    def put_board(self, board: BoardEntry) -> None:
        """Store a board, and its place among idle boards or those with room."""
        before = self.boards.find(board.name)
        old, new = _group(before), _group(board)
        if old != new:
            if before is not None and old is not None:
                self._ungroup(before, *old)
            if new is not None:
                kind, point = new
                groups = getattr(self.pools[board.pool], kind)
                self.set_pool(board.pool, **{kind: groups | {point: (*groups.get(point, ()), board.name)}})
        self.boards[board.name] = board

    def take_board(self, name: str) -> None:
        """Remove a board without work."""
        board = self.boards.pop(name)
        group = _group(board)
        if group is not None:
            self._ungroup(board, *group)

    def _ungroup(self, board: BoardEntry, kind: str, point: str) -> None:
        groups = dict(getattr(self.pools[board.pool], kind))
        names = groups[point]
        place = names.index(board.name)
        rest = names[:place] + names[place + 1 :]
        if rest:
            groups[point] = rest
        else:
            del groups[point]
        self.set_pool(board.pool, **{kind: groups})

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
        self.jobs[job_number] = change(job, stage=ON_BOARD, assignments=(*job.assignments, number))
        if waits:
            self.put_board(change(board, waiting=number))
            self.set_lane(lane.number, waiting=lane.waiting + 1)
        else:
            self.put_board(change(board, running=number, point=lane.point))
        self.set_campaign(lane.campaign, on_board=campaign.on_board + 1)
        pool = self.pools[board.pool]
        owner = campaign.spec.owner
        self.set_pool(
            board.pool,
            owner_used={**pool.owner_used, owner: used[0] + charged_s},
            campaign_used={**pool.campaign_used, lane.campaign: used[1] + charged_s / campaign.weight},
            lane_used={**pool.lane_used, lane.number: used[2] + charged_s},
        )
        self.decisions.append(Measure(number, job_number, task.key, job.candidate, board_name, waits))

    def release(self, number: int, board_s: float | None = None) -> Assignment:
        """Take a job from its board and charge `board_s`, or the time since its start."""
        assignment = self.assignments.pop(number)
        job, board = self.jobs[assignment.job], self.boards[assignment.board]
        lane = self.lane_of(job)
        self.jobs[job.number] = change(job, assignments=tuple(n for n in job.assignments if n != number))
        if assignment.started_s is None:
            self.set_lane(lane.number, waiting=lane.waiting - 1)
        if board_s is None:
            board_s = 0.0 if assignment.started_s is None else self.now_s - assignment.started_s
        if board.waiting == number:
            self.put_board(change(board, waiting=None))
        elif board.waiting is None:
            self.put_board(change(board, running=None))
        else:
            self._promote(board)
        self._settle(lane, board.pool, board_s, board_s - assignment.charged_s)
        return assignment

    def _promote(self, board: BoardEntry) -> None:
        """Start the job that waits at a board."""
        number = board.waiting
        if number is None:
            return
        assignment = change(self.assignments[number], started_s=self.now_s)
        self.assignments[number] = assignment
        lane = self.lane_of(self.jobs[assignment.job])
        self.set_lane(lane.number, waiting=lane.waiting - 1)
        self.put_board(change(board, running=number, waiting=None, point=lane.point))

    def _settle(self, lane: LaneEntry, key: PoolKey, board_s: float, more_s: float) -> None:
        campaign, pool = self.campaigns[lane.campaign], self.pools[key]
        owner = campaign.spec.owner
        self.charge(lane.campaign, board_s, on_board=campaign.on_board - 1)
        self.pools[key] = change(
            pool,
            owner_used={**pool.owner_used, owner: pool.owner_used.get(owner, 0.0) + more_s},
            campaign_used={
                **pool.campaign_used,
                lane.campaign: pool.campaign_used.get(lane.campaign, 0.0) + more_s / campaign.weight,
            },
            lane_used={**pool.lane_used, lane.number: pool.lane_used.get(lane.number, 0.0) + more_s},
        )

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
            numbers = getattr(lane, job.stage)
            place = numbers.index(job_number)
            self.set_lane(lane.number, **{job.stage: numbers[:place] + numbers[place + 1 :]})


def _group(board: BoardEntry | None) -> tuple[str, str] | None:
    """Return the group of its pool that a board is in: kind and operating point."""
    if board is None or board.yields or board.waiting is not None:
        return None
    return ("idle" if board.running is None else "room", board.point)


class Draft(Edit):
    """A state that is being changed at one moment, `now_s`."""

    # Jobs

    def queue(self, job_number: int, stage: str) -> None:
        """Put a job into a queue of its lane; it must be in none. A job of an ended workload is discarded."""
        job = self.jobs[job_number]
        if self.tasks[job.task].closed:
            self.jobs[job_number] = change(job, stage=ON_BOARD)
            self.discard(job_number, "its workload ended")
            return
        lane = self.lane_of(job)
        self.jobs[job_number] = change(job, stage=stage, since_s=self.now_s)
        self.set_lane(lane.number, **{stage: (*getattr(lane, stage), job_number)})

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
        self.set_task(job.task, banned=task.banned | {job.candidate})
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
        state = change(task.state, asked=task.state.asked - count)
        self.tasks[task_number] = change(task, open=task.open - count, state=state)
        campaign = self.campaign_of(task)
        self.set_campaign(task.key.campaign, open=campaign.open - count)
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
        campaign = self.campaign_of(task)
        self.decisions.append(Count(job_number, assignment, task.key, job.candidate, latency_s))
        better = latency_s is not None and (task.best_s is None or latency_s < task.best_s)
        best_s = latency_s if better else task.best_s
        in_round, state = task.in_round + 1, task.state
        if in_round >= self.settings.batch or (len(state.best_s) == 0 and best_s is not None):
            in_round = 0
            if best_s is not None:
                # The priorities read the last two rounds only, and state must not grow with trials.
                state = change(state, best_s=(*state.best_s[-1:], best_s))
        since_best = 0 if better else task.since_best + 1
        self.tasks[job.task] = change(
            task,
            counted=task.counted + 1,
            open=task.open - 1,
            since_best=since_best,
            best_s=best_s,
            in_round=in_round,
            state=state,
        )
        self.campaigns[task.key.campaign] = change(
            campaign,
            counted=campaign.counted + 1,
            open=campaign.open - 1,
            since_best=0 if better else campaign.since_best + 1,
            faults_in_a_row=0,
            faulty=frozenset(),
        )
        patience = campaign.spec.early_stopping
        if patience is not None and since_best >= patience and not task.ended:
            self.end_task(job.task, f"no better one in {since_best} trials")

    # Ends

    def end_search(self, task_number: int, reason: str) -> None:
        """Search a workload no further; proposed candidates are still measured."""
        task = self.tasks[task_number]
        self.tasks[task_number] = change(task, ended=reason, state=change(task.state, exhausted=True))
        self.decisions.append(TaskEnded(task.key, reason))
        # Its reserved trials are free for other workloads.
        self.may_ask_again(self.campaign_of(task))
        self.stale = True

    def end_task(self, task_number: int, reason: str) -> None:
        """End a workload. Running measurements still count; everything else is discarded."""
        self.end_search(task_number, reason)
        self.set_task(task_number, closed=True)
        for job in self.jobs.values():
            running = any(self.assignments[number].started_s is not None for number in job.assignments)
            # A running build cannot be stopped; its job is discarded at its end.
            if job.task == task_number and not running and job.stage != BUILDING:
                self.discard(job.number, "its workload ended")

    def set_status(self, name: str, status: Status, reason: str) -> None:
        """Change a campaign's status and report it."""
        self.set_campaign(name, status=status, reason=reason)
        self.decisions.append(Changed(name, status, reason))
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
                self.tasks.pop(task_number)
        for request in self.requests.values():
            if request.task not in self.tasks:
                self.requests.pop(request.number)
        for key, pool in self.pools.items():
            self.pools[key] = self._without(pool, campaign)
        self.set_campaign(name, lanes=(), open=0)
        self.set_status(name, status, reason)

    def _without(self, pool: Pool, campaign: CampaignEntry) -> Pool:
        """Return the pool without the accounts of an ended campaign, and of its owner if that was the last one."""
        owner, name = campaign.spec.owner, campaign.spec.name
        others = any(
            other.spec.owner == owner and other.spec.name != name and other.status not in OVER
            for other in self.campaigns.values()
        )
        return change(
            pool,
            lanes=tuple(n for n in pool.lanes if n not in campaign.lanes),
            owner_used={key: used for key, used in pool.owner_used.items() if others or key != owner},
            campaign_used={key: used for key, used in pool.campaign_used.items() if key != name},
            lane_used={key: used for key, used in pool.lane_used.items() if key not in campaign.lanes},
        )
