"""The rule of a board's health: what each observation does, and what no sequence of them may do."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.crew.health import COMMANDS, HealthLimits, Kind, Observation, transition
from farm.errors import UsageError
from farm.values import Health, HealthHistory, Standing, State, Transition

LIMITS = HealthLimits(faults=3, window_s=100.0, cooldown_s=50.0, passes=2)
OUT_OF_SERVICE = frozenset({Health.MAINTENANCE, Health.UNSAFE, Health.RETIRED})
BAD_NEWS = (
    Kind.PROBE_FAILED, Kind.FAULT, Kind.THROTTLED, Kind.DRIFTED, Kind.SLOW_SENSORS, Kind.MISFIT, Kind.INVALID_REPLY,
)  # fmt: skip

STANDINGS = [
    Standing(reachable, leased, health)
    for reachable, leased, health in itertools.product((True, False), (True, False), Health)
]


def step(board: Transition, kind: Kind, now_s: float = 0.0, detail: str = "") -> Transition:
    return transition(board.standing, Observation(kind, detail), board.history, LIMITS, now_s)


def board(health: Health, history: HealthHistory | None = None) -> Transition:
    return Transition(Standing(True, False, health), history or HealthHistory(), "")


def walk(start: Transition, *steps: tuple[Kind, float]) -> Transition:
    for kind, now_s in steps:
        start = step(start, kind, now_s)
    return start


@pytest.mark.parametrize("health", [Health.GOOD, Health.SUSPECT, Health.QUARANTINED, Health.MAINTENANCE])
def test_a_board_that_attacked_is_out_until_an_operator_clears_it(health: Health) -> None:
    """One attack is enough, and no probe, however late, brings it back."""
    after = step(board(health), Kind.HOSTILE, 0.0, "it sent a call")
    assert after.standing.health is Health.QUARANTINED
    assert "it sent a call" in after.reason
    assert walk(after, *[(Kind.PROBE_PASSED, 1e6 + n) for n in range(9)]).standing.health is Health.QUARANTINED
    assert step(after, Kind.HOSTILE, 1.0) == Transition(after.standing, after.history, "")
    assert step(after, Kind.CLEAR, 2.0).standing.health is Health.SUSPECT


# One step from everywhere


@pytest.mark.parametrize("kind", Kind)
def test_every_step_is_one_change_with_a_reason(kind: Kind) -> None:
    """Each observation of each board gives one standing; a change has a reason; only commands are ever refused."""
    history = HealthHistory(faults_s=(1.0, 2.0), passes=5)
    for standing in STANDINGS:
        try:
            after = transition(standing, Observation(kind), history, LIMITS, 60.0)
        except UsageError:
            assert kind in COMMANDS, standing
            continue
        assert isinstance(after.standing.state, State), standing
        assert isinstance(after.standing.health, Health), standing
        if after.standing != standing:
            assert after.reason, standing
        # An observation moves the health or the lease; only coming back moves two things at once.
        moved = [
            field.name
            for field in dataclasses.fields(Standing)
            if getattr(standing, field.name) != getattr(after.standing, field.name)
        ]
        assert len(moved) <= 1 or (kind is Kind.BACK and moved == ["reachable", "health"]), standing


@pytest.mark.parametrize(
    ("kind", "done"),
    [
        (Kind.DRAIN, {Health.MAINTENANCE}),
        (Kind.UNDRAIN, {Health.GOOD, Health.SUSPECT}),
        (Kind.CLEAR, {Health.GOOD}),
        (Kind.RETIRE, {Health.RETIRED}),
    ],
)
def test_a_command_that_is_carried_out_already_changes_nothing(kind: Kind, done: set[Health]) -> None:
    """Given twice, it is no error, and nothing is said to have happened."""
    for health in done:
        history = HealthHistory(passes=2, faults_s=(1.0,))
        assert step(board(health, history), kind) == Transition(Standing(True, False, health), history, "")


@pytest.mark.parametrize(
    ("health", "possible", "done"),
    [
        (Health.GOOD, {Kind.DRAIN, Kind.QUARANTINE, Kind.RETIRE}, {Kind.UNDRAIN, Kind.CLEAR}),
        (Health.SUSPECT, {Kind.DRAIN, Kind.QUARANTINE, Kind.CLEAR, Kind.RETIRE}, {Kind.UNDRAIN}),
        (Health.QUARANTINED, {Kind.DRAIN, Kind.QUARANTINE, Kind.CLEAR, Kind.RETIRE}, set()),
        (Health.MAINTENANCE, {Kind.UNDRAIN, Kind.QUARANTINE, Kind.RETIRE}, {Kind.DRAIN}),
        (Health.UNSAFE, {Kind.CLEAR, Kind.RETIRE}, set()),
        (Health.RETIRED, {Kind.CLEAR}, {Kind.RETIRE}),
    ],
)
def test_commands_apply_where_they_make_sense(health: Health, possible: set[Kind], done: set[Kind]) -> None:
    """The commands that each health admits, and those that it shows as carried out; the others are refused."""
    for kind in COMMANDS - done:
        if kind in possible:
            assert step(board(health), kind).reason
        else:
            with pytest.raises(UsageError, match=health) as caught:
                step(board(health), kind)
            assert set(caught.value.hint.removeprefix("Possible: ").rstrip(".").split(", ")) == possible


# The ways through


def test_what_passes_makes_good_and_is_noted_once() -> None:
    """That is how a new board, and one that came back, gets its first work. A probe of a good board, a second loss and
    a second return have no reason, so that no notice is sent.
    """
    after = step(board(Health.SUSPECT), Kind.PROBE_PASSED)
    assert (after.standing.health, after.reason) == (Health.GOOD, "a probe passed")
    assert step(board(Health.GOOD), Kind.PROBE_PASSED).reason == ""
    assert step(board(Health.GOOD), Kind.BACK).reason == ""
    assert step(step(board(Health.GOOD), Kind.LOST), Kind.LOST).reason == ""


@pytest.mark.parametrize("kind", BAD_NEWS)
def test_bad_news_makes_a_good_board_suspect(kind: Kind) -> None:
    """One sign of trouble is enough to want a probe before the next work, and its detail is in the reason."""
    after = step(board(Health.GOOD), kind, detail="zone CPU at 97 C")
    assert after.standing.health is Health.SUSPECT
    assert "zone CPU at 97 C" in after.reason


def test_k_faults_within_the_window_quarantine() -> None:
    """Passing probes between them do not help."""
    after = walk(
        board(Health.GOOD),
        (Kind.FAULT, 0),
        (Kind.PROBE_PASSED, 10),
        (Kind.PROBE_FAILED, 20),
        (Kind.PROBE_PASSED, 30),
        (Kind.FAULT, 99),
    )
    assert after.standing.health is Health.QUARANTINED
    assert "3 faults within 100 s" in after.reason


def test_faults_count_for_a_window_and_start_a_cool_down_over() -> None:
    """The window ends before the first fault's time is reached again. And the count of passing probes."""
    after = walk(board(Health.GOOD), (Kind.FAULT, 0), (Kind.FAULT, 50), (Kind.FAULT, 100))
    assert after.standing.health is Health.SUSPECT
    assert after.history.faults_s == (50, 100)
    quarantined = walk(board(Health.GOOD), *[(Kind.FAULT, 0.0)] * 3)
    after = walk(quarantined, (Kind.PROBE_PASSED, 55), (Kind.PROBE_FAILED, 56), *[(Kind.PROBE_PASSED, 105.0)] * 5)
    assert after.standing.health is Health.QUARANTINED
    assert walk(after, *[(Kind.PROBE_PASSED, 106.0)] * 2).standing.health is Health.GOOD


