"""A virtual board in a process of its own, with clients that fork, die and wait."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farm.virtual.client import SimulatedTree
from farm.virtual.tree import CLOCKS, ENERGY, FAULT, LOAD, TIME
from tests.integration.conftest import PATIENCE_S, wait_until

_CUR = "/sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq"
_MAX = "/sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq"
_RAIL = "/sys/bus/i2c/devices/6-0040/iio:device0/in_power0_input"

Start = Callable[..., "Simulator"]


class Simulator:
    def __init__(self, path: Path, *options: str) -> None:
        self.path = str(path)
        ready, written = os.pipe()
        command = [sys.executable, "-m", "farm.virtual.server", "jetson-nano", "--socket", self.path, *options]
        self.process = subprocess.Popen(
            [*command, "--exit-with-parent", "--ready-fd", str(written)], pass_fds=[written], stderr=subprocess.PIPE
        )
        os.close(written)
        try:
            self.said = os.read(ready, 6)
        finally:
            os.close(ready)

    @property
    def user(self) -> SimulatedTree:
        return SimulatedTree(self.path)

    @property
    def root(self) -> SimulatedTree:
        """A new client with root's."""
        return SimulatedTree(self.path + ".root")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        if self.process.stderr:
            self.process.stderr.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start_one(*options: str) -> Simulator:
            simulator = Simulator(tmp_path / "board.sock", *options)
            stack.callback(simulator.stop)
            return simulator

        yield start_one


def test_two_users_see_one_board(start: Start) -> None:
    """What root writes the user reads; the user may not write, and root's socket is its owner's alone."""
    simulator = start()
    user, root = simulator.user, simulator.root
    root.write(_MAX, "921600")
    assert user.read(_MAX) == "921600"
    with pytest.raises(PermissionError):
        user.write(_MAX, "1479000")
    with pytest.raises(PermissionError):
        user.read("/sys/kernel/debug/tegra_bwmgr/emc_rate")
    assert root.read("/sys/kernel/debug/tegra_bwmgr/emc_rate").isdecimal()
    assert stat.S_IMODE(Path(simulator.path + ".root").stat().st_mode) == 0o600
    assert "MAXN" in user.run(["nvpmodel", "-q"])


def test_a_forked_process_has_a_connection_of_its_own(start: Start) -> None:
    """Parent and child ask through the same object at the same time, and each gets its own answers."""
    tree = start().user
    assert tree.read("/sys/devices/system/cpu/online") == "0-3"
    pid = os.fork()
    if pid == 0:
        good = all(tree.read("/sys/class/thermal/thermal_zone1/type") == "CPU-therm" for _ in range(500))
        os._exit(0 if good else 1)
    assert all(tree.read("/sys/devices/system/cpu/online") == "0-3" for _ in range(500))
    assert os.waitpid(pid, 0)[1] == 0


def test_threads_may_share_a_client(start: Start) -> None:
    """A sampler's thread and the main one get their own answers."""
    tree = start().user
    wrong: list[str] = []

    def ask(path: str, expected: str) -> None:
        wrong.extend(text for text in (tree.read(path) for _ in range(300)) if text != expected)

    zones = [("/sys/class/thermal/thermal_zone1/type", "CPU-therm"), ("/sys/devices/system/cpu/online", "0-3")]
    threads = [threading.Thread(target=ask, args=zone) for zone in zones]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wrong


def test_a_killed_worker_takes_its_load_along(start: Start) -> None:
    """Killed, the process that computed says nothing: the board is idle at once, without any notice."""
    simulator = start()
    tree, watcher = simulator.user, simulator.user
    pid = os.fork()
    if pid == 0:
        tree.write(LOAD, '{"cluster": "a57", "cores": 4}')
        signal.pause()
    try:
        wait_until(lambda: watcher.read(_CUR) == "1479000", "the load to raise the clock")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    wait_until(lambda: watcher.read(_CUR) == "102000", "the clock to fall", timeout_s=2)


def test_a_client_that_is_stopped_holds_up_nobody(start: Start) -> None:
    """It asks without ever taking an answer; others are served meanwhile."""
    simulator = start()
    user = simulator.user
    message = json.dumps(["read", "/proc/cpuinfo"]).encode()
    frame = len(message).to_bytes(4, "little") + message
    with socket.socket(socket.AF_UNIX) as stuffed:
        stuffed.connect(simulator.path)
        stuffed.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            for _ in range(20_000):
                stuffed.sendall(frame)
        assert user.read("/sys/devices/system/cpu/online") == "0-3"
    assert user.read("/sys/devices/system/cpu/online") == "0-3"


@pytest.mark.parametrize("noise", [b"\xff" * 8, b"\x02\x00\x00\x00{}", b"\x05\x00\x00\x00[1,2]", b"\x00\x00\x00\x00"])
def test_nonsense_ends_only_its_own_connection(start: Start, noise: bytes) -> None:
    """Its sender is disconnected; others are served."""
    simulator = start()
    with socket.socket(socket.AF_UNIX) as babbler:
        babbler.settimeout(PATIENCE_S)
        babbler.connect(simulator.path)
        babbler.sendall(noise)
        assert babbler.recv(100) == b""
    assert simulator.user.read("/sys/devices/system/cpu/online") == "0-3"


def test_a_board_that_hangs_times_out_and_can_be_freed(start: Start) -> None:
    """Every call ends after its deadline, root's word to clear gets through, and then all is as before."""
    simulator = start()
    tree = SimulatedTree(simulator.path, timeout_s=0.2)
    assert tree.read("/sys/devices/system/cpu/online") == "0-3"
    simulator.root.write(FAULT, "hang")
    for call in (lambda: tree.read(_RAIL), lambda: tree.exists(_RAIL), lambda: tree.names("/sys")):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            call()
        assert time.monotonic() - began < 2
    simulator.root.write(FAULT, "clear")
    assert tree.read("/sys/devices/system/cpu/online") == "0-3"


