"""A board that hangs and that only a power command revives: a process of its own, the services, and the command."""

from __future__ import annotations

import pathlib
import signal
import stat
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from farm.crew.health import Kind, Observation, decide_by
from farm.errors import PermanentError, TransientError, UsageError
from farm.inventory.power_commands import PowerCommands
from farm.processes import children
from farm.services import powering
from farm.settings import Settings
from farm.store import Store
from farm.types.states import CampaignState
from farm.values import Direct
from tests.acceptance.conftest import new_home, wait_until
from tests.ports import find_free_port

# A power supply cuts power and restores it; the board then starts anew. The board's process is an orphan.
_PLUG = """#!{python}
import os, pathlib, signal, subprocess, sys
folder, port, name, action = pathlib.Path({folder!r}), {port}, sys.argv[1], sys.argv[2]
pid = folder / f"{{name}}.pid"
with (folder / "plug.log").open("a") as log:
    log.write(f"{{name}} {{action}}\\n")
if action == "off" and pid.exists():
    os.killpg(int(pid.read_text()), signal.SIGKILL)
    pid.unlink()
if action == "on":
    command = [sys.executable, "-m", "farm.virtual", "serve", "--virtual", "jetson-nano", "--name", name,
               "--tracker", f"127.0.0.1:{{port}}"]
    with (folder / f"{{name}}.log").open("ab") as out:
        board = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    pid.write_text(str(board.pid))
"""
CAMPAIGN = """\
name: small
models: mlp
boards: { types: jetson-nano }
budget: { per_workload: 4 }
search: { tuner: random, ops: dense }
measure: { repeat: 2, min_repeat: 5ms, timeout: 5s, verify_top: 1 }
"""


class Plug:
    def __init__(self, folder: pathlib.Path, tracker_port: int) -> None:
        self.folder, self.port = folder, tracker_port
        self.path = folder / "plug"
        self.path.write_text(_PLUG.format(python=sys.executable, folder=str(folder), port=tracker_port))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)
        self.commands = PowerCommands.model_validate(
            {"off": [str(self.path), "{board}", "off"], "on": [str(self.path), "{board}", "on"], "pause_s": 0.1}
        )

    @property
    def log(self) -> list[str]:
        path = self.folder / "plug.log"
        return path.read_text().splitlines() if path.exists() else []

    def find_board(self) -> int:
        """The board's process."""
        return int((self.folder / "real-1.pid").read_text())

    def hang(self) -> None:
        """Have every process of the board stop where it is, as a kernel that is stuck does: its port stays open."""
        for process in [psutil.Process(self.find_board()), *psutil.Process(self.find_board()).children(recursive=True)]:
            process.send_signal(signal.SIGSTOP)


@pytest.fixture
def plug(tmp_path: pathlib.Path) -> Iterator[Plug]:
    plug = Plug(tmp_path, find_free_port())
    yield plug
    powering.switch("real-1", plug.commands, "off")


def test_a_board_that_hangs_is_revived_by_its_power(plug: Plug) -> None:
    """It freezes in the middle of a campaign, which gives it up and measures elsewhere what it had there. Probes fail,
    its power is cycled, and it is good again; the events tell so in that order.
    """
    with new_home() as home, Store(Settings(home=home.environment["FARM_HOME"]).store_location) as store:
        home.environment["FARM_TRACKER_PORT"] = str(plug.port)
        store.boards.register("real-1", "jetson-nano", Direct(), power=plug.commands.to_document())
        powering.switch("real-1", plug.commands, "on")
        assert home.call("board", "add", "other", "--virtual", "jetson-nano").code == 0
        assert home.run("up", "--wait", "120s").code == 0
        (home.path / "small.yaml").write_text(CAMPAIGN)
        assert home.run("campaign", "run", "small.yaml", "--detach").code == 0
        wait_until(lambda: home.rows("SELECT 1 FROM trials WHERE board = 'real-1'"), "a trial there")
        before = plug.find_board()
        plug.hang()
        before_other = home.rows("SELECT sum(counted) FROM trials WHERE board = 'other'")[0][0] or 0
        wait_until(lambda: store.campaigns.require("small").over, "the campaign's end")
        campaign = store.campaigns.require("small")
        assert campaign.state is CampaignState.FINISHED, campaign.reason
        assert {count for _, count in home.rows("SELECT workload, sum(counted) FROM trials GROUP BY workload")} == {4}
        assert home.rows("SELECT sum(counted) FROM trials WHERE board = 'other'")[0][0] > before_other
        wait_until(lambda: plug.log[1:] == ["real-1 off", "real-1 on"], f"one power cycle, not {plug.log}")
        wait_until(lambda: store.boards.require("real-1").health == "good", "the board to be good again")
        assert plug.find_board() != before
        kinds = [event.kind for event in store.events.fetch_of_boards("real-1")]
        cycled = kinds.index("power_cycled")
        assert "probe_failed" in kinds[:cycled]
        assert "probe_passed" in kinds[cycled:]
        wait_until(lambda: store.boards.require("real-1").lease is None, "the board to be free")
        home.run("down", "--force")


