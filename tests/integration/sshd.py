"""A real OpenSSH server on loopback, with host keys of its own and a throw-away user key: the tests' "board"."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import pathlib
import shutil
import socket
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from farm.connectivity.host_keys import HostKey
from farm.connectivity.ssh_handshake import SshAddress
from tests.clocks import wait_until
from tests.ports import find_free_port

# Where Debian and others put it; it is seldom on a user's PATH, and insists on being started by its full path.
_PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
KINDS = ("ed25519", "ecdsa", "rsa")


def require_sshd() -> str:
    """The server's path. Skips the test where it is missing, and fails it where FARM_REQUIRE_SSHD is set."""
    path = shutil.which("sshd", path=_PLACES)
    if path and shutil.which("ssh-keygen"):
        return path
    reason = "OpenSSH's server is not installed (Debian: apt-get install openssh-server)"
    if os.environ.get("FARM_REQUIRE_SSHD"):
        pytest.fail(reason)
    pytest.skip(reason)


def make_key(path: pathlib.Path, kind: str = "ed25519", passphrase: str = "") -> pathlib.Path:
    path.unlink(missing_ok=True)
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=60)
    return path


@dataclasses.dataclass
class Sshd:
    """A server that lets in one user, the one who runs the tests, with one key."""

    folder: pathlib.Path
    options: str = ""
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    host: str = "127.0.0.1"

    @property
    def address(self) -> SshAddress:
        return SshAddress(self.host, getpass.getuser(), self.folder / "user_key", self.port)

    @property
    def pinned(self) -> SshAddress:
        return dataclasses.replace(self.address, host_key=self.host_key().fingerprint)

    def host_key(self, kind: str = "ed25519") -> HostKey:
        return HostKey.from_text((self.folder / f"host_{kind}.pub").read_text())

    def renew_host_keys(self) -> None:
        for kind in KINDS:
            make_key(self.folder / f"host_{kind}", kind)

    def start(self) -> None:
        """Start on the port of last time, at first on a free one; wait until it listens."""
        path = require_sshd()
        self.folder.mkdir(exist_ok=True)
        if not (self.folder / "user_key").exists():
            make_key(self.folder / "user_key")
            self.renew_host_keys()
        shutil.copy(self.folder / "user_key.pub", self.folder / "authorized_keys")
        self.port = self.port or find_free_port()
        if os.geteuid() == 0:
            pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # its privilege separation asks for it
        config = self.folder / "sshd_config"
        keys = "\n".join(f"HostKey {self.folder}/host_{kind}" for kind in KINDS)
        # sshd takes the first of two contradicting lines.
        config.write_text(
            f"{self.options}\nListenAddress {self.host}\nPort {self.port}\n{keys}\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nStrictModes no\nUsePAM no\nPidFile none\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            "AllowTcpForwarding yes\nSubsystem sftp internal-sftp\nMaxStartups 100\nPrintMotd no\nLogLevel VERBOSE\n"
        )
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(path, config), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(self._listens, f"sshd: {(self.folder / 'log').read_text()}")

    def command(self, path: str, config: pathlib.Path) -> list[str]:
        return [path, "-D", "-e", "-f", str(config)]

    def processes(self) -> list[psutil.Process]:
        if self.process is None or self.process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def sessions(self) -> list[psutil.Process]:
        """The server's processes of connections, without what they run."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("sshd"):
                    found.append(process)
        return found

    def drop_sessions(self) -> None:
        for process in self.sessions():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def stop(self) -> None:
        if self.process is None:
            return
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        self.process = None

    def _listens(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=1):
            return True
        return False


@contextlib.contextmanager
def running_sshd(folder: pathlib.Path, options: str = "") -> Iterator[Sshd]:
    """A server for the length of a block; `options` are lines of sshd_config that go before the tests' own."""
    server = Sshd(folder, options)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def read_all(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(1 << 16)
        assert chunk, "the connection ended early"
        data += chunk
    return bytes(data)


def require_end(sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        assert sock.recv(1) == b""
