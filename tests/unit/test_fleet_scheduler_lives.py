"""Events in any order: no trial lost or counted twice, no budget exceeded, no board idle beside work."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from device_agent.protocol import FaultSide
from farm.campaign.scheduler import events
from farm.campaign.scheduler.fleet import ON_BOARD
from farm.campaign.scheduler.scheduler import step
from farm.campaign.scheduler.state import OVER, BoardEntry, Job, Pool, Status, TaskKey
from farm.types.campaigns import Budget
from tests.unit.fleet_campaigns import Act, Hands, campaign

NAMES = st.sampled_from(["one", "two", "three"])
BOARDS = st.sampled_from(["a", "b", "c", "d", "e"])
SIDES = st.sampled_from([None, None, None, *FaultSide])
PICKS = st.integers(0, 50)
POINTS = ("default", "maxn")
# A test's clock moves by less than this in all, so that no measurement outlives what is reserved for it.
LIMIT_S = 2_000.0


class Checked(Hands):
    def __init__(self) -> None:
        self.open: set[tuple[TaskKey, str]] = set()
        self.late: list[int] = []
        super().__init__(batch=3, warmup=2, builders=3, measure_limit_s=LIMIT_S, max_faults_in_a_row=6)

    def tell(self, event: Any = None, *given: Any, after_s: float = 0.0) -> list[Act]:
        """Let an event happen; a candidate's only way out of the books is one conclusion."""
        twin, twins = copy.deepcopy((self.state, given))
        twin.now_s = now_s = self.now_s + after_s
        if event is not None:
            event(twin, *twins)
        step(twin, now_s)
        if event is events.proposed and given[0] in self.state.requests:
            key = self.state.requests[given[0]].task.key
            self.open |= {(key, candidate.hash) for candidate in given[1]}
        self.late += self.measures
        acts = super().tell(event, *given, after_s=after_s)
        assert acts == twin.worker.acts, "equal input, other output"
        for act in acts:
            if act.kind in ("count", "drop"):
                self.open.remove((act.task, act.candidate))
        return acts

    def may_run(self, board: BoardEntry, job: Job) -> bool:
        lane, entry = job.task.lane, job.task.lane.campaign

        def serves(pool: Pool) -> bool:
            return pool.board_type == lane.board_type and entry.labels <= pool.labels

        others = {other.name for other in self.state.boards.values() if serves(other.pool)}
        fits = entry.budget.board_s is None or entry.board_s + (entry.on_board + 1) * LIMIT_S <= entry.budget.board_s
        allowed = board.name not in job.avoid or others <= set(job.avoid)
        return serves(board.pool) and entry.status is Status.RUNNING and fits and allowed


