"""Six virtual boards of two types, a campaign of three models on them, and what may be done to them meanwhile.

Nothing here judges: what a campaign must reach in spite of it is in `test_campaign_faults.py`.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import psutil

from device_agent.sysfs import Tree
from farm.models.onnx_builder import GraphBuilder
from farm.virtual.client import SimulatedTree
from farm.virtual.tree import FAULT
from tests.acceptance.conftest import Home, new_home, wait_until

# Live, so that there is a measurement to meet when something is done to a board.
FLEET = """\
vars: { transport: virtual, time: live }
groups:
  nanos: { vars: { type: jetson-nano }, hosts: { nano: { count: 3 } } }
  tx2s: { vars: { type: jetson-tx2 }, hosts: { tx2: { count: 3 } } }
"""
PER_WORKLOAD = 4
CAMPAIGN = f"""\
name: vision
models: [tiny-cnn, mlp, head.onnx]
boards: {{ types: [jetson-nano, jetson-tx2] }}
operating_points: [default, {{ power_mode: MAXN }}]
budget: {{ per_workload: {PER_WORKLOAD} }}
search: {{ tuner: random, ops: [dense, depthwise_conv2d], warm_start: false, seed: 7 }}
measure: {{ repeat: 2, min_repeat: 5ms, timeout: 5s, verify_top: 2 }}
"""


class CampaignRack:
    """A home with the fleet and the campaign's file."""

    def __init__(self, home: Home, built: pathlib.Path | None = None) -> None:
        """`built` is a home whose compiled candidates are taken over, and what each costs this machine."""
        self.home = home
        self._agents: dict[str, psutil.Process] = {}
        (home.path / "fleet.yaml").write_text(FLEET)
        (home.path / "vision.yaml").write_text(CAMPAIGN)
        (home.path / "head.onnx").write_bytes(_make_head())
        if built is not None:
            for name in ("builds", "work"):
                shutil.copytree(built / "cache" / name, self.store / "cache" / name)
        applied = home.run("fleet", "apply", "fleet.yaml")
        assert applied.code == 0, applied.err

    @property
    def store(self) -> pathlib.Path:
        """The FARM_HOME."""
        return pathlib.Path(self.home.environment["FARM_HOME"])

    # Boards, and what happens to them

    def agent(self, board: str) -> psutil.Process:
        """The process that a virtual board's agent is."""

        def find() -> psutil.Process | None:
            for process in self.home.processes():
                with contextlib.suppress(psutil.Error):
                    words = process.cmdline()
                    if "serve" in words and board in words and "serve" not in process.parent().cmdline():
                        return process
            return None

        if board not in self._agents or not self._agents[board].is_running():
            self._agents[board] = wait_until(find, f"an agent of {board}")
        return self._agents[board]

    def hardware(self, board: str) -> Tree:
        """A virtual board's kernel files as root sees them."""
        for child in self.agent(board).children(recursive=True):
            words = child.cmdline()
            if "farm.virtual.server" in words:
                return SimulatedTree(f"{words[words.index('--socket') + 1]}.root")
        raise LookupError(f"{board} has no hardware")

    def harm(self, board: str, fault: str) -> None:
        """Inject a fault into a virtual board's hardware (`farm.virtual.faults`)."""
        self.hardware(board).write(FAULT, fault)

    def sessions(self, board: str) -> list[psutil.Process]:
        """The sessions of a board's agent, each followed by its workers: all of them are forked from it."""
        return [child for child in self.agent(board).children(recursive=True) if "serve" in child.cmdline()]

    def wait_measuring(self, board: str) -> list[psutil.Process]:
        def find() -> list[psutil.Process]:
            with contextlib.suppress(psutil.Error):
                found = self.sessions(board)
                parents = [process.ppid() for process in found]
                sessions = [process for process in found if process.pid in parents]
                return [*sessions, *(process for process in found if process not in sessions)] if sessions else []
            return []

        processes: list[psutil.Process] = wait_until(find, f"{board} to measure")
        return processes

    def crash(self, board: str) -> None:
        _signal(self.wait_measuring(board)[:1], signal.SIGKILL)

    def freeze(self, board: str) -> list[psutil.Process]:
        """Freeze a board's whole agent in mid-measurement; return its processes for `thaw`."""
        frozen = [self.agent(board), *self.wait_measuring(board)]
        _signal(frozen, signal.SIGSTOP)
        return frozen

    def thaw(self, frozen: list[psutil.Process]) -> None:
        _signal(frozen, signal.SIGCONT)

    def reboot(self, board: str) -> None:
        agent = self.agent(board)
        processes = [agent, *agent.children(recursive=True)]
        _signal(processes, signal.SIGKILL)

    def log(self) -> str:
        return (self.store / "logs" / "farm.log").read_text()

    def reasons(self, board: str, *kinds: str) -> list[str]:
        rows = self.home.rows("SELECT board, kind, reason FROM board_events ORDER BY id")
        return [reason for name, kind, reason in rows if name == board and kind in kinds]

    def was_doubted(self, board: str) -> bool:
        return bool(self.reasons(board, "fault", "probe_failed", "drifted", "throttled", "misfit"))

    # Campaigns

    def count(self) -> int:
        rows = self.home.rows("SELECT count(*) FROM trials WHERE counted IS NOT NULL")
        return int(rows[0][0]) if rows else 0

    def wait_count(self, count: int) -> None:
        wait_until(lambda: self.count() >= count, f"{count} trials")

    def show(self, name: str = "vision") -> dict[str, Any]:
        shown: dict[str, Any] = self.home.run("campaign", "show", name, "--json").json()
        return shown


@contextlib.contextmanager
def campaign_rack(built: pathlib.Path | None = None) -> Iterator[CampaignRack]:
    with new_home() as home:
        home.environment["FARM_BATCH"] = str(PER_WORKLOAD)
        rack = CampaignRack(home, built)
        try:
            up = home.run("up")
            assert up.code == 0, up.err
            good = "SELECT count(*) FROM boards WHERE health = 'good' AND reachable"
            wait_until(lambda: home.rows(good) == [(6,)], "all boards to be good")
            yield rack
        finally:
            home.run("down", "--force")


def _make_head() -> bytes:
    builder = GraphBuilder(5)
    hidden = builder.relu(builder.dense(builder.input("x", (4, 192)), 320, gain=2.0))
    return builder.finish("head", {"scores": (builder.dense(hidden, 10), (4, 10))})


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
