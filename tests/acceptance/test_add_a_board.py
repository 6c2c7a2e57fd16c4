"""docs/howto/add-a-board.md, done to the letter: its files saved, its commands run, its promises looked for."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from tests.acceptance.conftest import PATIENCE_S, Home, wait_until

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "howto" / "add-a-board.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVE = re.compile(r"Save this as `([^`]+)`")
# Between the commands of one block and of the next, on a line of its own.
_CUT = "-----8<-----"


@dataclasses.dataclass
class Step:
    commands: str
    promised: list[str]


def read_page() -> tuple[dict[str, str], list[Step]]:
    text = PAGE.read_text(encoding="utf-8")
    files: dict[str, str] = {}
    steps: list[Step] = []
    end = 0
    for block in _BLOCK.finditer(text):
        language, body = block.groups()
        if language == "sh":
            steps.append(Step(body, []))
        elif language == "text":
            steps[-1].promised += body.splitlines()
        else:
            names = _SAVE.findall(text[end : block.start()])
            assert len(names) == 1, f"the page does not say once where to save its {language} block"
            files[names[0]] = body
        end = block.end()
    return files, steps


def missing_lines(promised: list[str], output: str) -> list[str]:
    """Promised lines that no line of the output fulfils: all words in order; `...` stands for anything."""
    lines = iter(output.splitlines())
    missing = []
    for promise in promised:
        pattern = re.compile(".*?".join(re.escape(word) for word in promise.split() if word != "..."))
        if not any(pattern.search(line) for line in lines):
            missing.append(promise)
            lines = iter(output.splitlines())
    return missing


def run(home: Home, steps: list[Step]) -> list[str]:
    script = f"\necho '{_CUT}'\n".join(step.commands for step in steps)
    environment = home.environment | {
        "HOME": str(home.path),
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    process = subprocess.Popen(
        # An agent left behind by a step that failed would keep our pipe open.
        ["bash", "-e", "-u", "-c", f"exec 2>&1\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}"],
        cwd=home.path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=2 * PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"the page's commands did not finish:\n{output}")
    assert process.returncode == 0, output
    return output.split(f"{_CUT}\n")


def test_the_page_does_what_it_says(home: Home) -> None:
    """A made-up board is added by one file, listed, shown, pinned, refused a clock, and a program timed on it."""
    files, steps = read_page()
    home.remove_hostile_modules()
    assert list(files) == ["board-types/acme-edge-1.yaml"]
    for name, text in files.items():
        path = home.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    outputs = run(home, steps)
    assert len(outputs) == len(steps) >= 6
    for step, output in zip(steps, outputs, strict=True):
        assert missing_lines(step.promised, output) == [], output
    at_full, at_a_third = (float(seconds) for seconds in re.findall(r"wall time +s +([\d.]+)", outputs[-1]))
    assert at_a_third / at_full == pytest.approx(3.0, rel=0.1)
    wait_until(lambda: not home.processes(), "what the page's commands started to end")


def test_every_step_but_the_check_promises_something() -> None:
    """A page whose promises went missing would pass for nothing."""
    _, steps = read_page()
    assert all(step.promised for step in steps)
