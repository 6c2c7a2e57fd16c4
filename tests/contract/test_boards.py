"""What every store promises of boards: registered once, changed with care, every change with its reason."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from device_agent.protocol import Outcome, Status
from farm.crew.health import HealthLimits, Kind, Observation, decide_by
from farm.errors import InternalError, TransientError, UsageError
from farm.store import Store, golden_samples, parse_transport
from farm.store.standing import find_cause
from farm.values import DEFAULT_POINT, Board, Direct, GoldenSample, Health, State, Trial, Virtual
from tests.board_rows import make_quarantine
from tests.fleet_store import SSH, Clocks, kinds, observe, take
from tests.stored_workloads import make_workload


def test_a_new_board_is_offline_and_suspect(store: Store) -> None:
    """Until it was reached and probed; its description is stored unchanged."""
    store.boards.register("tx2-01", "jetson-tx2", Virtual(seed=3), by="me")
    shown = store.boards.require("tx2-01")
    assert (shown.state, shown.health, shown.seen_at, shown.simulated) == ("offline", "suspect", None, True)
    assert (shown.state_reason, shown.health_reason) == ("not reached yet", "not probed yet")
    known = store.boards.require("nano-01")
    assert (known.labels, parse_transport(known.transport)) == ({"rack": "2"}, SSH)
    json.dumps([board.model_dump(mode="json") for board in store.boards.fetch()], allow_nan=False)


@pytest.mark.parametrize("document", [{}, {"kind": "pigeon"}, {"kind": "ssh"}, {"kind": "direct", "password": "x"}])
def test_a_transport_that_nothing_writes(document: dict[str, str]) -> None:
    """Read back, it is our bug and no way to a board; there is no place for a secret in one."""
    with pytest.raises(InternalError, match="transport"):
        parse_transport(document)


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "ä", "a" * 64, "a\n"])
def test_names_that_cannot_be(store: Store, name: str) -> None:
    """A name is part of the tracker's key and of file names."""
    with pytest.raises(UsageError, match="cannot be a board's name"):
        store.boards.register(name, "local", Direct())


def test_a_name_is_given_once(store: Store) -> None:
    """A second board of a name is refused, with any type."""
    with pytest.raises(UsageError, match="already"):
        store.boards.register("nano-01", "jetson-tx2", SSH)


def test_labels_change_under_a_lease_but_the_way_to_the_board_does_not(store: Store) -> None:
    """A holder must not find itself on another machine; nothing given, nothing changed."""
    lease = take(store)
    assert store.boards.update("nano-01", labels={"rack": "3"})
    assert not store.boards.update("nano-01", labels={"rack": "3"}, transport=SSH, board_type="jetson-nano")
    with pytest.raises(TransientError, match="cannot be changed: left holds it"):
        store.boards.update("nano-01", transport=Direct())
    store.leases.release(lease)
    assert store.boards.update("nano-01", transport=Direct(9091))
    shown = store.boards.require("nano-01")
    assert (shown.labels, shown.state, shown.health) == ({"rack": "3"}, "offline", "suspect")
    with pytest.raises(UsageError, match="no board"):
        store.boards.update("nano-99", labels={})


def test_an_order_for_several_boards_is_all_or_none(store: Store) -> None:
    """Where one of them is unknown or held, nothing happens to the others."""
    store.boards.register("nano-02", "jetson-nano", Virtual())
    before = store.boards.fetch(), store.events.fetch_of_boards()
    drain = decide_by(Observation(Kind.DRAIN), HealthLimits())
    with pytest.raises(UsageError, match="nano-99"):
        store.boards.observe_several(["nano-01", "nano-99"], Kind.DRAIN, "op", drain)
    with pytest.raises(UsageError, match="nano-99"):
        store.boards.remove("nano-01", "nano-99")
    assert (store.boards.fetch(), store.events.fetch_of_boards()) == before
    assert set(store.boards.observe_several(["nano-01", "nano-02"], Kind.DRAIN, "op", drain)) == {"nano-01", "nano-02"}
    assert {board.health for board in store.boards.fetch()} == {"maintenance"}
    store.boards.remove("nano-01", "nano-02")
    assert store.boards.fetch() == []


