"""Errors name the how-to that has more."""

from __future__ import annotations

import pathlib
import unittest.mock

import pytest
import typer.testing

from farm import settings
from farm.cli import output
from farm.cli.main import make_app
from farm.errors import UsageError

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_every_page_and_every_part_is_there() -> None:
    """What the table names exists: pages, and modules, or the beginnings of their names."""
    for prefix, page in output.PAGES.items():
        assert (ROOT / output.FOLDER / f"{page}.md").is_file(), page
        name = pathlib.Path(*prefix.split("."))
        assert (ROOT / name).is_dir() or list((ROOT / name.parent).glob(f"{name.name}*.py")), prefix
    left = {path.stem for path in (ROOT / output.FOLDER).glob("*.md")} - set(output.PAGES.values())
    assert left <= {"extend-the-farm", "run-in-containers"}, "of these no part of the farm knows"


@pytest.mark.parametrize(
    ("words", "page"),
    [
        (("campaign", "run", "--dry-run", "none.yaml"), "plan-a-campaign"),
        (("campaign", "pause", "none"), "run-a-campaign"),
        (("fleet", "apply", "--dry-run", "none.yaml"), "describe-a-fleet"),
        (("board", "show", "none"), "describe-a-fleet"),
        (("board", "trust", "none"), "reach-boards"),
        (("model", "show", "none.onnx"), "bring-a-model"),
        (("model", "verify", "none"), "deploy-a-model"),
        (("record", "show", "none"), "keep-records"),
        (("sweep", "show", "9"), "sweep-clocks"),
        (("notices",), "watch-the-farm"),
    ],
)
def test_an_error_names_its_page(
    words: tuple[str, ...], page: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, whichever part of the farm found out, and whether or not its own hint says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    done = typer.testing.CliRunner().invoke(make_app(*words[:1]), list(words))
    assert done.exit_code == 2, done.stderr
    assert done.stderr.count(f"docs/howto/{page}.md") == 1, done.stderr
    assert done.stderr.count("docs/") == 1, done.stderr


def test_what_serves_everything_names_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an error in the settings, the part that asked for them says what it was about."""
    monkeypatch.setenv("FARM_BATCH", "many")
    with pytest.raises(UsageError) as raised:
        settings.load()
    assert output.find_page(raised.value) == ""
    with unittest.mock.patch.dict(output.PAGES, {__name__: "run-the-farm"}):
        assert output.find_page(raised.value) == "docs/howto/run-the-farm.md"
