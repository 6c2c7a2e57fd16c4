"""The emulations that come with the farm are of the emulator that comes with it."""

from __future__ import annotations

import pathlib

import pytest

from farm import emulation


def test_kept_emulations_are_of_this_emulator(tmp_path: pathlib.Path) -> None:
    """Costs and outputs are there for a new home; `make kept-emulations` makes them again after a change."""
    emulation.take_kept(tmp_path)
    found = {path.suffix for path in emulation.find_work_folder(tmp_path).rglob("*") if path.is_file()}
    assert found == {".json", ".npz"}


def test_emulations_of_another_emulator_are_not_used(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be what it would not find."""
    monkeypatch.setattr(emulation, "find_version", lambda: "another")
    emulation.take_kept(tmp_path)
    assert not emulation.find_work_folder(tmp_path).exists()
