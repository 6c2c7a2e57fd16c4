"""Probes of real virtual boards through the real tracker: what passes, what is found out, and that no lease is left.

One agent of a virtual Nano serves most tests; what they do to its hardware they undo.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from device_agent.clocks.client import HelperClient
from device_agent.protocol import OperatingPoint, PinStatus
from device_agent.sysfs import Tree
from farm.connectivity.tracker import Tracker
from farm.crew.crew import Crew
from farm.crew.health import HealthLimits, Kind, Observation, decide_by
from farm.inventory.board_types import load_board_types
from farm.measure.blocking import BlockingSession
from farm.search.codegen.golden import GoldenKernels, plan_target
from farm.services.probe import Prober, ProbeReport
from farm.settings import Settings
from farm.store import Store
from farm.values import DEFAULT_POINT, Virtual
from farm.virtual.client import SimulatedTree
from tests.awaiting import await_here
from tests.integration.conftest import Agent, wait_until
from tests.together import run_folder

POLICY = "/sys/devices/system/cpu/cpufreq/policy0"
SLOW_KHZ, FAST_KHZ = "403200", "1479000"


@pytest.fixture(scope="module")
def kernels() -> GoldenKernels:
    return GoldenKernels(run_folder() / "golden")


@pytest.fixture(scope="module")
def nano(tracker: Any, start_agent: Callable[..., Agent]) -> Agent:
    return start_nano(tracker, start_agent)


def start_nano(tracker: Any, start_agent: Callable[..., Agent], *options: str) -> Agent:
    return start_agent(
        *("--virtual", "jetson-nano", "--port", "9500", "--port-end", "9599"),
        *("--tracker", f"{tracker.host}:{tracker.port}", *options),
    )


def open_hardware(agent: Agent) -> Tree:
    """A virtual board's kernel files as root sees them."""
    (socket,) = agent.folder.glob("device-rig-*/board.sock")
    return SimulatedTree(f"{socket}.root")


def name_of(agent: Agent) -> str:
    """The board's name."""
    return agent.key.partition("/")[2]


@dataclasses.dataclass
class Fleet:
    store: Store
    prober: Prober

    def add(self, name: str, board_type: str = "jetson-nano") -> None:
        self.store.boards.register(name, board_type, Virtual())
        self.store.boards.observe(name, "back", "test", decide_by(Observation(Kind.BACK), HealthLimits()))

    def probe(self, name: str) -> ProbeReport:
        report = await_here(self.prober.probe(self.store, name))
        assert self.store.boards.require(name).lease is None
        assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["board"] == name
        return report


@pytest.fixture
def fleet(tmp_path: pathlib.Path, tracker: Any, kernels: GoldenKernels) -> Iterator[Fleet]:
    with Store(tmp_path / "farm.db") as store:
        client = Tracker(tracker.host, tracker.port)
        prober = Prober(client, kernels, load_board_types(), "test", wait_s=1.0)
        yield Fleet(store, prober)


@pytest.fixture
def name(fleet: Fleet, nano: Agent) -> str:
    fleet.add(name_of(nano))
    return name_of(nano)


def test_a_healthy_board_passes_and_is_good(fleet: Fleet, name: str) -> None:
    """It says what it is, its time is kept as a simulated one, and the store knows both."""
    report = fleet.probe(name)
    assert (report.passed, report.kind, report.health) == (True, "probe_passed", "good"), report
    row = fleet.store.boards.require(name)
    assert (row.health, row.board_type, row.description["name"]) == ("good", "jetson-nano", name)
    [sample] = fleet.store.golden.fetch("jetson-nano", report.kernel, DEFAULT_POINT, simulated=True)[name]
    assert sample.median_s == report.median_s
    assert len(sample.samples_s) >= 5
    assert 1e-3 < sample.median_s < 50e-3


def test_a_board_that_becomes_slow_is_suspect_until_it_is_mended(fleet: Fleet, name: str, nano: Agent) -> None:
    """After five runs a board has a history; one probe then finds a lower clock out and names it."""
    hardware = open_hardware(nano)
    for _ in range(5):
        assert fleet.probe(name).passed
    hardware.write(f"{POLICY}/scaling_max_freq", SLOW_KHZ)
    try:
        report = fleet.probe(name)
    finally:
        hardware.write(f"{POLICY}/scaling_max_freq", FAST_KHZ)
    assert (report.kind, report.health) == ("drifted", "suspect"), report
    assert "against its own history" in report.reason
    assert "limited to 403.2 of 1479 MHz" in report.reason
    assert fleet.probe(name).health == "good"


def test_an_agent_that_calls_its_board_something_else_does_not_pass(
    fleet: Fleet, tracker: Any, start_agent: Callable[..., Agent]
) -> None:
    """The device tree is believed, not the agent's options; the registered type stays in the store."""
    agent = start_nano(tracker, start_agent, "--board-type", "jetson-tx2")
    fleet.add(name_of(agent), "jetson-tx2")
    report = fleet.probe(name_of(agent))
    assert report.kind == "misfit"
    assert "registered as jetson-tx2, but its device tree says jetson-nano" in report.reason
    assert fleet.store.boards.require(name_of(agent)).board_type == "jetson-tx2"
    assert agent.stop() == 0


