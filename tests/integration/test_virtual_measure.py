"""Measuring on a virtual board: its clocks, heat and sensors decide what comes of a candidate that really runs.

One agent of a virtual Nano serves all tests; what they do to its hardware they undo.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
import tvm.rpc

from device_agent.clocks.client import HelperClient
from device_agent.protocol import (
    EnergySpec,
    Limits,
    MeasureSpec,
    OperatingPoint,
    Outcome,
    PinStatus,
    PowerSpec,
    StartConditions,
    Status,
    TensorSpec,
)
from device_agent.sysfs import VIRTUAL_PREFIX, Tree, open_tree
from farm.errors import BoardUnsafeError
from farm.measure.asking import AgentAddress
from farm.measure.session import BoardSession
from tests.integration import candidates
from tests.integration.conftest import Agent, wait_until

SHAPE = TensorSpec((candidates.SIZE, candidates.SIZE), "float32")
SLOW, FAST = 403_200_000, 1_428_000_000
POLICY = "/sys/devices/system/cpu/cpufreq/policy0"


@pytest.fixture(scope="module")
def nano(start_agent: Callable[..., Agent]) -> Agent:
    return start_agent("--virtual", "jetson-nano", "--port", "9500", "--port-end", "9599")


@pytest.fixture
def board(nano: Agent) -> Iterator[BoardSession]:
    key = f"jetson-nano/{nano.key.partition('/')[2]}"
    with BoardSession(AgentAddress("127.0.0.1", nano.port), key) as session:
        yield session


@pytest.fixture
def hardware(nano: Agent) -> Iterator[Tree]:
    """The board's kernel files as root sees them; faults are taken away afterwards."""
    (socket,) = nano.folder.glob("device-rig-*/board.sock")
    tree = open_tree(f"{VIRTUAL_PREFIX}{socket}.root")
    yield tree
    tree.write("/sys/virtual/fault", "clear")


def measure(board: BoardSession, library: bytes, **fields: object) -> Outcome:
    spec = MeasureSpec((SHAPE,) * 3, **({"limits": Limits(timeout_s=30.0, threads=1)} | fields))  # type: ignore[arg-type]
    return board.measure(spec, library)


def settle_costs(agent: Agent) -> None:
    """Let what is known of costs count as established in quiet: taken under load, it would be taken once more."""
    for path in agent.work.glob("*/*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quiet": True}))


def pin(board: BoardSession, freq_hz: int) -> None:
    report = board.pin(OperatingPoint(cpu_freq_hz={"a57": freq_hz}))
    assert report.status is PinStatus.OK, report.message


def test_latency_answers_to_the_clock(board: BoardSession, matmul: bytes) -> None:
    """The same candidate takes longer at a lower clock, by as much as the clock at most; both say where they were."""
    latency_s = {}
    for freq_hz in (FAST, SLOW):
        pin(board, freq_hz)
        outcome = measure(board, matmul, repeat=9, min_repeat_s=0.02)
        assert outcome.status is Status.OK, outcome.message
        assert outcome.simulated
        assert outcome.point is not None
        assert outcome.point.cpu_freq_hz == {"a57": freq_hz}
        assert outcome.before is not None
        assert set(outcome.before.cpu_freq_hz.values()) == {freq_hz}
        latency_s[freq_hz] = statistics.median(outcome.latency_s)
    assert 1.5 < latency_s[SLOW] / latency_s[FAST] < 1.3 * FAST / SLOW


def test_energy_per_call_is_above_idle_and_covers_the_window(board: BoardSession, matmul: bytes) -> None:
    """A kernel of microseconds repeats until the sensor has spoken often enough; idle is taken at the same clocks."""
    pin(board, FAST)
    outcome = measure(board, matmul, energy=EnergySpec(min_updates=4, limit_s=6.0, idle_s=1.0))
    assert outcome.status is Status.OK, outcome.message
    energy = outcome.energy
    assert energy is not None
    assert energy.idle is not None
    assert energy.busy.enough, energy.busy.note
    assert energy.busy.total is not None
    assert energy.busy.total.updates >= 4
    assert energy.busy.calls > 100
    assert energy.per_call_j is not None
    assert energy.per_call_j == pytest.approx(energy.busy.total.energy_j / energy.busy.calls)
    assert energy.above_idle_j is not None
    assert 0 < energy.above_idle_j < energy.per_call_j
    assert energy.busy.window_s < 6.5


def test_too_few_updates_are_said(board: BoardSession, matmul: bytes) -> None:
    """At the limit the window ends, and the outcome says that it was not enough."""
    outcome = measure(board, matmul, energy=EnergySpec(min_updates=50, limit_s=1.0, idle_s=0.0))
    assert outcome.status is Status.OK, outcome.message
    assert outcome.energy is not None
    assert not outcome.energy.busy.enough
    assert "50" in outcome.energy.busy.note
    assert outcome.energy.idle is None
    assert outcome.energy.above_idle_j is None


def test_a_board_that_throttles_is_found_out(board: BoardSession, hardware: Tree, matmul: bytes) -> None:
    """The samples are kept, and marked."""
    pin(board, FAST)
    hardware.write("/sys/virtual/fault", "throttle")
    outcome = measure(board, matmul)
    assert outcome.status is Status.THROTTLED, outcome.message
    assert len(outcome.latency_s) == 3


