"""What a shell completes, asked by the shell itself, and without loading the commands."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from farm.cli import completing
from farm.store import Store
from farm.values import Board
from tests import release_scripts

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    with Store(tmp_path / "farm.db") as store:
        for name in ("nano-01", "nano-02", "tx2-01"):
            store.boards.save(Board(name, "jetson-nano", simulated=True))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.onnx").touch()
    (tmp_path / "models" / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    return tmp_path


def test_bash_completes(home: pathlib.Path) -> None:
    """Commands, options and names of boards and models, with the script that `farm completion bash` prints."""
    expected = {
        ("board", "lis"): {"list"},
        ("board", "drain", "nano"): {"nano-01", "nano-02"},
        ("board", "list", "--js"): {"--json"},
        ("tune", "--board", "=", "tx"): {"tx2-01"},
        ("tune", "models/"): {"models/mine.onnx"},
    }
    lines = ["source <(farm completion bash)"]
    for typed in expected:
        lines += [
            f"COMP_WORDS=(farm {' '.join(typed)}); COMP_CWORD={len(typed)}; _farm_completion farm",
            'echo "${COMPREPLY[@]}"',
        ]
    environment = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert [set(line.split()) for line in done.stdout.splitlines()] == list(expected.values()), done.stderr


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["mod"], {"model"}),
        (["campaign", "re"], {"report", "resume"}),
        (["board", "drain", "nano-01", "t"], {"tx2-01"}),
        (["tune", "squ"], {"squeezenet1.1"}),
        (["tune", "--trials", "8", "squ"], {"squeezenet1.1"}),
        (["tune", "mlp", "--board-type", "jetson-t"], {"jetson-tx2"}),
        (["tune", "--board=nano-02"], {"--board=nano-02"}),
        (["schema", ""], {"campaign", "fleet"}),
        (["tune", "mlp", "--out", "x"], set()),
        (["nothing", "of", "the", "kind"], set()),
        ([], set(json.loads(completing.TABLE.read_text())["commands"]["commands"])),
    ],
)
def test_what_may_follow(home: pathlib.Path, typed: list[str], offered: set[str]) -> None:
    """An option's values, a noun's verbs, an argument's names: by what was typed before, and no more than begins so."""
    assert set(completing.answer("bash", typed).split()) == offered


def test_other_shells_and_the_table() -> None:
    """A colon for zsh, a tab for fish. What is checked in is what the commands say: `make generated` writes it."""
    assert "model:Models" in completing.answer("zsh", ["mod"])
    assert "model\tModels" in completing.answer("fish", ["mod"])
    module = release_scripts.load("completion")
    assert completing.TABLE.read_text(encoding="utf-8") == module.make_text()


def test_nothing_is_loaded_for_an_answer(home: pathlib.Path) -> None:
    """Neither the commands nor the store nor a model's reader: a shell waits for it at every tab."""
    program = (
        "import sys; from farm.cli.entry import main\ntry: main()\nexcept SystemExit: print('loaded', *sys.modules)"
    )
    for typed in (["tune", "res"], ["board", "drain", "nano"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *typed],
            env=os.environ | {completing.VARIABLE: "bash"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        found, _, loaded = done.stdout.partition("loaded")
        assert found.split()
        assert not {"typer", "click", "rich", "sqlalchemy", "numpy", "onnx", "tvm", "farm.cli.main"} & {*loaded.split()}


def test_names_are_read_without_a_store(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is made, and nothing is said, where there is no store or what is there is none."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path / "none"))
    assert completing.answer("bash", ["board", "drain", ""]) == ""
    assert not (tmp_path / "none").exists()
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    (tmp_path / "farm.db").write_text("no database")
    assert completing.answer("bash", ["campaign", "show", ""]) == ""
