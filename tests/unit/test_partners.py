"""Child processes that are spoken to: what is said where one cannot be started."""

from __future__ import annotations

import pathlib

import pytest

from farm.errors import TransientError
from farm.metaschedule.board_process import BoardOrder
from farm.metaschedule.boards import Boards
from farm.processes.worker_processes import Child


def test_a_process_for_which_there_is_no_room_is_an_error_of_the_farms(tmp_path: pathlib.Path) -> None:
    """Whoever starts one hears what is short, as an error that may pass; a log that cannot be opened is one way."""
    (tmp_path / "full").touch()
    with pytest.raises(TransientError, match="a process cannot be started") as caught:
        Child.start("farm.processes.compile_subprocess", tmp_path / "full" / "log")
    assert "short of" in caught.value.hint


def test_a_script_hears_why_its_boards_are_not_held_any_more(tmp_path: pathlib.Path) -> None:
    """Where a child died and no other one can be started, that is the error, not that a thread ended."""
    order = BoardOrder(tmp_path / "farm.db", ("127.0.0.1", 1), "jetson-nano", None, "script")
    boards = Boards(order, 1, 60.0, tmp_path / "log", print)
    boards._log = tmp_path / "log" / "log"
    boards._held[0].child.process.kill()
    with pytest.raises(TransientError, match="a process cannot be started"):
        boards.require_description()
    boards.close()