def test_a_reboot_hangs_up_and_forgets(start: Start) -> None:
    """At its time, without a request: connections end, limits and loads are as at boot."""
    simulator = start("--live", "--fault", "reboot@0.5")
    root, user = simulator.root, simulator.user
    boot_id = user.read("/proc/sys/kernel/random/boot_id")
    root.write(_MAX, "921600")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(PATIENCE_S)
        listener.connect(simulator.path)
        assert listener.recv(1) == b""
    with pytest.raises(OSError, match="no simulator answers") as caught:
        user.read(_MAX)
    assert caught.value.errno == errno.ENODEV
    assert user.read(_MAX) == "1479000"
    assert user.read("/proc/sys/kernel/random/boot_id") != boot_id


def test_a_slow_read_delays_its_own_answer_only(start: Start) -> None:
    """Writes and other users go on; the answer comes after the time that was given."""
    simulator = start("--fault", "slow_read:0.3")
    root = simulator.root
    began = time.monotonic()
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(simulator.user.read(_MAX)))
    thread.start()
    root.write(_MAX, "1479000")
    assert time.monotonic() - began < 0.3
    thread.join(PATIENCE_S)
    assert answers == ["1479000"]
    assert time.monotonic() - began >= 0.3


def test_a_simulator_that_is_gone_is_no_device(start: Start, tmp_path: Path) -> None:
    """ENODEV, before it starts, after it was killed, and again a board once there is a new one."""
    simulator = start()
    user = simulator.user
    assert user.exists(_RAIL)
    simulator.stop()
    for tree in (user, SimulatedTree(str(tmp_path / "never.sock"))):
        with pytest.raises(OSError, match="no simulator answers") as caught:
            tree.exists(_RAIL)
        assert caught.value.errno == errno.ENODEV
    start()
    assert user.exists(_RAIL)


def test_energy_and_clocks_can_be_asked_for(start: Start) -> None:
    """The exact integral grows with time on every rail that draws anything: by itself, or as time is let pass."""
    user = start("--live").user
    first_s = json.loads(user.read(ENERGY))["time_s"]
    wait_until(lambda: json.loads(user.read(ENERGY))["time_s"] > first_s + 0.1, "time to pass")
    user = start().user
    first = json.loads(user.read(ENERGY))
    user.write(TIME, '{"pass_s": 50}')
    last = json.loads(user.read(ENERGY))
    assert last["time_s"] == first["time_s"] + 50
    (text, until_s), *_, (_, last_s) = user.past(_RAIL, first["time_s"] + 25)
    assert str(text).isdecimal()
    assert first["time_s"] + 25 < until_s < first["time_s"] + 26
    assert first["time_s"] + 50 < last_s < first["time_s"] + 51
    power_w = (last["drawn_j"]["total"] - first["drawn_j"]["total"]) / (last["time_s"] - first["time_s"])
    assert 1.0 < power_w < 2.0
    assert last["drawn_j"]["POM_5V_GPU"] == 0
    assert json.loads(user.read(CLOCKS))["clusters"]["a57"] == {"hz": 102_000_000, "online": 4}


class Counted(SimulatedTree):
    asked = 0

    def _exchange(self, messages: list[bytes], deadline: float) -> list[Any]:
        self.asked += 1
        return super()._exchange(messages, deadline)


def test_time_that_changes_nothing_is_told_with_the_next_question(start: Start) -> None:
    """A hundred blocks cost one question; where something happens in one of them, the board is asked there."""
    simulator = start()
    user = Counted(simulator.path)
    first_s = user.let_pass(0.01)[0]
    for _ in range(100):
        user.let_pass(0.01)
    assert user.asked == 1
    assert json.loads(user.read(TIME))["now_s"] == pytest.approx(first_s + 1.0)
    assert user.asked == 2
    user.write(LOAD, '{"cores": 4, "ttl_s": 0.5}')
    clocks = [json.loads(user.let_pass(0.1)[1])["clusters"]["a57"]["hz"] for _ in range(10)]
    assert set(clocks[:4]) == {1_479_000_000}
    assert set(clocks[6:]) == {102_000_000}
    assert user.asked == 5  # the load, the time after it, the time when it ends


def test_many_files_are_one_question_and_each_may_fail(start: Start) -> None:
    """What cannot be read is nothing; the others are what they are alone."""
    simulator = start()
    user = Counted(simulator.path)
    assert user.read_many([_CUR, "/sys/none", _MAX]) == ["102000", None, "1479000"]
    assert user.asked == 1
    simulator.stop()
    with pytest.raises(OSError, match="no simulator answers"):
        user.read_many([_CUR])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("jetson-nano", "--fault", "melt"), "no fault 'melt'"),
        (("jetson-none",), "no board type 'jetson-none'"),
        (("local",), "no `simulation` section"),
    ],
)
def test_a_wrong_start_says_what_is_wrong(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    """Exit code 2 and one line; no socket is left."""
    path = tmp_path / "board.sock"
    command = [sys.executable, "-m", "farm.virtual.server", *arguments, "--socket", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_end_is_clean(start: Start) -> None:
    """SIGTERM removes the sockets; exit code 0."""
    simulator = start()
    simulator.process.terminate()
    assert simulator.process.wait(PATIENCE_S) == 0
    assert not Path(simulator.path).exists()
    assert not Path(simulator.path + ".root").exists()