def test_a_board_that_a_command_wrote_is_on_demand(store: Store) -> None:
    """Also where services missed it since; one that an operator registered is not."""
    store.boards.save(Board("vm", "local", False, {}))
    store.boards.register("desk", "local", Direct())
    store.boards.observe("desk", Kind.BACK, "test", decide_by(Observation(Kind.BACK), HealthLimits()))
    for _ in range(2):
        for name in ("vm", "desk"):
            store.boards.save(Board(name, "local", False, {}))
            observe(store, Kind.LOST, name)
        assert parse_transport(store.boards.require("vm").transport) == Direct(on_demand=True)
        assert store.boards.require("vm").state == "idle"
        assert parse_transport(store.boards.require("desk").transport) == Direct()
        assert store.boards.require("desk").state == "offline"


def test_a_replaced_board_keeps_its_name_and_nothing_else(store: Store) -> None:
    """What the old machine was found to be does not count for the new one; what happened stays, with a line between."""
    store.golden.add(sample(1.0))
    store.boards.save_description("nano-01", {"cpu_model": "old"}, simulated=False)
    observe(store, Kind.FAULT)
    observe(store, Kind.QUARANTINE)
    lease = store.leases.acquire("nano-01", "left", "tuning", allowed=frozenset(Health))
    with pytest.raises(TransientError, match="cannot be replaced: left holds it"):
        store.boards.replace("nano-01")
    store.leases.release(lease)
    events = len(store.events.fetch_of_boards("nano-01"))
    new = dataclasses.replace(SSH, host_key="SHA256:BBBB")
    store.boards.replace("nano-01", transport=new, labels={"serial": "42"}, reason="serial 42", by="op")
    shown = store.boards.require("nano-01")
    assert (shown.state, shown.health, shown.description, shown.seen_at) == ("offline", "suspect", {}, None)
    assert (parse_transport(shown.transport), shown.labels) == (new, {"serial": "42"})
    assert store.golden.fetch("jetson-nano", "golden/1", DEFAULT_POINT, simulated=False) == {}
    happened = store.events.fetch_of_boards("nano-01")
    assert len(happened) == events + 1
    assert (happened[-1].kind, happened[-1].by) == ("replaced", "op")
    assert "serial 42" in happened[-1].reason
    observe(store, Kind.FAULT)  # the first of the new one
    assert store.boards.require("nano-01").health == "suspect"


def test_a_retired_board_is_not_idle(store: Store) -> None:
    """The farm does not connect to it; cleared, it is as before until services find out."""
    observe(store, Kind.RETIRE)
    shown = store.boards.require("nano-01")
    assert (shown.state, shown.state_reason) == ("offline", "retired: the farm does not connect to it")
    observe(store, Kind.CLEAR)
    assert store.boards.require("nano-01").state == "idle"


def test_a_leased_board_is_not_removed(store: Store, clocks: Clocks) -> None:
    """Once it is free it is; what happened to it stays."""
    store.golden.add(sample(1.0))
    take(store, ttl_s=30)
    with pytest.raises(TransientError, match="cannot be removed"):
        store.boards.remove("nano-01")
    clocks.pass_s(30)
    store.boards.remove("nano-01", by="operator")
    assert store.boards.fetch() == []
    assert kinds(store)[-1] == "removed"
    with pytest.raises(UsageError, match="no board"):
        store.boards.remove("nano-01")


def test_a_seen_board_keeps_what_was_registered(store: Store) -> None:
    """What an agent says of itself leaves labels, transport, health and lease alone."""
    take(store)
    before = store.boards.require("nano-01")
    store.boards.save(Board("nano-01", "jetson-nano", simulated=False, description={"cores": 4}))
    after = store.boards.require("nano-01")
    assert after.seen_at is not None
    assert after == before.model_copy(update={"description": {"cores": 4}, "seen_at": after.seen_at})


def test_every_change_is_an_event_with_its_reason(store: Store) -> None:
    """From what to what, why, and by whom; a board that comes back moves twice."""
    observe(store, Kind.LOST)
    observe(store, Kind.BACK)
    events = store.events.fetch_of_boards("nano-01")
    assert [(event.kind, event.before, event.after) for event in events] == [
        ("registered", None, "suspect"),
        ("back", "offline", "idle"),
        ("probe_passed", "suspect", "good"),
        ("lost", "idle", "offline"),
        ("back", "offline", "idle"),
        ("back", "good", "suspect"),
    ]
    assert all(event.reason and event.by for event in events)


