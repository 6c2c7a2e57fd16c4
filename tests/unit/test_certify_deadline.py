"""A certificate whose time is up says so, with any error of the call that was cut."""

from __future__ import annotations

import pytest

from farm.errors import BoardUnsafeError, DeadlineError, FarmError, UnavailableError
from farm.services.board_certify import _Run
from farm.services.checks import Check


def cut_in_a_check(raised: FarmError) -> tuple[_Run, str]:
    """A check during which the deadline passes, and what it raises."""
    seen: list[Check] = []
    run = _Run(seen.append)

    def work() -> str:
        run.end(lambda: None, "the deadline of 1 s has passed")
        raise raised

    with pytest.raises(FarmError) as caught:
        run.watched(work)()
    return run, str(caught.value.message)


def test_a_call_that_was_cut_is_the_deadlines() -> None:
    """What TVM says of a connection that ended helps no reader."""
    run, message = cut_in_a_check(UnavailableError("device_agent.unpin failed: kShutdown"))
    assert message == run.over == "the deadline of 1 s has passed"


def test_an_attack_is_told_even_then() -> None:
    """A board that is not safe to talk to stays one."""
    run, message = cut_in_a_check(BoardUnsafeError("it sent a frame of another kind"))
    assert run.unsafe
    assert message == "it sent a frame of another kind"


def test_an_error_of_a_check_is_its_own() -> None:
    """As long as there is time."""
    run = _Run(lambda check: None)

    def work() -> str:
        raise DeadlineError("the board did not answer for 5 s")

    with pytest.raises(DeadlineError, match="did not answer"):
        run.watched(work)()
    assert "did not answer" in run.over
