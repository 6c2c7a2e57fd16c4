"""What a shell completes, asked by the shell itself."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from farm.cli import completion
from farm.store import Store
from farm.values import Board


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A farm with three boards."""
    with Store(tmp_path / "farm.db") as store:
        for name in ("nano-01", "nano-02", "tx2-01"):
            store.save_board(Board(name, "jetson-nano", simulated=True))
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["board", "lis"], {"list"}),
        (["campaign", "re"], {"report", "resume"}),
        (["board", "drain", "nano"], {"nano-01", "nano-02"}),
        (["board", "list", "--js"], {"--json"}),
    ],
)
def test_bash_completes(home: pathlib.Path, typed: list[str], offered: set[str]) -> None:
    """Commands, options and names of boards, with the script that `farm completion bash` prints."""
    words = " ".join(("farm", *typed))
    script = (
        "source <(farm completion bash) && "
        f"COMP_WORDS=({words}) && COMP_CWORD={len(typed)} && _farm_completion farm {typed[-1]} x; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert set(done.stdout.split()) == offered, done.stderr


def test_names_are_read_without_a_store(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is made, and nothing is said, where there is no store or what is there is none."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path / "none"))
    assert completion.list_boards("") == []
    assert not (tmp_path / "none").exists()
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    (tmp_path / "farm.db").write_text("no database")
    assert completion.list_campaigns("") == []