@pytest.mark.parametrize("kind", [Kind.THROTTLED, Kind.DRIFTED, Kind.SLOW_SENSORS, Kind.MISFIT])
def test_doubts_never_quarantine(kind: Kind) -> None:
    """A hot or drifting board stays suspect, however often it is said."""
    assert walk(board(Health.GOOD), *[(kind, 0.0)] * 50).standing.health is Health.SUSPECT


def test_a_cool_down_and_passing_probes_end_a_quarantine() -> None:
    """Probes during the cool-down do not count, and as many as asked for must pass in a row after it."""
    quarantined = walk(board(Health.GOOD), *[(Kind.FAULT, 0.0)] * 3)
    early = walk(quarantined, *[(Kind.PROBE_PASSED, 49.0)] * 5)
    assert early.standing.health is Health.QUARANTINED
    once = step(early, Kind.PROBE_PASSED, 50)
    assert once.standing.health is Health.QUARANTINED
    after = step(once, Kind.PROBE_PASSED, 60)
    assert (after.standing.health, after.reason) == (Health.GOOD, "2 probes passed in a row")
    assert step(after, Kind.FAULT, 61).standing.health is Health.SUSPECT, "old faults are forgiven"


@pytest.mark.parametrize("kind", [Kind.THROTTLED, Kind.DRIFTED, Kind.SLOW_SENSORS, Kind.MISFIT])
def test_a_doubt_in_quarantine_breaks_the_row(kind: Kind) -> None:
    """Probes must pass in a row, without a sign of trouble between them."""
    quarantined = walk(board(Health.GOOD), *[(Kind.FAULT, 0.0)] * 3)
    after = walk(quarantined, (Kind.PROBE_PASSED, 60), (kind, 61), (Kind.PROBE_PASSED, 62))
    assert after.standing.health is Health.QUARANTINED


