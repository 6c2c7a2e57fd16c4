"""What the tests of provisioning share: a folder that other users may enter, bundles of several versions, a listing."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import pathlib
import pwd
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator

import pytest

from farm.connectivity.board_link import BoardLink
from farm.connectivity.frames import FrameFilter
from farm.connectivity.host_keys import KnownHosts
from farm.connectivity.ssh_files import hash_file
from farm.connectivity.ssh_handshake import SshAddress
from farm.connectivity.tracker import Tracker
from farm.provision.board import ProvisioningJob, ProvisioningTarget
from farm.provision.boards import FIND_TIMEOUT_S, prove, provision_boards
from farm.provision.bundle import Bundle, write_bundle
from farm.provision.bundle_build import BundleCache, BundleRecipe, build_bundle, find_agent_source, pack_agent
from farm.provision.layout import AgentOptions, Layout
from farm.provision.plan import BoardReport, StepStatus
from farm.search.codegen import golden
from tests.integration.conftest import wait_until
from tests.ports import find_free_port

# The Python that a board on this machine has, as its root finds it.
SYSTEM_PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# Loads, as it must to be installed, and does not start.
BROKEN = "def main(*_: object) -> int:\n    raise SystemExit('this version is broken')\n"


@pytest.fixture(scope="module")
def accounts() -> Iterator[None]:
    """The users and services of this machine for the tests of one module; other modules wait."""
    with (pathlib.Path(tempfile.gettempdir()) / "farm-test-accounts.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the deadline is that of the test
        yield


@contextlib.contextmanager
def open_folder() -> Iterator[pathlib.Path]:
    """A folder that every user may look into; pytest's own are for one user only, and the agent is another."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="board-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def find_system_python() -> str:
    done = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return done.stdout.strip()


def make_interpreter(folder: pathlib.Path) -> pathlib.Path:
    """An archive such as python-build-standalone publishes, made of this machine's own Python."""
    series = find_system_python()
    place = folder / "python"
    (place / "bin").mkdir(parents=True)
    shutil.copy(pathlib.Path("/usr/bin/python3").resolve(), place / "bin" / f"python{series}")
    (place / "bin" / "python3").symlink_to(f"python{series}")
    unwanted = shutil.ignore_patterns("test", "dist-packages", "site-packages", "config-*", "__pycache__", "idlelib")
    stdlib = f"lib/python{series}"
    # Debian's has links out of it, which uv refuses.
    shutil.copytree(f"/usr/{stdlib}", place / stdlib, ignore=unwanted, ignore_dangling_symlinks=True)
    name = f"cpython-{series}.99+20990101-{os.uname().machine}-unknown-linux-gnu-install_only.tar.gz"
    with tarfile.open(folder / name, "w:gz", compresslevel=1) as archive:
        archive.add(place, "python")
    shutil.rmtree(place)
    return folder / name


def make_bundle(folder: pathlib.Path) -> Bundle:
    recipe = BundleRecipe(os.uname().machine, (find_system_python(),), archive=make_interpreter(folder))
    return build_bundle(recipe, folder / "own.tar")


