"""The clock helper as it runs: two processes, a socket, a holder; and what is left when one is killed or stopped."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from device_agent.clocks import access
from device_agent.clocks.access import AccessStatus
from device_agent.clocks.client import HelperClient
from device_agent.errors import AgentError, ClockError, HelperUnavailableError, RefusedError, UnsafeError
from tests.clock_tree import A57, make_tree, read_all
from tests.integration.conftest import ROOT, wait_until

# What users are promised: at most this long after the holder, or the helper, has gone.
PROMISED_S = 3.0
GOVERNOR = f"{A57}/scaling_governor"


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


class Holder:
    def __init__(self, path: pathlib.Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/integration/clock_holder.py"), str(path), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self.forked = int(self.read()) if "--fork" in options else 0
        assert self.read() == "held"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.forked:
                os.kill(self.forked, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


class Helper:
    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.socket = folder / "helper.sock"
        self.state = folder / "state"
        self.root = make_tree(folder / "root")
        self.before = read_all(self.root)
        self.client = HelperClient(self.socket)
        self.process: subprocess.Popen[bytes] | None = None
        self.holders: list[Holder] = []

    def start(self, *options: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "device_agent.clocks.helper", "--socket", str(self.socket)]
        command += ["--state-dir", str(self.state), "--root", str(self.root), *options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=log, env=os.environ | (env or {}))
        wait_until(self.serves, "the helper")

    def serves(self) -> bool:
        assert self.process.poll() is None, self.log()
        with contextlib.suppress(HelperUnavailableError):
            self.client.status()
            return True
        return False

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def hold(self, *options: str) -> Holder:
        holder = Holder(self.socket, *options)
        self.holders.append(holder)
        assert self.now() != self.before
        return holder

    def now(self) -> dict[str, str]:
        return read_all(self.root)

    def find_child(self) -> int:
        assert self.process is not None
        return psutil.Process(self.process.pid).children()[0].pid

    def wait_restored(self, since: float) -> None:
        """Wait until every file is as it was; fail if that takes longer than promised."""
        wait_until(lambda: self.now() == self.before, "the clocks to be restored", 2 * PROMISED_S)
        assert time.monotonic() - since < PROMISED_S, self.log()

    def stop(self) -> None:
        for holder in self.holders:
            holder.stop()
        if self.process is not None and self.process.poll() is None:
            for pid in (self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children())):
                os.kill(pid, signal.SIGCONT)
            self.process.terminate()
            self.process.wait(10)


@pytest.fixture
def helper(tmp_path: pathlib.Path) -> Iterator[Helper]:
    helper = Helper(tmp_path)
    helper.start()
    yield helper
    helper.stop()


def test_holder_killed(helper: Helper) -> None:
    """SIGKILL of the holder restores at once, although a process that it forked lives on."""
    holder = helper.hold("--fork")
    holder.process.kill()
    helper.wait_restored(time.monotonic())
    assert is_alive(holder.forked)
    assert helper.client.status() == AccessStatus()


def test_holder_stopped(helper: Helper) -> None:
    """A holder that is stopped loses its clocks after 2 s; when it goes on, its next write says so."""
    holder = helper.hold()
    since = time.monotonic()
    os.kill(holder.process.pid, signal.SIGSTOP)
    helper.wait_restored(since)
    os.kill(holder.process.pid, signal.SIGCONT)
    answer = holder.ask(f"write {GOVERNOR} performance")
    assert answer.startswith("HelperUnavailableError")
    assert "no heartbeat" in answer
    assert helper.now() == helper.before
    assert holder.ask("begin again") == "ok"
    assert holder.ask(f"write {GOVERNOR} performance") == "ok"
    assert holder.ask("restore") == "ok"
    assert helper.now() == helper.before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_serving_process_harmed(helper: Helper, number: signal.Signals) -> None:
    """A serving process that is killed or stopped is replaced; the next one restores, and its holder hears of it."""
    holder = helper.hold()
    harmed = helper.find_child()
    since = time.monotonic()
    os.kill(harmed, number)
    helper.wait_restored(since)
    assert holder.ask(f"write {GOVERNOR} performance").startswith("HelperUnavailableError")
    assert holder.ask("restore") == "ok"
    assert helper.now() == helper.before
    assert not is_alive(harmed)
    assert holder.ask("begin again") == "ok"


def test_guardian_killed(helper: Helper) -> None:
    """Without its guardian the serving process restores and ends; a new helper takes over the same socket."""
    helper.hold()
    child = helper.find_child()
    helper.process.kill()
    helper.wait_restored(time.monotonic())
    helper.process.wait()
    helper.start()
    assert not is_alive(child)
    helper.hold()


def test_guardian_stopped(helper: Helper) -> None:
    """A guardian that is stopped stops nothing: clocks stay held, and are restored when their holder goes."""
    holder = helper.hold()
    held = helper.now()
    os.kill(helper.process.pid, signal.SIGSTOP)
    for _ in range(2):
        assert holder.ask(f"write {GOVERNOR} performance") == "ok"
    assert helper.now() == held
    holder.process.kill()
    helper.wait_restored(time.monotonic())
    os.kill(helper.process.pid, signal.SIGCONT)
    helper.hold()


def test_no_longer_wanted(helper: Helper) -> None:
    """A holder that is busy lets go of the clocks as soon as those for whom it holds them have gone."""
    wanted = [True]
    helper.client.is_wanted = lambda: wanted[0]
    helper.client.begin("a test")
    helper.client.write(GOVERNOR, "performance")
    wanted.clear()
    wanted.append(False)
    helper.wait_restored(time.monotonic())
    with pytest.raises(HelperUnavailableError):
        helper.client.write(GOVERNOR, "performance")
    assert helper.client.restore()


def test_told_to_end(helper: Helper) -> None:
    """SIGTERM restores, ends with exit code 0 and leaves no socket."""
    helper.hold()
    helper.process.terminate()
    assert helper.process.wait(10) == 0
    assert helper.now() == helper.before
    assert not helper.socket.exists()
    assert os.listdir(helper.state) == []


def test_ends_with_parent(tmp_path: pathlib.Path) -> None:
    """With --exit-with-parent the helper restores and ends when its parent is killed."""
    helper = Helper(tmp_path)
    command = [sys.executable, "-m", "device_agent.clocks.helper", "--socket", str(helper.socket), "--exit-with-parent"]
    command += ["--state-dir", str(helper.state), "--root", str(helper.root)]
    script = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen([sys.executable, "-c", script, *command], cwd=ROOT, stderr=log)
    helper.process = parent  # type: ignore[assignment]
    wait_until(helper.serves, "the helper")
    helper.hold()
    pid = helper.find_child()
    parent.kill()
    helper.wait_restored(time.monotonic())
    parent.wait()
    wait_until(lambda: not is_alive(pid), "the helper's end")
    helper.stop()


def test_restores_at_boot(helper: Helper) -> None:
    """What both processes leave behind when they die together is restored by the next start, before it serves."""
    helper.hold()
    child = helper.find_child()
    os.kill(helper.process.pid, signal.SIGSTOP)
    os.kill(child, signal.SIGKILL)
    helper.process.kill()
    helper.process.wait()
    assert helper.now() != helper.before
    helper.start()
    assert helper.now() == helper.before
    assert os.listdir(helper.state) == []


def test_taken_by_force(helper: Helper) -> None:
    """An operator may take the clocks from any holder."""
    holder = helper.hold()
    assert helper.client.clear_unsafe(force=True)
    assert helper.now() == helper.before
    assert "taken by force" in holder.ask(f"write {GOVERNOR} performance")


def test_old_token(helper: Helper) -> None:
    """A request of a transaction that is over is refused, even on the same connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(helper.socket))
        tokens = []
        for _ in range(2):
            sock.send(access.pack({"id": 1, "op": "begin", "holder": "a test"}))
            tokens.append(json.loads(sock.recv(4096))["value"])
            sock.send(access.pack({"id": 2, "op": "restore", "token": tokens[-1]}))
            assert "value" in json.loads(sock.recv(4096))
        sock.send(access.pack({"id": 3, "op": "begin", "holder": "a test"}))
        assert json.loads(sock.recv(4096))["value"] not in tokens
        sock.send(access.pack({"id": 4, "op": "write", "path": GOVERNOR, "text": "performance", "token": tokens[0]}))
        assert json.loads(sock.recv(4096))["error"] == "ended"
    assert helper.now() == helper.before


