"""Decide what a whole fleet does next, for all campaigns. Pure: state and time in, new state and decisions out.

`farm.campaign.engine.engine` executes its decisions; `farm.testing.fleet_simulation` simulates a fleet. Nothing here
starts or waits.

Use: `observe` the events, `decide`, execute the decisions, and repeat after `wake_s` at the latest. States are
immutable and share unchanged parts (`state.Table`): a trial costs the same on a thousand boards as on one, and an old
state can be kept, compared and replayed.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from farm.campaign.scheduler import events as fleet_events
from farm.campaign.scheduler.dispatch import begin_measuring, dispatch, end_measuring, may_prepare, plan_queues
from farm.campaign.scheduler.edit import BUILDING, Draft
from farm.campaign.scheduler.priority import PrioritySettings, WorkloadState, decide_next
from farm.campaign.scheduler.state import CampaignEntry, FleetState, LaneEntry, Pool, RequestEntry, change
from farm.campaign.scheduler.values import Build, Decision, Event, Search, Status


def search_ahead(draft: Draft) -> None:
    """Request candidates wherever too few are queued."""
    if not may_prepare(draft):
        return
    queues = plan_queues(draft)
    # Of hundreds of lanes an event lets one or two want more.
    for number in [number for number, lane in draft.lanes.items() if lane.wants or number in queues]:
        lane = draft.lanes[number]
        if lane.dry or draft.campaigns[lane.campaign].status is not Status.RUNNING:
            continue
        wanted = queues.get(number, lane.planned) if lane.boards else 0
        while draft.lanes[number].ahead < wanted and _ask(draft, draft.lanes[number], wanted):
            pass


def _ask(draft: Draft, lane: LaneEntry, wanted: int) -> bool:
    """Request candidates of a lane's most promising workload; False where there is none."""
    settings, campaign = draft.settings, draft.campaigns[lane.campaign]
    if not campaign.may_measure(settings.measure_limit_s):
        return False
    remaining = 10**9 if campaign.budget.trials is None else campaign.budget.trials - campaign.counted - campaign.open
    per_workload = campaign.budget.per_workload or 10**9
    tasks = [draft.tasks[number] for number in lane.tasks]
    states = [
        change(task.state, exhausted=True) if task.counted + task.open >= per_workload else task.state for task in tasks
    ]
    batch = min(settings.max_batch, max(settings.batch, wanted // 8))
    kept = 0 if any(map(_is_fresh, states)) else _count_fresh_elsewhere(draft, campaign, lane, remaining)
    decided = decide_next(states, remaining - kept, PrioritySettings(settings.warmup, batch))
    if decided is None:
        draft.set_lane(lane.number, dry=True)
        return False
    task = tasks[decided[0]]
    count = min(decided[1], per_workload - task.counted - task.open)
    number = draft.new_number()
    draft.requests[number] = RequestEntry(number, task.number, count, draft.now_s)
    state = change(task.state, asked=task.state.asked + count, exhausted=True)
    draft.tasks[task.number] = change(task, open=task.open + count, state=state)
    draft.campaigns[lane.campaign] = change(campaign, open=campaign.open + count)
    draft.set_lane(lane.number, searching=lane.searching + count)
    draft.decisions.append(Search(number, task.key, count))
    return True


def _is_fresh(state: WorkloadState) -> bool:
    return state.asked == 0 and not state.exhausted


def _count_fresh_elsewhere(draft: Draft, campaign: CampaignEntry, lane: LaneEntry, remaining: int) -> int:
    """Count untried workloads of other types and points with boards at hand: one trial is reserved for each.

    Where many boards of one type are quicker than the only one of another, that one's models would have no total.
    """
    others = [draft.lanes[number] for number in campaign.lanes if number != lane.number]
    if remaining > sum(len(each.tasks) for each in others):
        return 0
    return sum(_is_fresh(draft.tasks[number].state) for each in others if each.boards for number in each.tasks)


def build_ahead(draft: Draft) -> None:
    """Start builds on idle compilers, first for the lane with the least built for its share of boards.

    Among equal lanes, as with too few compilers, the owner with the least board time goes first.
    """
    if not may_prepare(draft) or draft.building >= draft.settings.builders:
        return
    lanes = {
        number: _standing(draft, lane)
        for number, lane in draft.lanes.items()
        if lane.to_build and lane.boards and draft.campaigns[lane.campaign].status is Status.RUNNING
    }
    while lanes and draft.building < draft.settings.builders:
        lane = draft.lanes[min(lanes, key=lanes.__getitem__)]
        job = draft.jobs[lane.to_build[0]]
        draft.unqueue(job.number)
        draft.jobs[job.number] = change(job, stage=BUILDING, since_s=draft.now_s)
        draft.building += 1
        draft.set_lane(lane.number, building=lane.building + 1)
        draft.decisions.append(Build(job.number, draft.tasks[job.task].key, job.candidate))
        lane = draft.lanes[lane.number]
        lanes[lane.number] = _standing(draft, lane)
        if not lane.to_build:
            del lanes[lane.number]


def _standing(draft: Draft, lane: LaneEntry) -> tuple[float, float]:
    """Return what a lane has built or in the making per board of its share, and its owner's board time (s)."""
    built = len(lane.ready) + len(lane.again) + lane.building
    return built / lane.boards, draft.owner_board_s.get(draft.campaigns[lane.campaign].spec.owner, 0.0)


_GOING = (Status.RUNNING, Status.WAITING)


@dataclasses.dataclass(frozen=True)
class Decided:
    """Decisions, and the state in which they are under way.

    Without an event `decide` is due after `wake_s`; None: never.
    """

    state: FleetState
    decisions: tuple[Decision, ...]
    wake_s: float | None


def observe(state: FleetState, events: Iterable[Event], now_s: float) -> FleetState:
    """Apply events in order and return the new state; `decide` then returns what follows from them.

    Late events, such as the result of a revoked measurement, change nothing. Raises UsageError for an invalid request
    of a user; `state` stays valid.
    """
    draft = Draft(state, now_s)
    for event in events:
        fleet_events.observe(event, draft)
    return draft.freeze(tuple(draft.decisions))


def decide(state: FleetState, now_s: float) -> Decided:
    """Decide what to do at `now_s` (s, on any monotonic clock)."""
    return _decide(Draft(state, now_s))


def step(state: FleetState, events: Iterable[Event], now_s: float) -> Decided:
    """Call `observe` and `decide` in one step, which is cheaper."""
    draft = Draft(state, now_s)
    for event in events:
        fleet_events.observe(event, draft)
    return _decide(draft)


def _decide(draft: Draft) -> Decided:
    for name in list(draft.campaigns):
        reason = _find_end(draft, draft.campaigns[name])
        if reason:
            draft.end_campaign(name, Status.FINISHED, reason)
    if draft.stale:
        _share_out(draft)
    end_measuring(draft)
    dispatch(draft)
    search_ahead(draft)
    build_ahead(draft)
    if begin_measuring(draft):
        dispatch(draft)
    decisions, wake_s = tuple(draft.decisions), _find_wake_s(draft)
    return Decided(draft.freeze(), decisions, wake_s)


def _find_end(draft: Draft, campaign: CampaignEntry) -> str:
    """Return why a campaign has to end now; "" where it goes on."""
    budget, patience = campaign.budget, campaign.spec.early_stopping_all
    if campaign.status not in _GOING:
        return ""
    if budget.trials is not None and campaign.counted >= budget.trials:
        return f"its {budget.trials} trials are made"
    if campaign.ends_s is not None and draft.now_s >= campaign.ends_s:
        return f"its {budget.wall_clock_s:.0f} s for trials are over"
    if patience is not None and campaign.since_best >= patience:
        return f"no better candidate in {campaign.since_best} trials"
    if budget.energy_j is not None and campaign.energy_j >= budget.energy_j:
        return f"its {budget.energy_j:,.0f} J for trials are used"
    if not campaign.on_board and not campaign.may_measure(draft.settings.measure_limit_s):
        return (
            f"its {budget.board_s:.0f} s of board time for trials are used, or too little is left for one more "
            "measurement"
        )
    if not campaign.open and not any(_may_be_asked(draft, campaign, draft.lanes[n]) for n in campaign.lanes):
        return "all its workloads have ended"
    return ""


def _may_be_asked(draft: Draft, campaign: CampaignEntry, lane: LaneEntry) -> bool:
    most = campaign.budget.per_workload
    tasks = (draft.tasks[number] for number in lane.tasks)
    return any(not task.ended and (most is None or task.counted < most) for task in tasks)


def _share_out(draft: Draft) -> None:
    """Recompute which lanes each pool serves, each lane's share of boards, and which campaigns wait."""
    draft.stale = False
    boards: dict[int, float] = {}
    alive = {number for number, lane in draft.lanes.items() if _is_alive(draft, lane)}
    for key, pool in draft.pools.items():
        mine = tuple(
            number
            for number, lane in draft.lanes.items()
            if lane.board_type == key.board_type and draft.campaigns[lane.campaign].spec.labels <= set(key.labels)
        )
        lanes = [draft.lanes[number] for number in mine if number in alive]
        campaigns = {lane.campaign: draft.campaigns[lane.campaign] for lane in lanes}
        weights: dict[str, float] = {}
        for campaign in campaigns.values():
            weights[campaign.spec.owner] = weights.get(campaign.spec.owner, 0.0) + campaign.weight
        lanes_of = collections.Counter(lane.campaign for lane in lanes)
        for lane in lanes:
            campaign = campaigns[lane.campaign]
            others = len(weights) * weights[campaign.spec.owner] * lanes_of[lane.campaign]
            share = pool.boards * campaign.weight / others
            boards[lane.number] = boards.get(lane.number, 0.0) + share
        draft.set_pool(key, lanes=mine, **_open_accounts(pool, lanes, campaigns))
    for number, lane in draft.lanes.items():
        if lane.boards != boards.get(number, 0.0):
            draft.set_lane(number, boards=boards.get(number, 0.0))
            if not lane.boards or number not in boards:
                draft.may_ask_again(draft.campaigns[lane.campaign])
    for campaign in list(draft.campaigns.values()):
        if campaign.status in _GOING:
            _wait_or_go_on(draft, campaign, any(boards.get(number) for number in campaign.lanes))


def _open_accounts(pool: Pool, lanes: list[LaneEntry], campaigns: Mapping[str, CampaignEntry]) -> dict[str, object]:
    """Give each new participant an account in the pool that starts at the least use of any other.

    A campaign's lanes start together at zero, and need no such account.
    """
    owner_used, campaign_used = dict(pool.owner_used), dict(pool.campaign_used)
    for lane in lanes:
        campaign = campaigns[lane.campaign]
        owner = campaign.spec.owner
        if owner not in owner_used:
            others = {c.spec.owner for c in campaigns.values()} & owner_used.keys()
            owner_used[owner] = min((owner_used[name] for name in others), default=0.0)
        if lane.campaign not in campaign_used:
            others = {name for name, c in campaigns.items() if c.spec.owner == owner} & campaign_used.keys()
            campaign_used[lane.campaign] = min((campaign_used[name] for name in others), default=0.0)
    return {"owner_used": owner_used, "campaign_used": campaign_used}


def _is_alive(draft: Draft, lane: LaneEntry) -> bool:
    """Whether a lane may still have work for boards."""
    campaign = draft.campaigns[lane.campaign]
    return campaign.status in _GOING and (
        any(draft.tasks[number].open for number in lane.tasks) or _may_be_asked(draft, campaign, lane)
    )


def _wait_or_go_on(draft: Draft, campaign: CampaignEntry, has_boards: bool) -> None:
    if has_boards == (campaign.status is Status.RUNNING):
        return
    spec = campaign.spec
    with_labels = f" with {', '.join(sorted(spec.labels))}" if spec.labels else ""
    kinds = " or ".join(dict.fromkeys(part.board_type for part in spec.all_parts))
    reason = "" if has_boards else f"no board of type {kinds}{with_labels} is here"
    draft.set_status(spec.name, Status.RUNNING if has_boards else Status.WAITING, reason)
    # A waiting campaign has no boards, so no share has changed.
    draft.stale = False


def _find_wake_s(draft: Draft) -> float | None:
    """Return when something is due without an event: a wall clock's end, or a straggler for an idle board to double."""
    times = [c.ends_s for c in draft.campaigns.values() if c.status in _GOING and c.ends_s is not None]
    times += [
        pool.straggler_check_s
        for pool in draft.pools.values()
        if pool.idle and any(draft.campaigns[draft.lanes[number].campaign].on_board for number in pool.lanes)
    ]
    return min(times, default=None)
