"""How the farm starts Python: without the modules of the folder that it is started in."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from device_agent.protocol.interpreters import python_command

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("has_safe_path", sorted({False, sys.version_info >= (3, 11)}))
@pytest.mark.parametrize("words", [("-c", "import json, sys; print(sys.argv)"), ("-m", "started")])
def test_a_child_imports_nothing_from_its_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], has_safe_path: bool
) -> None:
    """A child with `-m` or `-c` takes the installed `json`, also on a Python without `-P`, and gets its arguments."""
    folder, installed = tmp_path / "downloads", tmp_path / "installed"
    for each in (folder, installed):
        each.mkdir()
    for name in ("json", "runpy", "started"):
        (folder / f"{name}.py").write_text("print('hostile')")
    (installed / "started.py").write_text("import json, sys; print(__name__, ['-c', *sys.argv[1:]])")
    monkeypatch.setenv("PYTHONPATH", str(installed))
    command = python_command(*words, "a b", "-c", has_safe_path=has_safe_path)
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.strip().removeprefix("__main__ ") == "['-c', 'a b', '-c']"


def test_one_function_starts_python() -> None:
    """No other module of the farm or the agent makes a command of the interpreter's path."""
    found = [
        path.relative_to(ROOT).as_posix()
        for package in ("farm", "device_agent")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"[\[(]\s*sys\.executable", path.read_text(encoding="utf-8"))
    ]
    assert found == ["device_agent/protocol/interpreters.py"]
