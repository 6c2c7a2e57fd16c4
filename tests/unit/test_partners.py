"""Child processes that are spoken to: what is said where one cannot be started."""

from __future__ import annotations

import pathlib

import pytest

from farm.errors import FarmError, TransientError
from farm.metaschedule.boards import BoardOrder, Boards
from farm.processes.worker_processes import Child


def test_a_process_for_which_there_is_no_room_is_an_error_of_the_farms(tmp_path: pathlib.Path) -> None:
    """Whoever starts one hears what is short, as an error that may pass; a log that cannot be opened is one way."""
    (tmp_path / "full").touch()
    with pytest.raises(TransientError, match="a process cannot be started") as caught:
        Child.start("farm.processes.compile_subprocess", tmp_path / "full" / "log")
    assert "short of" in caught.value.hint


def test_a_script_hears_why_its_boards_cannot_be_had(tmp_path: pathlib.Path) -> None:
    """What ends the threads that drive its boards is the error of whoever waits for them, not that they ended."""
    (tmp_path / "full").touch()
    order = BoardOrder(tmp_path / "full" / "farm.db", ("127.0.0.1", 1), "jetson-nano", None, "script")
    boards = Boards(order, 1, 60.0, tmp_path / "log", print)
    with pytest.raises(FarmError, match="full"):
        boards.require_description()
    boards.close()
