"""What can go wrong between the farm and a board: each fault is found in time, named in plain words, and survived.

The board is a machine of its own; detection times are printed (`pytest -rP`). Faults of files and of provisioning are
in `test_fleet.py` and `test_provision.py`, those of leases in `test_coordinators.py`.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests import children
from tests.acceptance.conftest import wait_until
from tests.acceptance.rack import NAME, Rack, running_rack, timed
from tests.integration.sshd import make_key
from tests.ports import find_free_port

# What a user is promised.
DEAD_S, BACK_S = 10.0, 20.0


@pytest.fixture(scope="module")
def shared_rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    with running_rack(tmp_path_factory.mktemp("rack")) as rack:
        yield rack


@pytest.fixture
def rack(shared_rack: Rack) -> Iterator[Rack]:
    shared_rack.wait_state("online", 40)
    shared_rack.clear()
    yield shared_rack
    shared_rack.wait_state("online", 40)


def say(fault: str, what: str, seconds: float, allowed: float) -> None:
    print(f"{fault}: {what} after {seconds:.1f} s (allowed {allowed:g} s)")
    assert seconds <= allowed


def cut_the_power(rack: Rack) -> Callable[[], None]:
    rack.host.cut_the_power()

    def mend() -> None:
        rack.host.plug_in()
        rack.host.boot()

    return mend


def pull_the_plug(rack: Rack) -> Callable[[], None]:
    rack.host.pull_the_plug()
    return rack.host.plug_in


def crash_the_agent(rack: Rack) -> Callable[[], None]:
    rack.host.kill_agent()
    return rack.host.start_agent


def freeze_sshd(rack: Rack) -> Callable[[], None]:
    """The board's kernel still acknowledges bytes that no process reads."""
    frozen = rack.host.sshd.sessions()
    for process in frozen:
        process.suspend()

    def mend() -> None:
        for process in frozen:
            with contextlib.suppress(Exception):
                process.kill()

    return mend


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (cut_the_power, "nothing heard"),
        (pull_the_plug, "nothing heard"),
        (crash_the_agent, "its agent has not registered"),
        (freeze_sshd, "nothing heard"),
    ],
)
def test_a_dead_board_is_found_and_taken_back(
    rack: Rack, fault: Callable[[Rack], Callable[[], None]], reason: str
) -> None:
    """A board that cannot be reached is offline within 10 s with its reason, and back within 20 s of being mended."""
    name = fault.__name__
    began = time.monotonic()
    mend = fault(rack)
    try:
        rack.wait_state("offline", 30)
        say(name, "found", time.monotonic() - began, DEAD_S)
        assert reason in rack.state()
    finally:
        mended = time.monotonic()
        mend()
    rack.wait_state("online", 40)
    say(name, "back", time.monotonic() - mended, BACK_S)


def test_a_rebooted_board_is_in_service_again(rack: Rack) -> None:
    """From the moment that it boots: reached, probed and good within 20 s, without help."""
    code, report = rack.probe()
    assert code == 0, report["reason"] or report
    rack.host.cut_the_power()
    rack.wait_state("offline", 20)
    rack.host.plug_in()
    began = time.monotonic()
    rack.host.boot()
    wait_until(
        lambda: rack.home.rows("SELECT name FROM boards WHERE reachable AND health = 'good'") == [(NAME,)],
        f"the board to be good: {rack.state()}",
        40,
    )
    say("reboot", "in service", time.monotonic() - began, BACK_S)


def test_a_hung_agent_fails_its_probe_by_the_deadline(rack: Rack) -> None:
    """An agent that is stopped still has its port; the probe ends by its own deadline and blames the board."""
    rack.host.signal_agent(signal.SIGSTOP)
    try:
        began = time.monotonic()
        code, report = rack.probe()
        say("hung agent", "found", time.monotonic() - began, 70)
        assert code != 0
        assert not report["passed"]
        assert "within" in report["reason"], report
        assert rack.row()["health"] in ("suspect", "quarantined")
    finally:
        rack.host.signal_agent(signal.SIGCONT)
    assert not rack.home.rows("SELECT board FROM leases")
    rack.clear()
    code, report = rack.probe()
    assert code == 0, report["reason"] or report