class Lives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fleet = Checked()

    @rule(name=NAMES, fields=st.fixed_dictionaries({
        "owner": st.sampled_from(["x", "y"]),
        "priority": st.integers(-1, 2),
        "labels": st.sampled_from([{}, {"rack": "a"}]),
        "points": st.sampled_from([POINTS, POINTS[:1]]),
        "board_types": st.sampled_from([("nano",), ("nano", "tx2")]),
        "early_stopping": st.sampled_from([None, 4]),
    }))  # fmt: skip
    def add(self, name: str, fields: dict[str, Any]) -> None:
        known = self.fleet.state.campaigns.get(name)
        if known is None or known.status in OVER:
            self.fleet.tell(events.add_campaign, campaign(name, budget=Budget(trials=15), **fields))

    @rule(name=NAMES, order=st.sampled_from([events.pause, events.resume, events.resume, events.cancel]))
    def order(self, name: str, order: Any) -> None:
        if name in self.fleet.state.campaigns:
            self.fleet.tell(order, name)

    @rule(
        name=NAMES,
        trials=st.integers(1, 30),
        board_s=st.sampled_from([None, 3 * LIMIT_S]),
        per_workload=st.one_of(st.none(), st.integers(1, 6)),
    )
    def change_budget(self, name: str, trials: int, board_s: float | None, per_workload: int | None) -> None:
        if name in self.fleet.state.campaigns:
            budget = Budget(trials=trials, board_s=board_s, per_workload=per_workload)
            self.fleet.tell(events.change_budget, name, budget)

    @rule(
        board=BOARDS,
        board_type=st.sampled_from(["nano", "nano", "tx2"]),
        point=st.sampled_from(POINTS),
        label=st.sampled_from([frozenset({"rack=a"})]),
    )
    def arrive(self, board: str, board_type: str, point: str, label: frozenset[str]) -> None:
        self.fleet.tell(events.arrive, board, board_type, point, label)

    @rule(board=BOARDS)
    def leave(self, board: str) -> None:
        self.fleet.tell(events.leave, board)

    @precondition(lambda self: self.fleet.searches)
    @rule(pick=PICKS, most=st.integers(0, 4), exhausted=st.sampled_from([False, False, False, True]))
    def propose(self, pick: int, most: int, exhausted: bool) -> None:
        request = list(self.fleet.searches)[pick % len(self.fleet.searches)]
        self.fleet.propose(request, None if most else self.fleet.searches[request].count + 1, exhausted)

    @precondition(lambda self: self.fleet.searches)
    @rule(pick=PICKS)
    def fail_search(self, pick: int) -> None:
        request = list(self.fleet.searches)[pick % len(self.fleet.searches)]
        del self.fleet.searches[request]
        self.fleet.tell(events.search_failed, request)

    @precondition(lambda self: self.fleet.builds)
    @rule(picks=st.lists(PICKS, min_size=1, max_size=4), side=st.sampled_from([None, None, *FaultSide]))
    def build(self, picks: list[int], side: FaultSide | None) -> None:
        for pick in picks:
            if self.fleet.builds:
                self.fleet.build(list(self.fleet.builds)[pick % len(self.fleet.builds)], side)

    @precondition(lambda self: self.fleet.running())
    @rule(pick=PICKS, side=SIDES, takes_s=st.floats(0.0, 20.0))
    def measure(self, pick: int, side: FaultSide | None, takes_s: float) -> None:
        running = self.fleet.running()
        now = running[pick % len(running)]
        began_s = self.fleet.state.assignments[now.assignment].started_s
        assert began_s is not None
        self.fleet.tell(after_s=takes_s)
        if now.assignment in self.fleet.measures:
            del self.fleet.measures[now.assignment]
            latency_s = 1e-3 * (1 + pick) if side is None else None
            self.fleet.tell(events.measured, now.assignment, side, self.fleet.now_s - began_s, latency_s)

    @precondition(lambda self: self.fleet.late)
    @rule(pick=PICKS, side=SIDES)
    def answer_late(self, pick: int, side: FaultSide | None) -> None:
        number = self.fleet.late[pick % len(self.fleet.late)]
        if number not in self.fleet.measures:
            before = pickle.dumps(self.fleet.state.campaigns)
            assert self.fleet.tell(events.measured, number, side, 1.0, 1e-6) == []
            assert pickle.dumps(self.fleet.state.campaigns) == before

    @invariant()
    def nothing_is_lost(self) -> None:
        """Every candidate that was proposed and not concluded is a job, and each is open in its budget."""
        state = self.fleet.state
        assert self.fleet.open == {(job.task.key, job.candidate.hash) for job in state.jobs.values()}
        for entry in state.campaigns.values():
            jobs = [job for job in state.jobs.values() if job.task.lane.campaign is entry]
            asked = [r.count for r in state.requests.values() if r.task.lane.campaign is entry]
            assert entry.open == len(jobs) + sum(asked)
            assert entry.on_board == sum(len(job.assignments) for job in jobs)
        for lane in state.lanes:
            for stage in ("to_build", "ready", "again"):
                assert all(job.stage == stage for job in getattr(lane, stage))
            mine = [job for job in state.jobs.values() if job.task.lane is lane]
            assert lane.waiting == sum(each.started_s is None for job in mine for each in job.assignments)
            queued = len(lane.to_build) + len(lane.ready) + len(lane.again) + lane.building
            assert queued + sum(job.stage == ON_BOARD for job in mine) == len(mine)
        assert state.building == sum(lane.building for lane in state.lanes) <= state.settings.builders

    @invariant()
    def no_budget_is_exceeded(self) -> None:
        """What counted and what is under way fit into every budget, unless it was cut below what had counted."""
        state = self.fleet.state
        for entry in state.campaigns.values():
            trials, most = entry.budget.trials, entry.budget.per_workload
            assert trials is None or entry.open <= max(0, trials - entry.counted)
            for task in entry.tasks if entry.status not in OVER else ():
                assert most is None or task.open <= max(0, most - task.counted)
            if entry.budget.board_s is not None and entry.on_board:
                assert entry.board_s + entry.on_board * LIMIT_S <= entry.budget.board_s

    @invariant()
    def no_board_idles_beside_work(self) -> None:
        """A board without work is one for which nothing is built that does not run already."""
        state = self.fleet.state
        spare = [
            job
            for job in state.jobs.values()
            if job.stage in ("ready", "again")
            or (job.assignments and all(each.started_s is None for each in job.assignments))
        ]
        for board in state.boards.values():
            assert board.waiting is None or board.running is not None
            assert board.running is not None or not any(self.fleet.may_run(board, job) for job in spare)

    def teardown(self) -> None:
        fleet = self.fleet
        fleet.boards("a", "b", labels=frozenset({"rack=a"}))
        fleet.boards("c", board_type="tx2", labels=frozenset({"rack=a"}))
        for name in fleet.state.campaigns:
            fleet.tell(events.resume, name)
        fleet.finish(most=500)
        for entry in fleet.state.campaigns.values():
            assert entry.status in OVER
            assert entry.open == 0
        assert not fleet.open


Lives.TestCase.settings = hypothesis.settings(max_examples=30, stateful_step_count=50)
TestLives = Lives.TestCase
