"""When a board is due for a probe: never where it may not be, soon where it is doubted, seldom where it is good."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.crew.health import HealthLimits
from farm.services.probe_rules import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    LAST_SKIP_PAUSE_S,
    MOST_AT_ONCE,
    QUARANTINE_PAUSE_S,
    SETTLE_S,
    ProbePast,
    note_report,
    plan_next_s,
    plan_pause_s,
    plan_probes,
)
from farm.types.documents import BoardInfo
from farm.values import Health, State
from tests.board_rows import make_lease, make_quarantine, make_row

INTERVAL_S = 600.0
PASSED, FAILED = {"passed": True}, {"passed": False}
SKIPPED = {"passed": False, "skipped": True}


def row(health: str, state: str = "idle", **changes: Any) -> BoardInfo:
    usual = {"name": "a", "lease": make_lease() if state == "leased" else None}
    usual["quarantine"] = make_quarantine() if health == "quarantined" else None
    return make_row(health=health, state=state, **usual | changes)


pasts = st.none() | st.builds(
    ProbePast, st.floats(0, 1e6), st.booleans(), st.booleans(), st.integers(min_value=0, max_value=2000)
)
rows = st.builds(
    lambda health, state, cooling_s, held, name: row(
        health, state, name=name, quarantine=make_quarantine(cooling_s, held) if health == "quarantined" else None
    ),
    st.sampled_from([str(health) for health in Health]),
    st.sampled_from([str(state) for state in State]),
    st.floats(0, 1e5),
    st.booleans(),
    st.sampled_from([f"board-{number}" for number in range(12)]),
)


@given(st.lists(rows, unique_by=lambda one: one.name), st.dictionaries(st.sampled_from("abc"), pasts), st.data())
def test_what_may_not_be_probed_never_is(fleet: list[BoardInfo], extra: dict[str, Any], data: st.DataObject) -> None:
    """With any history: leased, offline, busy, and out of service are left alone, and the bound holds."""
    known = {one.name: data.draw(pasts) for one in fleet} | extra
    past = {name: what for name, what in known.items() if what is not None}
    busy = data.draw(st.sets(st.sampled_from([f"board-{number}" for number in range(12)])))
    now_s, interval_s = data.draw(st.floats(0, 1e6)), data.draw(st.sampled_from([0.0, 1.0, INTERVAL_S]))
    chosen = plan_probes(fleet, past, busy, now_s, interval_s)
    by_name = {one.name: one for one in fleet}
    assert len(set(chosen)) == len(chosen) <= max(0, MOST_AT_ONCE - len(busy))
    assert not set(chosen) & busy
    for name in chosen:
        one = by_name[name]
        assert one.state == "idle"
        assert one.health in ("good", "suspect", "quarantined")
        assert one.health != "good" or interval_s > 0
        assert one.health != "quarantined" or not one.quarantine.held
    healths = [by_name[name].health == "good" for name in chosen]
    assert healths == sorted(healths)  # doubted boards first


@given(st.lists(rows, min_size=1, unique_by=lambda one: one.name), st.floats(0, 1e6))
def test_everybody_in_doubt_gets_a_turn(fleet: list[BoardInfo], now_s: float) -> None:
    """A fleet of suspects that pass their probes is through after as many rounds as it takes, no board twice."""
    waiting = [one.model_copy(update={"state": State.IDLE, "lease": None, "health": Health.SUSPECT}) for one in fleet]
    past: dict[str, ProbePast] = {}
    rounds = 0
    while chosen := plan_probes(waiting, past, (), now_s, INTERVAL_S):
        rounds += 1
        past |= {name: note_report(None, PASSED, now_s) for name in chosen}
    assert len(past) == len(waiting)
    assert rounds == -(-len(waiting) // MOST_AT_ONCE)


@given(st.lists(st.sampled_from([PASSED, FAILED, SKIPPED]), min_size=1, max_size=30))
def test_pauses_grow_and_are_bounded(reports: list[dict[str, Any]]) -> None:
    """Each failure in a row doubles the pause up to its bound; a pass takes it away."""
    past = None
    for report in reports:
        before = past
        past = note_report(past, report, 0.0)
        pause_s = plan_pause_s(past)
        if report is PASSED:
            assert pause_s == 0
            continue
        bound_s = LAST_SKIP_PAUSE_S if report is SKIPPED else LAST_PAUSE_S
        assert FIRST_PAUSE_S <= pause_s <= bound_s
        if before is not None and before.tries and before.skipped == past.skipped:
            assert pause_s == min(bound_s, 2 * plan_pause_s(before))


def test_a_good_board_waits_for_the_interval() -> None:
    """Before first use, and whenever it became suspect; but not again before the store could have said otherwise. With
    an interval of 0 it is probed only once something made it suspect. A probe that could not be made is tried again
    soon.
    """
    assert plan_next_s(row("suspect"), None, 100.0, 0.0) == 100.0
    passed = note_report(None, PASSED, 100.0)
    assert plan_next_s(row("suspect"), passed, 100.5, 0.0) == 100.0 + SETTLE_S
    assert plan_next_s(row("suspect"), passed, 500.0, 0.0) == 500.0
    passed = note_report(None, PASSED, 100.0)
    assert plan_next_s(row("good"), passed, 101.0, INTERVAL_S) == 100.0 + INTERVAL_S
    assert plan_next_s(row("good"), passed, 101.0, 0.0) is None
    assert plan_next_s(row("good"), None, 101.0, INTERVAL_S) == 101.0
    skipped = note_report(note_report(None, PASSED, 0.0), SKIPPED, 700.0)
    assert plan_next_s(row("good"), skipped, 701.0, INTERVAL_S) == 700.0 + FIRST_PAUSE_S


def test_a_quarantined_board_cools_down_first() -> None:
    """Then its probes keep a distance; where an operator ordered it there are none."""
    cooldown_s = HealthLimits().cooldown_s
    cooling = row("quarantined", quarantine={"cooling_s": 100.0, "held": False})
    assert plan_next_s(cooling, None, 0.0, INTERVAL_S) == cooldown_s - 100.0
    cooled = row("quarantined", quarantine={"cooling_s": cooldown_s + 5.0, "held": False})
    assert plan_next_s(cooled, note_report(None, PASSED, 1000.0), 1001.0, 0.0) == 1000.0 + QUARANTINE_PAUSE_S
    assert plan_next_s(row("quarantined", quarantine={"cooling_s": 1e9, "held": True}), None, 0.0, 1.0) is None


@pytest.mark.parametrize("health", ["maintenance", "unsafe", "retired"])
def test_what_an_operator_has_is_his(health: str) -> None:
    """No probe changes these."""
    assert plan_next_s(row(health), None, 0.0, INTERVAL_S) is None