@pytest.mark.core
def test_another_host_key_is_refused_loudly(rack: Rack) -> None:
    """A board that shows another key is not talked to, and both fingerprints are named."""
    before = rack.host.fingerprint
    saved = {path: path.read_bytes() for path in rack.host.sshd.folder.glob("host_*")}
    rack.host.sshd.stop()
    rack.host.sshd.renew_host_keys()
    rack.host.sshd.start()
    try:
        seconds = rack.wait_trouble("HAS CHANGED", 20)
        say("host key", "refused", seconds, DEAD_S)
        assert before in rack.trouble()
        assert rack.host.fingerprint in rack.trouble()
    finally:
        rack.host.sshd.stop()
        for path, content in saved.items():
            path.write_bytes(content)
        rack.host.sshd.start()
        children.own(rack.host.sshd.process.pid)  # the rack ends it
        # What is wrong for good is looked at again now and then; this is the command that says now.
        rack.home.run("board", "trust", NAME)


def test_a_key_that_the_board_does_not_know_is_refused(rack: Rack) -> None:
    """A wrong user key is an error of its own, found at once and not tried again and again."""
    foreign = make_key(rack.home.path / "foreign")
    # By another name of its address: a board is registered once.
    with registered(rack, "wrong-key", f"[::ffff:{rack.host.address}]", 22, "--key-file", str(foreign)):
        seconds = rack.wait_trouble("refuses the key", 20, "wrong-key")
        say("wrong key", "refused", seconds, DEAD_S)


def test_an_sshd_that_accepts_and_hangs_is_named(rack: Rack) -> None:
    """A port that takes connections and never speaks is no board, and does not hold anything up."""
    with socket.create_server(("127.0.0.1", find_free_port())) as silent:
        port = silent.getsockname()[1]
        with registered(rack, "silent", "127.0.0.1", port, "--key-file", str(rack.host.key_file)):
            seconds = rack.wait_trouble(f"127.0.0.1:{port}", 30, "silent")
            say("silent sshd", "found", seconds, 20)
            assert rack.state().startswith("online")


def test_a_board_whose_clock_is_a_year_off_works(rack: Rack) -> None:
    """Nothing that decides anything compares the board's wall clock with ours."""
    year = "import time; now = time.time; time.time = lambda: now() - 31_536_000"
    rack.host.kill_agent()
    rack.host.start_agent(program=year)
    try:
        rack.wait_state("online", 30)
        code, report = rack.probe()
        assert code == 0, report["reason"] or report
        assert rack.row()["health"] == "good"
    finally:
        rack.host.kill_agent()
        rack.host.start_agent()


def test_killed_services_leave_a_board_that_the_next_ones_use(rack: Rack) -> None:
    """After kill -9 of the services in the middle of a probe the next ones take the board when its lease is over."""
    services = rack.home.run("status", "--json").json()["pid"]
    # The services probe a board that came back by themselves; that lease is not the one to wait for.
    rack.probe()
    wait_until(lambda: not rack.home.rows("SELECT board FROM leases"), "earlier probes to end", 60)
    waiting = rack.home.start("board", "probe", NAME)
    wait_until(lambda: rack.home.rows("SELECT board FROM leases") or waiting.process.poll() is not None, "the probe")
    subprocess.run(["kill", "-9", str(services)], check=True, timeout=10)
    assert waiting.wait(90).code != 0
    assert rack.home.run("up").code == 0
    seconds = timed(
        lambda: wait_until(
            lambda: rack.home.rows("SELECT name FROM boards WHERE reachable AND health = 'good'") == [(NAME,)],
            "the board to be good again",
            120,
        )
    )
    say("coordinator killed", "in service", seconds, 90)


@contextlib.contextmanager
def registered(rack: Rack, name: str, host: str, port: int, *options: str) -> Iterator[None]:
    added = rack.home.run(
        *("board", "add", name, "--board-type", "jetson-nano", "--ssh", f"root@{host}:{port}"),
        *("--host-key", rack.host.fingerprint, *options),
    )
    assert added.code == 0, added.err
    try:
        yield
    finally:
        assert rack.home.run("board", "remove", name).code == 0
