"""How much to search and build ahead, and of which workloads: bounded queues sized by the boards' consumption.

Works on a draft. `dispatch` assigns what was built to boards.
"""

from __future__ import annotations

from farm.campaign.scheduler.dispatch import may_prepare, plan_queues
from farm.campaign.scheduler.edit import BUILDING, Draft
from farm.campaign.scheduler.priority import PrioritySettings, WorkloadState, decide_next
from farm.campaign.scheduler.state import CampaignEntry, LaneEntry, RequestEntry, change
from farm.campaign.scheduler.values import Build, Search, Status


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
