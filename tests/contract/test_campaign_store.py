"""What the store promises of campaigns over a fleet: a name once, a result per candidate once, no wish lost."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from device_agent.protocol import Outcome, Status
from farm.errors import InternalError, PermanentError, UsageError
from farm.report import campaign_document
from farm.settings import StoreLocation
from farm.store import Store
from farm.store.session import StoreSession
from farm.types.campaigns import Budget
from farm.types.states import CampaignState
from farm.values import SEARCH_TRIAL, WINNER_TRIAL, Trial
from tests.contract.conftest import run_python
from tests.fleet_store import Clocks
from tests.places import Places, execute
from tests.stored_workloads import make_record, make_trial, make_workload
from tests.unit.campaign_orders import make_order, make_type

ROOT = pathlib.Path(__file__).parents[2]
# Until a child has begun; Python and SQLAlchemy take a second to load on a busy machine.
CHILD_TIMEOUT_S = 60
ENGINE = {"host": "here", "pid": 4711, "created": 1.5}
NANO, TX2 = "jetson-nano", "jetson-tx2"
_ENGINE = """
import itertools, pathlib, sys
from device_agent.protocol import Outcome, Status
from farm.settings import parse_store
from farm.store import Store
from farm.store.session import StoreSession
from farm.values import Trial
with Store(parse_store(sys.argv[1])) as store:
    store.campaigns.note(1, "running", "", engine={"host": "here", "pid": 4711, "created": 1.5})
    for number in itertools.count(int(sys.argv[2])):
        outcome = Outcome(Status.OK, latency_s=(1.0,) * 100)
        trial = Trial(1, "w1", f"c{number}", "default", 1, outcome, "x" * 100_000, board_type="jetson-nano", held_s=1.0)
        assert store.trials.add(trial)
        store.campaigns.save_progress(1, {"counted": number + 1})
        print(number, flush=True)
        if store.campaigns.require("fleet").wanted == "cancel":
            break
    store.campaigns.note(1, "cancelled", "as wanted")
    print("ended", flush=True)
"""
_SUBMITTER = """
import sys
from farm.errors import UsageError
from farm.settings import parse_store
from farm.store import Store
from farm.store.session import StoreSession
from tests.unit.campaign_orders import make_order
order = make_order("same", owner=sys.argv[2])
with Store(parse_store(sys.argv[1])) as store:
    try:
        print(store.campaigns.submit(order, "farm campaign run", []))
    except UsageError:
        print("refused")
