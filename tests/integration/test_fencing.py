"""Leases on real boards: who was presumed dead comes back and disturbs nothing; who is no farm is waited for."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from device_agent import protocol
from device_agent.protocol import ClaimReport, ClaimStatus, LeaseClaim, OperatingPoint, PinStatus, Status
from farm.connectivity.tracker import Tracker
from farm.crew.leased_board import LeaseKeeper
from farm.crew.leased_site import FleetSite
from farm.errors import BoardBusyError, BoardLostError, LeaseOverError, PermanentError, UnavailableError
from farm.measure import answers
from farm.measure.answers import AgentAddress
from farm.measure.blocking import BlockingSession
from farm.search import tvm_env
from farm.store import Store
from farm.store.sqlite import copy_store
from farm.values import Board, Lease
from tests.awaiting import take
from tests.integration import coordinator
from tests.integration.conftest import ROOT, Agent, wait_until
from tests.integration.stock_board import stock_board

# These tests share a process with ones that compile: the session alone would load TVM's runtime only.
tvm_env.load()

# What a second coordinator may wait for the board of a frozen one, once it has the lease.
PROMISED_S = 5.0
TTL_S = 2.0


@pytest.fixture(scope="module")
def nano(tracker: Any, start_agent: Callable[..., Agent]) -> Agent:
    where = f"{tracker.host}:{tracker.port}"
    agent = start_agent("--virtual", "jetson-nano", "--tracker", where, "--port", "9600", "--port-end", "9699")
    agent.key = f"jetson-nano/{agent.key.partition('/')[2]}"
    return agent


@pytest.fixture
def path(tmp_path: pathlib.Path, nano: Agent) -> pathlib.Path:
    path = tmp_path / "farm.db"
    with Store(path) as store:
        store.boards.save(Board(nano.key.partition("/")[2], "jetson-nano", simulated=True))
    return path


class Coordinator:
    def __init__(self, path: pathlib.Path, tracker: Tracker, key: str, name: str = "left") -> None:
        arguments = [path, tracker.host, tracker.port, key, TTL_S, name]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.coordinator", *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | {"TVM_USE_RUNTIME_LIB": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.token = int(self.read()["token"])

    def read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, "the coordinator ended"
        return dict(json.loads(line))

    def do(self, order: str) -> dict[str, Any]:
        self.process.stdin.write(order.encode() + b"\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


@pytest.fixture
def start_coordinator(path: pathlib.Path, client: Tracker, nano: Agent) -> Iterator[Callable[..., Coordinator]]:
    with contextlib.ExitStack() as stack:

        def start(name: str = "left") -> Coordinator:
            coordinator = Coordinator(path, client, nano.key, name)
            stack.callback(coordinator.close)
            return coordinator

        yield start


def make_lease(agent: Agent, token: int, store: str, owner: str = "right") -> Lease:
    return Lease(agent.key.partition("/")[2], owner, "tuning", store, token, 60.0, 0.0, 0.0)


@pytest.mark.core
def test_a_frozen_coordinator_loses_its_board_and_disturbs_nothing(
    path: pathlib.Path,
    client: Tracker,
    nano: Agent,
    start_coordinator: Callable[..., Coordinator],
    matmul: bytes,
    library_folder: pathlib.Path,
) -> None:
    """Stopped, it loses lease, session and clocks to the next one within seconds; awake again, it gets that error."""
    library = library_folder / "for-the-frozen.so"
    library.write_bytes(matmul)
    frozen = start_coordinator("frozen")
    assert frozen.do("pin 403200000")["status"] == "ok"
    assert frozen.do(f"measure {library}")["status"] == "ok"
    with Store(path) as store:
        with store.session.writing():  # its keeper writes: frozen within a transaction it would hold up the store
            os.kill(frozen.process.pid, signal.SIGSTOP)
        lease = coordinator.acquire(store, nano.key.partition("/")[2], "awake", 60.0)
        began = time.monotonic()
        with LeaseKeeper(path, lease), BlockingSession(client, nano.key, lease=lease) as session:
            took_s = time.monotonic() - began
            assert took_s < PROMISED_S
            print(f"from the lease to a session in the place of a frozen one: {took_s:.2f} s")
            [cluster] = session.description.clocks.clusters
            assert session.description.clocks.holder == ""
            assert cluster.max_hz == 1_479_000_000
            assert session.pin(OperatingPoint(cpu_freq_hz={"*": 1_428_000_000})).status is PinStatus.OK
            os.kill(frozen.process.pid, signal.SIGCONT)
            said = frozen.do(f"measure {library}")
            assert said["status"] == "BoardLostError"
            assert said["lost"]  # its keeper found out as well
            outcome = session.measure(coordinator.SPEC, matmul)
            assert outcome.status is Status.OK, outcome.message
            assert outcome.point == OperatingPoint(cpu_freq_hz={"a57": 1_428_000_000})


def test_a_stock_client_is_waited_for(client: Tracker, tracker: Any, agent: Agent, matmul: bytes) -> None:
    """A lease does not end the session of a client that knows no leases: it waits, says for whom, and then proceeds."""
    stock = tracker.request(agent.key)
    lease = make_lease(agent, 7, "waits")
    with pytest.raises(BoardBusyError, match="held by a client that is not the farm"):
        BlockingSession(client, agent.key, 0.5, lease)
    assert stock.cpu(0).exist  # undisturbed
    started = threading.Event()
    outcomes = []

    def work() -> None:
        started.set()
        with BlockingSession(client, agent.key, lease=lease) as session:
            outcomes.append(session.measure(coordinator.SPEC, matmul))

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    wait_until(
        lambda: anyio.run(client.fetch_summary)["queue_info"].get(agent.key, {}).get("pending", 0) >= 1,
        "the farm to queue up",
    )
    assert not outcomes
    del stock
    thread.join(30)
    assert [outcome.status for outcome in outcomes] == [Status.OK]


def test_a_fence_ends_the_session_of_an_earlier_lease_alone(client: Tracker, agent: Agent) -> None:
    """Of the same store and lower: evicted. Of another store, or the same lease again: left alone."""
    address = anyio.run(answers.find_agent, client, agent.key)
    assert address == ("127.0.0.1", agent.port)
    with BlockingSession(client, agent.key, lease=make_lease(agent, 5, "fenced", "left")) as session:
        for claim in (LeaseClaim("another", 99, "x"), LeaseClaim("fenced", 5, "left")):
            report = anyio.run(answers.send_fence, address, claim)
            assert report.status is ClaimStatus.OK
            assert report.holder == "left for tuning (lease 5)"
        session.unpin()
        report = anyio.run(answers.send_fence, address, LeaseClaim("fenced", 6, "right"))
        assert (report.status, report.holder) == (ClaimStatus.EVICTED, "")
        with pytest.raises(BoardLostError):
            session.unpin()
    report = anyio.run(answers.send_fence, address, LeaseClaim("fenced", 5, "left"))
    assert (report.status, report.greatest, report.owner) == (ClaimStatus.REFUSED, 6, "right")
    with pytest.raises(LeaseOverError, match="right has had the board since, under lease 6") as caught:
        BlockingSession(client, agent.key, lease=make_lease(agent, 5, "fenced", "left"))
    assert pickle.loads(pickle.dumps(caught.value)).greatest == 6


def test_a_store_that_was_put_back_gets_its_boards_again(client: Tracker, agent: Agent, tmp_path: pathlib.Path) -> None:
    """A site whose lease's number was given before is refused, leaves the board, and has it with the next lease."""
    before, path = tmp_path / "before.db", tmp_path / "farm.db"
    kind, _, name = agent.key.partition("/")
    address = wait_until(lambda: anyio.run(answers.find_agent, client, agent.key), "the agent")
    with Store(path) as store:
        store.boards.save(Board(name, kind, simulated=False))
        copy_store(path, before)
        for _ in range(5):  # what is forgotten afterwards
            lease = store.leases.acquire(name, "left", "tuning")
            anyio.run(answers.send_fence, address, answers.to_claim(lease))
            store.leases.release(lease)
    notes: list[str] = []
    with (
        Store(before) as restored,
        take(
            FleetSite(types.SimpleNamespace(tracker=client), restored, kind, name, "tune", 10.0, notes.append)
        ) as site,
    ):
        with pytest.raises(LeaseOverError) as caught:
            BlockingSession(client, agent.key, lease=site.lease)
        site.note_refusal(caught.value)
        while not site.has_board:
            site.ensure_alive()
            time.sleep(0.05)
        assert site.lease.token > lease.token
        BlockingSession(client, agent.key, lease=site.lease).close()