def test_an_unsafe_board_is_not_probed_again(fleet: Fleet, tracker: Any, start_agent: Callable[..., Agent]) -> None:
    """The first probe finds it out; from then on it is an operator's."""
    agent = start_nano(tracker, start_agent)
    name = name_of(agent)
    fleet.add(name)
    hardware = open_hardware(agent)
    with BlockingSession(fleet.prober.tracker, f"jetson-nano/{name}") as session:
        assert session.pin(OperatingPoint(cpu_freq_hz={"a57": 403_200_000})).status is PinStatus.OK
        hardware.write("/sys/virtual/fault", "write_refused:*scaling_max_freq")
        assert session.unpin().status is PinStatus.UNSAFE
    report = wait_until(lambda: None if (made := fleet.probe(name)).busy else made, "the session to be gone")
    assert (report.kind, report.health) == ("unsafe", "unsafe"), report
    assert "scaling_max_freq" in report.reason
    report = fleet.probe(name)
    assert (report.skipped, report.busy) == (True, False)
    hardware.write("/sys/virtual/fault", "clear")
    (socket,) = agent.folder.glob("device-rig-*/clock-helper.sock")
    assert HelperClient(socket).clear_unsafe()
    assert agent.stop() == 0


def test_a_board_that_a_stock_client_has_is_left_to_it(fleet: Fleet, tracker: Any, name: str) -> None:
    """That is no failure: the board's health stays, and once the client is gone the probe passes."""
    assert fleet.probe(name).health == "good"
    client = tracker.request(f"jetson-nano/{name}")
    report = fleet.probe(name)
    assert (report.passed, report.skipped, report.busy) == (False, True, True), report
    assert "without a lease" in report.reason
    assert fleet.store.boards.require(name).health == "good"
    del client
    wait_until(lambda: fleet.probe(name).passed, "the board to be free")


def test_a_leased_board_is_left_to_its_holder(fleet: Fleet, name: str) -> None:
    """A probe never takes a board from work; the reason says who has it."""
    assert fleet.probe(name).passed
    lease = fleet.store.leases.acquire(name, "bob", "tuning")
    report = await_here(fleet.prober.probe(fleet.store, name))
    assert (report.skipped, report.busy) == (True, True)
    assert "bob" in report.reason
    assert fleet.store.leases.release(lease)


def test_an_agent_that_hangs_fails_by_the_deadline(
    fleet: Fleet, tracker: Any, start_agent: Callable[..., Agent]
) -> None:
    """A stopped agent still has its port and its place at the tracker; when it goes on, so do probes."""
    agent = start_nano(tracker, start_agent)
    fleet.add(name_of(agent))
    agent.process.send_signal(signal.SIGSTOP)
    report = fleet.probe(name_of(agent))
    assert report.kind == "probe_failed"
    assert "did not answer within 5 s" in report.reason
    agent.process.send_signal(signal.SIGCONT)
    wait_until(lambda: fleet.probe(name_of(agent)).passed, "the board to pass", 60)
    assert agent.stop() == 0


def test_a_board_whose_agent_never_came_is_not_blamed(fleet: Fleet) -> None:
    """Whether a board can be reached is the keeper's to find out."""
    fleet.add("absent")
    report = fleet.probe("absent")
    assert (report.skipped, report.busy) == (True, True)
    assert "jetson-nano/absent" in report.reason


def test_a_tracker_that_is_gone_is_no_fault_of_the_board(fleet: Fleet, name: str) -> None:
    """Nothing is observed of it."""
    fleet.prober.tracker = Tracker("127.0.0.1", 1)
    report = fleet.probe(name)
    assert (report.skipped, report.busy) == (True, True)
    assert "tracker" in report.reason


def test_a_damaged_kernel_is_built_again(tmp_path: pathlib.Path) -> None:
    """What is kept is checked when it is read; an undamaged one is not built twice."""
    target = plan_target(None, "aarch64")
    kernel = GoldenKernels(tmp_path).require(target)
    (path,) = tmp_path.glob("*/*")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert GoldenKernels(tmp_path).require(target).library[:4] == b"\x7fELF"
    written = path.stat().st_ino
    assert GoldenKernels(tmp_path).require(target).name == kernel.name
    assert path.stat().st_ino == written
    assert list(tmp_path.glob("*/.*")) == []


def test_a_hung_board_holds_up_its_own_probe_alone_and_leaves_no_lease(
    fleet: Fleet, tracker: Any, start_agent: Callable[..., Agent], name: str
) -> None:
    """While one waits for its deadline another passes; ended in the middle, a probe gives its lease back."""
    agent = start_nano(tracker, start_agent)
    stuck = name_of(agent)
    fleet.add(stuck)
    agent.process.send_signal(signal.SIGSTOP)
    home = str(fleet.store.location.parent)
    with Crew(Settings(home=home), print) as crew:

        async def probe(board: str) -> ProbeReport:
            return await fleet.prober.probe(crew.store, board)

        async def probe_again_and_again(board: str) -> None:
            while True:
                await probe(board)

        assert crew.call(probe(name)).passed
        hung = crew.start(probe_again_and_again(stuck))
        wait_until(lambda: fleet.store.boards.require(stuck).lease, "the hung board to be leased")
        assert crew.call(probe(name)).passed
        wait_until(lambda: fleet.store.boards.require(stuck).lease, "the hung board to be leased still")
    assert hung.cancelled()
    assert fleet.store.boards.require(stuck).lease is None
    agent.process.kill()
