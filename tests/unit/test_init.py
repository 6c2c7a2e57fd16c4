"""`farm init`: files that the farm takes as they are, from options and from a person's answers."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import subprocess
import sys

import pytest
import typer.testing
import yaml

from farm import settings
from farm.campaign.spec import read_campaign
from farm.cli import init as starting
from farm.cli.main import make_app
from farm.inventory.fleets import read_fleet
from farm.values import Ssh, Virtual


def init(*words: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(make_app("init"), ["init", *words])


def test_files_are_taken_as_they_are(tmp_path: pathlib.Path) -> None:
    """The fleet has the boards that were named, the campaign is for their type, and the commands to type next exist."""
    words = ("--board-type", "jetson-nano", "--ssh", "farm@192.0.2.11", "--ssh", "[2001:db8::7]:2022", "--virtual", "2")
    done = init(*words, "--out", str(tmp_path / "rack"), "--json")
    assert done.exit_code == 0, done.stderr
    boards = read_fleet(tmp_path / "rack" / "fleet.yaml").boards
    ways = [each.transport for each in boards if isinstance(each.transport, Ssh)]
    assert [(way.user, way.host, way.port) for way in ways] == [("farm", "192.0.2.11", 22), ("", "2001:db8::7", 2022)]
    assert sum(isinstance(each.transport, Virtual) for each in boards) == 2
    assert {each.board_type for each in boards} == {"jetson-nano"}
    assert read_campaign(tmp_path / "rack" / "campaign.yaml").spec.boards.types == ("jetson-nano",)
    document = json.loads(done.stdout)
    assert all(pathlib.Path(path).is_file() for path in document["files"])
    named = [word for step in document["next"] for word in step["command"].split() if word.startswith("jetson-nano-")]
    assert set(named) == {"jetson-nano-1", "jetson-nano-2"}


def test_other_users_write_no_file_that_a_command_makes(tmp_path: pathlib.Path) -> None:
    """Under any umask."""
    program = "import os; os.umask(0); from farm.cli.main import main; main()"
    words = ("init", "--board-type", "jetson-tx2", "--virtual", "1", "--out", str(tmp_path / "new"))
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True, timeout=120)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o644}
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o755


def test_schemas_that_files_name_lie_beside_them(tmp_path: pathlib.Path) -> None:
    """What the first line names for editors is there."""
    assert init("--board-type", "jetson-tx2", "--virtual", "1", "--out", str(tmp_path)).exit_code == 0
    for name in ("fleet", "campaign"):
        first = (tmp_path / f"{name}.yaml").read_text().splitlines()[0]
        assert json.loads((tmp_path / first.partition("$schema=")[2]).read_text())["title"] == f"tvm-farm {name} file"


def test_settings_have_defaults_and_words_of_yaml_are_quoted() -> None:
    """Every setting is there once, and taking all `#` away leaves what holds without the file. A user called `no` stays
    a text.
    """
    lines = [line[1:] for line in starting.write_settings().splitlines() if line.startswith("#FARM_")]
    assert settings.load(dict(line.split("=", 1) for line in lines)) == settings.load({})
    text = starting.write_fleet(starting.Start("jetson-nano", [Ssh(host="on", user="no")]))
    [host] = yaml.safe_load(text)["groups"]["boards"]["hosts"].values()
    assert host == {"address": "on", "user": "no"}


def test_nothing_is_overwritten(tmp_path: pathlib.Path) -> None:
    """One file that is there keeps all from being written."""
    (tmp_path / "settings.env").write_text("mine")
    done = init("--board-type", "jetson-nano", "--virtual", "1", "--out", str(tmp_path))
    assert done.exit_code == 2
    assert "is there already" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["settings.env"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "stdin is not a terminal"),
        (("--virtual", "1"), "--board-type is missing"),
        (("--virtual", "1", "--board-type", "jetson-nan"), "jetson-nano"),
        (("--virtual", "1", "--board-type", "local"), "needs no fleet file"),
        (("--ssh", "a b", "--board-type", "jetson-nano"), "is no host name"),
    ],
)
def test_wrong_words_write_nothing(tmp_path: pathlib.Path, words: tuple[str, ...], said: str) -> None:
    """Each is reported with advice, exit code 2."""
    done = init(*words, "--out", str(tmp_path / "rack"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert not (tmp_path / "rack").exists()


def test_a_person_is_asked(tmp_path: pathlib.Path) -> None:
    """At a terminal, a wrong address is asked for again; input that ends before the end writes nothing."""
    farm = pathlib.Path(sys.executable).with_name("farm")
    for answers, code in (("jetson-tx2\na b\nfarm@tx2-a\n\n", 0), ("jetson-tx2\n\x04", 2)):
        ours, theirs = pty.openpty()
        os.write(ours, answers.encode())
        folder = tmp_path / str(code)
        done = subprocess.run([farm, "init", "--out", folder], stdin=theirs, stderr=theirs, timeout=60, check=False)
        said = os.read(ours, 65536).decode()
        os.close(ours)
        os.close(theirs)
        assert done.returncode == code, said
        assert folder.exists() == (code == 0)
    [board] = read_fleet(tmp_path / "0" / "fleet.yaml").boards
    assert (board.board_type, board.where) == ("jetson-tx2", "ssh farm@tx2-a:22")
