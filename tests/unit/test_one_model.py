"""`farm.optimize`: what it refuses before anything is started."""

from __future__ import annotations

import pathlib

import pytest

import farm
from farm.errors import UsageError
from farm.one_model import Optimized
from farm.settings import Settings


@pytest.mark.parametrize("boards", [[], ["local", "jetson-nano"]])
def test_boards_are_of_the_fleet_or_this_machine(boards: list[str], tmp_path: pathlib.Path) -> None:
    """No boards at all, and this machine beside others, cannot be tuned for."""
    with pytest.raises(UsageError, match="boards are"):
        farm.optimize("tiny-cnn", boards=boards, home=tmp_path)
    assert not list(tmp_path.iterdir())


def test_several_board_types_are_several_packages(tmp_path: pathlib.Path) -> None:
    """One path cannot take two wheels."""
    optimized = Optimized({"models": [], "types": [{}, {}]}, Settings(home=str(tmp_path)), print)
    with pytest.raises(UsageError, match="several packages") as caught:
        optimized.save_package(tmp_path / "out.whl")
    assert "save_packages" in caught.value.hint
