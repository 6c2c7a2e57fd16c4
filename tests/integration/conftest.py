"""A real tracker and real agents on loopback, and candidate libraries for them.

Every agent gets a temporary folder of its own (TMPDIR), so that a test can look for what is left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from device_agent import protocol
from farm.connectivity.ssh import SshConnection
from farm.connectivity.tracker import Tracker as FarmTracker
from tests import children
from tests.clocks import wait_until as wait_until
from tests.integration import candidates
from tests.integration.sshd import Sshd, running_sshd
from tests.ports import find_free_port

ROOT = pathlib.Path(__file__).parents[2]
EMULATED_BOARD = ROOT / "deploy" / "emulated-board"

# Generous: a busy machine must not fail a test that waits for something to happen.
PATIENCE_S = 60.0
# No test holds a board longer; a session left over by a failed test must not block the next one.
SESSION_TIMEOUT_S = 45
# For an agent to end its children; one that a test froze is killed.
_STOP_TIMEOUT_S = 10.0


# What `python -m tvm.exec.rpc_tracker` runs in a helper process, which outlives it when it is killed: here in one.
_TRACKER = """
import sys
from tvm.rpc.tracker import PopenTrackerServerState
host, port = sys.argv[1], int(sys.argv[2])
PopenTrackerServerState(host, port, port + 1, silent=True).thread.join()
"""


class Tracker:
    """TVM's own tracker as a process; can be stopped and started again on the same port."""

    def __init__(self) -> None:
        self.host = "127.0.0.1"
        self.port = find_free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TRACKER, self.host, str(self.port)], env=os.environ | {"TVM_USE_RUNTIME_LIB": "1"}
        )
        wait_until(lambda: self.process.poll() is not None or self._accepts(), "the tracker")
        assert self.process.poll() is None, f"the tracker ended; is port {self.port} in use?"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def request(self, key: str, session_timeout_s: int = SESSION_TIMEOUT_S) -> Any:
        from tvm import rpc

        return rpc.connect_tracker(self.host, self.port).request(key, session_timeout=session_timeout_s)

    def free_boards(self) -> dict[str, int]:
        from tvm import rpc

        queues = rpc.connect_tracker(self.host, self.port).summary()["queue_info"]
        return {key: queue["free"] for key, queue in queues.items()}

    def _accepts(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=1):
            return True
        return False


@dataclasses.dataclass
class Agent:
    process: subprocess.Popen[bytes]
    key: str
    port: int
    folder: pathlib.Path  # its TMPDIR
    log_path: pathlib.Path
    work: pathlib.Path  # where a virtual one keeps what programs cost

    def session_files(self, name: str) -> list[pathlib.Path]:
        """Files called `name` in the work folders of this agent's sessions."""
        return list(self.folder.glob(f"device-agent-*/session-*/{name}"))

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE_S)


@dataclasses.dataclass
class Board:
    """The farm's side of a session with an agent."""

    rpc: Any

    def describe(self) -> protocol.Description:
        return protocol.Description.from_json(self.rpc.get_function(protocol.DESCRIBE)())

    def measure(self, library: bytes, **fields: Any) -> protocol.Outcome:
        """Measure `library`; `fields` are those of MeasureSpec, by default for the 64 x 64 matmul."""
        shape = protocol.TensorSpec((candidates.SIZE, candidates.SIZE), "float32")
        spec = protocol.MeasureSpec(**{"arguments": (shape,) * 3} | fields)
        return protocol.Outcome.from_json(self.rpc.get_function(protocol.MEASURE)(spec.to_json(), library))

    def run_model(
        self, spec: protocol.RunSpec, program: bytes, arrays: dict[str, Any]
    ) -> tuple[protocol.Outcome, list[Any]]:
        inputs = io.BytesIO()
        np.savez(inputs, **arrays)
        frame = self.rpc.get_function(protocol.RUN_MODEL)(spec.to_json(), program, inputs.getvalue())
        text, payload = protocol.unpack_frame(bytes(frame))
        outputs: list[Any] = []
        if payload:
            with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
                outputs = [archive[name] for name in archive.files]
        return protocol.Outcome.from_json(text), outputs


@pytest.fixture(scope="session")
def tracker() -> Iterator[Tracker]:
    tracker = Tracker()
    try:
        tracker.start()
        yield tracker
    finally:
        tracker.stop()


@pytest.fixture(scope="session")
def start_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Agent]]:
    """Start an agent with the given options, wait until it is ready; it is stopped after the last test."""
    agents: list[Agent] = []
    # Boards of one farm agree on what a program costs; each for itself would find something else on a busy machine.
    work = tmp_path_factory.mktemp("work")

    def start(*options: str, folder: pathlib.Path | None = None, wait: bool = True) -> Agent:
        name = f"board-{len(agents)}"
        folder = folder or tmp_path_factory.mktemp(name)
        ready, log_path = folder / f"{name}.json", folder / f"{name}.log"
        program = "farm.virtual" if "virtual" in " ".join(options) else "device_agent"
        command = [sys.executable, "-m", program, "serve", "--name", name, "--ready-file", str(ready), *options]
        if "--virtual" in options:
            command += ["--work-folder", str(work)]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, stderr=log, env=os.environ | {"TMPDIR": str(folder)})
        children.own(process.pid)
        agent = Agent(process, f"local/{name}", 0, folder, log_path, work)
        agents.append(agent)
        if wait:
            wait_until(lambda: ready.exists() or process.poll() is not None, f"agent {name} to be ready")
            assert process.poll() is None, log_path.read_text()
            agent.port = json.loads(ready.read_text())["port"]
        return agent

    yield start
    running = [agent.process for agent in agents if agent.process.poll() is None]
    for process in running:
        process.terminate()  # it ends its clock helper and simulator, which outlive a killed agent by a moment
    for process in running:
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def agent(tracker: Tracker, start_agent: Callable[..., Agent]) -> Iterator[Agent]:
    """One agent for the tests of a module, registered with the tracker; has .key, .port and .process."""
    agent = start_agent("--tracker", f"{tracker.host}:{tracker.port}")
    yield agent
    assert agent.stop() == 0, agent.log_path.read_text()


@pytest.fixture
def board(tracker: Tracker, agent: Agent) -> Iterator[Board]:
    """A session with the module's agent."""
    board = Board(tracker.request(agent.key))
    yield board
    board.rpc = None  # dropping the session ends it


@pytest.fixture(scope="session")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("candidates")


@pytest.fixture(scope="session")
def matmul(library_folder: pathlib.Path) -> bytes:
    return candidates.build_matmul(library_folder)


@pytest.fixture(scope="session")
def bad(library_folder: pathlib.Path) -> bytes:
    return candidates.build_bad(library_folder)


@pytest.fixture(scope="session")
def emulated_root() -> str:
    """The emulated board's root. Without it tests are skipped; with FARM_REQUIRE_EMULATED_BOARD=1 they fail."""
    checked = subprocess.run(
        [EMULATED_BOARD / "build", "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    if checked.returncode != 0:
        reason = checked.stderr.strip().removeprefix("error: ") or "deploy/emulated-board/build --check failed"
        if os.environ.get("FARM_REQUIRE_EMULATED_BOARD") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return checked.stdout.strip()


@pytest.fixture(scope="module")
def client(tracker: Tracker) -> FarmTracker:
    """Our client of the tests' tracker."""
    return FarmTracker(tracker.host, tracker.port)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def connection(sshd: Sshd) -> Iterator[SshConnection]:
    """A connection with the host key pinned."""
    with SshConnection.connect(sshd.pinned) as connection:
        yield connection