def test_a_command_that_fails_or_hangs_is_told_of(tmp_path: pathlib.Path) -> None:
    """Its exit code and last words, or its deadline, are the error; what it started does not outlive it."""
    with pytest.raises(PermanentError, match="cannot be run"):
        children.run([str(tmp_path / "nothing")], 5.0)
    with pytest.raises(TransientError, match=r"exit code 3: no such outlet\?$"):
        children.run(["/bin/sh", "-c", "printf 'no such outlet\\033' >&2; exit 3"], 5.0)
    child = tmp_path / "child"
    began = time.monotonic()
    with pytest.raises(TransientError, match=r"did not end within 0\.5 s"):
        children.run(["/bin/sh", "-c", f"sleep 60 & echo $! > {child}; wait"], 0.5)
    assert time.monotonic() - began < 30
    wait_until(lambda: not pathlib.Path(f"/proc/{child.read_text().strip()}").exists(), "its child to be gone", 10)


def test_a_board_is_not_left_switched_off(tmp_path: pathlib.Path) -> None:
    """`on` is tried twice after `off`, also when the pause is cut short; where it fails for good, the error says so."""
    once = tmp_path / "once"
    commands = PowerCommands.model_validate(
        {"off": ["true"], "on": ["/bin/sh", "-c", f"test -e {once} || {{ touch {once}; exit 1; }}"], "pause_s": 0}
    )
    assert powering.switch("nano-01", commands, "cycle") == ""
    broken = commands.model_copy(update={"on": ["false"]})
    with pytest.raises(TransientError, match="nano-01 was switched off and not on again"):
        powering.switch("nano-01", broken, "cycle")
    with pytest.raises(UsageError, match="no command cycles"):
        powering.switch("nano-01", PowerCommands.model_validate({"on": ["true"]}), "cycle")


def test_the_command_switches_a_board_and_keeps_work_off_it(tmp_path: pathlib.Path) -> None:
    """Off is drained and on is back in service, with who did it; a held board takes --force; no commands, no power."""
    script, log = tmp_path / "outlet", tmp_path / "outlet.log"
    script.write_text(f'#!/bin/sh\necho "$FARM_BOARD $FARM_POWER $1" >> {log}\n')
    script.chmod(0o755)
    commands = {"off": [str(script), "{board}"], "on": [str(script), "{board}"], "pause_s": 0}
    with new_home() as home, Store(Settings(home=home.environment["FARM_HOME"]).store_location) as store:
        store.boards.register("a", "jetson-nano", Direct(), power=commands)
        store.boards.register("b", "jetson-nano", Direct())
        for kind in (Kind.BACK, Kind.PROBE_PASSED):
            store.boards.observe("a", str(kind), "tests", decide_by(Observation(kind)))
        store.leases.acquire("a", "bob@lab", "a look")
        refused = home.call("board", "power", "a", "off", LOGNAME="ann")
        assert (refused.code, "leased by bob@lab" in refused.err) == (3, True), refused.err
        done = home.call("board", "power", "a", "off", "--force", "--why", "moved", LOGNAME="ann")
        assert done.code == 0, done.err
        board = store.boards.require("a")
        assert (board.health, board.lease) == ("maintenance", None)
        assert "its power was switched off: moved" in board.health_reason
        assert home.call("board", "power", "a", "on", LOGNAME="ann").code == 0
        assert store.boards.require("a").health == "suspect"
        assert log.read_text().splitlines() == ["a off a", "a on a"]
        changes = home.call("logs", "--changes", "--json").json()
        told = {each["kind"]: each["by"].partition("@")[0] for each in changes if each["kind"].startswith("power_")}
        assert told == {"power_off": "ann", "power_on": "ann"}
        nothing = home.call("board", "power", "b", "cycle")
        assert (nothing.code, "docs/howto/switch-power.md" in nothing.err) == (2, True)
