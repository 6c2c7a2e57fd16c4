"""What an outcome says of its board: kept, changed where the board was no longer ours, told to the farm."""

from __future__ import annotations

import pytest

from device_agent.protocol import Outcome, PinReport, PinStatus, Status
from farm.connectivity.tracker import Tracker
from farm.crew.health import Kind
from farm.crew.site import Blame, pin_outcome
from farm.errors import (
    BoardBusyError,
    BoardHostileError,
    BoardLostError,
    BoardUnsafeError,
    FarmError,
    InvalidReplyError,
    LeaseOverError,
    PermanentError,
)


class Place:
    tracker = Tracker("127.0.0.1", 1)
    key = "jetson-nano/n1"
    lease = None
    has_board = True

    def __init__(self, ours: bool = True, can_change: bool = True) -> None:
        self.ours, self.can_change = ours, can_change
        self.seen: list[Kind] = []
        self.refused: list[LeaseOverError] = []

    def ensure_alive(self) -> list[str]:
        return []

    def restart_agent(self) -> bool:
        return False

    def confirm(self) -> bool:
        return self.ours

    def note_refusal(self, error: LeaseOverError) -> None:
        self.refused.append(error)

    def observe(self, kind: Kind, detail: str) -> None:
        self.seen.append(kind)


def test_what_is_held_against_a_board_of_ours() -> None:
    """A fault on the board's side is reported to the farm; the outcome stays. A trial that ended well before the board
    was left counts. A lost connection is the board's fault; a later lease is not, and the store records its number.
    """
    place = Place()
    outcome = Outcome(Status.BOARD_LOST, "hung up")
    assert Blame(place).judge(outcome) == outcome
    assert place.seen == [Kind.FAULT]
    outcome = Outcome(Status.OK, latency_s=(1.0,))
    assert Blame(Place(ours=False)).judge(outcome) == outcome
    place = Place()
    assert Blame(place).judge_error(BoardLostError("hung up")).status is Status.BOARD_LOST
    assert place.seen == [Kind.FAULT]
    error = LeaseOverError("a later one")
    assert Blame(place).judge_error(error).status is Status.FARM_ERROR
    assert (place.refused, place.seen) == ([error], [Kind.FAULT])


@pytest.mark.parametrize("status", [Status.BOARD_LOST, Status.FARM_ERROR])
def test_a_board_that_was_given_up_is_not_blamed(status: Status) -> None:
    """What our own leaving or a later lease has cut short is the farm's fault, and no observation."""
    place = Place(ours=False)
    outcome = Blame(place).judge(Outcome(status, "hung up"))
    assert outcome.status is Status.FARM_ERROR
    assert outcome.message == "the board was given up meanwhile: hung up"
    assert place.seen == []


def test_throttling_counts_when_it_repeats() -> None:
    """Three throttled trials in a row are an observation; one that is not in between begins the count anew."""
    place = Place()
    blame = Blame(place)
    for status in (Status.THROTTLED, Status.THROTTLED, Status.OK, Status.THROTTLED, Status.THROTTLED):
        blame.judge(Outcome(status))
    assert place.seen == []
    blame.judge(Outcome(Status.NOISY))  # too warm to begin: nothing was run
    blame.judge(Outcome(Status.THROTTLED))
    assert place.seen == [Kind.THROTTLED]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(BoardHostileError("it sent a call"), Kind.HOSTILE), (InvalidReplyError("latency -1"), Kind.INVALID_REPLY)],
)
def test_a_board_that_attacks_or_lies_is_told_apart(error: BoardHostileError | InvalidReplyError, kind: Kind) -> None:
    """The trial is the farm's failure with the reason, and the farm learns which it was."""
    place = Place()
    outcome = Blame(place).judge_error(error)
    assert (outcome.status, outcome.message) == (Status.FARM_ERROR, error.message)
    assert place.seen == [kind]


def test_what_ends_the_run_on_the_only_board() -> None:
    """It ends no run at once; an attack does. Where another board may take its place it is reported; on the one machine
    there is, the error goes up.
    """
    assert Blame(Place(can_change=False)).judge_error(InvalidReplyError("x")).status is Status.FARM_ERROR
    with pytest.raises(BoardHostileError):
        Blame(Place(can_change=False)).judge_error(BoardHostileError("x"))
    place, error = Place(), BoardUnsafeError("stuck")
    assert Blame(place).judge_error(error).status is Status.FARM_ERROR
    assert place.seen == [Kind.UNSAFE]
    with pytest.raises(BoardUnsafeError):
        Blame(Place(can_change=False)).judge_error(error)


@pytest.mark.parametrize(
    ("status", "seen"),
    [
        (PinStatus.UNAVAILABLE, [Kind.MISFIT]),
        (PinStatus.FAILED, [Kind.MISFIT]),
        (PinStatus.REFUSED, []),
        (PinStatus.BUSY, []),
    ],
)
def test_a_board_whose_clocks_cannot_be_held_is_doubted(status: PinStatus, seen: list[Kind]) -> None:
    """Twice in a row, and it is better left; it is reported, unless it lacks the point or another has its clocks."""
    place = Place()
    blame = Blame(place)
    for _ in range(2):
        assert blame.doubt is None
        outcome = blame.judge(pin_outcome(PinReport(status, "why"), "n1"), status)
        assert (outcome.status, outcome.board) == (Status.CLOCK_DRIFTED, "n1")
    assert blame.doubt.lasts
    assert blame.doubt.reason == "its clocks could not be held"
    assert place.seen == seen


def test_clocks_that_do_not_hold_are_told_the_third_time() -> None:
    """Which a trial that ended well in between forgets. A place whose board changed begins to count anew."""
    place = Place()
    blame = Blame(place)
    for status in (Status.CLOCK_DRIFTED, Status.OK, *(Status.CLOCK_DRIFTED,) * 3):
        assert blame.doubt is None
        blame.judge(Outcome(status))
    assert blame.doubt is not None
    assert place.seen == [Kind.DRIFTED]
    place = Place()
    blame = Blame(place)
    for key in ("jetson-nano/n1", "jetson-nano/n1", "jetson-nano/n2"):
        place.key = key
        blame.judge(Outcome(Status.CLOCK_DRIFTED))
    assert blame.doubt is None


@pytest.mark.parametrize(
    ("error", "seen"), [(PermanentError("it raised"), [Kind.FAULT]), (BoardBusyError("ann has it"), [])]
)
def test_a_board_on_which_nothing_works_is_left(error: FarmError, seen: list[Kind]) -> None:
    """The third call in a row that fails without a known fault makes it suspect, unless another client has it."""
    place = Place()
    blame = Blame(place)
    outcomes = [blame.judge_error(error) for _ in range(3)]
    assert {outcome.status for outcome in outcomes} == {Status.FARM_ERROR}
    assert error.message in blame.doubt.reason
    assert place.seen == seen
