"""One board with a real kernel for all tests here, and a farm that knows it; each test starts at a snapshot.

The board is `deploy/real-kernel-board`'s. Everything on it is slow: its four processors share what this machine has.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import children
from tests.acceptance.conftest import Done, Home, new_home

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "real-kernel-board"
sys.path.insert(0, str(FOLDER))

import guest as guests  # noqa: E402

TYPE = "jetson-nano"
PROVISIONED = "provisioned"
# From nothing: 230 MB through an emulated network card, unpacked by an emulated processor.
PROVISION_TIMEOUT_S = 600.0
AGENT = "/opt/tvm-farm/current/bin/device-agent"
SERVICES = ("tvm-farm-clock-helper", "tvm-farm-agent")
SERVICES_TIMEOUT_S = 180
NAME = "b1"


# The first test of a run waits for the first provisioning as well.
TEST_TIMEOUT_S = 1500.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == pathlib.Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@dataclasses.dataclass
class Site:
    """The board, and a farm in whose store it is, with a bundle made once; `before` lists it without an agent."""

    board: guests.Guest
    home: Home
    bundle: pathlib.Path
    before: str = ""

    def add(self, login: str = "farm", name: str = NAME) -> None:
        done = self.home.run(
            *("board", "add", name, "--board-type", self.board.board, "--ssh", f"{login}@127.0.0.1:{self.board.port}"),
            *("--key-file", str(self.board.key), "--host-key", self.fingerprint()),
        )
        assert done.code == 0, done.err

    def fingerprint(self) -> str:
        """Of the board's host key."""
        command = ["ssh-keygen", "-l", "-f", str(self.board.image / "host_key.pub")]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()[1]

    def provision(self, *arguments: str, name: str = NAME, bundle: pathlib.Path | None = None) -> Done:
        command = ("board", "provision", name, "--bundle", str(bundle or self.bundle), *arguments)
        return self.home.run(*command, timeout_s=PROVISION_TIMEOUT_S)

    def wait_for_services(self) -> None:
        up = " && ".join(f"systemctl is-active --quiet {unit}" for unit in SERVICES)
        turns = f"for i in $(seq {SERVICES_TIMEOUT_S * 2}); do {up} && exit; sleep 0.5; done"
        self.board.run(f"{turns}; systemctl status {' '.join(SERVICES)} >&2; exit 1", timeout_s=SERVICES_TIMEOUT_S + 60)


def list_board(board: guests.Guest) -> str:
    """Every path with mode and owner where software is put, the accounts, and units of ours."""
    folders = "/etc /home /opt /root /srv /usr/local /var/lib /var/spool"
    # What the system keeps for itself: copies of the account files, seeds, timers.
    own = r"/(passwd|group|shadow|gshadow|subuid|subgid)-|\.pwd\.lock|/var/lib/(systemd|dbus|private|apt|dpkg|sudo)"
    listing = f"find {folders} -xdev -printf '%p %M %U:%G\\n' | grep -vE '{own}' | sort"
    units = "systemctl list-unit-files --no-legend 'tvm*'; systemctl list-units --all --no-legend 'tvm*'"
    units += "; ls /run | grep tvm"
    return board.run(f"{listing}; cat /etc/passwd /etc/group; {units} || true").stdout


def require_image(board: str) -> pathlib.Path:
    """A board's image. Without it tests are skipped; with FARM_REQUIRE_REAL_KERNEL=1 they fail."""
    checked = subprocess.run(
        [FOLDER / "build", "--board", board, "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    if checked.returncode != 0:
        reason = checked.stderr.strip().removeprefix("error: ")
        if os.environ.get("FARM_REQUIRE_REAL_KERNEL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return pathlib.Path(checked.stdout.strip())


class _Board(guests.Guest):
    """The board of all tests, whichever of them boots it."""

    def start(self, snapshot: str = "") -> None:
        super().start(snapshot)
        assert self._process is not None
        children.own(self._process.pid)


@pytest.fixture(scope="session")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[guests.Guest]:
    with _Board(TYPE, require_image(TYPE), tmp_path_factory.mktemp("board")) as found:
        yield found


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("bundle") / "board.tar"
    with new_home() as home:
        made = home.run("board", "bundle", "--arch", "aarch64", "--python", "3.11", "--out", str(path))
    assert made.code == 0, made.err
    return path


@pytest.fixture
def home() -> Iterator[Home]:
    """A farm of a test's own."""
    with new_home() as found:
        yield found


@pytest.fixture
def fresh(board: guests.Guest, bundle: pathlib.Path, home: Home) -> Iterator[Site]:
    _load(board, guests.FRESH)
    site = Site(board, home, bundle)
    site.add()
    yield site
    _rest(board)


@pytest.fixture(scope="session")
def kept(board: guests.Guest, bundle: pathlib.Path) -> Iterator[Site]:
    with new_home() as home:
        _load(board, guests.FRESH)
        site = Site(board, home, bundle, list_board(board))
        site.add()
        done = site.provision()
        assert done.code == 0, done.out + done.err
        board.save(PROVISIONED)
        yield site


@pytest.fixture
def provisioned(kept: Site) -> Iterator[Site]:
    _load(kept.board, PROVISIONED)
    yield kept
    _rest(kept.board)


def _load(board: guests.Guest, snapshot: str) -> None:
    board.load(snapshot)
    board.set_clock()


def _rest(board: guests.Guest) -> None:
    """No time of the host's until the next test, wherever this one has left it."""
    if board.is_running():
        board.pause()