def test_an_operators_quarantine_does_not_end_by_itself() -> None:
    """Only the operator knows why it was ordered. A fault meanwhile does not turn it into one that ends by itself."""
    held = step(board(Health.GOOD), Kind.QUARANTINE, 0)
    assert walk(held, *[(Kind.PROBE_PASSED, 1e6)] * 99).standing.health is Health.QUARANTINED
    cleared = walk(held, (Kind.CLEAR, 1), (Kind.PROBE_PASSED, 2))
    assert cleared.standing.health is Health.GOOD
    held = walk(board(Health.GOOD), (Kind.QUARANTINE, 0), (Kind.FAULT, 1))
    assert walk(held, *[(Kind.PROBE_PASSED, 1e6)] * 99).standing.health is Health.QUARANTINED


def test_what_outranks_what() -> None:
    """A board whose clocks are loose is unsafe even in quarantine or maintenance. A leased board that cannot be reached
    is offline, and leased again if the lease outlives the cut. It may have rebooted; other healths than good are
    left alone.
    """
    for health in Health:
        expected = Health.RETIRED if health is Health.RETIRED else Health.UNSAFE
        assert step(board(health), Kind.UNSAFE).standing.health is expected
    lost = step(Transition(Standing(True, True, Health.GOOD), HealthHistory(), ""), Kind.LOST)
    assert lost.standing.state is State.OFFLINE
    assert step(lost, Kind.BACK).standing.state is State.LEASED
    for health in Health:
        expected = Health.SUSPECT if health is Health.GOOD else health
        assert walk(board(health), (Kind.LOST, 0), (Kind.BACK, 1)).standing.health is expected


@pytest.mark.parametrize(
    "wrong", [{"faults": 0}, {"passes": 0}, {"suspect_passes": 0}, {"window_s": 0}, {"cooldown_s": -1}]
)
def test_limits_that_limit_nothing_are_refused(wrong: dict[str, int]) -> None:
    """No setting lets a board out of quarantine without a probe."""
    with pytest.raises(ValueError, match="1 or more"):
        HealthLimits(**wrong)


# Whole lives

observed = st.tuples(st.sampled_from(Kind), st.floats(0, 40))
starts = st.builds(Standing, st.booleans(), st.booleans(), st.sampled_from(Health))


@given(starts, st.lists(observed, max_size=60))
def test_no_life_returns_a_board_to_service_without_an_operator(
    start: Standing, life: list[tuple[Kind, float]]
) -> None:
    """Over any sequence of observations: out of service only a command leads back, and to good only a passing probe.

    From quarantine only after the cool-down, from an operator's not at all; and every change has its reason.
    """
    now_s, quarantined_at = 0.0, 0.0
    last_command: Kind | None = None
    current = Transition(start, HealthHistory(), "")
    for kind, wait_s in life:
        now_s += wait_s
        before = current
        try:
            current = step(before, kind, now_s)
        except UsageError:
            continue
        health, was = current.standing.health, before.standing.health
        assert current.standing == before.standing or current.reason
        last_command = kind if kind in COMMANDS else last_command
        if was in OUT_OF_SERVICE and health not in OUT_OF_SERVICE:
            assert kind in COMMANDS or (kind is Kind.HOSTILE and health is Health.QUARANTINED)
        if health is Health.QUARANTINED and (
            was is not health or kind in (Kind.FAULT, Kind.PROBE_FAILED, Kind.INVALID_REPLY)
        ):
            quarantined_at = now_s
        if health is Health.GOOD and was is not Health.GOOD:
            assert kind is Kind.PROBE_PASSED
            assert was in (Health.SUSPECT, Health.QUARANTINED)
            if was is Health.QUARANTINED:
                assert last_command is not Kind.QUARANTINE
                assert now_s - quarantined_at >= LIMITS.cooldown_s
        assert len(current.history.faults_s) < LIMITS.faults
        assert current.history.passes < max(LIMITS.passes, LIMITS.suspect_passes)


@given(starts, st.lists(observed, max_size=40))
def test_the_rule_is_pure(start: Standing, life: list[tuple[Kind, float]]) -> None:
    """Equal lives end equally, and what is put in is left as it was."""

    def live() -> list[Transition]:
        current, now_s, seen = Transition(start, HealthHistory(), ""), 0.0, []
        for kind, wait_s in life:
            now_s += wait_s
            try:
                current = step(current, kind, now_s)
            except UsageError:
                continue
            seen.append(current)
        return seen

    assert live() == live()
