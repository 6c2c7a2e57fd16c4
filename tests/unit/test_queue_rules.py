"""Who gets a board next: what holds for any queue, the shares in the long run, and the reasons that are given."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.crew import queue_rules
from farm.crew.queue_rules import INTERACTIVE_SHARE, TURN_S, QueueBoard, QueuePlan, plan_queue
from farm.store.queue import count_use, fade
from farm.values import BoardRequest, WorkKind

TYPE = "jetson-nano"
BENCH, SWEEP, TRIALS = WorkKind.BENCH, WorkKind.SWEEP, WorkKind.TRIALS
NAMES = ("a", "b", "c", "d")
OWNERS = ("ann", "bob", "engine", "other engine")


def ask(
    number: int, owner: str, kind: WorkKind, *boards: str, wanted: int = 1, priority: int = 0, waited_s: float = 0.0
) -> BoardRequest:
    return BoardRequest(number, owner, kind, f"{kind} x", TYPE, boards, wanted, priority, 0.0, waited_s)


def board(name: str, holder: str = "", kind: WorkKind | None = None, held_s: float = 0.0) -> QueueBoard:
    return QueueBoard(name, TYPE, holder, kind, held_s)


def held(*names: str) -> list[QueueBoard]:
    return [board(name, "engine", TRIALS, 3600.0) for name in names]


# Any queue


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[BoardRequest], list[QueueBoard], dict[tuple[str, str, WorkKind], float]]:
    """Requests of some owners, boards that are free or held, and what everybody has had."""
    requests = []
    for number in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from((BENCH, SWEEP, TRIALS)))
        owner = draw(st.sampled_from(OWNERS[2:] if kind is TRIALS else OWNERS[:2]))
        names = draw(st.sets(st.sampled_from(NAMES), min_size=1))
        wanted = len(names) if kind is TRIALS else draw(st.integers(1, 2))
        priority, waited_s = draw(st.integers(-2, 2)), draw(st.floats(0.0, 1e4))
        requests.append(ask(number, owner, kind, *sorted(names), wanted=wanted, priority=priority, waited_s=waited_s))
    boards = []
    for name in NAMES:
        holder = draw(st.sampled_from(("", "probe", *OWNERS)))
        kind = TRIALS if holder in OWNERS[2:] else BENCH
        boards.append(board(name, holder, None if holder in ("", "probe") else kind, draw(st.floats(0.0, 1e4))))
    keys = st.tuples(st.sampled_from(NAMES), st.sampled_from(OWNERS), st.sampled_from((BENCH, TRIALS)))
    return requests, boards, draw(st.dictionaries(keys, st.floats(0.0, 1e4)))


@given(queues())
def test_what_holds_for_any_queue(
    queue: tuple[list[BoardRequest], list[QueueBoard], dict[tuple[str, str, WorkKind], float]],
) -> None:
    """A request gets only free boards that it asked for; no board is idle while a request waits for it."""
    requests, boards, used_s = queue
    plan = plan_queue(requests, boards, used_s)
    assert plan == plan_queue(list(reversed(requests)), list(reversed(boards)), used_s)
    known, here = {each.id: each for each in requests}, {each.name: each for each in boards}
    for name, number in (plan.grants | plan.yields).items():
        assert name in known[number].boards
    given = collections.Counter([*plan.grants.values(), *plan.yields.values()])
    assert all(count <= known[number].wanted for number, count in given.items())
    assert all(not here[name].holder for name in plan.grants)
    assert all(here[name].kind is TRIALS and here[name].holder != known[n].owner for name, n in plan.yields.items())
    for each in boards:
        waiting = [one for one in requests if each.name in one.boards and given[one.id] < one.wanted]
        assert each.holder or each.name in plan.grants or not waiting
    shared = {name for one in requests if one.kind is TRIALS for name in one.boards}
    asked_back = {name for name, number in plan.yields.items() if known[number].kind is not TRIALS} & shared
    if asked_back:
        taken = sum(here[name].is_interactive for name in shared)
        taken += sum(known[number].kind is not TRIALS for name, number in plan.grants.items() if name in shared)
        assert taken + len(asked_back) <= max(1, INTERACTIVE_SHARE * len(shared) + 1e-9)
    assert not any(known[number].priority < 0 for number in plan.yields.values() if known[number].kind is not TRIALS)


# What people see


def test_interactive_work_goes_first_within_its_share() -> None:
    """Of three boards that a campaign holds two go to who waits, after their trials; the third has the reason."""
    waiting = [ask(n, f"user {n}", BENCH, "a", "b", "c", waited_s=10.0 - n) for n in (1, 2, 3)]
    plan = plan_queue([ask(9, "engine", TRIALS, "a", "b", "c", wanted=3), *waiting], held("a", "b", "c"), {})
    assert sorted(plan.yields.values()) == [1, 2]
    assert plan.why == {3: "interactive work has 2 of 3 boards that campaigns want too: its share"}
    alone = plan_queue(waiting, [board(name) for name in "abc"], {})
    assert sorted(alone.grants.values()) == [1, 2, 3]


def test_a_named_board_is_asked_back_and_no_other() -> None:
    """Who needs one board alone gets that one, and who may use any leaves it to them."""
    requests = [ask(1, "ann", BENCH, "b", waited_s=1.0), ask(2, "bob", SWEEP, "a", "b", waited_s=2.0)]
    assert plan_queue(requests, [board("a"), board("b")], {}).grants == {"b": 1, "a": 2}
    plan = plan_queue([ask(9, "engine", TRIALS, "a", "b", "c", wanted=3), requests[0]], held("a", "b", "c"), {})
    assert plan.yields == {"b": 1}


def test_one_board_is_shared_by_time() -> None:
    """Interactive work that has had more than its share lets a campaign have its turn, and then goes first again."""
    requests = [ask(1, "ann", BENCH, "a"), ask(9, "engine", TRIALS, "a")]
    used: dict[tuple[str, str, WorkKind], float] = {("a", "bob", SWEEP): 900.0, ("a", "engine", TRIALS): 300.0}
    assert plan_queue(requests, [board("a")], used).grants == {"a": 9}
    assert "75% of the board's time" in plan_queue(requests, [board("a")], used).why[1]
    used["a", "engine", TRIALS] = 500.0
    assert plan_queue(requests, [board("a")], used).grants == {"a": 1}
    assert plan_queue(requests, [board("a", "engine", TRIALS, TURN_S - 1)], used).yields == {}
    assert plan_queue(requests, [board("a", "engine", TRIALS, TURN_S)], used).yields == {"a": 1}


@pytest.mark.parametrize(("priority", "first"), [(0, 1), (1, 2), (-1, 1)])
def test_a_priority_decides_among_equals(priority: int, first: int) -> None:
    """Who waits longest is first, unless another has more priority; below 0 a campaign goes before."""
    requests = [ask(1, "ann", BENCH, "a", waited_s=9.0), ask(2, "bob", BENCH, "a", priority=priority)]
    assert plan_queue(requests, [board("a")], {}).grants == {"a": first}
    behind = [dataclasses.replace(requests[0], priority=-1), ask(9, "engine", TRIALS, "a")]
    assert plan_queue(behind, [board("a")], {}).grants == {"a": 9}
    assert plan_queue(behind, held("a"), {}).yields == {}


def test_engines_share_as_their_campaigns_weigh() -> None:
    """An engine that comes gets boards of one that has all, until each has its part; what goes already goes first."""
    requests = [ask(1, "engine", TRIALS, *"abc", wanted=3), ask(2, "new", TRIALS, *"abc", wanted=3)]
    assert list(plan_queue(requests, held("a", "b", "c"), {}).yields.values()) == [2]
    assert plan_queue(requests, held("a", "b", "c"), {}, leaving=["c"]).yields == {"c": 2}
    weighty = [requests[0], dataclasses.replace(requests[1], priority=1)]
    assert len(plan_queue(weighty, held("a", "b", "c"), {}).yields) == 2


# In the long run


class Rack:
    """Boards on which some work in turns of their own, second by second, by the rules."""

    def __init__(self, boards: int, askers: Mapping[str, tuple[WorkKind, int, Callable[[], float]]]) -> None:
        """`askers`: what kind of work, how many boards each can use at once, and how long a turn or a trial takes."""
        self.names = tuple(f"b{n}" for n in range(boards))
        self.askers, self.now_s = askers, 0.0
        self.numbers = {owner: number for number, owner in enumerate(askers, 1)}
        self.since: dict[str, float] = dict.fromkeys(askers, 0.0)
        self.held: dict[
            str, tuple[str, float, float]
        ] = {}  # by board: who, since when, until when its turn or trial is
        self.leaving: set[str] = set()
        self.used: dict[tuple[str, str, WorkKind], tuple[float, float]] = {}
        self.total_s: collections.Counter[str] = collections.Counter()

    def run(self, seconds: float, count_from_s: float) -> dict[str, float]:
        while self.now_s < seconds:
            self._end_turns()
            plan = self._plan()
            self.leaving |= plan.yields.keys()
            for name, number in plan.grants.items():
                owner = next(each for each in self.askers if self.numbers[each] == number)
                self.held[name] = owner, self.now_s, self.now_s + self.askers[owner][2]()
                self.since[owner] = self.now_s
            if self.now_s >= count_from_s:
                for owner, _, _ in self.held.values():
                    self.total_s[owner] += 1
            self.now_s += 1.0
        return {owner: self.total_s[owner] / (seconds - count_from_s) / len(self.names) for owner in self.askers}

    def _end_turns(self) -> None:
        for name, (owner, since_s, until_s) in list(self.held.items()):
            kind, _, length = self.askers[owner]
            if self.now_s < until_s:
                continue
            if kind is TRIALS and name not in self.leaving:
                self.held[name] = owner, since_s, self.now_s + length()
                continue
            del self.held[name]
            self.leaving.discard(name)
            self.used[name, owner, kind] = self._count(name, owner, kind) + count_use(self.now_s - since_s), self.now_s

    def _count(self, name: str, owner: str, kind: WorkKind) -> float:
        used_s, at_s = self.used.get((name, owner, kind), (0.0, 0.0))
        return fade(used_s, self.now_s - at_s)

    def _plan(self) -> QueuePlan:
        requests = []
        for owner, (kind, most, _) in self.askers.items():
            wanted = most - sum(each == owner for each, _, _ in self.held.values())
            if kind is TRIALS or wanted > 0:
                waited_s = self.now_s - self.since[owner]
                requests.append(
                    ask(self.numbers[owner], owner, kind, *self.names, wanted=wanted or most, waited_s=waited_s)
                )
        boards, used_s = [], {key: self._count(*key) for key in self.used}
        for name in self.names:
            owner, since_s, _ = self.held.get(name, ("", 0.0, 0.0))
            kind = self.askers[owner][0] if owner else None
            boards.append(board(name, owner, kind, self.now_s - since_s if owner else 0.0))
            if kind is not None:
                used_s[name, owner, kind] = used_s.get((name, owner, kind), 0.0) + count_use(self.now_s - since_s)
        return plan_queue(requests, boards, used_s, self.leaving)


def turns(seed: int, least_s: float, most_s: float) -> Callable[[], float]:
    """How long one turn after the other takes, in s."""
    draws = random.Random(seed)
    return lambda: draws.uniform(least_s, most_s)


def test_two_campaigns_a_sweep_and_a_bench_each_get_their_share() -> None:
    """Of three boards interactive work has two thirds, half of it each; campaigns the rest, half each: within 10 %."""
    rack = Rack(
        3,
        {
            "one": (TRIALS, 3, turns(1, 1.0, 6.0)),
            "two": (TRIALS, 3, turns(2, 2.0, 9.0)),
            "sweep": (SWEEP, 3, turns(3, 20.0, 90.0)),
            "bench": (BENCH, 1, turns(4, 10.0, 40.0)),
        },
    )
    shares = rack.run(3 * 3600.0, 1800.0)
    interactive = INTERACTIVE_SHARE / 2
    assert shares == {
        "one": pytest.approx((1 - INTERACTIVE_SHARE) / 2, rel=0.1),
        "two": pytest.approx((1 - INTERACTIVE_SHARE) / 2, rel=0.1),
        "sweep": pytest.approx(interactive, rel=0.1),
        "bench": pytest.approx(interactive, rel=0.1),
    }


def test_a_campaign_is_not_starved_on_one_board() -> None:
    """A sweep and benches that always want the only board have two thirds of its time, a campaign one: within 10 %."""
    rack = Rack(
        1,
        {
            "campaign": (TRIALS, 1, turns(1, 1.0, 6.0)),
            "sweep": (SWEEP, 1, turns(2, 20.0, 90.0)),
            "bench": (BENCH, 1, turns(3, 10.0, 40.0)),
        },
    )
    shares = rack.run(4 * 3600.0, 3600.0)
    assert shares["campaign"] == pytest.approx(1 - INTERACTIVE_SHARE, rel=0.1)
    assert shares["sweep"] == pytest.approx(shares["bench"], rel=0.1)


def test_shares_are_as_documented() -> None:
    """What docs/howto/run-the-farm.md promises is what the rules say."""
    assert (queue_rules.INTERACTIVE_SHARE, queue_rules.TURN_S) == (2 / 3, 60.0)
