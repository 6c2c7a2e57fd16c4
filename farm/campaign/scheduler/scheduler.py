"""Decide what a whole fleet does next, for all campaigns.

`farm.campaign.engine.engine` tells it what happened (`events`) and is the worker that carries out what it decides.
Nothing here starts or waits, and nothing but the state and its time decides: a kept copy of a state can be replayed.

Use: `step` after events, and now and then without one.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from farm.campaign.scheduler.dispatch import begin_measuring, dispatch, end_measuring, may_prepare, plan_queues
from farm.campaign.scheduler.fleet import BUILDING, FleetState
from farm.campaign.scheduler.state import GOING, CampaignEntry, Lane, Pool, SearchRequest, Status, Task

# Alpha and beta of Ansor's task scheduler (Zheng et al., OSDI 2020, section 6): weights of the two estimates of a
# workload's next gain, and the share of its operator family's best speed that it should reach.
_ALPHA, _BETA = 0.2, 2.0
# Rounds over which the recent gain is averaged. With Ansor's three, half of a small budget went to whichever workload
# had started worst.
_WINDOW = 1

# A workload below this share of the model's FLOP starts with one trial: its first schedule is usually its last.
_LIGHT_SHARE = 0.002


def step(fleet: FleetState, now_s: float) -> None:
    """Decide what to do at `now_s` (s, on any monotonic clock)."""
    fleet.now_s = now_s
    for campaign in list(fleet.campaigns.values()):
        if reason := _find_end(fleet, campaign):
            fleet.end_campaign(campaign, Status.FINISHED, reason)
    if fleet.stale:
        _share_out(fleet)
    end_measuring(fleet)
    dispatch(fleet)
    search_ahead(fleet)
    build_ahead(fleet)
    if begin_measuring(fleet):
        dispatch(fleet)


def search_ahead(fleet: FleetState) -> None:
    """Request candidates wherever too few are queued."""
    if not may_prepare(fleet):
        return
    queues = plan_queues(fleet)
    # Of hundreds of lanes an event lets one or two want more.
    for lane in [lane for lane in fleet.lanes if lane.wants or lane in queues]:
        if lane.dry or lane.campaign.status is not Status.RUNNING:
            continue
        wanted = queues.get(lane, lane.planned) if lane.boards else 0
        while lane.ahead < wanted and _ask(fleet, lane, wanted):
            pass


def _ask(fleet: FleetState, lane: Lane, wanted: int) -> bool:
    """Request candidates of a lane's most promising workload; False where there is none."""
    settings, campaign, tasks = fleet.settings, lane.campaign, lane.tasks
    if not campaign.has_board_time(settings.measure_limit_s):
        return False
    remaining = 10**9 if campaign.budget.trials is None else campaign.budget.trials - campaign.counted - campaign.open
    most = campaign.budget.per_workload or 10**9
    batch = min(settings.max_batch, max(settings.batch, wanted // 8))
    kept = 0 if any(map(_is_fresh, tasks)) else _count_fresh_elsewhere(campaign, lane, remaining)
    decided = decide_next(tasks, remaining - kept, settings.warmup, batch, most)
    if decided is None:
        lane.dry = True
        fleet.replan(lane)
        return False
    task, count = tasks[decided[0]], decided[1]
    request = SearchRequest(fleet.new_number(), task, count, fleet.now_s)
    fleet.requests[request.number] = request
    task.asked, task.exhausted = task.asked + count, True
    campaign.open += count
    lane.searching += count
    fleet.replan(lane)
    fleet.worker.search(request)
    return True


def decide_next(tasks: Sequence[Task], remaining: int, warmup: int, batch: int, most: int) -> tuple[int, int] | None:
    """Return the index of the next task and its number of trials; None where nothing is left to do.

    Each gets one trial first. Then `warmup` go to each that matters, where there are enough, before gains are compared;
    at most `batch` at a time after that, and `most` in all.
    """
    open_ = [i for i, task in enumerate(tasks) if not task.exhausted and task.asked < most]
    if remaining <= 0 or not open_:
        return None
    heaviness = [task.workload.flop * task.workload.weight for task in tasks]
    # A workload without a trial leaves every total of its models open.
    if fresh := [i for i in open_ if tasks[i].asked == 0]:
        return max(fresh, key=lambda i: heaviness[i]), 1
    light = _LIGHT_SHARE * sum(heaviness)
    young = [i for i in open_ if tasks[i].asked < warmup and heaviness[i] >= light]
    if young and remaining >= 2 * warmup * len(young):
        chosen = max(young, key=lambda i: heaviness[i])
        return chosen, min(warmup, most) - tasks[chosen].asked
    # Too few for a warm-up of all: all compete from the first trial on. A workload with few trials gets few, so that
    # one bad first schedule does not take the rest.
    speeds: dict[str, float] = {}
    for task in tasks:
        kind, flop = task.workload.kind, task.workload.flop
        if task.rounds_s and flop > 0:
            speeds[kind] = max(flop / task.rounds_s[-1], speeds.get(kind, 0.0))
    gains = {i: _expected_gain(tasks[i], speeds.get(tasks[i].workload.kind)) for i in open_}
    best = max(open_, key=lambda i: gains[i])
    return best, min(remaining, batch, max(1, tasks[best].asked), most - tasks[best].asked)


def _expected_gain(task: Task, speed: float | None) -> float:
    """Estimate the seconds of model latency that one more round saves; `speed` is the best of its kind (FLOP/s)."""
    if not task.rounds_s:
        # Untuned code does about 1e9 operations per second. Without a good trial nothing is known to be lost by
        # waiting; more tries make it less promising.
        return task.workload.weight * task.workload.flop / 1e9 / (1 + task.asked)
    latency = task.rounds_s[-1]
    window = min(_WINDOW, len(task.rounds_s) - 1)
    recent = (task.rounds_s[-1 - window] - latency) / window if window else 0.0
    optimistic = latency / max(1, task.asked)
    if speed and task.workload.flop > 0:
        similar = latency - task.workload.flop / (_BETA * speed)
        optimistic = min(optimistic, similar) if similar > 0 else 0.0
    return task.workload.weight * (_ALPHA * recent + (1 - _ALPHA) * optimistic)


def _is_fresh(task: Task) -> bool:
    return task.asked == 0 and not task.exhausted


def _count_fresh_elsewhere(campaign: CampaignEntry, lane: Lane, remaining: int) -> int:
    """Count untried workloads of other types and points with boards at hand: one trial is reserved for each.

    Where many boards of one type are quicker than the only one of another, that one's models would have no total.
    """
    others = [each for each in campaign.lanes if each is not lane]
    if remaining > sum(len(each.tasks) for each in others):
        return 0
    return sum(_is_fresh(task) for each in others if each.boards for task in each.tasks)


def build_ahead(fleet: FleetState) -> None:
    """Start builds on idle compilers, first for the lane with the least built for its share of boards.

    Among equal lanes, as with too few compilers, the owner with the least board time goes first.
    """
    if not may_prepare(fleet) or fleet.building >= fleet.settings.builders:
        return
    lanes = {
        lane: _standing(fleet, lane)
        for lane in fleet.lanes
        if lane.to_build and lane.boards and lane.campaign.status is Status.RUNNING
    }
    while lanes and fleet.building < fleet.settings.builders:
        lane = min(lanes, key=lanes.__getitem__)
        job = lane.to_build.pop(0)
        job.stage, job.since_s = BUILDING, fleet.now_s
        fleet.building += 1
        lane.building += 1
        fleet.replan(lane)
        fleet.worker.build(job)
        lanes[lane] = _standing(fleet, lane)
        if not lane.to_build:
            del lanes[lane]


def _standing(fleet: FleetState, lane: Lane) -> tuple[float, float]:
    """Return what a lane has built or in the making per board of its share, and its owner's board time (s)."""
    built = len(lane.ready) + len(lane.again) + lane.building
    return built / lane.boards, fleet.owner_board_s.get(lane.campaign.owner, 0.0)


def _find_end(fleet: FleetState, campaign: CampaignEntry) -> str:
    """Return why a campaign has to end now; "" where it goes on."""
    budget, patience = campaign.budget, campaign.order.search.early_stopping_all
    if campaign.status not in GOING:
        return ""
    if budget.trials is not None and campaign.counted >= budget.trials:
        return f"its {budget.trials} trials are made"
    if campaign.ends_s is not None and fleet.now_s >= campaign.ends_s:
        return f"its {budget.wall_clock_s:.0f} s for trials are over"
    if patience is not None and campaign.since_best >= patience:
        return f"no better candidate in {campaign.since_best} trials"
    if budget.energy_j is not None and campaign.energy_j >= budget.energy_j:
        return f"its {budget.energy_j:,.0f} J for trials are used"
    if not campaign.on_board and not campaign.has_board_time(fleet.settings.measure_limit_s):
        return (
            f"its {budget.board_s:.0f} s of board time for trials are used, or too little is left for one more "
            "measurement"
        )
    if not campaign.open and not any(map(_may_be_asked, campaign.lanes)):
        return "all its workloads have ended"
    return ""


def _may_be_asked(lane: Lane) -> bool:
    most = lane.campaign.budget.per_workload
    return any(not task.ended and (most is None or task.counted < most) for task in lane.tasks)


def _share_out(fleet: FleetState) -> None:
    """Recompute which lanes each pool serves, each lane's share of boards, and which campaigns wait."""
    fleet.stale = False
    boards: dict[Lane, float] = {}
    alive = {lane for lane in fleet.lanes if _is_alive(lane)}
    for pool in fleet.pools.values():
        pool.lanes = [
            lane for lane in fleet.lanes if lane.board_type == pool.board_type and lane.campaign.labels <= pool.labels
        ]
        lanes = [lane for lane in pool.lanes if lane in alive]
        lanes_of = collections.Counter(lane.campaign for lane in lanes)
        weights: dict[str, float] = {}
        for campaign in lanes_of:
            weights[campaign.owner] = weights.get(campaign.owner, 0.0) + campaign.weight
        for lane in lanes:
            campaign = lane.campaign
            others = len(weights) * weights[campaign.owner] * lanes_of[campaign]
            boards[lane] = boards.get(lane, 0.0) + pool.boards * campaign.weight / others
        _open_accounts(pool, lanes)
    for lane in fleet.lanes:
        if lane.boards != boards.get(lane, 0.0):
            lane.boards = boards.get(lane, 0.0)
            fleet.replan(lane)
            if not lane.boards:
                fleet.may_ask_again(lane.campaign)
    for campaign in fleet.campaigns.values():
        if campaign.status in GOING:
            _wait_or_go_on(fleet, campaign, any(lane.boards for lane in campaign.lanes))


def _open_accounts(pool: Pool, lanes: list[Lane]) -> None:
    """Give each new participant an account in the pool that starts at the least use of any other.

    A campaign's lanes start together at zero, and need no such account.
    """
    for lane in lanes:
        for level, account in enumerate(lane.accounts[:2]):
            if account not in pool.used:
                others = (each.accounts for each in lanes if each.accounts[:level] == lane.accounts[:level])
                pool.used[account] = min(
                    (pool.used[each[level]] for each in others if each[level] in pool.used), default=0.0
                )


def _is_alive(lane: Lane) -> bool:
    """Whether a lane may still have work for boards."""
    return lane.campaign.status in GOING and (any(task.open for task in lane.tasks) or _may_be_asked(lane))


def _wait_or_go_on(fleet: FleetState, campaign: CampaignEntry, has_boards: bool) -> None:
    if has_boards == (campaign.status is Status.RUNNING):
        return
    with_labels = f" with {', '.join(sorted(campaign.labels))}" if campaign.labels else ""
    kinds = " or ".join(dict.fromkeys(lane.board_type for lane in campaign.lanes))
    reason = "" if has_boards else f"no board of type {kinds}{with_labels} is here"
    fleet.set_status(campaign, Status.RUNNING if has_boards else Status.WAITING, reason)
    # A waiting campaign has no boards, so no share has changed.
    fleet.stale = False