"""


@pytest.fixture
def store(place: StoreLocation, clocks: Clocks) -> Iterator[Store]:
    """A store whose campaign 1, `fleet`, is for two board types; w1 is for both, w2 for jetson-nano alone."""
    with Store(StoreSession(place, clocks.read, clocks.read_wall)) as store:
        assert submit(store) == 1
        yield store


def submit(store: Store, name: str = "fleet", types: tuple[str, ...] = (NANO, TX2)) -> int:
    order = make_order(name, owner="ann@desk", types=tuple(map(make_type, types)), labels={"rack": "a"})
    workloads = [make_workload("w1", board_type=kind, weight=2.5) for kind in types]
    workloads.append(make_workload("w2", board_type=types[0]))
    return store.campaigns.submit(order, "farm campaign run fleet.yaml", workloads)


def add(store: Store, candidate: str, median_s: float | None = 1.0, status: Status = Status.OK, **fields: Any) -> bool:
    given = {"trace_json": f"[{candidate}]"} | fields
    return store.trials.add(make_trial(candidate, median_s, status, simulated=True, **given))


# Orders


def test_a_campaign_comes_back_as_it_was_ordered(store: Store) -> None:
    """Order, budget and owner are kept; until an engine takes it, it is submitted and has no owner."""
    campaign = store.campaigns.require("fleet")
    assert (campaign.id, campaign.state, campaign.wanted, campaign.over) == (1, "submitted", "run", False)
    assert (campaign.owner, campaign.command) == ("ann@desk", "farm campaign run fleet.yaml")
    assert campaign.order.labels == {"rack": "a"}
    assert campaign.budget == Budget(trials=100)
    assert (campaign.engine, campaign.progress, campaign.finished_at) == (None, None, None)
    assert store.campaigns.fetch() == [campaign]
    [event] = store.events.fetch("fleet")
    assert (event.kind, "ann@desk" in event.message) == ("campaign_submitted", True)


def test_an_order_that_cannot_be_read_names_its_campaign(store: Store, place: StoreLocation) -> None:
    """As after a change by hand; a row that reads well keeps integers as integers."""
    execute(place, """UPDATE fleet_campaigns SET budget = '{"board_s": 3600}'""")
    assert repr(campaign_document.summarise(store.campaigns.require("fleet"))["budget"]) == "{'board_s': 3600}"
    execute(place, """UPDATE fleet_campaigns SET budget = '{"trials": "many"}'""")
    with pytest.raises(PermanentError, match=r"'fleet' cannot be read: budget\.trials"):
        store.campaigns.require("fleet")


def test_workloads_come_back_for_each_board_type(store: Store) -> None:
    """In the order in which they were given, with weights that need not be whole."""
    found = store.workloads.fetch(1)
    assert [(each.hash, each.board_type, each.weight) for each in found] == [
        ("w1", NANO, 2.5),
        ("w1", TX2, 2.5),
        ("w2", NANO, 1.0),
    ]
    assert found[0] == make_workload("w1", board_type=NANO, weight=2.5)
    assert store.workloads.fetch_names() == [("w1", "conv2d w1"), ("w2", "conv2d w2")]


def test_a_name_is_used_once(store: Store) -> None:
    """A second campaign of the same name is refused with nothing written, even when the first is long over."""
    store.campaigns.want("fleet", "cancel", "ann")
    with pytest.raises(UsageError, match=r"'fleet' already \(cancelled\)") as caught:
        submit(store)
    assert "farm campaign show fleet" in caught.value.hint
    assert len(store.campaigns.fetch_searches()) == 1
    assert submit(store, "fleet-2") == 2


def test_an_unknown_name_lists_those_that_there_are(store: Store, places: Places) -> None:
    """The error suggests the right name, also where there is no campaign at all."""
    submit(store, "another")
    calls: list[Callable[[], object]] = [
        lambda: store.campaigns.require("flet"),
        lambda: store.campaigns.want("flet", "run", "ann"),
        lambda: store.campaigns.change_budget("flet", Budget(), "ann"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="no campaign 'flet'") as caught:
            call()
        assert "another, fleet" in caught.value.hint
    with Store(places.make()) as empty, pytest.raises(UsageError) as caught:
        empty.campaigns.require("flet")
    assert "farm campaign run" in caught.value.hint


def test_campaigns_that_are_over_can_be_told_apart(store: Store) -> None:
    """An engine that polls asks for those that are not, and need not read the rest."""
    submit(store, "second")
    store.campaigns.note(1, "finished", "all done")
    assert [each.name for each in store.campaigns.fetch(over=False)] == ["second"]
    assert [each.name for each in store.campaigns.fetch(over=True)] == ["fleet"]
    assert [each.name for each in store.campaigns.fetch()] == ["fleet", "second"]


# States and wishes


def test_an_engine_takes_a_campaign_and_ends_it(store: Store) -> None:
    """Who carries it out stays noted until it is over; progress and the time of the end are kept."""
    assert store.campaigns.note(1, "running", "2 boards", engine=ENGINE)
    assert store.campaigns.note(1, "waiting", "no board is free")
    store.campaigns.save_progress(1, {"counted": 1})
    store.campaigns.save_progress(1, {"counted": 2})
    campaign = store.campaigns.require("fleet")
    assert (campaign.state, campaign.reason, campaign.engine) == ("waiting", "no board is free", ENGINE)
    assert campaign.progress == {"counted": 2}
    assert store.campaigns.note(1, "finished", "the budget is spent")
    campaign = store.campaigns.require("fleet")
    assert (campaign.state, campaign.engine, campaign.over) == ("finished", None, True)
    assert campaign.finished_at is not None
    assert campaign.progress == {"counted": 2}
    kinds = [event.kind for event in store.events.fetch("fleet")]
    assert kinds == ["campaign_submitted", "campaign_running", "campaign_waiting", "campaign_finished"]


def test_a_state_is_noted_as_an_event_once(store: Store) -> None:
    """Another reason for the same state is kept without an event: the log says what changed."""
    store.campaigns.note(1, "running", "1 board", engine=ENGINE)
    store.campaigns.note(1, "running", "2 boards")
    assert store.campaigns.require("fleet").reason == "2 boards"
    assert len(store.events.fetch("fleet")) == 2


def test_a_running_campaign_is_left_to_its_engine(store: Store) -> None:
    """A wish changes what is wanted and no state; wishing twice is wishing once."""
    store.campaigns.note(1, "running", "", engine=ENGINE)
    for wanted in ("pause", "pause", "run", "cancel"):
        campaign = store.campaigns.want("fleet", wanted, "bob@desk")
        assert (campaign.wanted, campaign.state, campaign.engine) == (wanted, "running", ENGINE)
    kinds = [event.kind for event in store.events.fetch("fleet")][2:]
    assert kinds == ["campaign_pause", "campaign_run", "campaign_cancel"]
    assert "bob@desk" in store.events.fetch("fleet")[-1].message


def test_what_nobody_carries_out_is_cancelled_at_once(store: Store) -> None:
    """There is no engine that could do it, and one that comes a moment later cannot bring it back."""
    campaign = store.campaigns.want("fleet", "cancel", "bob")
    assert (campaign.state, campaign.reason) == ("cancelled", "cancelled by bob")
    assert campaign.finished_at is not None
    assert not store.campaigns.note(1, "running", "", engine=ENGINE)
    assert store.campaigns.require("fleet") == campaign


@pytest.mark.parametrize("state", ["interrupted", "paused"])
def test_resuming_has_the_next_engine_find_it(store: Store, state: str) -> None:
    """An interrupted campaign, or a paused one that no engine holds, is submitted again with all it had."""
    if state == "interrupted":
        store.campaigns.note(1, "running", "", engine=ENGINE)
    store.campaigns.note(1, state, "told to end")
    campaign = store.campaigns.want("fleet", "run", "ann")
    assert (campaign.state, campaign.wanted, campaign.engine) == ("submitted", "run", None)


def test_a_paused_campaign_is_resumed_by_the_engine_that_holds_it(store: Store) -> None:
    """Its state is the engine's to change while there is one."""
    store.campaigns.note(1, "paused", "", engine=ENGINE)
    assert store.campaigns.want("fleet", "run", "ann").state is CampaignState.PAUSED


