"""docs/howto/describe-a-fleet.md, done to the letter, and what `farm fleet` promises to scripts."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from farm.inventory.fleet_document import Host
from farm.store import Store
from farm.values import Board
from tests.acceptance.conftest import PATIENCE_S, Home, wait_until

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
    lines = [" ".join(line.split()) for line in output.splitlines()]
    return [line for line in promised.splitlines() if not any(" ".join(line.split()) in other for other in lines)]


def run_in_shell(home: Home, commands: str) -> str:
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
    assert steps >= 5


def test_the_page_names_every_variable() -> None:
    """What a board may have in a fleet file and what the page says of it are the same words."""
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(Host.model_fields)


def test_example_can_be_applied(home: Home) -> None:
    """The example fleet has nothing wrong, and a dry run adds all of it and leaves no trace."""
    assert home.run("fleet", "apply", "--dry-run", str(EXAMPLE)).code == 0
    document = home.run("fleet", "apply", str(EXAMPLE), "--dry-run", "--json").json()
    assert len(document["added"]) == 27
    assert document["dry_run"] is True
    assert not pathlib.Path(home.environment["FARM_HOME"]).exists()


@pytest.mark.core
def test_wrong_file_changes_nothing(home: Home) -> None:
    """A mistake anywhere in the file is exit code 2 with its line, and no board is registered."""
    path = home.path / "fleet.yaml"
    path.write_text(FLEET + "colour: blue\n")
    for options in (["--dry-run"], []):
        done = home.run("fleet", "apply", *options, str(path))
        assert (done.code, done.out) == (2, "")
        assert "fleet.yaml line 3: unknown key colour" in done.err
        assert "Traceback" not in done.err
    missing = home.run("fleet", "apply", "--dry-run", str(home.path / "nowhere.yaml"))
    assert missing.code == 2
    assert "cannot be read: No such file" in missing.err


def write_fleet(home: Home, text: str) -> str:
    """Save a fleet file; returns its path."""
    path = home.path / "fleet.yaml"
    path.write_text(text)
    return str(path)


def open_store(home: Home) -> Store:
    """The store that the home's commands use."""
    return Store(pathlib.Path(home.environment["FARM_HOME"]) / "farm.db")


@pytest.mark.core
def test_apply_makes_the_store_agree(home: Home) -> None:
    """Boards are added, changed field by field, and removed only with --prune; a second run finds nothing to do."""
    done = home.run("fleet", "apply", write_fleet(home, FLEET))
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "+ a: jetson-nano, virtual, seed 0",
        "+ b: jetson-nano, virtual, seed 0",
        "+ c: jetson-nano, virtual, seed 0",
        "3 added",
    ]
    assert home.run("fleet", "apply", write_fleet(home, FLEET)).out == "3 unchanged\n"

    changed = (
        "vars: {transport: virtual, type: jetson-nano}\nhosts: {a: , b: {type: jetson-tx2, labels: {rack: '1'}}}\n"
    )
    planned = home.run("fleet", "apply", write_fleet(home, changed), "--prune", "--dry-run").out
    assert planned.splitlines() == [
        "~ b",
        "    type: jetson-nano → jetson-tx2",
        "    labels.rack: none → 1",
        "- c",
        "nothing was changed; would be: 1 changed, 1 removed, 1 unchanged",
    ]
    kept = home.run("fleet", "apply", write_fleet(home, changed), "--json").json()
    assert (kept["unlisted"], kept["removed"], kept["unchanged"]) == (["c"], [], ["a"])
    assert [change["name"] for change in kept["changed"]] == ["b"]
    assert home.run("fleet", "apply", write_fleet(home, changed), "--prune").out == "- c\n1 removed, 2 unchanged\n"
    with open_store(home) as store:
        rows = {row.name: (row.board_type, row.labels) for row in store.boards.fetch()}
    assert rows == {"a": ("jetson-nano", {}), "b": ("jetson-tx2", {"rack": "1"})}


def test_leased_boards_are_left_alone(home: Home) -> None:
    """What cannot be done under a lease is left, said, and exit code 3; the rest is done, and it is done later."""
    with open_store(home) as store:
        for name in ("a", "gone"):
            store.boards.save(Board(name, "jetson-nano", simulated=True))
        leases = [store.leases.acquire(name, "another", "a test") for name in ("a", "gone")]
        done = home.run("fleet", "apply", write_fleet(home, FLEET), "--prune")
        assert done.code == 3
        assert "! a: leased by another; change it when it is free" in done.out
        assert "! gone: leased by another; remove it when it is free" in done.out
        assert "2 added, 2 held back" in done.out
        assert "because they are leased: a, gone" in done.err
        assert {row.name for row in store.boards.fetch()} == {"a", "b", "c", "gone"}
        for lease in leases:
            store.leases.release(lease)
        assert home.run("fleet", "apply", write_fleet(home, FLEET), "--prune").code == 0
        assert {row.name for row in store.boards.fetch()} == {"a", "b", "c"}


def test_a_killed_run_is_continued(home: Home) -> None:
    """A run killed at any moment leaves whole boards only, and the next one adds the rest."""
    path = write_fleet(home, "vars: {transport: virtual, type: jetson-nano}\nhosts: {'a[1:1000]': , 'b[1:1000]': }\n")
    running = home.start("fleet", "apply", path)
    wait_until(lambda: home.rows("SELECT count(*) FROM boards") > [(20,)], "some boards to be registered")
    running.send(signal.SIGKILL)
    running.wait()
    ((there,),) = home.rows("SELECT count(*) FROM boards")
    assert there < 2000, "it ended before it could be killed"
    done = home.run("fleet", "apply", path)
    assert done.out.splitlines()[-1] == f"{2000 - there} added, {there} unchanged"
    assert home.rows("SELECT count(*) FROM boards") == [(2000,)]


def test_two_at_once(home: Home) -> None:
    """Of two runs at once none breaks anything: one may have to give way, and says so; each board is there once."""
    path = write_fleet(home, "vars: {transport: virtual, type: jetson-nano}\nhosts: {'a[1:500]': }\n")
    both = [home.start("fleet", "apply", path) for _ in range(2)]
    for done in [running.wait() for running in both]:
        assert done.code in {0, 3}, done.err
        assert done.code == 0 or "another command is changing boards as well" in done.err
    assert home.run("fleet", "apply", path).code == 0
    assert home.run("fleet", "apply", path).out == "500 unchanged\n"


def test_texts_are_shown_as_they_are(home: Home) -> None:
    """An address or a label that looks like markup or an emoji's name is printed like any other."""
    text = """\
vars: {transport: ssh, type: jetson-nano, user: farm, key_file: k}
hosts: {a: {address: "2001:db8:a:b::1", labels: {x: ":bug: [red]x[/]"}}}
"""
    line = "a: jetson-nano, ssh farm@[2001:db8:a:b::1]:22, x=:bug: [red]x[/]"
    assert home.run("fleet", "apply", write_fleet(home, text)).out == f"+ {line}\n1 added\n"


@pytest.mark.core
def test_no_secret_reaches_the_store(home: Home) -> None:
    """Of a key, only its path is kept."""
    key = home.path / "id_farm"
    key.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nsecret\n")
    text = "hosts: {a: {transport: ssh, type: jetson-nano, user: farm, key_file: id_farm}}\n"
    assert home.run("fleet", "apply", write_fleet(home, text)).code == 0
    ((transport,),) = home.rows("SELECT transport FROM boards")
    assert str(key) in transport
    for path in pathlib.Path(home.environment["FARM_HOME"]).rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes()