@pytest.mark.core
@pytest.mark.parametrize(
    "packet",
    [
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b"[" * 4000,
        b'{"id":1}',
        b'{"id":1,"op":"shell"}',
        b'{"op":"status"}',
        b'{"id":1,"op":"begin"}',
        b'{"id":1,"op":"read","path":5}',
        b'{"id":1,"op":["status"]}',
        b'{"id":1,"op":"status","x":"' + b"a" * 10_000 + b'"}',
    ],
)
def test_malformed_requests(helper_for_all: Helper, packet: bytes) -> None:
    """Nonsense is answered with an error and a hang-up, and hurts no other client."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(5)
        sock.connect(str(helper_for_all.socket))
        sock.send(packet)
        assert "error" in json.loads(sock.recv(4096))
        assert sock.recv(4096) == b""
    assert helper_for_all.client.status() == AccessStatus()


@pytest.fixture(scope="module")
def helper_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    helper = Helper(tmp_path_factory.mktemp("helper"))
    helper.start()
    yield helper
    helper.stop()


def test_a_crowd(helper_for_all: Helper) -> None:
    """Clients beyond the limit are turned away; there is room again when others have gone."""
    with contextlib.ExitStack() as stack:
        for _ in range(70):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.connect(str(helper_for_all.socket))
        with pytest.raises(HelperUnavailableError, match="too many"):
            helper_for_all.client.status()
    wait_until(helper_for_all.serves, "room")


def test_floods_do_not_starve_the_watchdog(helper: Helper) -> None:
    """A client that asks without end keeps neither others waiting nor a stopped holder's clocks held."""
    holder = helper.hold()
    script = (
        "import socket, sys\ns = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\ns.connect(sys.argv[1])\n"
        'while True: s.send(b\'{"id":1,"op":"status"}\'); s.recv(4096)'
    )
    flood = subprocess.Popen([sys.executable, "-c", script, str(helper.socket)])
    try:
        since = time.monotonic()
        os.kill(holder.process.pid, signal.SIGSTOP)
        helper.wait_restored(since)
    finally:
        flood.kill()
        flood.wait()


