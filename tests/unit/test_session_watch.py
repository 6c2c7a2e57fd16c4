"""The doctor's checks of hardware end with the session, and an attack is noticed."""

from __future__ import annotations

import pytest

from farm.errors import BoardUnsafeError, DeadlineError, FarmError, PermanentError
from farm.services.board_doctor import SessionWatch


def watch_a_check(raised: FarmError) -> SessionWatch:
    """What a check that raises leaves behind."""
    watch = SessionWatch()

    def work() -> str:
        raise raised

    with pytest.raises(FarmError) as caught:
        watch.watched(work)()
    assert caught.value is raised
    return watch


def test_an_attack_is_told() -> None:
    """A board that is not safe to talk to is asked no more."""
    watch = watch_a_check(BoardUnsafeError("it sent a frame of another kind"))
    assert watch.unsafe
    assert "another kind" in watch.over


def test_a_lost_session_ends_the_checks() -> None:
    """What follows names the error."""
    watch = watch_a_check(DeadlineError("the board did not answer for 5 s"))
    assert not watch.unsafe
    assert watch.over == "the session has ended: the board did not answer for 5 s"


def test_a_failed_check_ends_no_other() -> None:
    """The session is still there."""
    watch = watch_a_check(PermanentError("a clock does not follow"))
    assert (watch.over, watch.unsafe) == ("", False)