def test_what_is_not_worth_noting_is_no_event(store: Store) -> None:
    """A good board may be probed every minute for years."""
    before = kinds(store)
    observe(store, Kind.PROBE_PASSED)
    assert kinds(store) == before


def test_faults_are_counted_over_transactions(store: Store, clocks: Clocks) -> None:
    """The history that decides is the store's, so it outlives its observers, and each fault is an event."""
    for _ in range(3):
        clocks.pass_s(10)
        last = observe(store, Kind.FAULT)
    assert last.standing.health is Health.QUARANTINED
    assert kinds(store)[-3:] == ["fault"] * 3


def test_a_refused_command_changes_nothing(store: Store) -> None:
    """The error goes to who gave it, and no event is kept."""
    observe(store, Kind.UNSAFE)
    before = kinds(store)
    with pytest.raises(UsageError, match="does not apply"):
        observe(store, Kind.DRAIN)
    assert kinds(store) == before


# The golden kernel


def sample(median_s: float, board: str = "nano-01", **fields: Any) -> GoldenSample:
    values = {"kernel": "golden/1", "operating_point": "default", "samples_s": (median_s,), "simulated": False}
    return GoldenSample(board=board, median_s=median_s, **(values | fields))


def test_golden_times_are_kept_apart(store: Store) -> None:
    """By board, kernel, point and whether they are simulated; oldest first, as many as asked for."""
    store.boards.save(Board("b", "jetson-nano", simulated=False))
    store.boards.save(Board("c", "local", simulated=False))
    for number in (1.0, 2.0, 3.0):
        store.golden.add(sample(number))
    for other in ({"kernel": "golden/2"}, {"operating_point": "maxn"}, {"simulated": True}, {"board": "c"}):
        store.golden.add(sample(9.0, **other))
    store.golden.add(sample(4.0, "b", samples_s=(4.0, 5.0)))
    found = store.golden.fetch("jetson-nano", "golden/1", "default", simulated=False, newest=2)
    assert {board: [run.median_s for run in runs] for board, runs in found.items()} == {
        "nano-01": [2.0, 3.0],
        "b": [4.0],
    }
    assert found["b"][0].samples_s == (4.0, 5.0)
    assert found["b"][0].at > 0
    assert set(store.golden.fetch("jetson-nano", "golden/1", "default", simulated=False, board="b")) == {"b"}


def test_a_golden_time_that_no_run_takes_counts_for_nothing(store: Store) -> None:
    """It would make every honest run after it look like drift."""
    for median_s in (-1.0, 2.0, 0.0):
        store.golden.add(sample(median_s))
    [runs] = store.golden.fetch("jetson-nano", "golden/1", "default", simulated=False).values()
    assert [run.median_s for run in runs] == [2.0]


def test_the_latest_golden_run_is_found(store: Store) -> None:
    """Of whichever kernel it is, the newest run of the board itself; None where there was none."""
    store.boards.save(Board("b", "jetson-nano", simulated=False))
    assert store.golden.find_last("nano-01") is None
    for kernel, median_s in (("a/1", 1.0), ("b/1", 2.0)):
        store.golden.add(sample(median_s, kernel=kernel))
    found = store.golden.find_last("nano-01")
    assert (found.kernel, found.median_s) == ("b/1", 2.0)
    assert store.golden.find_last("b") is None


def test_golden_history_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A board that is probed for years keeps the last runs only, per kernel and point."""
    monkeypatch.setattr(golden_samples, "GOLDEN_KEPT", 3)
    store.golden.add(sample(9.0, operating_point="maxn"))
    for number in range(1, 6):
        store.golden.add(sample(float(number)))
    [runs] = store.golden.fetch("jetson-nano", "golden/1", "default", simulated=False).values()
    assert [run.median_s for run in runs] == [3.0, 4.0, 5.0]
    assert store.golden.fetch("jetson-nano", "golden/1", "maxn", simulated=False)
    with pytest.raises(UsageError, match="no board"):
        store.golden.add(sample(1.0, "nano-99"))


def test_a_description_leaves_the_registered_type_alone(store: Store) -> None:
    """What a board says of itself is kept with the time; what it was registered as is the operator's."""
    store.boards.save_description("nano-01", {"board_type": "local"}, simulated=True)
    shown = store.boards.require("nano-01")
    assert (shown.board_type, shown.description) == ("jetson-nano", {"board_type": "local"})
    assert shown.simulated
    assert shown.seen_at is not None
    with pytest.raises(UsageError, match="no board 'nano-99'"):
        store.boards.save_description("nano-99", {}, simulated=False)