def test_system_time_jumps(tmp_path: pathlib.Path) -> None:
    """A system clock that jumps by years, forwards and back, ends no transaction and keeps none alive."""
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools, time\n"
        "real, jumps = time.time, itertools.cycle((0, 3e8, -3e8))\n"
        "time.time = lambda: real() + next(jumps)\n"
        "time.time_ns = lambda: int(time.time() * 1e9)\n"
    )
    helper = Helper(tmp_path)
    helper.start(env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    holder = helper.hold()
    held = helper.now()
    until = time.monotonic() + access.HOLDER_TIMEOUT_S + 0.5
    wait_until(lambda: time.monotonic() > until, "the watchdog's time")
    assert helper.now() == held
    assert holder.ask(f"write {GOVERNOR} performance") == "ok"
    holder.process.kill()
    helper.wait_restored(time.monotonic())
    helper.stop()


def test_unsafe_outlives_restarts(helper: Helper) -> None:
    """A board that is unsafe stays so through a restart, holds nothing, and is cleared by an operator only."""
    holder = helper.hold()
    file, aside = (pathlib.Path(f"{helper.root}{GOVERNOR}{end}") for end in ("", ".aside"))
    file.rename(aside)
    file.mkdir()
    holder.process.kill()
    status = wait_until(lambda: ask_unsafe(helper), "the board to be unsafe")
    assert GOVERNOR in status
    # Everything else has gone back.
    assert helper.now() == {path: text for path, text in helper.before.items() if path != GOVERNOR}
    helper.process.terminate()
    assert helper.process.wait(10) == 0
    helper.start()
    assert helper.client.status().unsafe == status
    with pytest.raises(UnsafeError):
        helper.client.begin("next")
    file.rmdir()
    aside.rename(file)
    assert helper.client.status().unsafe == status
    helper.client.clear_unsafe()
    assert helper.now() == helper.before
    assert os.listdir(helper.state) == []
    helper.hold()


def ask_unsafe(helper: Helper) -> str:
    with contextlib.suppress(AgentError):
        return helper.client.status().unsafe
    return ""


def test_driver_that_hangs(helper: Helper) -> None:
    """A file that never answers blocks no other client: the helper reports the board as unsafe and goes on serving."""
    holder = helper.hold()
    file = pathlib.Path(f"{helper.root}{GOVERNOR}")
    file.unlink()
    os.mkfifo(file)  # opening it blocks for ever
    holder.process.kill()
    assert "hangs" in wait_until(lambda: ask_unsafe(helper), "the board to be unsafe")
    assert (helper.state / "snapshot.json").exists()
    file.unlink()
    file.write_text("performance")
    helper.client.clear_unsafe()
    assert helper.now() == helper.before


def test_state_folder_that_is_not_one(tmp_path: pathlib.Path) -> None:
    """A helper that cannot write its state serves all the same, and starts no new claim."""
    helper = Helper(tmp_path)
    helper.state.write_text("not a folder")
    helper.start()
    with pytest.raises(ClockError, match="cannot be written"):
        helper.client.begin("a test")
    assert helper.client.status() == AccessStatus()
    assert helper.now() == helper.before
    helper.stop()


def test_no_socket(tmp_path: pathlib.Path) -> None:
    """Without a helper every call says where it was looked for."""
    client = HelperClient(tmp_path / "absent.sock")
    calls: tuple[Callable[[], object], ...] = (
        client.status,
        lambda: client.begin("a test"),
        lambda: client.read(GOVERNOR),
        client.clear_unsafe,
    )
    for call in calls:
        with pytest.raises(HelperUnavailableError, match=r"there is no socket .*absent.sock"):
            call()
    with pytest.raises(RefusedError):
        client.write(GOVERNOR, "performance")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(tmp_path / "absent.sock"))
    with pytest.raises(HelperUnavailableError, match="no clock helper serves"):
        client.status()


