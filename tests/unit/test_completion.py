"""What a shell completes, asked by the shell itself."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from farm.cli import options
from farm.store import Store
from farm.values import Board


def test_bash_completes(tmp_path: pathlib.Path) -> None:
    """Commands, options and names of boards, with the script that `farm --show-completion bash` prints."""
    with Store(tmp_path / "farm.db") as store:
        for name in ("nano-01", "nano-02", "tx2-01"):
            store.boards.save(Board(name, "jetson-nano", simulated=True))
    expected = {
        ("board", "lis"): {"list"},
        ("board", "list", "--js"): {"--json"},
        ("board", "hold", "nano"): {"nano-01", "nano-02"},
        ("tune", "--board", "tx"): {"tx2-01"},
    }
    lines = ["source <(farm --show-completion bash)"]
    for typed in expected:
        lines += [
            f"COMP_WORDS=(farm {' '.join(typed)}); COMP_CWORD={len(typed)}; _farm_completion farm",
            'echo "${COMPREPLY[@]}"',
        ]
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "FARM_HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert [set(line.split()) for line in done.stdout.splitlines()] == list(expected.values()), done.stderr


def test_names_are_read_without_a_store(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is made, and nothing is said, where there is no store or the file is not one."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path / "none"))
    assert options.complete_board("") == []
    assert not (tmp_path / "none").exists()
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    (tmp_path / "farm.db").write_text("no database")
    assert options.complete_campaign("") == []
