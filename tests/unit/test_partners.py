"""Child processes that are spoken to: what is said where one cannot be started."""

from __future__ import annotations

import pathlib
import threading

import pytest

from farm.crew.crew import Crew
from farm.errors import FarmError, TransientError
from farm.processes.jobs import JobProcess
from farm.settings import Settings


def test_a_process_for_which_there_is_no_room_is_an_error_of_the_farms(tmp_path: pathlib.Path) -> None:
    """Its starter gets the missing resource, as an error that may pass; a log that cannot be opened is one way."""
    (tmp_path / "full").touch()
    with pytest.raises(TransientError, match="a process cannot be started") as caught:
        JobProcess(tmp_path / "full" / "log")
    assert "short of" in caught.value.hint


def test_who_waits_for_boards_hears_why_they_cannot_be_had(tmp_path: pathlib.Path) -> None:
    """No thread is left where its store cannot be opened."""
    (tmp_path / "full").touch()
    with pytest.raises(FarmError, match="full"):
        Crew(Settings(home=str(tmp_path / "full")), print)
    assert "farm-crew" not in [each.name for each in threading.enumerate()]