def change_agent(bundle: Bundle, version: str, agent: str = "") -> Bundle:
    """The same bundle with an agent that calls itself `version`; `agent` takes its main module's place."""
    folder = bundle.path.parent / version
    with tarfile.open(bundle.path) as archive:
        archive.extractall(folder, filter="data")
    (folder / "manifest.json").unlink()
    (old,) = (folder / "wheels").glob("tvm_farm-*.whl")
    old_sum = bundle.manifest.files[f"wheels/{old.name}"]
    source = bundle.path.parent / f"source-{version}" / "device_agent"
    shutil.copytree(find_agent_source(), source, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "__init__.py").write_text(f'"""Another version."""\n\n__version__ = "{version}"\n')
    if agent:
        (source / "agent.py").write_text(f'"""Another agent."""\n\n{agent}')
    old.unlink()
    new = pack_agent(source, folder / "wheels")
    for pins in folder.glob("requirements-*.txt"):
        text = pins.read_text().replace(old_sum, hash_file(new))
        pins.write_text(re.sub(r"(?m)^tvm_farm==\S+", f"tvm_farm=={version}", text))
    files = {str(path.relative_to(folder)): hash_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest = dataclasses.replace(bundle.manifest, version=version, files=files)
    return write_bundle(folder, manifest, bundle.path.with_name(f"{version}.tar"))


@contextlib.contextmanager
def made_user(home: pathlib.Path) -> Iterator[pathlib.Path]:
    """An ordinary user with this home. Skips the test where users cannot be made."""
    name = f"farm-test-{os.getpid()}"
    home.mkdir(mode=0o755)
    command = ["useradd", "--no-create-home", "--home-dir", str(home), "--shell", "/bin/sh"]
    # sshd refuses users with a locked password; this one matches nothing.
    if subprocess.run([*command, "--password", "*", name], check=False).returncode:
        pytest.skip("users cannot be made here")
    try:
        shutil.chown(home, name, name)
        yield home
    finally:
        remove = ["userdel", name]
        wait_until(lambda: not subprocess.run(remove, check=False, capture_output=True).returncode, "the user's end")


def make_target(name: str, address: SshAddress) -> ProvisioningTarget:
    return ProvisioningTarget(name, address, AgentOptions(name, "local", find_free_port(), find_free_port()))


def provision(target: ProvisioningTarget, bundle: Bundle, job: ProvisioningJob) -> BoardReport:
    (report,) = provision_boards(
        [target], dataclasses.replace(job, bundles=BundleCache(bundle.path.parent, bundle.path))
    )
    for step in report.steps:
        print(f"{step.name:10} {step.status:8} {step.seconds:6.2f} s  {step.detail}")
    print(f"{report.outcome}: {report.state}")
    return report


def changed_steps(report: BoardReport) -> list[str]:
    return [step.name for step in report.steps if step.status is StepStatus.DONE]


def find_failed(report: BoardReport) -> str:
    return next((f"{step.name}: {step.detail}" for step in report.steps if step.status is StepStatus.FAILED), "")


def has_account(prefix: pathlib.Path) -> bool:
    """Whether there is a user for the agent of an installation that root made."""
    return any(entry.pw_name == Layout(str(prefix), True, True).user for entry in pwd.getpwall())


def list_tree(*folders: pathlib.Path, contents: bool = True) -> dict[str, str]:
    """Every path below folders with mode, owner and contents; and all accounts but those of installations.

    Other tests provision boards at the same time; `has_account` tells of one.
    """
    found = {f"account {e.pw_name}": str(e) for e in pwd.getpwall() if not e.pw_name.startswith("tvm-farm-")}
    for folder in folders:
        for path in (folder, *sorted(folder.rglob("*"))):
            status = path.lstat()
            facts = f"{stat.filemode(status.st_mode)} {status.st_uid}:{status.st_gid}"
            if stat.S_ISREG(status.st_mode) and contents:
                facts += f" {status.st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
            found[str(path)] = facts
    return found


class TunnelProof:
    """The same through a tunnel of its own to a tracker of the caller's, where no services of the farm run.

    Thread-safe.
    """

    def __init__(self, tracker: tuple[str, int], kernels: golden.GoldenKernels, known_hosts: KnownHosts | None) -> None:
        self._tracker = tracker
        self._kernels = kernels
        self._known_hosts = known_hosts

    def __call__(self, target: ProvisioningTarget) -> str:
        """What was seen. Raises what `prove` and links raise."""
        link = BoardLink(target.address, self._known_hosts)
        forward = link.add_forward(target.options.agent_port, FrameFilter)
        link.add_tracker(target.options.tracker_port, self._tracker, target.key, forward)
        with link:
            link.wait_up(FIND_TIMEOUT_S)
            return prove(Tracker(*self._tracker), self._kernels, target)