def test_a_session_whose_lease_is_over_gets_nothing_done(client: Tracker, agent: Agent, matmul: bytes) -> None:
    """Every use of the board is refused with the reason, no candidate is blamed; release still works."""
    with BlockingSession(client, agent.key, lease=make_lease(agent, 7, "over")) as session:
        stale = LeaseClaim("over", 6, "left", "tuning")
        report = ClaimReport.from_json(
            str(session._loop.call(session._session._call(protocol.CLAIM, 5.0, stale.to_json())))
        )
        assert report.status is ClaimStatus.REFUSED
        outcome = session.measure(coordinator.SPEC, matmul)
        assert outcome.status is Status.FARM_ERROR
        assert "lease 6 of left is over" in outcome.message
        outcome, outputs = session.run_model(protocol.RunSpec(protocol.Engine.KERNEL), matmul, {})
        assert (outcome.status, outputs) == (Status.FARM_ERROR, {})
        assert session.pin(OperatingPoint(gpu_freq_hz=1)).status is PinStatus.FAILED
        with pytest.raises(PermanentError, match="lease 6 of left is over"):
            session.power(protocol.PowerSpec(0.1))
        assert session.unpin().status is PinStatus.OK


def test_an_agent_that_starts_again_remembers(
    start_agent: Callable[..., Agent], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With --state-dir, the holder of an earlier lease is refused after a restart too."""
    options = ("--state-dir", str(tmp_path / "state"), "--port", "9600", "--port-end", "9699")
    for token, status in ((7, ClaimStatus.OK), (6, ClaimStatus.REFUSED)):
        agent = start_agent(*options)
        claim = LeaseClaim("kept", token, "ann")
        assert anyio.run(answers.send_fence, ("127.0.0.1", agent.port), claim).status is status
        assert agent.stop() == 0


def test_what_knows_no_fences_is_named(tracker: Any, client: Tracker, tmp_path: pathlib.Path) -> None:
    """TVM's own server refuses the greeting; a session with it fails as one of another protocol."""
    lease = Lease("fenced", "right", "tuning", "stock", 1, 60.0, 0.0, 0.0)
    with stock_board(tmp_path, "--tracker", f"{tracker.host}:{tracker.port}", "--key", "stock/fenced"):
        address = wait_until(lambda: anyio.run(answers.find_agent, client, "stock/fenced"), "the stock server")
        with pytest.raises(UnavailableError, match="knows no fences"):
            anyio.run(answers.send_fence, address, answers.to_claim(lease))
        with pytest.raises(UnavailableError, match="stock/fenced does not speak our protocol"):
            BlockingSession(client, "stock/fenced", lease=lease)


def test_clients_wait_in_turn_beside_fences(start_agent: Callable[..., Agent], matmul: bytes) -> None:
    """While one is served, clients that left are forgotten, foreign ones dropped, and the next served in order."""
    agent = start_agent("--port", "9600", "--port-end", "9699")
    key = f"client:{agent.key}".encode()
    greeting = struct.pack("<ii", protocol.RPC_MAGIC, len(key)) + key

    def connect(data: bytes) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", agent.port), timeout=20)
        sock.sendall(data)
        return sock

    def is_served(sock: socket.socket) -> bool:
        return sock.recv(4) == struct.pack("<i", protocol.RPC_SUCCESS)

    with contextlib.ExitStack() as stack:
        first = stack.enter_context(connect(greeting))
        assert is_served(first)
        second, third, gone = (stack.enter_context(connect(greeting)) for _ in range(3))
        foreign = stack.enter_context(connect(b"GET / HTTP/1.1\r\n\r\n"))
        assert foreign.recv(1) == b""  # closed at once
        gone.close()
        for _ in range(3):
            report = anyio.run(answers.send_fence, ("127.0.0.1", agent.port), LeaseClaim("beside", 1, "x"))
            assert report.holder.startswith("a client that is not the farm")
        third.setblocking(False)
        with pytest.raises(BlockingIOError):
            third.recv(1)
        third.settimeout(20)
        first.close()
        assert is_served(second)
        third.setblocking(False)
        with pytest.raises(BlockingIOError):
            third.recv(1)
        third.settimeout(20)
        second.close()
        assert is_served(third)
    with BlockingSession(
        AgentAddress("127.0.0.1", agent.port), agent.key, lease=make_lease(agent, 2, "beside")
    ) as session:
        assert session.measure(coordinator.SPEC, matmul).status is Status.OK
