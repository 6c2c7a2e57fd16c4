"""A real agent behind a real OpenSSH server: registered with a real tracker, measured through the tunnel, cut off."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import psutil
import pytest

from device_agent.protocol import Limits, MeasureSpec, Status, TensorSpec
from farm.connectivity.board_link import BoardLink
from farm.connectivity.tracker import Tracker
from farm.connectivity.tunnels import Forward
from farm.errors import BoardLostError
from farm.measure.answers import AgentAddress
from farm.measure.blocking import BlockingSession
from farm.processes.children import Backoff
from farm.search import tvm_env
from tests.integration import candidates
from tests.integration.conftest import ROOT, wait_until
from tests.integration.sshd import Sshd

# These tests share a process with ones that compile: the session alone would load TVM's runtime only.
tvm_env.load()

PATIENCE_S = 20.0
QUICK = Backoff(first_s=0.1, last_s=0.5)
SHAPE = TensorSpec((candidates.SIZE, candidates.SIZE), "float32")


@dataclasses.dataclass
class RealBoard:
    link: BoardLink
    forward: Forward
    key: str
    pid: int
    port: int

    @property
    def sessions(self) -> list[psutil.Process]:
        """The agent's children: one per client."""
        return psutil.Process(self.pid).children(recursive=True)


@pytest.fixture(scope="module")
def real_board(sshd: Sshd, tracker: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBoard]:
    folder = tmp_path_factory.mktemp("agent")
    key = "local/over-ssh"
    link = BoardLink(sshd.pinned, backoff=QUICK)
    forward = link.add_forward(0)
    back = link.add_tracker(0, (tracker.host, tracker.port), key, forward)
    with link:
        connection = link.wait_up(PATIENCE_S)
        ready, log = folder / "ready.json", folder / "log"
        command = [sys.executable, "-m", "device_agent", "serve", "--name", "over-ssh", "--ready-file", str(ready)]
        command += ["--tracker", f"127.0.0.1:{back.board_port}"]
        started = connection.exec(
            f"cd {ROOT} && TMPDIR={folder} setsid {shlex.join(command)} </dev/null >{log} 2>&1 & echo $!", PATIENCE_S
        )
        pid = int(started.out)
        try:
            wait_until(ready.exists, f"the agent: {log.read_text() if log.exists() else ''}")
            facts = json.loads(ready.read_text())
            yield RealBoard(link, forward, key, facts["pid"], facts["port"])
        finally:
            for one in {pid, json.loads(ready.read_text())["pid"] if ready.exists() else pid}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, 15)


def spec(entry: str = "main", timeout_s: float = 10.0) -> MeasureSpec:
    return MeasureSpec((SHAPE,) * 3, entry=entry, limits=Limits(timeout_s=timeout_s, threads=1))


def find_board(tracker: Tracker, board: RealBoard, at: int) -> bool:
    summary = anyio.run(tracker.fetch_summary)
    free = summary["queue_info"].get(board.key, {"free": 0})["free"]
    ports = [info["addr"][1] for info in summary["server_info"] if info["key"] == f"server:{board.key}"]
    return bool(free) and ports == [at]


def test_a_kernel_is_measured_through_the_tunnel(real_board: RealBoard, client: Tracker, matmul: bytes) -> None:
    """By the forward's address: the tracker gives only the key, without which the agent refuses every client."""
    _, _, match_key = anyio.run(client.request, real_board.key, PATIENCE_S)
    with BlockingSession(AgentAddress(*real_board.forward.address), match_key) as session:
        assert session.description.board_type == "local"
        outcomes = [session.measure(spec(), matmul) for _ in range(3)]
    assert [outcome.status for outcome in outcomes] == [Status.OK] * 3


def test_a_tracker_hands_the_board_out_under_the_tunnels_port(
    real_board: RealBoard, client: Tracker, matmul: bytes
) -> None:
    """The agent registered from the board; the tracker sends clients to the forward, not to the agent's port."""
    local_port = real_board.forward.address[1]
    assert local_port != real_board.port
    wait_until(lambda: find_board(client, real_board, local_port), "the board to be registered")
    with BlockingSession(client, real_board.key) as session:
        assert len(real_board.forward) == 1
        assert session.measure(spec(), matmul).status is Status.OK


@pytest.mark.parametrize("how", ["forward cut", "session killed"])
def test_a_tunnel_cut_during_a_measurement(
    real_board: RealBoard, client: Tracker, sshd: Sshd, bad: bytes, matmul: bytes, how: str
) -> None:
    """The client ends at once with a lost board, the agent ends the candidate and offers the board again."""
    end: dict[str, Callable[[], None]] = {
        "forward cut": real_board.forward.cut_links,
        "session killed": sshd.drop_sessions,
    }
    connects = real_board.link.state.connects + (how == "session killed")
    wait_until(lambda: find_board(client, real_board, real_board.forward.address[1]), "the board to be free")
    with BlockingSession(client, real_board.key) as session:
        cut_at: list[float] = []

        def cut() -> None:
            # The worker is a child of the session's: it is there once the candidate runs.
            wait_until(lambda: len(real_board.sessions) >= 2, "the candidate")
            cut_at.append(time.monotonic())
            end[how]()

        cutter = threading.Thread(target=cut)
        cutter.start()
        with pytest.raises(BoardLostError):
            session.measure(spec("loops", timeout_s=30.0), bad)
        print(f"{how}: BoardLostError after {time.monotonic() - cut_at[0]:.2f} s")
        cutter.join()
    wait_until(lambda: not real_board.sessions, "the agent to end the candidate")
    print(f"{how}: board freed after {time.monotonic() - cut_at[0]:.2f} s")
    # Not before: a tracker that has not noticed yet would hand out what it knew.
    wait_until(lambda: real_board.link.state.connects == connects, "the connection to be back")
    wait_until(lambda: find_board(client, real_board, real_board.forward.address[1]), "the board to be offered again")
    print(f"{how}: offered again after {time.monotonic() - cut_at[0]:.2f} s")
    with BlockingSession(client, real_board.key) as session:
        assert session.measure(spec(), matmul).status is Status.OK
