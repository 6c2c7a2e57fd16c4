"""Decide what a whole fleet does next, for all campaigns: events and time in, decisions out.

`farm.campaign.engine.engine` executes its decisions. Nothing here starts or waits, and nothing but the state, the
events and the time decides: a kept copy of a state can be replayed.

Use: `step` with the events, execute the decisions, and repeat after `wake_s` at the latest.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from farm.campaign.scheduler import events as fleet_events
from farm.campaign.scheduler.dispatch import begin_measuring, dispatch, end_measuring, may_prepare, plan_queues
from farm.campaign.scheduler.fleet import BUILDING, FleetState
from farm.campaign.scheduler.priority import PrioritySettings, WorkloadState, decide_next
from farm.campaign.scheduler.state import CampaignEntry, LaneEntry, Pool, RequestEntry
from farm.campaign.scheduler.values import Build, Decision, Event, Search, Status


def search_ahead(fleet: FleetState) -> None:
    """Request candidates wherever too few are queued."""
    if not may_prepare(fleet):
        return
    queues = plan_queues(fleet)
    # Of hundreds of lanes an event lets one or two want more.
    for number in [number for number, lane in fleet.lanes.items() if lane.wants or number in queues]:
        lane = fleet.lanes[number]
        if lane.dry or fleet.campaigns[lane.campaign].status is not Status.RUNNING:
            continue
        wanted = queues.get(number, lane.planned) if lane.boards else 0
        while fleet.lanes[number].ahead < wanted and _ask(fleet, fleet.lanes[number], wanted):
            pass


def _ask(fleet: FleetState, lane: LaneEntry, wanted: int) -> bool:
    """Request candidates of a lane's most promising workload; False where there is none."""
    settings, campaign = fleet.settings, fleet.campaigns[lane.campaign]
    if not campaign.may_measure(settings.measure_limit_s):
        return False
    remaining = 10**9 if campaign.budget.trials is None else campaign.budget.trials - campaign.counted - campaign.open
    per_workload = campaign.budget.per_workload or 10**9
    tasks = [fleet.tasks[number] for number in lane.tasks]
    states = [
        dataclasses.replace(task.state, exhausted=True) if task.counted + task.open >= per_workload else task.state
        for task in tasks
    ]
    batch = min(settings.max_batch, max(settings.batch, wanted // 8))
    kept = 0 if any(map(_is_fresh, states)) else _count_fresh_elsewhere(fleet, campaign, lane, remaining)
    decided = decide_next(states, remaining - kept, PrioritySettings(settings.warmup, batch))
    if decided is None:
        fleet.set_lane(lane.number, dry=True)
        return False
    task = tasks[decided[0]]
    count = min(decided[1], per_workload - task.counted - task.open)
    number = fleet.new_number()
    fleet.requests[number] = RequestEntry(number, task.number, count, fleet.now_s)
    task.state.asked, task.state.exhausted = task.state.asked + count, True
    task.open += count
    campaign.open += count
    fleet.set_lane(lane.number, searching=lane.searching + count)
    fleet.decisions.append(Search(number, task.key, count))
    return True


def _is_fresh(state: WorkloadState) -> bool:
    return state.asked == 0 and not state.exhausted


def _count_fresh_elsewhere(fleet: FleetState, campaign: CampaignEntry, lane: LaneEntry, remaining: int) -> int:
    """Count untried workloads of other types and points with boards at hand: one trial is reserved for each.

    Where many boards of one type are quicker than the only one of another, that one's models would have no total.
    """
    others = [fleet.lanes[number] for number in campaign.lanes if number != lane.number]
    if remaining > sum(len(each.tasks) for each in others):
        return 0
    return sum(_is_fresh(fleet.tasks[number].state) for each in others if each.boards for number in each.tasks)


def build_ahead(fleet: FleetState) -> None:
    """Start builds on idle compilers, first for the lane with the least built for its share of boards.

    Among equal lanes, as with too few compilers, the owner with the least board time goes first.
    """
    if not may_prepare(fleet) or fleet.building >= fleet.settings.builders:
        return
    lanes = {
        number: _standing(fleet, lane)
        for number, lane in fleet.lanes.items()
        if lane.to_build and lane.boards and fleet.campaigns[lane.campaign].status is Status.RUNNING
    }
    while lanes and fleet.building < fleet.settings.builders:
        lane = fleet.lanes[min(lanes, key=lanes.__getitem__)]
        job = fleet.jobs[lane.to_build[0]]
        fleet.unqueue(job.number)
        job.stage, job.since_s = BUILDING, fleet.now_s
        fleet.building += 1
        fleet.set_lane(lane.number, building=lane.building + 1)
        fleet.decisions.append(Build(job.number, fleet.tasks[job.task].key, job.candidate))
        lane = fleet.lanes[lane.number]
        lanes[lane.number] = _standing(fleet, lane)
        if not lane.to_build:
            del lanes[lane.number]


def _standing(fleet: FleetState, lane: LaneEntry) -> tuple[float, float]:
    """Return what a lane has built or in the making per board of its share, and its owner's board time (s)."""
    built = len(lane.ready) + len(lane.again) + lane.building
    return built / lane.boards, fleet.owner_board_s.get(fleet.campaigns[lane.campaign].spec.owner, 0.0)


_GOING = (Status.RUNNING, Status.WAITING)


@dataclasses.dataclass(frozen=True)
class Decided:
    """Decisions, which are under way in the state from then on.

    Without an event `step` is due after `wake_s`; None: never.
    """

    decisions: tuple[Decision, ...]
    wake_s: float | None


def observe(fleet: FleetState, events: Iterable[Event], now_s: float) -> None:
    """Apply events in order; the next `step` returns what follows from them.

    Late events, such as the result of a revoked measurement, change nothing. Raises UsageError for an invalid request
    of a user, which changes nothing either.
    """
    fleet.now_s = now_s
    for event in events:
        fleet_events.observe(event, fleet)


def step(fleet: FleetState, events: Iterable[Event], now_s: float) -> Decided:
    """Apply events in order, and decide what to do at `now_s` (s, on any monotonic clock)."""
    observe(fleet, events, now_s)
    for name in list(fleet.campaigns):
        reason = _find_end(fleet, fleet.campaigns[name])
        if reason:
            fleet.end_campaign(name, Status.FINISHED, reason)
    if fleet.stale:
        _share_out(fleet)
    end_measuring(fleet)
    dispatch(fleet)
    search_ahead(fleet)
    build_ahead(fleet)
    if begin_measuring(fleet):
        dispatch(fleet)
    decisions, fleet.decisions = tuple(fleet.decisions), []
    return Decided(decisions, _find_wake_s(fleet))


def _find_end(fleet: FleetState, campaign: CampaignEntry) -> str:
    """Return why a campaign has to end now; "" where it goes on."""
    budget, patience = campaign.budget, campaign.spec.early_stopping_all
    if campaign.status not in _GOING:
        return ""
    if budget.trials is not None and campaign.counted >= budget.trials:
        return f"its {budget.trials} trials are made"
    if campaign.ends_s is not None and fleet.now_s >= campaign.ends_s:
        return f"its {budget.wall_clock_s:.0f} s for trials are over"
    if patience is not None and campaign.since_best >= patience:
        return f"no better candidate in {campaign.since_best} trials"
    if budget.energy_j is not None and campaign.energy_j >= budget.energy_j:
        return f"its {budget.energy_j:,.0f} J for trials are used"
    if not campaign.on_board and not campaign.may_measure(fleet.settings.measure_limit_s):
        return (
            f"its {budget.board_s:.0f} s of board time for trials are used, or too little is left for one more "
            "measurement"
        )
    if not campaign.open and not any(_may_be_asked(fleet, campaign, fleet.lanes[n]) for n in campaign.lanes):
        return "all its workloads have ended"
    return ""


def _may_be_asked(fleet: FleetState, campaign: CampaignEntry, lane: LaneEntry) -> bool:
    most = campaign.budget.per_workload
    tasks = (fleet.tasks[number] for number in lane.tasks)
    return any(not task.ended and (most is None or task.counted < most) for task in tasks)


def _share_out(fleet: FleetState) -> None:
    """Recompute which lanes each pool serves, each lane's share of boards, and which campaigns wait."""
    fleet.stale = False
    boards: dict[int, float] = {}
    alive = {number for number, lane in fleet.lanes.items() if _is_alive(fleet, lane)}
    for key, pool in fleet.pools.items():
        mine = tuple(
            number
            for number, lane in fleet.lanes.items()
            if lane.board_type == key.board_type and fleet.campaigns[lane.campaign].spec.labels <= set(key.labels)
        )
        lanes = [fleet.lanes[number] for number in mine if number in alive]
        campaigns = {lane.campaign: fleet.campaigns[lane.campaign] for lane in lanes}
        weights: dict[str, float] = {}
        for campaign in campaigns.values():
            weights[campaign.spec.owner] = weights.get(campaign.spec.owner, 0.0) + campaign.weight
        lanes_of = collections.Counter(lane.campaign for lane in lanes)
        for lane in lanes:
            campaign = campaigns[lane.campaign]
            others = len(weights) * weights[campaign.spec.owner] * lanes_of[lane.campaign]
            share = pool.boards * campaign.weight / others
            boards[lane.number] = boards.get(lane.number, 0.0) + share
        pool.lanes = mine
        _open_accounts(pool, lanes, campaigns)
    for number, lane in fleet.lanes.items():
        if lane.boards != boards.get(number, 0.0):
            fleet.set_lane(number, boards=boards.get(number, 0.0))
            if not lane.boards or number not in boards:
                fleet.may_ask_again(fleet.campaigns[lane.campaign])
    for campaign in list(fleet.campaigns.values()):
        if campaign.status in _GOING:
            _wait_or_go_on(fleet, campaign, any(boards.get(number) for number in campaign.lanes))


def _open_accounts(pool: Pool, lanes: list[LaneEntry], campaigns: Mapping[str, CampaignEntry]) -> None:
    """Give each new participant an account in the pool that starts at the least use of any other.

    A campaign's lanes start together at zero, and need no such account.
    """
    owner_used, campaign_used = pool.owner_used, pool.campaign_used
    for lane in lanes:
        campaign = campaigns[lane.campaign]
        owner = campaign.spec.owner
        if owner not in owner_used:
            others = {c.spec.owner for c in campaigns.values()} & owner_used.keys()
            owner_used[owner] = min((owner_used[name] for name in others), default=0.0)
        if lane.campaign not in campaign_used:
            others = {name for name, c in campaigns.items() if c.spec.owner == owner} & campaign_used.keys()
            campaign_used[lane.campaign] = min((campaign_used[name] for name in others), default=0.0)


def _is_alive(fleet: FleetState, lane: LaneEntry) -> bool:
    """Whether a lane may still have work for boards."""
    campaign = fleet.campaigns[lane.campaign]
    return campaign.status in _GOING and (
        any(fleet.tasks[number].open for number in lane.tasks) or _may_be_asked(fleet, campaign, lane)
    )


def _wait_or_go_on(fleet: FleetState, campaign: CampaignEntry, has_boards: bool) -> None:
    if has_boards == (campaign.status is Status.RUNNING):
        return
    spec = campaign.spec
    with_labels = f" with {', '.join(sorted(spec.labels))}" if spec.labels else ""
    kinds = " or ".join(dict.fromkeys(part.board_type for part in spec.parts))
    reason = "" if has_boards else f"no board of type {kinds}{with_labels} is here"
    fleet.set_status(campaign, Status.RUNNING if has_boards else Status.WAITING, reason)
    # A waiting campaign has no boards, so no share has changed.
    fleet.stale = False


def _find_wake_s(fleet: FleetState) -> float | None:
    """Return when something is due without an event: a wall clock's end, or a straggler for an idle board to double."""
    times = [c.ends_s for c in fleet.campaigns.values() if c.status in _GOING and c.ends_s is not None]
    times += [
        pool.straggler_check_s
        for pool in fleet.pools.values()
        if pool.idle and any(fleet.campaigns[fleet.lanes[number].campaign].on_board for number in pool.lanes)
    ]
    return min(times, default=None)