def test_helper_that_never_answers(tmp_path: pathlib.Path) -> None:
    """Every call has a deadline."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(tmp_path / "deaf.sock"))
        sock.listen()
        with pytest.raises(HelperUnavailableError, match="does not answer"):
            HelperClient(tmp_path / "deaf.sock", timeout_s=0.1).status()


def let_others_in(folder: pathlib.Path) -> None:
    """Pytest's own folders, two or three deep, are for one user only."""
    while folder != pathlib.Path(tempfile.gettempdir()):
        folder.chmod(0o755)
        folder = folder.parent


@pytest.mark.core
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_need_the_group_and_cannot_force(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Only the owner and the given group may connect; others get the reason. Clients run foreign code: they
    take no clocks from others and declare no board safe.
    """
    folder = pathlib.Path(tmp_path_factory.mktemp("shared"))
    let_others_in(folder)
    helper = Helper(folder)
    helper.start("--group", "daemon")

    def ask(request: str, group: str) -> str:
        script = (
            "import grp, os, pwd, sys; from device_agent.clocks.client import HelperClient\n"
            "os.setgroups([]); os.setgid(grp.getgrnam(sys.argv[2]).gr_gid); os.setuid(pwd.getpwnam('daemon').pw_uid)\n"
            f"print(HelperClient(sys.argv[1]).{request})"
        )
        command = [sys.executable, "-c", script, str(helper.socket), group]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    try:
        assert helper.socket.stat().st_mode & 0o777 == 0o660
        assert "refuses this user" in ask("status()", "nogroup")
        assert "AccessStatus" in ask("status()", "daemon")
        holder = helper.hold()
        held = helper.now()
        assert "force is for root, not for uid" in ask("clear_unsafe(force=True)", "daemon")
        assert helper.now() == held
        assert holder.ask(f"write {GOVERNOR} performance") == "ok"
    finally:
        helper.stop()


def test_second_helper(helper: Helper) -> None:
    """A second helper for the same socket, or the same state, says that there is one, and changes nothing."""
    helper.hold()
    held = helper.now()
    command = [sys.executable, "-m", "device_agent.clocks.helper", "--root", str(helper.root)]
    for path, state in ((helper.socket, "other"), (helper.folder / "other.sock", "state")):
        done = subprocess.run(
            [*command, "--socket", str(path), "--state-dir", str(helper.folder / state)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert done.returncode == 1
        assert "already" in done.stderr or "another process" in done.stderr
    assert helper.now() == held


def test_tells_systemd(tmp_path: pathlib.Path) -> None:
    """The service manager hears when the helper serves, that it lives, and that it ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(10)
        sock.bind(str(tmp_path / "notify.sock"))
        helper = Helper(tmp_path)
        helper.start(env={"NOTIFY_SOCKET": str(tmp_path / "notify.sock")})
        assert sock.recv(100) in (b"READY=1", b"WATCHDOG=1")
        assert sock.recv(100) in (b"READY=1", b"WATCHDOG=1")
        helper.stop()
        states = []
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                states.append(sock.recv(100))
        assert b"STOPPING=1" in states


def test_standard_library_only() -> None:
    """Nothing that a board would have to install runs with root's rights."""
    script = (
        "import sys; import device_agent.clocks.helper\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))"
    )
    command = [sys.executable, "-S", "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    assert set(done.stdout.split()) <= {"device_agent", "__main__"}


def test_helper_that_is_just_coming_back(helper: Helper) -> None:
    """A client that begins while a killed helper restarts waits for it."""
    helper.process.kill()
    helper.process.wait()
    with pytest.raises(HelperUnavailableError):
        helper.client.status()
    command = [sys.executable, "-m", "device_agent.clocks.helper", "--socket", str(helper.socket)]
    command += ["--state-dir", str(helper.state), "--root", str(helper.root)]
    helper.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    helper.client.begin("a test")
    helper.client.restore()
