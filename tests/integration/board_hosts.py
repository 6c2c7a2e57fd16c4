"""Machines of their own for tests: a network namespace each, with sshd and agent inside, reached over a veth pair.

The cable can be pulled, the power cut, the machine booted again; nothing of that touches this machine's own network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.integration.conftest import ROOT, wait_until
from tests.integration.sshd import Sshd, require_sshd

# RFC 2544 keeps 198.18.0.0/15 for tests between networks: no real addresses.
_NETWORK = "198.18"
# Workers of pytest-xdist (gw0, gw1, ...) count in eighths of their own; 16,384 networks of four addresses there are.
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers = itertools.count(_worker % 8 * 2048 + os.getpid() % 32 * 64)
_LISTENING = """
import json, psutil
print(json.dumps([c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]))
"""


def require_namespaces() -> None:
    """Skip the test where network namespaces cannot be made, and fail it where FARM_REQUIRE_NETNS is set."""
    reason = "network namespaces need root and iproute2"
    if os.geteuid() == 0 and shutil.which("ip"):
        name = f"farm-try-{os.getpid()}"
        if _ip("netns", "add", name, check=False):
            _ip("netns", "del", name)
            return
        reason = "this machine does not allow network namespaces"
    if os.environ.get("FARM_REQUIRE_NETNS"):
        pytest.fail(reason)
    pytest.skip(reason)


def _ip(*arguments: str, check: bool = True) -> bool:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if check and done.returncode:
        pytest.fail(f"ip {' '.join(arguments)}: {done.stderr}")
    return done.returncode == 0


@dataclasses.dataclass
class HostSshd(Sshd):
    namespace: str = ""
    host: str = ""
    # Unreachable from outside.
    is_hidden: bool = False

    def _listens(self) -> bool:
        if not self.is_hidden:
            return super()._listens()
        assert self.process.poll() is None, (self.folder / "log").read_text()
        return "Server listening" in (self.folder / "log").read_text()

    def command(self, path: str, config: pathlib.Path) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *super().command(path, config)]


class Cable:
    """A network of two addresses with a namespace at its other end. It can be pulled out: what is sent is lost then."""

    def __init__(self) -> None:
        number = next(_numbers) % 16384
        self.namespace = f"farm-{os.getpid()}-{number}"
        self._outside = f"fv{os.getpid() % 100000}x{number}"[:15]
        base = number * 4
        self.gateway = f"{_NETWORK}.{base // 256}.{base % 256 + 1}"
        self.address = f"{_NETWORK}.{base // 256}.{base % 256 + 2}"

    def lay(self) -> None:
        _ip("netns", "add", self.namespace)
        _ip("link", "add", self._outside, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _ip("addr", "add", f"{self.gateway}/30", "dev", self._outside)
        _ip("-n", self.namespace, "addr", "add", f"{self.address}/30", "dev", "eth0")
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        self.plug_in()

    def pull_the_plug(self) -> None:
        """Cut the network: from now on there is no answer at all, not even a refusal."""
        # The far end: without the near one the kernel would look for another route, and out of this machine.
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def plug_in(self) -> None:
        _ip("-n", self.namespace, "link", "set", "eth0", "up")
        _ip("link", "set", self._outside, "up")

    def take_up(self) -> None:
        _ip("link", "del", self._outside, check=False)
        _ip("netns", "del", self.namespace, check=False)


class BoardHost(Cable):
    def __init__(self, name: str, folder: pathlib.Path, board_type: str = "jetson-nano") -> None:
        require_sshd()
        super().__init__()
        self.name, self.folder, self.board_type = name, folder, board_type
        folder.mkdir(parents=True, exist_ok=True)
        self.sshd = HostSshd(folder / "sshd", port=22, namespace=self.namespace, host=self.address)
        self.agent: subprocess.Popen[bytes] | None = None

    @property
    def key_file(self) -> pathlib.Path:
        return self.sshd.folder / "user_key"

    @property
    def fingerprint(self) -> str:
        return self.sshd.host_key().fingerprint

    @property
    def key(self) -> str:
        return f"{self.board_type}/{self.name}"

    def start(self) -> BoardHost:
        self.lay()
        self.boot()
        return self

    def boot(self) -> None:
        self.sshd.start()
        self.start_agent()

    def start_agent(self, *options: str, program: str = "") -> None:
        """Start the agent alone, on 9090 of its machine's own loopback; the Python code `program` runs in it first."""
        work = self.folder / "tmp"
        work.mkdir(exist_ok=True)
        program += "\nimport sys; from farm.virtual.agent import main; sys.exit(main())"
        command = ["ip", "netns", "exec", self.namespace, sys.executable, "-c", program, "serve"]
        # A kernel costs the same after a restart, also where this machine is busier by then.
        command += ["--virtual", self.board_type, "--work-folder", str(self.folder / "work"), "--name", self.name]
        command += ["--tracker", "127.0.0.1:9190", *options]
        with (self.folder / "agent.log").open("ab") as log:
            self.agent = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | {"TMPDIR": str(work)},
                start_new_session=True,
            )
        wait_until(lambda: "listens on" in self.agent_log(), f"the agent: {self.agent_log()}")

    def agent_log(self) -> str:
        path = self.folder / "agent.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def agent_processes(self) -> list[psutil.Process]:
        if self.agent is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.agent.pid)
            return [top, *top.children(recursive=True)]
        return []

    def signal_agent(self, number: signal.Signals) -> None:
        for process in self.agent_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill_agent(self) -> None:
        self.signal_agent(signal.SIGKILL)
        if self.agent is not None:
            self.agent.wait()
            self.agent = None
        (self.folder / "agent.log").unlink(missing_ok=True)

    def cut_the_power(self) -> None:
        self.pull_the_plug()
        self.kill_agent()
        self.sshd.stop()

    def listening(self) -> set[tuple[str, int]]:
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace, sys.executable, "-c", _LISTENING],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return {(address, port) for address, port in json.loads(done.stdout)}

    def remove(self) -> None:
        self.kill_agent()
        self.sshd.stop()
        self.take_up()


@contextlib.contextmanager
def board_host(name: str, folder: pathlib.Path, board_type: str = "jetson-nano") -> Iterator[BoardHost]:
    """A machine for the length of a block. Skips where there can be none."""
    require_namespaces()
    host = BoardHost(name, folder, board_type)
    try:
        yield host.start()
    finally:
        host.remove()
