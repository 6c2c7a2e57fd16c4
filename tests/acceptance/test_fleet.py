"""docs/howto/describe-a-fleet.md, done to the letter, and what `farm fleet` promises to scripts."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

from tests.acceptance.conftest import PATIENCE_S, Home

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "describe-a-fleet.md"
EXAMPLE = ROOT / "inventory" / "fleet.example.yaml"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVE = re.compile(r"Save this as `([^`]+)`")

FLEET = """\
vars: {transport: virtual, type: jetson-nano}
hosts: {a: , b: , c: }
"""


def missing_lines(promised: str, output: str) -> list[str]:
    """Promised lines of which no line of the output has all words in order."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    return [line for line in promised.splitlines() if not any(" ".join(line.split()) in other for other in lines)]


def run_in_shell(home: Home, commands: str) -> str:
    """What a reader sees who types the commands."""
    done = subprocess.run(
        ["bash", "-e", "-u", "-c", f"exec 2>&1\n{commands}"],
        cwd=home.path,
        env=home.environment | {"PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_page_does_what_it_says(home: Home) -> None:
    """Every file of the page is saved, every command run, every promised line printed."""
    text = PAGE.read_text(encoding="utf-8")
    output, end, steps = "", 0, 0
    for block in _BLOCK.finditer(text):
        language, body = block.groups()
        if language == "sh":
            output = run_in_shell(home, body)
            steps += 1
        elif language == "text":
            assert missing_lines(body, output) == [], output
        else:
            (name,) = _SAVE.findall(text[end : block.start()])
            (home.path / name).write_text(body)
        end = block.end()
    assert steps >= 3


def test_example_can_be_applied(home: Home) -> None:
    """The example fleet has nothing wrong, and a dry run adds all of it and leaves no trace."""
    assert home.run("fleet", "check", str(EXAMPLE)).code == 0
    document = home.run("fleet", "apply", str(EXAMPLE), "--dry-run", "--json").json()
    assert len(document["added"]) == 27
    assert document["dry_run"] is True
    assert not pathlib.Path(home.environment["FARM_HOME"]).exists()


def test_wrong_file_changes_nothing(home: Home) -> None:
    """A mistake anywhere in the file is exit code 2 with its line, and no board is registered."""
    path = home.path / "fleet.yaml"
    path.write_text(FLEET + "colour: blue\n")
    for verb in ("check", "apply"):
        done = home.run("fleet", verb, str(path))
        assert (done.code, done.out) == (2, "")
        assert "fleet.yaml line 3: unknown key colour" in done.err
        assert "Traceback" not in done.err
    missing = home.run("fleet", "check", str(home.path / "nowhere.yaml"))
    assert missing.code == 2
    assert "cannot be read: No such file" in missing.err
