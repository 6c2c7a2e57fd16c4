"""Measuring on a virtual board: its clocks, heat and sensors decide what comes of a candidate that really runs.

One agent of a virtual Nano serves all tests; what they do to its hardware they undo.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
import tvm.rpc

from device_agent.protocol import (
    EnergySpec,
    Limits,
    MeasureSpec,
    OperatingPoint,
    Outcome,
    PinStatus,
    PowerSpec,
    Status,
    TensorSpec,
)
from device_agent.sysfs import Tree
from farm.measure.answers import AgentAddress
from farm.measure.blocking import BlockingSession
from farm.virtual.client import SimulatedTree
from tests.integration import candidates
from tests.integration.conftest import Agent, wait_until

SHAPE = TensorSpec((candidates.SIZE, candidates.SIZE), "float32")
SLOW, FAST = 403_200_000, 1_428_000_000
POLICY = "/sys/devices/system/cpu/cpufreq/policy0"


@pytest.fixture(scope="module")
def nano(start_agent: Callable[..., Agent]) -> Agent:
    return start_agent("--virtual", "jetson-nano", "--port", "9500", "--port-end", "9599")


@pytest.fixture
def board(nano: Agent) -> Iterator[BlockingSession]:
    key = f"jetson-nano/{nano.key.partition('/')[2]}"
    with BlockingSession(AgentAddress("127.0.0.1", nano.port), key) as session:
        yield session


@pytest.fixture
def hardware(nano: Agent) -> Iterator[Tree]:
    """The board's kernel files as root sees them; faults are taken away afterwards."""
    (socket,) = nano.folder.glob("device-rig-*/board.sock")
    tree = SimulatedTree(f"{socket}.root")
    yield tree
    tree.write("/sys/virtual/fault", "clear")


def measure(board: BlockingSession, library: bytes, **fields: object) -> Outcome:
    spec = MeasureSpec((SHAPE,) * 3, **({"limits": Limits(timeout_s=30.0, threads=1)} | fields))  # type: ignore[arg-type]
    return board.measure(spec, library)


def pin(board: BlockingSession, freq_hz: int) -> None:
    report = board.pin(OperatingPoint(cpu_freq_hz={"a57": freq_hz}))
    assert report.status is PinStatus.OK, report.message


def test_energy_per_call_is_above_idle_and_covers_the_window(board: BlockingSession, matmul: bytes) -> None:
    """A kernel of microseconds repeats until the sensor has spoken often enough; idle is taken at the same clocks."""
    pin(board, FAST)
    outcome = measure(board, matmul, energy=EnergySpec(min_updates=4, limit_s=6.0, idle_s=1.0))
    assert outcome.status is Status.OK, outcome.message
    energy = outcome.energy
    assert energy.idle is not None
    assert energy.busy.enough, energy.busy.note
    assert energy.busy.total.updates >= 4
    assert energy.busy.calls > 100
    assert energy.per_call_j is not None
    assert energy.per_call_j == pytest.approx(energy.busy.total.energy_j / energy.busy.calls)
    assert energy.above_idle_j is not None
    assert 0 < energy.above_idle_j < energy.per_call_j
    assert energy.busy.window_s < 6.5


def test_a_board_that_throttles_is_found_out(board: BlockingSession, hardware: Tree, matmul: bytes) -> None:
    """The samples are kept, and marked."""
    pin(board, FAST)
    hardware.write("/sys/virtual/fault", "throttle")
    outcome = measure(board, matmul)
    assert outcome.status is Status.THROTTLED, outcome.message
    assert len(outcome.latency_s) == 3


