"""Files that people write, with anything wrong in them: an error of ours or a result, never a traceback or a hang."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from farm.campaign.spec import read_campaign
from farm.errors import FarmError
from farm.inventory.board_types import load_board_types
from farm.inventory.fleets import read_fleet
from tests import fuzzing
from tests.fuzzing import deadline, mutate_text, run_command

ROOT = pathlib.Path(__file__).parents[2]
COUNT = 300
TYPES = load_board_types()
KINDS: dict[str, tuple[pathlib.Path, Callable[[pathlib.Path], Any]]] = {
    "fleet": (ROOT / "inventory" / "fleet.example.yaml", lambda path: read_fleet(path, TYPES)),
    "campaign": (ROOT / "inventory" / "campaign.example.yaml", read_campaign),
}


@pytest.fixture(autouse=True)
def _home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_broken_file_is_said(kind: str, tmp_path: pathlib.Path) -> None:
    """Hundreds of seeded mutations of the example, each read to an end within a moment."""
    example, read = KINDS[kind]
    good = example.read_text()
    path = tmp_path / "here" / "file.yaml"
    refused = 0
    for seed, rng in enumerate(fuzzing.each(COUNT)):
        data = mutate_text(good, rng)
        path.write_bytes(data)
        try:
            with deadline(f"{kind} {seed}"):
                read(path)
        except FarmError as error:
            refused += bool(str(error).strip())
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r} for {data[-2000:]!r}") from error
    assert COUNT / 4 < refused / fuzzing.ROUNDS < COUNT
    assert [each.name for each in path.parent.iterdir()] == ["file.yaml"]


def test_a_broken_fleet_is_applied_whole_or_not_at_all(tmp_path: pathlib.Path) -> None:
    """All that can be read is kept under FARM_HOME and nowhere else, and every command after it works."""
    good = KINDS["fleet"][0].read_text()
    path = tmp_path / "here" / "fleet.yaml"
    complaints = []
    for rng in fuzzing.each(8):
        path.write_bytes(mutate_text(good, rng))
        complaints += [run_command("fleet", "apply", "fleet.yaml"), run_command("board", "list", "--json")]
    assert not [text for text in complaints if text]
    assert [each.name for each in path.parent.iterdir()] == ["fleet.yaml"]
    assert {each.name for each in tmp_path.iterdir()} == {"here", "home"}
