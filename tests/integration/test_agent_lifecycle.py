"""The agent as a server: stock clients, crashing sessions, vanishing clients, a restarted tracker, signals."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from device_agent.protocol import Limits, Status
from tests.integration import candidates
from tests.integration.conftest import ROOT, Agent, Board, Tracker, wait_until
from tests.ports import find_free_port

# What the agent promises for every kind of accident.
_PROMISE_S = 2.0

# A client in a process of its own: borrows a board and calls a function of a library, in the session or measured.
_CLIENT = """
import sys
from tvm import rpc
from device_agent import protocol
how, host, port, key, path, entry = sys.argv[1:]
session = rpc.connect_tracker(host, int(port)).request(key)
if how == "direct":
    session.upload(path)
    session.load_module(path.rpartition("/")[2])[entry]()
else:
    spec = protocol.MeasureSpec(arguments=(), entry=entry, limits=protocol.Limits(timeout_s=60))
    session.get_function(protocol.MEASURE)(spec.to_json(), open(path, "rb").read())
"""


@contextlib.contextmanager
def client(how: str, tracker: Tracker, agent: Agent, library: pathlib.Path, entry: str) -> Iterator[Any]:
    arguments = [how, tracker.host, str(tracker.port), agent.key, str(library), entry]
    process = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, *arguments],
        cwd=ROOT,
        env=os.environ | {"TVM_USE_RUNTIME_LIB": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended; one that only waits to be reaped by a lazy init has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


@pytest.fixture
def bad_path(library_folder: pathlib.Path, bad: bytes) -> pathlib.Path:
    return library_folder / "bad.so"


def assert_served_within(tracker: Tracker, agent: Agent, matmul: bytes, timeout_s: float = _PROMISE_S) -> None:
    started = time.monotonic()
    board = Board(tracker.request(agent.key))
    assert time.monotonic() - started < timeout_s
    assert board.measure(matmul).status is Status.OK


@pytest.mark.parametrize("entry", ["segfault", "aborts", "exits_0", "exits_3"])
def test_a_stock_client_that_crashes_its_session_costs_nobody_else(
    tracker: Tracker, agent: Agent, bad_path: pathlib.Path, matmul: bytes, entry: str
) -> None:
    """A stock client runs a crashing function straight in its session; the next client is served within 2 s."""
    session = tracker.request(agent.key)
    session.upload(str(bad_path))
    function = session.load_module("bad.so")[entry]
    with pytest.raises(Exception):  # noqa: B017  TVM says so in several ways
        function()
    assert_served_within(tracker, agent, matmul)


@pytest.mark.parametrize("how", ["direct", "measured"])
def test_a_client_that_vanishes_frees_the_board(
    tracker: Tracker, agent: Agent, bad_path: pathlib.Path, matmul: bytes, how: str
) -> None:
    """A client killed while its session is inside a function that never returns holds the board no longer."""
    with client(how, tracker, agent, bad_path, "loops") as process:
        (busy,) = wait_until(lambda: agent.session_files("busy"), "the function to run")
        looping = int(busy.read_text())
        process.kill()
        assert_served_within(tracker, agent, matmul)
    assert not psutil.pid_exists(looping)
    assert not agent.session_files("busy")


def test_a_session_timeout_is_honoured(tracker: Tracker, agent: Agent, bad_path: pathlib.Path, matmul: bytes) -> None:
    """A session with a time-out ends on time even inside a function, and its client gets the reason."""
    session = tracker.request(agent.key, session_timeout_s=1)
    session.upload(str(bad_path))
    function = session.load_module("bad.so")["loops"]
    with pytest.raises(Exception, match="session_timeout"):
        function()
    assert_served_within(tracker, agent, matmul)


def test_a_connection_that_says_nothing_holds_up_nobody(tracker: Tracker, agent: Agent, matmul: bytes) -> None:
    """Silent connections, foreign clients and clients with a stale key do not keep the board from the next client."""
    with socket.create_connection(("127.0.0.1", agent.port)), socket.create_connection(("127.0.0.1", agent.port)) as s:
        s.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert_served_within(tracker, agent, matmul)


def test_a_dead_session_leaves_no_folder(tracker: Tracker, agent: Agent, bad_path: pathlib.Path, matmul: bytes) -> None:
    """What a client uploaded is gone once its session is, however that ended."""
    session = tracker.request(agent.key)
    session.upload(str(bad_path))
    assert agent.session_files("bad.so")
    with pytest.raises(Exception):  # noqa: B017
        session.load_module("bad.so")["segfault"]()
    wait_until(lambda: not agent.session_files("*"), "the session's folder to go")


def test_uploads_stay_inside_the_sessions_folder(tracker: Tracker, agent: Agent, bad_path: pathlib.Path) -> None:
    """A name that leads out of the work folder is refused."""
    session = tracker.request(agent.key)
    with pytest.raises(Exception, match="outside"):
        session.upload(str(bad_path), target="../../elsewhere")


def test_the_stock_runner_measures(tracker: Tracker, agent: Agent, library_folder: pathlib.Path) -> None:
    """What MetaSchedule's RPCRunner does (upload a tar, link, allocate, evaluate, clean up) works on the agent."""
    from tvm.s_tir.meta_schedule import runner

    candidates.build_matmul(library_folder, "matmul.tar")
    config = runner.EvaluatorConfig(number=2, repeat=3, min_repeat_ms=0)
    arguments = [["TENSOR", "float32", [candidates.SIZE, candidates.SIZE]]] * 3
    rpc = runner.RPCConfig(tracker.host, tracker.port, agent.key, 0, 60)
    session = runner.rpc_runner.default_create_session(rpc)
    module = runner.rpc_runner.default_upload_module(session, str(library_folder / "matmul.tar"), "matmul.tar")
    device = session.cpu(0)
    tensors = runner.rpc_runner.default_alloc_argument(session, device, arguments, 1)
    costs = runner.rpc_runner.default_run_evaluator(session, module, device, config, tensors)
    runner.rpc_runner.default_cleanup(session, "matmul.tar")
    assert len(costs) == 3
    assert all(0 < float(cost) < 0.1 for cost in costs)
    a, b, c = tensors[0]
    np.testing.assert_allclose(c.numpy(), a.numpy() @ b.numpy(), rtol=1e-4)