def test_a_limit_that_somebody_moves_meanwhile_is_found_out(
    board: BlockingSession, hardware: Tree, nano: Agent, matmul: bytes
) -> None:
    """Another root process (nvpmodel's service) lowers a limit while a candidate runs."""
    pin(board, FAST)
    hardware.write("/sys/virtual/fault", "slow_read:0.01")  # so that it runs for long enough to be met

    def meddle() -> None:
        with contextlib.suppress(psutil.Error):
            wait_until(lambda: len(nano.descendants()) >= 5, "the worker")  # simulator, helper and its child, session
        hardware.write(f"{POLICY}/scaling_min_freq", str(SLOW // 1000))
        hardware.write(f"{POLICY}/scaling_max_freq", str(SLOW // 1000))

    meddler = threading.Thread(target=meddle)
    meddler.start()
    outcome = measure(board, matmul, repeat=30, min_repeat_s=0.05)
    meddler.join()
    hardware.write("/sys/virtual/fault", "clear")
    assert outcome.status is Status.CLOCK_DRIFTED, outcome.message
    # Before the next measurement the point is put back.
    assert measure(board, matmul).status is Status.OK
    assert hardware.read(f"{POLICY}/scaling_max_freq") == str(FAST // 1000)


def test_what_takes_the_board_too_long_is_a_timeout(board: BlockingSession, matmul: bytes, bad: bytes) -> None:
    """By the board's clock, which is not waited for, and by this machine's, for a candidate that hangs."""
    began = time.monotonic()
    outcome = measure(board, matmul, repeat=9, min_repeat_s=60.0, limits=Limits(timeout_s=100.0, threads=1))
    assert (outcome.status, time.monotonic() - began < 30) == (Status.RUN_TIMEOUT, True), outcome.message
    assert "100 s" in outcome.message
    outcome = measure(board, bad, entry="loops", limits=Limits(timeout_s=1.0, threads=1))
    assert outcome.status is Status.RUN_TIMEOUT


def test_a_cluster_that_the_board_lacks_is_no_fault_of_the_candidate(board: BlockingSession, matmul: bytes) -> None:
    """The message names the clusters."""
    outcome = measure(board, matmul, limits=Limits(cluster="denver"))
    assert outcome.status is Status.FARM_ERROR
    assert "a57" in outcome.message


def test_power_over_the_session(board: BlockingSession) -> None:
    """A window over all rails, with what the sensors said one by one."""
    trace = board.power(PowerSpec(seconds=1.5))
    assert trace.simulated
    assert {rail.rail for rail in trace.window.rails} == {"POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU"}
    assert 1.0 < trace.window.total.power_w < 3.0
    assert trace.samples["POM_5V_IN"]


def test_threads_run_on_the_cores_of_the_cluster_that_was_asked_for(
    start_agent: Callable[..., Agent], tmp_path: pathlib.Path, bad: bytes
) -> None:
    """On a board with two clusters, the worker is placed on the second one's core; an isolated one needs just that."""
    cpus = tmp_path / "sys/devices/system/cpu"
    for cpu in (0, 1):
        policy = cpus / f"cpufreq/policy{cpu}"
        policy.mkdir(parents=True)
        (policy / "related_cpus").write_text(f"{cpu}\n")
        (policy / "affected_cpus").write_text(f"{cpu}\n")
        (cpus / f"cpu{cpu}").mkdir()
    for name in ("online", "present", "possible"):
        (cpus / name).write_text("0-1\n")
    (cpus / "isolated").write_text("1\n")
    agent = start_agent("--root", str(tmp_path), "--port", "9500", "--port-end", "9599")
    key = json.loads(next(agent.folder.glob("board-*.json")).read_text())["key"]
    with BlockingSession(AgentAddress("127.0.0.1", agent.port), key) as session:
        seen: list[set[int]] = []

        def look() -> None:
            (path,) = wait_until(lambda: agent.session_files("busy"), "the worker")
            seen.append(set(psutil.Process(int(path.read_text())).cpu_affinity()))
            path.unlink()

        for cluster, cores in (("policy1", {1}), ("", {0})):
            watcher = threading.Thread(target=look)
            watcher.start()
            spec = MeasureSpec((SHAPE,) * 3, entry="loops", limits=Limits(timeout_s=1.0, cluster=cluster))
            assert session.measure(spec, bad).status is Status.RUN_TIMEOUT
            watcher.join()
            assert seen[-1] == cores


def test_timing_takes_a_set_time(board: BlockingSession, hardware: Tree, matmul: bytes) -> None:
    """Where timing takes a set time, it does however many calls are asked for, and the host computes a few of them."""
    hardware.write("/sys/virtual/fault", "timing:0.6")
    outcome = measure(board, matmul, repeat=3, min_repeat_s=10.0)
    assert outcome.status is Status.OK, outcome.message
    assert (len(outcome.latency_s), outcome.calls_per_sample) == (3, 1)
    assert 0.6 <= outcome.timing_s < 3.0


def test_timing_of_a_stock_client_takes_a_set_time(nano: Agent, hardware: Tree, matmul: bytes) -> None:
    """TVM's own clients get samples of that board after the set time as well, and their own time otherwise."""
    remote = tvm.rpc.connect("127.0.0.1", nano.port, key=f"jetson-nano/{nano.key.partition('/')[2]}")
    remote.upload(bytearray(matmul), "matmul.so")
    zeros = np.zeros((candidates.SIZE, candidates.SIZE), "float32")
    tensors = [tvm.runtime.tensor(zeros, remote.cpu()) for _ in range(3)]
    module = remote.load_module("matmul.so")
    took_s = {}
    for fault in ("clear", "timing:0.6"):
        hardware.write("/sys/virtual/fault", fault)
        evaluator = module.time_evaluator("main", remote.cpu(), number=2, repeat=3)
        began = time.monotonic()
        samples = evaluator(*tensors).results
        took_s[fault] = time.monotonic() - began
        assert len(samples) == 3
        assert all(0 < sample < 0.1 for sample in samples)
    assert took_s["clear"] < 0.6 <= took_s["timing:0.6"] < 3.0
