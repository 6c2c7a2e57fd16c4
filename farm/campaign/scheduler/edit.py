"""A fleet's state while one call of the scheduler changes it: its tables, its boards, jobs that go to and from them.

What becomes of jobs, trials and campaigns is added by `fleet_draft`, which is what everybody uses.
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
    PoolKey,
    TaskEntry,
    change,
)
from farm.campaign.scheduler.values import (
    Decision,
    Measure,
    Revoke,
    SchedulerSettings,
)

# What a measurement is taken to cost while nothing is known; the charge is put right when it ends.
_FIRST_GUESS_S = 1.0
# The weight of the newest value in a running mean.
_NEWEST = 0.1

# While nothing is known of how long search and build take: one candidate at each board, one waiting for it.
_FIRST_DEPTH = 2.0
# What `plan_ahead` rests on.
_PLANNED_BY = frozenset({"boards", "search_s", "build_s", "measure_s"})

# Where a job is.
TO_BUILD, BUILDING, READY, AGAIN, ON_BOARD = "to_build", "building", "ready", "again", "board"


def mean_with(old: float | None, value: float) -> float:
    """The running mean after one more value."""
    return value if old is None else old + _NEWEST * (value - old)


def expect_with(old: float | None, value: float) -> float:
    """What to be prepared for after one more value: as much as that at once, less only as the running mean falls.

    Searches are quick at random and slow where they evolve: boards prepared for the mean of both would run dry.
    """
    return max(value, mean_with(old, value))


def plan_ahead(lane: LaneEntry, settings: SchedulerSettings) -> int:
    """Below how many candidates ahead of its boards a lane's searches are asked for more; a host's own have
    `plan_queues`.

    As many as its share of the boards measures while one is searched for and built, and one per board; waiting for a
    compiler is left out of that time, or a host that is too slow would be given longer queues instead of nothing.
    """
    depth = _FIRST_DEPTH
    if lane.measure_s and lane.search_s is not None:
        depth = max(depth, 1.0 + (lane.search_s + (lane.build_s or 0.0)) / lane.measure_s)
    most = max(settings.batch, math.ceil(lane.boards * settings.max_ahead))
    return min(most, math.ceil(lane.boards * depth))


class Edit:
    """The part of a draft that knows nothing of trials."""

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
        """The new state. This edit must not be used afterwards."""
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
        """A number that nothing else has or had."""
        self._next_number += 1
        return self._next_number - 1

    def set_lane(self, number: int, **changes: object) -> None:
        """Change fields of a lane, and what follows from them."""
        lane = change(self.lanes[number], **changes)
        if not changes.keys().isdisjoint(_PLANNED_BY):
            lane = change(lane, planned=plan_ahead(lane, self.settings))
        self.lanes[number] = change(lane, wants=not lane.dry and lane.ahead < lane.planned)

    def set_task(self, number: int, **changes: object) -> None:
        """Change fields of a task."""
        self.tasks[number] = change(self.tasks[number], **changes)

    def set_campaign(self, name: str, **changes: object) -> None:
        """Change fields of a campaign."""
        self.campaigns[name] = change(self.campaigns[name], **changes)

    def charge(self, name: str, board_s: float, **changes: object) -> None:
        """A campaign has used board time, and its owner with it; other fields of the campaign change besides."""
        campaign = self.campaigns[name]
        owner = campaign.spec.owner
        self.campaigns[name] = change(campaign, board_s=campaign.board_s + board_s, **changes)
        self.owner_board_s[owner] = self.owner_board_s.get(owner, 0.0) + board_s

    def set_pool(self, key: PoolKey, **changes: object) -> None:
        """Change fields of a pool."""
        self.pools[key] = change(self.pools[key], **changes)

    def lane_of(self, job: JobEntry) -> LaneEntry:
        """The lane that a job is in."""
        return self.lanes[self.tasks[job.task].lane]

    def campaign_of(self, task: TaskEntry) -> CampaignEntry:
        """The campaign that a task is part of."""
        return self.campaigns[task.key.campaign]

    # Boards

    def put_board(self, board: BoardEntry) -> None:
        """Keep a board as it is now, and its place among the idle ones or those with room."""
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
        """Forget a board that has no work."""
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
        """Give a built job to a board, to run at once or after the one that it runs.

        `used` is what owner, campaign and lane have had of the board's pool; this measurement is added to it.
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
        """Take a job from its board and settle what it cost: `board_s`, or the time since it began."""
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
        """What waited at a board begins."""
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
        """Take a job from its board before its answer came."""
        self.decisions.append(Revoke(number, self.assignments[number].board, reason))
        return self.release(number)

    def unqueue(self, job_number: int) -> None:
        """Take a job out of the queue, or the build, that it is in."""
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
    """Which of its pool's groups a board is in: kind and operating point."""
    if board is None or board.yields or board.waiting is not None:
        return None
    return ("idle" if board.running is None else "room", board.point)