def test_a_quarantine_says_how_long_it_has_cooled(store: Store, clocks: Clocks) -> None:
    """On the clock that cool-downs are judged by, so that planning probes needs no guess; else there is none."""
    assert store.boards.require("nano-01").quarantine is None
    for _ in range(3):
        observe(store, Kind.PROBE_FAILED)
    clocks.pass_s(70.0)
    assert store.boards.require("nano-01").quarantine == make_quarantine(70.0)
    observe(store, Kind.QUARANTINE)
    assert store.boards.require("nano-01").quarantine == make_quarantine(held=True)


def test_a_suspect_shows_its_newest_reason(store: Store) -> None:
    """A board that fails its first probe is no longer "not probed yet"; since when it is suspect stays."""
    store.boards.register("tx2-01", "jetson-tx2", Virtual())
    since = store.boards.require("tx2-01").health_since
    for kind, words in ((Kind.PROBE_FAILED, "a probe failed"), (Kind.MISFIT, "does not fit")):
        observe(store, kind, "tx2-01")
        shown = store.boards.require("tx2-01")
        assert words in shown.health_reason
        assert shown.health_since == since
    observe(store, Kind.QUARANTINE, "tx2-01")
    observe(store, Kind.PROBE_FAILED, "tx2-01")
    assert "by an operator" in store.boards.require("tx2-01").health_reason


def test_a_board_was_last_seen_when_it_last_did_something(store: Store, clocks: Clocks) -> None:
    """A trial, a visit of a sweep and a golden run count as a probe does; a trial that the board lost does not."""
    number = store.campaigns.start("farm tune", "m", "", "jetson-nano", 9, {})
    store.workloads.save(number, [make_workload()])

    def run(candidate: str, status: Status) -> float | None:
        clocks.wall += 60
        latency_s = (1e-3,) if status is Status.OK else ()
        outcome = Outcome(status, latency_s=latency_s, board="nano-01")
        store.trials.add(Trial(number, "w", candidate, DEFAULT_POINT, 1, outcome, "[]"))
        seen_at: float | None = store.boards.require("nano-01").seen_at
        return seen_at

    assert run("a", Status.OK) == clocks.wall
    assert run("b", Status.CRASHED) == clocks.wall
    before = clocks.wall
    assert run("c", Status.BOARD_LOST) == before


def test_one_reason_keeps_a_board_from_being_used(store: Store) -> None:
    """What was decided of a board counts before its connection, and that before a doubt; the reason is the newest."""
    shown = store.boards.require("nano-01")
    good = shown.model_copy(update={"state": State.IDLE, "health": Health.GOOD})
    assert find_cause(good) is None
    offline = good.model_copy(update={"state": State.OFFLINE, "state_reason": "no route"})
    for row, what, why in (
        (offline, "offline", "no route"),
        (offline.model_copy(update={"health": Health.SUSPECT, "health_reason": "doubt"}), "offline", "no route"),
        (good.model_copy(update={"health": Health.SUSPECT, "health_reason": "doubt"}), "suspect", "doubt"),
        (
            offline.model_copy(update={"health": Health.MAINTENANCE, "health_reason": "a new fan"}),
            "maintenance",
            "a new fan",
        ),
    ):
        found = find_cause(row)
        assert (found.what, found.why) == (what, why)
    store.boards.note_unreachable("nano-01", "it cannot be reached: not while it can")
    assert store.boards.require("nano-01").state_reason == shown.state_reason
    observe(store, Kind.LOST)
    store.boards.note_unreachable("nano-01", "it cannot be reached: its key has changed")
    assert store.boards.require("nano-01").state_reason == "it cannot be reached: its key has changed"