def test_a_limit_that_somebody_moves_meanwhile_is_found_out(
    board: BoardSession, hardware: Tree, nano: Agent, matmul: bytes
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


def test_what_takes_the_board_too_long_is_a_timeout(board: BoardSession, matmul: bytes, bad: bytes) -> None:
    """By the board's clock, which is not waited for, and by this machine's, for a candidate that hangs."""
    began = time.monotonic()
    outcome = measure(board, matmul, repeat=9, min_repeat_s=60.0, limits=Limits(timeout_s=100.0, threads=1))
    assert (outcome.status, time.monotonic() - began < 30) == (Status.RUN_TIMEOUT, True), outcome.message
    assert "100 s" in outcome.message
    outcome = measure(board, bad, entry="loops", limits=Limits(timeout_s=1.0, threads=1))
    assert outcome.status is Status.RUN_TIMEOUT


def test_a_measurement_again_in_another_session_is_the_same(nano: Agent, matmul: bytes) -> None:
    """To the digit, with power and energy, whichever work came in between; within a session noise differs."""
    key = f"jetson-nano/{nano.key.partition('/')[2]}"
    with BoardSession(AgentAddress("127.0.0.1", nano.port), key) as session:
        measure(session, matmul)
    settle_costs(nano)
    seen = []
    for _ in range(2):
        with BoardSession(AgentAddress("127.0.0.1", nano.port), key) as session:
            pin(session, FAST)
            spec = EnergySpec(min_updates=4, limit_s=20.0, idle_s=1.0)
            first, second = (measure(session, matmul, repeat=5, energy=spec) for _ in range(2))
            seen.append([(each.latency_s, each.energy, each.power) for each in (first, second)])
    assert seen[0] == seen[1]
    assert seen[0][0][0] != seen[0][1][0]
    assert seen[0][0][1] is not None


def test_samples_that_spread_are_noisy(board: BoardSession, matmul: bytes) -> None:
    """A bound that no board keeps."""
    outcome = measure(board, matmul, repeat=9, max_spread=1e-9)
    assert outcome.status is Status.NOISY
    assert "spread" in outcome.message


def test_a_board_that_is_too_hot_is_waited_for_and_given_up(board: BoardSession, matmul: bytes) -> None:
    """No candidate runs; the answer names the zone."""
    outcome = measure(board, matmul, start=StartConditions(max_temperature_c=5.0, deadline_s=0.5))
    assert outcome.status is Status.NOISY
    assert "above 5 C" in outcome.message
    assert outcome.latency_s == ()


def test_a_cluster_that_the_board_lacks_is_no_fault_of_the_candidate(board: BoardSession, matmul: bytes) -> None:
    """The message names the clusters."""
    outcome = measure(board, matmul, limits=Limits(cluster="denver"))
    assert outcome.status is Status.FARM_ERROR
    assert "a57" in outcome.message


def test_power_over_the_session(board: BoardSession) -> None:
    """A window over all rails, with what the sensors said one by one."""
    trace = board.power(PowerSpec(seconds=1.5))
    assert trace.simulated
    assert trace.window is not None
    assert {rail.rail for rail in trace.window.rails} == {"POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU"}
    assert trace.window.total is not None
    assert 1.0 < trace.window.total.power_w < 3.0
    assert trace.samples["POM_5V_IN"]


def test_the_clocks_are_free_after_the_session(nano: Agent, hardware: Tree) -> None:
    """The session is the lease: its end, without any unpin, restores."""
    before = hardware.read(f"{POLICY}/scaling_max_freq")
    key = f"jetson-nano/{nano.key.partition('/')[2]}"
    with BoardSession(AgentAddress("127.0.0.1", nano.port), key) as session:
        pin(session, SLOW)
        assert hardware.read(f"{POLICY}/scaling_max_freq") != before
    wait_until(lambda: hardware.read(f"{POLICY}/scaling_max_freq") == before, "the clocks to be restored")


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
    with BoardSession(AgentAddress("127.0.0.1", agent.port), key) as session:
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


def test_a_board_whose_clocks_do_not_go_back_is_unsafe_until_an_operator_clears_it(
    start_agent: Callable[..., Agent],
) -> None:
    """The farm does not measure on it, and says why; after `clocks restore` it does."""
    agent = start_agent("--virtual", "jetson-nano", "--port", "9500", "--port-end", "9599")
    key = f"jetson-nano/{agent.key.partition('/')[2]}"
    (socket,) = agent.folder.glob("device-rig-*/board.sock")
    hardware = open_tree(f"{VIRTUAL_PREFIX}{socket}.root")
    address = AgentAddress("127.0.0.1", agent.port)
    with BoardSession(address, key) as session:
        pin(session, SLOW)
        hardware.write("/sys/virtual/fault", "write_refused:*scaling_max_freq")
        report = session.unpin()
        assert report.status is PinStatus.UNSAFE
        assert "scaling_max_freq" in report.message
    with pytest.raises(BoardUnsafeError, match="scaling_max_freq"):
        BoardSession(address, key)
    hardware.write("/sys/virtual/fault", "clear")
    helper = HelperClient(socket.with_name("clock-helper.sock"))
    assert helper.clear_unsafe()
    with BoardSession(address, key) as session:
        assert not session.description.clocks.unsafe
    assert agent.stop() == 0


def test_timing_takes_a_set_time(board: BoardSession, hardware: Tree, matmul: bytes) -> None:
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
