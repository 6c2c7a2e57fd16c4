"""Any process is killed or stopped at any moment: no clock stays held for more than 3 s after its holder is gone.

The board is a virtual TX2 whose simulator outlives everything that is harmed here, as hardware does. Several boards are
harmed side by side, each by its own seeded sequence.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from device_agent.clocks.client import HelperClient
from device_agent.errors import AgentError
from device_agent.sysfs import Tree
from farm.virtual.client import SimulatedTree
from tests import fuzzing
from tests.integration.conftest import PATIENCE_S, ROOT, Agent, wait_until

SEED = 20
BOARDS = 4
# Every victim is killed and stopped some four times; for longer, see `tests.fuzzing`.
ROUNDS = 13 * fuzzing.ROUNDS
# The bound that users are promised, and what it takes a loaded machine to find out.
PROMISED_S = 3.0
VICTIMS = ("worker", "session", "agent", "helper", "guardian", "client")
# Agents are named by how many there are.
_STARTING = threading.Lock()
POINT = {"cores_online": [0, 3, 4, 5], "cpu_freq_hz": {"a57": 806_400_000}, "gpu_freq_hz": 318_750_000}


def read_state(tree: Tree) -> dict[str, str]:
    cpus = "/sys/devices/system/cpu"
    paths = [f"{cpus}/online"]
    paths += [
        f"{cpus}/cpufreq/policy{policy}/{name}"
        for policy in (0, 1)
        for name in ("scaling_min_freq", "scaling_max_freq", "scaling_governor")
    ]
    gpu = "/sys/class/devfreq/17000000.gp10b"
    paths += [f"{gpu}/min_freq", f"{gpu}/max_freq"]
    return {path: tree.read(path) for path in paths if tree.exists(path)}


def _answers(helper: pathlib.Path) -> bool:
    with contextlib.suppress(AgentError):
        return not HelperClient(helper).status().unsafe
    return False


@dataclasses.dataclass
class Bench:
    """One board: its simulator, its helper, its agent; the last two are started again when they have been killed."""

    folder: pathlib.Path
    start_agent: Callable[..., Agent]
    clients: subprocess.Popen[bytes]
    library: pathlib.Path
    agent: Agent | None = None
    helper: subprocess.Popen[bytes] | None = None
    said: bytes = b""
    harmed: set[int] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self.socket = self.folder / "board.sock"
        self.simulator = self._start("farm.virtual.server", "jetson-tx2", "--socket", str(self.socket))
        wait_until(self.socket.exists, "the simulator")
        self.tree = SimulatedTree(f"{self.socket}")
        self.at_boot = read_state(self.tree)

    def _start(self, module: str, *options: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{module}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", module, *options], cwd=ROOT, stderr=log, stdout=log)

    def make_ready(self) -> None:
        helper_socket = self.folder / "helper.sock"
        if self.helper is None or self.helper.poll() is not None:
            self.helper = self._start(
                "farm.virtual.clock_helper",
                *("--socket", str(helper_socket), "--state-dir", str(self.folder / "state")),
                *("--root", f"virtual:{self.socket}.root"),
            )
            wait_until(lambda: _answers(helper_socket), "the clock helper")
        if self.agent is None or self.agent.process.poll() is not None:
            (self.folder / "tmp").mkdir(exist_ok=True)
            with _STARTING:
                self.agent = self.start_agent(
                    *("--root", f"virtual:{self.socket}", "--clock-helper", str(helper_socket)),
                    *("--board-type", "jetson-tx2", "--port", "9300", "--port-end", "9499"),
                )

    def order_client(self) -> dict[str, Any]:
        """Have a client made that pins; wait for its word. Several benches share the process: see `Round`."""
        key = f"jetson-tx2/{self.agent.key.partition('/')[2]}"
        order = {"port": self.agent.port, "key": key, "point": POINT, "library": str(self.library)}
        self.clients.stdin.write(json.dumps(order).encode() + b"\n")
        self.clients.stdin.flush()
        deadline = time.monotonic() + PATIENCE_S
        words = self.clients.stdout.fileno()
        while True:
            while b"\n" in self.said:
                line, _, self.said = self.said.partition(b"\n")
                word: dict[str, Any] = json.loads(line)
                if word["pid"] not in self.harmed:  # not the last word of an earlier round's client
                    return word
            ready, _, _ = select.select([words], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return {"pid": 0, "status": "silent", "message": self.agent.log_path.read_text()[-2000:]}
            self.said += os.read(words, 65536)

    def find(self, victim: str, client: int) -> int | None:
        """The process id of a victim, None if it does not exist at this moment."""
        with contextlib.suppress(psutil.Error, IndexError):
            if victim == "client":
                return client
            if victim == "agent":
                return self.agent.process.pid
            if victim == "guardian":
                return self.helper.pid
            if victim == "helper":
                return psutil.Process(self.helper.pid).children()[0].pid
            session = psutil.Process(self.agent.process.pid).children()[0]
            return session.pid if victim == "session" else session.children()[0].pid
        return None

    def stop(self) -> None:
        for process in (self.helper, self.simulator):
            if process is not None:
                process.terminate()
                process.wait(10)


def harm(pid: int, number: signal.Signals) -> None:
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def run_round(bench: Bench, source: random.Random) -> str:
    """Pin, harm a process, let the client go, and wait for the clocks; say what was wrong, "" for nothing."""
    bench.make_ready()
    word = bench.order_client()
    bench.harmed.add(word["pid"])
    if word["status"] != "ok":
        harm(word["pid"], signal.SIGKILL)
        return f"pin: {word['status']}: {word['message']}"
    assert read_state(bench.tree) != bench.at_boot
    victim, how = source.choice(VICTIMS), source.choice((signal.SIGKILL, signal.SIGSTOP))
    time.sleep(source.uniform(0.0, 0.2))  # the moment is what is drawn at random here; nothing is waited for
    pid = bench.find(victim, word["pid"])
    stopped: set[int] = set()
    if pid is not None:
        harm(pid, how)
        if how is signal.SIGSTOP:
            stopped.add(pid)
    session = bench.find("session", word["pid"])
    # A stopped client may hold the board indefinitely; it leaves now.
    harm(word["pid"], signal.SIGKILL)
    gone = time.monotonic()
    state = read_state(bench.tree)
    while state != bench.at_boot and time.monotonic() - gone < 4 * PROMISED_S:
        time.sleep(0.02)
        state = read_state(bench.tree)
    took = time.monotonic() - gone
    for stopped_pid in stopped:
        harm(stopped_pid, signal.SIGCONT)
    if session is not None:
        wait_until(lambda: not psutil.pid_exists(session), "the session's end")
    if state != bench.at_boot:
        changed = {path: text for path, text in state.items() if bench.at_boot.get(path) != text}
        return f"{victim} {how.name}: still held after {took:.1f} s: {changed}"
    return f"{victim} {how.name}: held for {took:.1f} s" if took > PROMISED_S else ""


@pytest.fixture
def make_bench(
    tmp_path: pathlib.Path, start_agent: Callable[..., Agent], matmul: bytes
) -> Iterator[Callable[[int], Bench]]:
    library = tmp_path / "matmul.so"
    library.write_bytes(matmul)
    with contextlib.ExitStack() as stack:

        def make(index: int) -> Bench:
            folder = tmp_path / f"bench-{index}"
            folder.mkdir()
            clients = subprocess.Popen(
                [sys.executable, str(ROOT / "tests/integration/clock_clients.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            stack.callback(clients.wait, 30)
            stack.callback(clients.stdin.close)
            bench = Bench(folder, start_agent, clients, library)
            stack.callback(bench.stop)
            return bench

        yield make


def test_no_clock_stays_held(make_bench: Callable[[int], Bench]) -> None:
    """Over 50 rounds of kill -9 and SIGSTOP on worker, session, agent, helper, guardian and client."""
    benches = [make_bench(index) for index in range(BOARDS)]

    def harm_one_board(index: int) -> list[str]:
        source = random.Random(SEED + index)
        problems = []
        for number in range(ROUNDS):
            problems.append(run_round(benches[index], source))
            print(f"board {index} round {number}: {problems[-1] or 'restored'}", flush=True)
            if problems[-1]:  # what is wrong once may make every later round wait
                break
        return problems

    with concurrent.futures.ThreadPoolExecutor(BOARDS) as pool:
        problems = [problem for board in pool.map(harm_one_board, range(BOARDS)) for problem in board]
    assert not [problem for problem in problems if problem]
    assert len(problems) == BOARDS * ROUNDS
