"""The README's third section, run as it is written: from boards and a model to packages for two board types."""

from __future__ import annotations

import json
import pathlib
import shlex
from collections.abc import Iterator

import pytest

from tests.acceptance.conftest import Home, new_home

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECTION = "## Tune a fleet, and ship its code"


def read_commands() -> list[list[str]]:
    """The words of the section's commands, all of which are the farm's."""
    section = (ROOT / "README.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    block = section[section.index("\n    ") :].partition("\n\n")[0]
    lines = [shlex.split(line, comments=True) for line in block.splitlines() if line.strip()]
    assert all(words[0] == ".venv/bin/farm" for words in lines)
    return [words[1:] for words in lines]


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with new_home() as home:
        (home.path / "inventory").symlink_to(ROOT / "inventory")
        for words in read_commands():
            done = home.run(*words, timeout_s=400.0)
            assert done.code == 0, f"{words}: {done.err}"
        yield home


def test_two_board_types_have_a_package_each(home: Home) -> None:
    """Verified wheels, made of the campaign's records and marked as simulated, and a report that says how they came."""
    for board_type in ("jetson-nano", "jetson-tx2"):
        manifest = json.loads((home.path / "packages" / f"tiny-cnn-{board_type}" / "manifest.json").read_text())
        assert manifest["simulated"]
        assert manifest["verified"]["matches"]
        # From records, or by prediction where the model was faster so.
        assert {one["source"] for one in manifest["workloads"]} <= {"record", "rule"}
        (wheel,) = (home.path / "packages").glob(f"tiny_cnn-*{board_type.replace('-', '.')}*.whl")
        assert wheel.stat().st_size > 10_000
        assert f"farm model compile tiny-cnn --board-type {board_type}" in home.run("campaign", "show", "two-types").out
    assert (home.path / "report" / "boards.png").stat().st_size > 10_000
    home.expect_no_processes()