def test_an_interrupted_campaign_cannot_be_paused(store: Store) -> None:
    """Nothing of it is under way; the error says what to do."""
    store.campaigns.note(1, "interrupted", "told to end")
    with pytest.raises(UsageError, match="nothing of it is under way") as caught:
        store.campaigns.want("fleet", "pause", "ann")
    assert "farm campaign resume fleet" in caught.value.hint


@pytest.mark.parametrize("state", ["finished", "cancelled", "failed"])
def test_nothing_can_be_wanted_of_what_is_over(store: Store, state: str) -> None:
    """The error says how it ended, and that it can be run again."""
    store.campaigns.note(1, state, "as it is")
    calls: list[Callable[[], object]] = [
        lambda: store.campaigns.want("fleet", "run", "ann"),
        lambda: store.campaigns.change_budget("fleet", Budget(trials=200), "ann"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=f"over \\({state}: as it is\\)") as caught:
            call()
        assert "run --from" in caught.value.hint


def test_a_budget_can_be_changed(store: Store) -> None:
    """The order stays what it was; who changed what is an event, and no change is none."""
    store.campaigns.change_budget("fleet", Budget(trials=100), "ann")
    campaign = store.campaigns.change_budget("fleet", Budget(trials=200, per_workload=64), "ann")
    assert (campaign.budget.trials, campaign.order.budget.trials) == (200, 100)
    [_, event] = store.events.fetch("fleet")
    assert (event.kind, event.message) == (
        "campaign_budget",
        "per_workload None -> 64, trials 100 -> 200; changed by ann",
    )


def test_campaigns_of_a_killed_engine_are_interrupted(store: Store) -> None:
    """Those alone: others, submitted ones and those that are over stay as they are."""
    for number, name in enumerate(("other", "new", "done"), 2):
        assert submit(store, name) == number
    store.campaigns.note(1, "verifying", "", engine=ENGINE)
    store.campaigns.note(2, "running", "", engine=ENGINE | {"pid": 1})
    store.campaigns.note(4, "finished", "", engine=ENGINE)
    assert store.campaigns.interrupt(lambda engine: engine["pid"] == 4711) == ["fleet"]
    campaign = store.campaigns.require("fleet")
    assert (campaign.state, campaign.engine) == ("interrupted", None)
    assert "verifying" in campaign.reason
    states = [each.state for each in store.campaigns.fetch()]
    assert states == ["interrupted", "running", "submitted", "finished"]
    assert store.campaigns.interrupt(lambda engine: engine["pid"] == 4711) == []


def test_a_campaign_that_no_engine_takes_is_interrupted(store: Store, clocks: Clocks) -> None:
    """An engine that died before it took a campaign leaves it submitted: after a deadline it can be resumed."""
    for name in ("paused", "taken", "doomed"):
        submit(store, name)
    store.campaigns.want("paused", "pause", "ann")
    store.campaigns.note(3, "running", "", engine=ENGINE)
    clocks.pass_s(60)
    assert store.campaigns.interrupt_untaken() == []
    store.campaigns.want("fleet", "pause", "ann")
    store.campaigns.want("fleet", "run", "ann")
    clocks.pass_s(60)
    assert store.campaigns.interrupt_untaken() == ["doomed"]
    clocks.pass_s(60)
    assert store.campaigns.interrupt_untaken() == ["fleet"]
    assert [each.state for each in store.campaigns.fetch()] == ["interrupted", "submitted", "running", "interrupted"]
    assert store.campaigns.fetch_left(lambda _: False) == ["fleet", "doomed"]


def test_what_operators_wanted_outlives_a_killed_engine(store: Store) -> None:
    """What was paused stays so without an engine, what was to be cancelled is; a resume not heard is interrupted."""
    for name in ("unheard", "doomed"):
        submit(store, name)
    for number, wanted in enumerate(("pause", "run", "cancel"), 1):
        store.campaigns.note(number, "paused", "as wanted", engine=ENGINE)
        store.campaigns.want(("fleet", "unheard", "doomed")[number - 1], wanted, "ann")
    assert store.campaigns.interrupt(lambda _: True) == ["unheard"]
    campaigns = store.campaigns.fetch()
    assert [each.state for each in campaigns] == ["paused", "interrupted", "cancelled"]
    assert [each.engine for each in campaigns] == [None] * 3
    assert (campaigns[0].reason, campaigns[2].finished_at is not None) == ("as wanted", True)


def test_a_cancellation_cannot_be_taken_back(store: Store) -> None:
    """Neither another request nor an engine that is stopped before it noticed makes the campaign go on."""
    store.campaigns.note(1, "running", "", engine=ENGINE)
    store.campaigns.want("fleet", "cancel", "ann")
    assert store.campaigns.want("fleet", "run", "bob").wanted == "cancel"
    store.campaigns.note(1, "interrupted", "told to end")
    assert store.campaigns.require("fleet").state is CampaignState.CANCELLED


def test_an_engine_can_let_go_of_a_campaign(store: Store) -> None:
    """A paused campaign needs none; the next one finds it once it is resumed."""
    store.campaigns.note(1, "paused", "", engine=ENGINE)
    store.campaigns.note(1, "paused", "", engine={})
    assert store.campaigns.require("fleet").engine is None
    assert store.campaigns.want("fleet", "run", "ann").state is CampaignState.SUBMITTED


def test_a_campaign_can_be_made_from_anothers_workloads(store: Store) -> None:
    """What the store gave of a campaign's workloads, it takes for a copy."""
    copy = store.campaigns.require("fleet").order.model_copy(update={"name": "copy"})
    number = store.campaigns.submit(copy, "farm campaign run --from", store.workloads.fetch(1))
    assert store.workloads.fetch(number) == store.workloads.fetch(1)


def test_what_cannot_be_is_our_bug(store: Store) -> None:
    """A state, a wish or a campaign that there is not is an internal error."""
    calls: list[Callable[[], object]] = [
        lambda: store.campaigns.note(1, "happy", ""),
        lambda: store.campaigns.note(99, "running", ""),
        lambda: store.campaigns.save_progress(99, {}),
        lambda: store.campaigns.want("fleet", "win", "ann"),
        lambda: add(store, "c", board_type=""),
    ]
    for call in calls:
        with pytest.raises(InternalError):
            call()


def test_a_campaign_of_one_type_needs_no_type_in_its_trials(store: Store) -> None:
    """It is the campaign's own then, as for those of one command."""
    number = submit(store, "single", types=(TX2,))
    assert add(store, "c", campaign=number, board_type="")
    assert [each["board_type"] for each in store.trials.fetch(number)] == [TX2]


# Trials


def test_a_candidate_has_one_result_per_campaign_and_task(store: Store) -> None:
    """A duplicated straggler's second result is refused, with any number; other tasks and purposes are not."""
    assert add(store, "c", None, Status.BOARD_LOST)
    assert add(store, "c", 1.0, attempt=2)
    assert not add(store, "c", 2.0, attempt=3)
    assert not add(store, "c", None, Status.CRASHED, attempt=4)
    assert add(store, "c", None, Status.NOISY, attempt=5)
    assert add(store, "c", 1.0, board_type=TX2)
    assert add(store, "c", 1.0, operating_point="mode=MAXN")
    assert add(store, "c", 1.0, workload="w2")
    assert add(store, "c", 1.0, purpose=WINNER_TRIAL)
    assert add(store, "c", 1.0, purpose=WINNER_TRIAL, attempt=2)
    assert add(store, "c", None, Status.WRONG_RESULT, purpose=WINNER_TRIAL, attempt=3)
    assert len(store.trials.fetch_counted(1)) == 4


def test_resuming_finds_what_counted_and_what_was_tried(store: Store) -> None:
    """Results in the order of writing, attempts of candidates without one, and the time that boards were held."""
    add(store, "a", None, Status.BOARD_LOST, held_s=4.0)
    add(store, "b", None, Status.CRASHED, held_s=0.5)
    add(store, "a", 0.25, attempt=2, held_s=1.0)
    add(store, "d", None, Status.FARM_ERROR, board_type=TX2)
    add(store, "a", 0.5, purpose=WINNER_TRIAL, attempt=7, held_s=2.0)
    assert store.trials.fetch_counted(1) == [
        (candidate, f"[{candidate}]", "nano-1", median_s, False) for candidate, median_s in (("b", None), ("a", 0.25))
    ]
    assert add(store, "e", None, Status.WRONG_RESULT, attempt=3)
    assert store.trials.fetch_attempts(1) == {(TX2, "w1", "default", "d"): 1, (NANO, "w1", "default", "e"): 3}
    assert store.trials.fetch_board_seconds(1) == 7.5
    assert [each.candidate for each in store.trials.fetch_counted(1, (NANO, "w1", "default"))] == ["b", "a"]
    assert store.trials.fetch_counted(1, (TX2, "w1", "default")) == []
    assert (store.trials.fetch_counted(99), store.trials.fetch_attempts(99), store.trials.fetch_board_seconds(99)) == (
        [],
        {},
        0.0,
    )


def test_what_took_boards_down_is_told(store: Store) -> None:
    """Candidates under which boards failed twice are named, unless they count after all; other faults say nothing."""
    for attempt in (1, 2):
        add(store, "breaker", None, Status.BOARD_LOST, attempt=attempt)
        add(store, "unlucky", None, Status.BOARD_LOST, attempt=attempt)
        add(store, "farm", None, Status.FARM_ERROR, attempt=attempt)
    add(store, "once", None, Status.BOARD_LOST)
    add(store, "unlucky", 0.5, attempt=3)
    assert store.trials.fetch_board_breakers(1, 2) == [(NANO, "w1", "default", "breaker")]


def test_what_is_known_goes_by_the_trials_board_type(store: Store) -> None:
    """A campaign for two types tells what each of them measured, to searches, plans and prices alike."""
    add(store, "a", 1.0, held_s=3.0)
    add(store, "a", 0.5, board_type=TX2, held_s=1.0)
    add(store, "b", 0.25, board_type=TX2, held_s=1.0)
    known = store.trials.fetch_known_candidates("w1", TX2, "default", simulated=True)
    assert [(each.candidate, each.median_s) for each in known] == [("a", 0.5), ("b", 0.25)]
    assert store.totals.count_known_candidates(["w1"], NANO, simulated=True) == {("w1", "default"): 1}
    assert store.totals.fetch_trial_costs(TX2, simulated=True).held_s == 1.0


def test_a_winners_own_measurement_is_what_is_known_of_it(store: Store) -> None:
    """A low time by luck does not outlive the measurement that showed it to be luck."""
    add(store, "lucky", 0.5)
    add(store, "lucky", 0.75, purpose=WINNER_TRIAL)
    add(store, "steady", 0.625)
    known = store.trials.fetch_known_candidates("w1", NANO, "default", simulated=True)
    assert {each.candidate: each.median_s for each in known} == {"lucky": 0.75, "steady": 0.625}


def test_what_a_lying_board_measured_is_doubted(store: Store) -> None:
    """A candidate is doubted until another board has measured it; a sound trial, or a winner's, is believed instead."""
    for candidate in ("alone", "again", "won"):
        add(store, candidate, 0.5)
    assert store.trials.add_doubt("nano-1", 0, "it is slow") == 3
    assert store.trials.add_doubt("nano-2", 0, "so is this one") == 0
    # Another campaign has measured it on a board that can be believed.
    other = submit(store, "other")
    sound = Outcome(Status.OK, latency_s=(0.75,), board="nano-3", simulated=True)
    assert store.trials.add(Trial(other, "w1", "again", "default", 1, sound, "[again]", board_type=NANO))
    add(store, "won", 0.625, purpose=WINNER_TRIAL)
    known = store.trials.fetch_known_candidates("w1", NANO, "default", simulated=True)
    assert {each.candidate: (each.median_s, each.doubted) for each in known} == {
        "alone": (0.5, 1),
        "again": (0.75, 0),
        "won": (0.625, 0),
    }


def test_doubts_end_with_the_lie(store: Store) -> None:
    """What a board measured before and after is believed, at any setting of the time."""
    add(store, "early", 0.5)
    mark = store.trials.fetch_mark()
    store.session.wall_clock = lambda: 1.0
    add(store, "lie", 0.5)
    assert store.trials.add_doubt("nano-1", mark, "it is slow") == 1
    add(store, "late", 0.5)
    known = store.trials.fetch_known_candidates("w1", NANO, "default", simulated=True)
    assert {each.candidate: each.doubted for each in known} == {"early": 0, "lie": 1, "late": 0}


def test_trials_can_be_read_by_purpose(store: Store) -> None:
    """A trial is for the search unless it says otherwise."""
    add(store, "a")
    add(store, "b", purpose=WINNER_TRIAL)
    assert [each["candidate"] for each in store.trials.fetch(1)] == ["a", "b"]
    assert [each["candidate"] for each in store.trials.fetch(1, purpose=SEARCH_TRIAL)] == ["a"]
    assert [each["candidate"] for each in store.trials.fetch(purpose=WINNER_TRIAL)] == ["b"]


# Warm starts


def test_similar_trials_are_the_best_and_a_spread_of_the_rest(store: Store) -> None:
    """Half of a task's share are its best; the worst is there too; each comes with its workload, once."""
    for number in range(1, 41):
        add(store, f"c{number}", number / 64)
    add(store, "c1", 9.0, purpose=WINNER_TRIAL)
    rows = store.trials.fetch_similar(["w1", "w2"], simulated=True, per_task=10)
    assert [each.candidate for each in rows] == ["c1", "c2", "c3", "c4", "c5", *(f"c{n}" for n in range(12, 41, 7))]
    assert rows[0].workload is rows[1].workload
    assert rows[0] == (make_workload("w1"), NANO, "default", "c1", "[c1]", 1 / 64)


def test_similar_trials_share_the_limit_between_tasks(store: Store) -> None:
    """Every task gives as much, the best first, but the one that is asked for; other kinds and faults are left out."""
    for number in range(1, 9):
        for board_type, point, workload in (
            (TX2, "default", "w1"),
            (NANO, "mode=MAXN", "w1"),
            (NANO, "default", "w2"),
            (NANO, "default", "w1"),
        ):
            add(store, f"c{number}", number / 8, board_type=board_type, operating_point=point, workload=workload)
    add(store, "wrong", 0.001, board_type=TX2)
    add(store, "wrong", None, Status.WRONG_RESULT, board_type=TX2, purpose=WINNER_TRIAL)
    add(store, "lost", None, Status.BOARD_LOST, board_type=TX2)
    own = ("w1", NANO, "default")
    rows = store.trials.fetch_similar(["w1", "w2", "unmet"], simulated=True, exclude=own, limit=6)
    tasks = [(each.workload.hash, each.board_type, each.operating_point) for each in rows]
    assert len(set(tasks)) == 3
    assert own not in tasks
    assert sorted(tasks[:3]) == sorted(tasks[3:])
    assert [each.candidate for each in rows] == ["c1"] * 3 + ["c8"] * 3
    assert store.trials.fetch_similar(["w1"], simulated=False) == []
    assert store.trials.fetch_similar([], simulated=True) == []


# Records


def test_a_measured_winner_replaces_a_lucky_trial(store: Store) -> None:
    """It may be slower than what it replaces, brings its evidence, and luck of the same candidate cannot undo it."""
    evidence = {"boards": ["nano-1", "nano-2"], "samples": 12, "interval": [1.0, 1.25], "tie": False}
    assert store.records.save(make_record(1.0, "c"))
    assert not store.records.save(make_record(1.125, "c", evidence=evidence))
    assert store.records.save(make_record(1.125, "c", evidence=evidence), replace=True)
    assert not store.records.save(make_record(1.0, "c"))
    [kept] = store.records.fetch()
    assert (kept.median_s, kept.evidence) == (1.125, evidence)
    assert store.records.save(make_record(1.0, "faster"))
    assert store.records.fetch()[0].evidence is None


# Several processes, and their deaths


@contextlib.contextmanager
def engine_at(place: StoreLocation, first: int = 0) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A process that writes trials `first`, `first + 1`, …, and the lines in which it says so; killed at the end.

    It is killed after `CHILD_TIMEOUT_S` at the latest, so that reading always ends. All lines are read
    here: `communicate` would miss those that reading one line has taken along.
    """
    engine = run_python(_ENGINE, place, first)
    watchdog = threading.Timer(CHILD_TIMEOUT_S, engine.kill)
    watchdog.start()
    try:
        assert engine.stdout
        yield engine, iter(engine.stdout)
    finally:
        watchdog.cancel()
        engine.kill()
        engine.communicate(timeout=CHILD_TIMEOUT_S)


def test_operators_and_an_engine_share_the_store(store: Store, place: StoreLocation) -> None:
    """While an engine writes trial after trial, others read and wish; every wish is kept, and it heeds the last."""
    with engine_at(place) as (engine, lines):
        announced = [next(lines)]
        with Store(place) as operator:
            for number in range(1, 21):
                campaign = operator.campaigns.change_budget("fleet", Budget(trials=number), "bob")
                assert (campaign.state, campaign.budget) == ("running", Budget(trials=number))
                assert operator.campaigns.want("fleet", ("run", "pause")[number % 2], "bob").engine == ENGINE
            operator.campaigns.want("fleet", "cancel", "bob")
        announced += lines
        assert engine.wait(CHILD_TIMEOUT_S) == 0
    *numbers, last = [line.strip() for line in announced]
    assert last == "ended"
    counted = store.trials.fetch_counted(1)
    assert [each.candidate for each in counted] == [f"c{number}" for number in numbers]
    assert store.campaigns.require("fleet").state is CampaignState.CANCELLED
    wishes = [event for event in store.events.fetch("fleet") if event.kind in ("campaign_pause", "campaign_run")]
    assert len(wishes) == 20


def test_a_killed_engine_loses_one_trial_at_most(store: Store, place: StoreLocation) -> None:
    """Killed while it writes, each time somewhere else: what it announced is there, whole, and can be gone on from."""
    expected = 0
    for count in (1, 2, 7):
        with engine_at(place, expected) as (engine, lines):
            announced = [next(lines) for _ in range(count)]
            engine.kill()
            last = int([*announced, *lines][-1])
        counted = store.trials.fetch_counted(1)
        assert len(counted) in (last + 1, last + 2)
        assert [each.candidate for each in counted] == [f"c{n}" for n in range(len(counted))]
        assert {len(each.trace_json) for each in counted} == {100_000}
        campaign = store.campaigns.require("fleet")
        assert campaign.progress["counted"] in (last + 1, last + 2)
        assert store.campaigns.interrupt(lambda _: True) == ["fleet"]
        store.campaigns.want("fleet", "run", "ann")
        expected = len(counted)
    if isinstance(place, pathlib.Path):
        assert execute(place, "PRAGMA integrity_check") == [("ok",)]
        assert execute(place, "PRAGMA foreign_key_check") == []
    assert store.trials.fetch_board_seconds(1) == expected
    assert store.trials.fetch_attempts(1) == {}


@pytest.mark.usefixtures("store")
def test_of_two_campaigns_of_one_name_one_is_taken(place: StoreLocation) -> None:
    """Commands that submit the same file at once get one campaign and one refusal each, never two campaigns."""
    submitters = [run_python(_SUBMITTER, place, who) for who in ("ann", "bob", "eve")]
    answers = [submitter.communicate(timeout=CHILD_TIMEOUT_S)[0].strip() for submitter in submitters]
    assert sorted(answers) == ["2", "refused", "refused"]
    with Store(place) as store:
        assert store.campaigns.require("same").owner in ("ann", "bob", "eve")
        assert len(store.campaigns.fetch_searches()) == 2


def test_a_time_that_no_run_takes_counts_for_nothing(store: Store) -> None:
    """A store from a time when boards were believed resumes: the candidate has had its trial, and won nothing."""
    for index, median_s in enumerate((-1.0, 0.0, float("inf"), float("nan"), 2e-3, 1e-3)):
        assert add(store, f"c{index}", median_s)
    counted = store.trials.fetch_counted(1)
    wanted = [None, None, None, None, 2e-3, 1e-3]
    assert [row.median_s for row in counted] == wanted
    assert [row["median_s"] for row in store.trials.fetch(1)] == wanted
    assert [row.median_s for row in store.totals.fetch_course(1)] == wanted
    known = store.trials.fetch_known_candidates("w1", NANO, "default", True)
    assert [(row.candidate, row.median_s) for row in known] == [("c4", 2e-3), ("c5", 1e-3)]
    similar = store.trials.fetch_similar(["w1"], simulated=True)
    assert [each.candidate for each in similar] == ["c5", "c4"]


def test_a_record_that_no_run_gave_is_replaced(store: Store) -> None:
    """It is not shown either."""
    store.records.save(make_record(-1.0, "drifting"))
    assert store.records.fetch() == []
    assert store.records.save(make_record(1e-3, "c"))
    assert [each.candidate for each in store.records.fetch()] == ["c"]


def test_connecting_is_no_news(store: Store) -> None:
    """How every campaign begins is not in its history; that there was nothing to connect to is."""
    for state in ("running", "connecting", "running", "connecting", "waiting"):
        assert store.campaigns.note(1, state, "")
    kinds = [event.kind for event in store.events.fetch("fleet")]
    assert [kind for kind in kinds if kind != "campaign_submitted"] == ["campaign_running", "campaign_waiting"]
