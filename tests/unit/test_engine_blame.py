"""What an outcome says of its board: kept, changed where the board was no longer ours, told to the farm."""

from __future__ import annotations

import pytest

from device_agent.protocol import Outcome, Status
from farm.boards.blame import Blame
from farm.boards.health import Kind
from farm.errors import BoardHostileError, BoardNonsenseError, BoardUnsafeError
from farm.reach.tracker import Tracker


class Place:
    """A site that keeps what it is told."""

    tracker = Tracker("127.0.0.1", 1)
    key = "jetson-nano/n1"
    lease = None
    has_board = True

    def __init__(self, ours: bool = True, can_change: bool = True) -> None:
        self.ours, self.can_change = ours, can_change
        self.seen: list[Kind] = []

    def ensure_alive(self) -> list[str]:
        return []

    def restart_agent(self) -> bool:
        return False

    def confirm(self) -> bool:
        return self.ours

    def observe(self, kind: Kind, detail: str) -> None:
        self.seen.append(kind)


def test_a_lost_board_that_is_still_ours_is_at_fault() -> None:
    """The farm is told of a fault on the board's side; the outcome stays."""
    place = Place()
    outcome = Outcome(Status.BOARD_LOST, "hung up")
    assert Blame(place).judge(outcome, True) == outcome
    assert place.seen == [Kind.FAULT]


@pytest.mark.parametrize(("ours", "still_there"), [(False, True), (True, False)])
@pytest.mark.parametrize("status", [Status.BOARD_LOST, Status.FARM_ERROR])
def test_a_board_that_was_given_up_is_not_blamed(ours: bool, still_there: bool, status: Status) -> None:
    """What our own leaving or a later lease has cut short is the farm's fault, and no observation."""
    place = Place(ours)
    outcome = Blame(place).judge(Outcome(status, "hung up"), still_there)
    assert outcome.status is Status.FARM_ERROR
    assert outcome.message == "the board was given up meanwhile: hung up"
    assert place.seen == []


def test_a_good_outcome_is_kept_wherever_it_came_from() -> None:
    """A trial that ended well before the board was left counts."""
    outcome = Outcome(Status.OK, latency_s=(1.0,))
    assert Blame(Place(ours=False)).judge(outcome, False) == outcome


def test_throttling_counts_when_it_repeats() -> None:
    """Three throttled trials in a row are an observation; one that is not in between begins the count anew."""
    place = Place()
    blame = Blame(place)
    for status in (Status.THROTTLED, Status.THROTTLED, Status.OK, Status.THROTTLED, Status.THROTTLED):
        blame.judge(Outcome(status), True)
    assert place.seen == []
    blame.judge(Outcome(Status.THROTTLED), True)
    assert place.seen == [Kind.THROTTLED]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(BoardHostileError("it sent a call"), Kind.HOSTILE), (BoardNonsenseError("latency -1"), Kind.NONSENSE)],
)
def test_a_board_that_attacks_or_lies_is_told_apart(error: BoardHostileError | BoardNonsenseError, kind: Kind) -> None:
    """The trial is the farm's failure with the reason, and the farm is told which it was."""
    place = Place()
    outcome = Blame(place).judge_error(error)
    assert (outcome.status, outcome.message) == (Status.FARM_ERROR, error.message)
    assert place.seen == [kind]


def test_nonsense_on_the_only_board_is_tried_again() -> None:
    """It ends no run at once; an attack does."""
    assert Blame(Place(can_change=False)).judge_error(BoardNonsenseError("x")).status is Status.FARM_ERROR
    with pytest.raises(BoardHostileError):
        Blame(Place(can_change=False)).judge_error(BoardHostileError("x"))


def test_an_unsafe_board_is_left_or_ends_the_run() -> None:
    """Where another board may take its place the farm is told; on the one machine there is, the error goes up."""
    place, error = Place(), BoardUnsafeError("stuck")
    assert Blame(place).judge_error(error).status is Status.FARM_ERROR
    assert place.seen == [Kind.UNSAFE]
    with pytest.raises(BoardUnsafeError):
        Blame(Place(can_change=False)).judge_error(error)