def test_the_agent_comes_back_to_a_restarted_tracker(start_agent: Callable[..., Agent], matmul: bytes) -> None:
    """After the tracker was killed and started again, the board is offered there again and works."""
    tracker = Tracker()
    try:
        tracker.start()
        agent = start_agent("--tracker", f"127.0.0.1:{tracker.port}")
        tracker.stop()
        tracker.start()
        wait_until(lambda: tracker.free_boards().get(agent.key) == 1, "the agent to register again")
        assert_served_within(tracker, agent, matmul)
        assert agent.stop() == 0
    finally:
        tracker.stop()


def test_a_match_key_that_nobody_used_is_replaced(tracker: Tracker, agent: Agent, matmul: bytes) -> None:
    """A client that took the board from the tracker and died before it came does not block the board for long."""
    from tvm.rpc import base

    with socket.create_connection((tracker.host, tracker.port)) as connection:
        connection.sendall(np.int32(base.RPC_TRACKER_MAGIC).tobytes())
        base.recvall(connection, 4)
        base.sendjson(connection, [base.TrackerCode.REQUEST, agent.key, "", 1])
        assert base.recvjson(connection)[0] == base.TrackerCode.SUCCESS
    assert_served_within(tracker, agent, matmul, timeout_s=15)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_agent_leaves_nothing_behind(
    tracker: Tracker, start_agent: Callable[..., Agent], bad_path: pathlib.Path, number: signal.Signals
) -> None:
    """Ended in the middle of a measurement, an agent is gone within 2 s with every process it started."""
    agent = start_agent("--tracker", f"{tracker.host}:{tracker.port}")
    with client("measured", tracker, agent, bad_path, "loops"):
        wait_until(lambda: agent.session_files("busy"), "the candidate to run")
        below = agent.descendants()
        assert len(below) == 2  # the session and its worker
        agent.process.send_signal(number)
        code = agent.process.wait(_PROMISE_S)
        wait_until(lambda: all(map(is_gone, below)), "the session and its worker to end", _PROMISE_S)
    wait_until(lambda: agent.key not in tracker.free_boards() or not tracker.free_boards()[agent.key], "deregistration")
    if number == signal.SIGKILL:
        assert agent.session_files("busy"), "the folder has an owner to remove it"
    else:
        assert code == 0
        assert list(agent.folder.glob("device-agent-*")) == []


def test_the_next_agent_removes_the_folder_of_a_killed_one(start_agent: Callable[..., Agent]) -> None:
    """A folder that a killed agent left is removed when an agent starts there; that of a living one is not."""
    killed = start_agent()
    killed.process.kill()
    killed.process.wait()
    (left,) = killed.folder.glob("device-agent-*")
    start_agent(folder=killed.folder)
    start_agent(folder=killed.folder)
    folders = list(killed.folder.glob("device-agent-*"))
    assert len(folders) == 2
    assert left not in folders


def test_an_agent_ends_with_its_parent(tmp_path: pathlib.Path) -> None:
    """With --exit-with-parent, killing the process that started it ends the agent."""
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "device_agent", "serve", "--exit-with-parent", "--ready-file", str(ready)]
    code = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(600)"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *command], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    try:
        wait_until(ready.exists, "the agent")
        (agent,) = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: is_gone(agent), "the agent to end", _PROMISE_S)


def test_a_busy_port_is_passed_over(start_agent: Callable[..., Agent]) -> None:
    """The agent takes the next port of its range, and says so when there is none."""
    port = find_free_port()
    with socket.create_server(("127.0.0.1", port)):
        agent = start_agent("--port", str(port), "--port-end", str(port + 20))
        assert port < agent.port <= port + 20
        refused = start_agent("--port", str(port), "--port-end", str(port), wait=False)
        assert refused.process.wait(10) == 3
        assert "in use" in refused.log_path.read_text()


def test_a_board_without_a_tracker_is_served_by_its_key(start_agent: Callable[..., Agent], matmul: bytes) -> None:
    """Without a tracker, a client with the board's key can connect directly."""
    from tvm import rpc

    agent = start_agent("--name", "alone", "--board-type", "desk")
    board = Board(rpc.connect("127.0.0.1", agent.port, key="desk/alone"))
    assert board.measure(matmul, limits=Limits(timeout_s=5)).status is Status.OK
    assert board.describe().board_type == "desk"


def test_the_listening_process_has_one_thread(agent: Agent) -> None:
    """No thread exists that a fork would lose."""
    assert psutil.Process(agent.process.pid).num_threads() == 1


def test_a_library_beyond_the_limit_is_refused(
    tracker: Tracker, start_agent: Callable[..., Agent], matmul: bytes, bad_path: pathlib.Path
) -> None:
    """Libraries and uploads larger than --max-library-bytes are refused, naming the limit."""
    agent = start_agent("--tracker", f"{tracker.host}:{tracker.port}", "--max-library-bytes", "1000")
    board = Board(tracker.request(agent.key))
    with pytest.raises(Exception, match="max-library-bytes"):
        board.measure(matmul)
    with pytest.raises(Exception, match="max-library-bytes"):
        board.rpc.upload(str(bad_path))
