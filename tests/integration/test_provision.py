"""Boards provisioned over a real OpenSSH server: from nothing, again, upgraded, rolled back, cut off, removed.

The "board" is this machine below a prefix of its own, without systemd; its agent is a process of another user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import threading
from collections.abc import Iterator

import psutil
import pytest

from farm.connectivity.ssh_files import hash_file
from farm.errors import PermanentError
from farm.provision import interpreters
from farm.provision.board import ProvisioningJob, ProvisioningTarget
from farm.provision.boards import provision_boards
from farm.provision.bundle import Bundle
from farm.provision.bundle_build import BundleCache
from farm.provision.plan import ProvisioningOutcome, StepReport, StepStatus
from farm.search.codegen.golden import GoldenKernels
from tests.integration.conftest import Tracker, wait_until
from tests.integration.provisioning import (
    BROKEN,
    SYSTEM_PYTHONS,
    TunnelProof,
    accounts,
    change_agent,
    changed_steps,
    find_failed,
    find_system_python,
    has_account,
    list_tree,
    made_user,
    make_bundle,
    make_interpreter,
    make_target,
    open_folder,
    provision,
)
from tests.integration.sshd import Sshd, running_sshd
from tests.ports import find_free_port
from tests.together import run_folder

__all__ = ["accounts"]  # a fixture
pytestmark = [
    pytest.mark.usefixtures("accounts"),
    pytest.mark.skipif(
        os.geteuid() != 0 or find_system_python() not in SYSTEM_PYTHONS,
        reason="a board with a user and a clock helper of its own takes root and a system Python >= 3.10",
    ),
]

ETC = pathlib.Path("/etc")
EVERY_STEP = ["folder", "send", "install", "user", "services", "switch", "start", "finish"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    own = make_bundle(tmp_path_factory.mktemp("bundles"))
    return {"1": change_agent(own, "1.0"), "2": change_agent(own, "2.0"), "broken": change_agent(own, "3.0", BROKEN)}


@pytest.fixture(scope="module")
def proof(tracker: Tracker) -> TunnelProof:
    return TunnelProof((tracker.host, tracker.port), GoldenKernels(run_folder() / "golden"), None)


@pytest.fixture
def room() -> Iterator[pathlib.Path]:
    with open_folder() as folder:
        yield folder


@pytest.fixture
def job(proof: TunnelProof, room: pathlib.Path) -> ProvisioningJob:
    return ProvisioningJob(BundleCache(room), proof, prefix=str(room / "deep" / "farm"))


@pytest.fixture(scope="module")
def kept(sshd: Sshd) -> Iterator[tuple[ProvisioningTarget, pathlib.Path]]:
    with open_folder() as folder:
        yield make_target("board", sshd.pinned), folder / "farm"


@pytest.fixture
def board(
    kept: tuple[ProvisioningTarget, pathlib.Path], bundles: dict[str, Bundle], job: ProvisioningJob
) -> tuple[ProvisioningTarget, ProvisioningJob]:
    """A board that has version 1 after any earlier test, and what is wanted of it."""
    target, prefix = kept
    job = dataclasses.replace(job, prefix=str(prefix))
    assert provision(target, bundles["1"], job).version == bundles["1"].manifest.key
    return target, job


@pytest.fixture(scope="module", autouse=True)
def removed(
    kept: tuple[ProvisioningTarget, pathlib.Path], bundles: dict[str, Bundle], proof: TunnelProof
) -> Iterator[None]:
    target, prefix = kept
    before = list_tree(prefix.parent)
    yield
    job = ProvisioningJob(BundleCache(prefix.parent), proof, prefix=str(prefix), uninstall=True)
    assert provision(target, bundles["1"], job).outcome in (ProvisioningOutcome.REMOVED, ProvisioningOutcome.UNCHANGED)
    assert list_tree(prefix.parent) == before


def find_agents(target: ProvisioningTarget) -> list[psutil.Process]:
    """Processes that listen on the agent's port, by their open sockets."""
    found = []
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == target.options.agent_port:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(connection.pid))
    return found


def test_the_life_of_an_installation(
    sshd: Sshd, bundles: dict[str, Bundle], job: ProvisioningJob, room: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """From a plan that fetches nothing to a measured kernel; again; upgraded; not upgraded to what fails; removed."""
    target = make_target("whole", sshd.pinned)
    prefix = pathlib.Path(job.prefix)
    before = list_tree(room), list_tree(ETC, contents=False)

    planned = provision(target, bundles["1"], dataclasses.replace(job, dry_run=True))
    assert planned.outcome is ProvisioningOutcome.PLANNED
    assert list_tree(room) == before[0]
    unmade = dataclasses.replace(job, dry_run=True, bundles=BundleCache(tmp_path / "bundles"))
    (planned,) = provision_boards([target], unmade)
    assert planned.outcome is ProvisioningOutcome.PLANNED
    assert {"bundle", "send", "install", "start"} <= {
        step.name for step in planned.steps if step.status is StepStatus.WOULD
    }
    assert list_tree(room) == before[0]
    assert not (tmp_path / "bundles").exists(), "a dry run made a bundle"

    first = provision(target, bundles["1"], job)
    assert (first.outcome, first.version) == (ProvisioningOutcome.PROVISIONED, bundles["1"].manifest.key)
    assert changed_steps(first) == EVERY_STEP
    assert "golden kernel" in next(step.detail for step in first.steps if step.name == "probe")
    (agent,) = find_agents(target)
    # Not root; below the supervisor; reached by this machine only.
    assert agent.username().startswith("tvm-farm-")
    listening = [c for c in agent.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
    assert not list(prefix.rglob("libtvm_compiler*"))

    installed = list_tree(prefix / "versions", prefix / "etc", prefix / "bin", ETC)
    again = provision(target, bundles["1"], job)
    assert (again.outcome, changed_steps(again)) == (ProvisioningOutcome.UNCHANGED, [])
    assert list_tree(prefix / "versions", prefix / "etc", prefix / "bin", ETC) == installed
    assert find_agents(target) == [agent]

    upgraded = provision(target, bundles["2"], job)
    assert (upgraded.outcome, upgraded.version) == (ProvisioningOutcome.PROVISIONED, bundles["2"].manifest.key)
    assert "agent 2.0" in next(step.detail for step in upgraded.steps if step.name == "probe")
    assert {path.name for path in (prefix / "versions").iterdir()} == {bundles[v].manifest.key for v in ("1", "2")}

    failed = provision(target, bundles["broken"], job)
    assert (failed.outcome, failed.version) == (ProvisioningOutcome.ROLLED_BACK, bundles["2"].manifest.key)
    assert "this version is broken" in find_failed(failed)
    again = provision(target, bundles["2"], job)
    assert (again.outcome, changed_steps(again)) == (ProvisioningOutcome.UNCHANGED, [])

    removed = provision(target, bundles["2"], dataclasses.replace(job, uninstall=True))
    assert removed.outcome is ProvisioningOutcome.REMOVED
    assert (list_tree(room), list_tree(ETC, contents=False)) == before
    assert not find_agents(target)
    assert not has_account(prefix)
    assert (
        provision(target, bundles["2"], dataclasses.replace(job, uninstall=True)).outcome
        is ProvisioningOutcome.UNCHANGED
    )


def test_an_upgrade_that_is_not_proven_is_taken_back(
    board: tuple[ProvisioningTarget, ProvisioningJob], bundles: dict[str, Bundle], proof: TunnelProof
) -> None:
    """A new agent that starts and then fails its probe gives way to the old one, which serves as before."""
    target, job = board

    def refuse(target: ProvisioningTarget) -> str:
        raise PermanentError(f"{target.name} computes something else")

    report = provision(target, bundles["2"], dataclasses.replace(job, probe=refuse))
    assert (report.outcome, report.version) == (ProvisioningOutcome.ROLLED_BACK, bundles["1"].manifest.key)
    assert find_failed(report) == "probe: board computes something else"
    assert [path.name for path in (pathlib.Path(job.prefix) / "versions").iterdir()] == [bundles["1"].manifest.key]
    assert "agent 1.0" in proof(target)


def test_what_dies_is_started_again(board: tuple[ProvisioningTarget, ProvisioningJob], proof: TunnelProof) -> None:
    """A killed agent is brought back; a killed supervisor takes the agent with it, and `start` brings both."""
    target, job = board
    (agent,) = find_agents(target)
    supervisor = agent.parent()
    agent.kill()
    wait_until(lambda: find_agents(target) not in ([], [agent]), "another agent")
    (agent,) = find_agents(target)
    supervisor.kill()
    wait_until(lambda: not agent.is_running(), "the agent to follow its supervisor")
    program = f"{job.prefix}/bin/tvm-farm-board"
    assert subprocess.run([program, "status"], capture_output=True, check=False, timeout=30).returncode == 3
    assert subprocess.run([program, "start"], check=False, timeout=30).returncode == 0
    wait_until(lambda: find_agents(target), "the agent")
    assert subprocess.run([program, "status"], capture_output=True, check=False, timeout=30).returncode == 0
    assert "agent 1.0" in proof(target)


def test_a_connection_that_is_cut(
    board: tuple[ProvisioningTarget, ProvisioningJob], sshd: Sshd, bundles: dict[str, Bundle], proof: TunnelProof
) -> None:
    """Wherever it is cut, the version before serves on or again; and the next run completes the upgrade."""
    target, job = board
    prefix = pathlib.Path(job.prefix)
    new = prefix / "versions" / bundles["2"].manifest.key

    def cut_after(wanted: str) -> ProvisioningJob:
        def cut(name: str, step: StepReport) -> None:
            if step.name == wanted:
                sshd.drop_sessions()

        return dataclasses.replace(job, show=cut)

    cutter = threading.Thread(
        target=lambda: (wait_until(lambda: (new / "bin").exists(), "the installation"), sshd.drop_sessions())
    )
    cutter.start()
    report = provision(target, bundles["2"], job)
    cutter.join()
    assert (report.outcome, report.version) == (ProvisioningOutcome.FAILED, bundles["1"].manifest.key)
    assert "agent 1.0" in proof(target)
    config = (prefix / "etc" / "board.json").read_text()
    moved = dataclasses.replace(target, options=dataclasses.replace(target.options, tracker_port=find_free_port()))
    # Nothing was touched yet; the files of the services were; the version was too.
    for after, of, outcome in (
        ("install", target, ProvisioningOutcome.FAILED),
        ("services", moved, ProvisioningOutcome.ROLLED_BACK),
        ("switch", target, ProvisioningOutcome.ROLLED_BACK),
    ):
        report = provision(of, bundles["2"], cut_after(after))
        assert (report.outcome, report.version) == (outcome, bundles["1"].manifest.key), after
        assert (prefix / "etc" / "board.json").read_text() == config
        assert "agent 1.0" in proof(target)
    completed = provision(target, bundles["2"], job)
    assert (completed.outcome, completed.version) == (ProvisioningOutcome.PROVISIONED, bundles["2"].manifest.key)
    assert not {path.name for path in prefix.iterdir()} & {"incoming", "previous", "pending"}


@pytest.fixture
def small_disk(room: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system with room for one version and the upgrade to the next; it takes root to make one."""
    folder = room / "disk"
    folder.mkdir(mode=0o755)
    mount = ["mount", "-t", "tmpfs", "-o", "size=460m,mode=755", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a full disk is made with mount, which is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: pathlib.Path) -> pathlib.Path:
    path = folder / "full"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            return path


def test_a_disk_that_is_full(
    sshd: Sshd, bundles: dict[str, Bundle], job: ProvisioningJob, proof: TunnelProof, small_disk: pathlib.Path
) -> None:
    """Said before anything is sent; one that fills meanwhile stops the upgrade, and the old version serves on."""
    job = dataclasses.replace(job, prefix=str(small_disk / "farm"))
    target = make_target("full", sshd.pinned)
    full = fill(small_disk)
    report = provision(target, bundles["1"], job)
    assert find_failed(report).startswith("bundle: the disk is full: 0 MiB free")
    assert [path.name for path in small_disk.iterdir()] == ["full"]
    full.unlink()
    assert provision(target, bundles["1"], job).outcome is ProvisioningOutcome.PROVISIONED

    def fill_now(name: str, step: StepReport) -> None:
        if step.name == "send":
            fill(small_disk)

    report = provision(target, bundles["2"], dataclasses.replace(job, show=fill_now))
    assert report.outcome is ProvisioningOutcome.FAILED
    assert "disk is full" in find_failed(report)
    assert "agent 1.0" in proof(target)
    full.unlink()
    assert provision(target, bundles["2"], job).outcome is ProvisioningOutcome.PROVISIONED
    assert (
        provision(target, bundles["2"], dataclasses.replace(job, uninstall=True)).outcome is ProvisioningOutcome.REMOVED
    )
    assert not list(small_disk.iterdir())


def test_boards_that_fail_do_not_stop_the_others(
    sshd: Sshd, bundles: dict[str, Bundle], job: ProvisioningJob, proof: TunnelProof, room: pathlib.Path
) -> None:
    """Side by side: one is proven, on one nothing listens, one's prefix belongs to another user."""
    good = make_target("good", sshd.pinned)
    down = make_target("down", dataclasses.replace(sshd.pinned, port=1))
    bundle = BundleCache(room, bundles["1"].path)
    job = dataclasses.replace(job, bundles=bundle)
    reports = provision_boards([down, good], job)
    assert [report.outcome for report in reports] == [ProvisioningOutcome.FAILED, ProvisioningOutcome.PROVISIONED]
    assert find_failed(reports[0]).startswith("connect: ")
    (room / "theirs").mkdir()
    (room / "theirs" / "file").touch()
    theirs = provision(good, bundles["1"], dataclasses.replace(job, prefix=str(room / "theirs")))
    assert "holds files that are not ours" in find_failed(theirs)
    assert (
        provision(good, bundles["1"], dataclasses.replace(job, uninstall=True)).outcome is ProvisioningOutcome.REMOVED
    )


def test_work_that_is_interrupted(
    sshd: Sshd, bundles: dict[str, Bundle], job: ProvisioningJob, room: pathlib.Path
) -> None:
    """It ends at once, says how the board is left, and can be taken up again or undone."""
    from farm.provision.board import Provisioner

    target = make_target("stopped", sshd.pinned)
    before = list_tree(room)
    workers: list[Provisioner] = []

    def stop(name: str, step: StepReport) -> None:
        if step.name == "send":
            threading.Thread(target=workers[0].interrupt).start()
            wait_until(lambda: not workers[0]._connection or workers[0]._connection.lost.is_set(), "the interruption")

    workers.append(
        Provisioner(target, dataclasses.replace(job, bundles=BundleCache(room, bundles["1"].path), show=stop))
    )
    report = workers[0].run()
    assert report.outcome is ProvisioningOutcome.INTERRUPTED
    assert report.state == "as before: no agent of ours"
    assert (
        provision(target, bundles["1"], dataclasses.replace(job, uninstall=True)).outcome is ProvisioningOutcome.REMOVED
    )
    assert list_tree(room) == before


def hide_pythons(folder: pathlib.Path) -> str:
    """Options for a server on whose board no system Python is found: its commands run where other files cover them."""
    script = folder / "without-python"
    script.write_text(
        "#!/bin/sh\n"
        'case "$SSH_ORIGINAL_COMMAND" in *sftp*) exec /usr/lib/openssh/sftp-server;; esac\n'
        'for python in /usr/bin/python3.*[0-9]; do mount --bind /dev/null "$python" || exit 1; done\n'
        'exec sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    script.chmod(0o755)
    return f"ForceCommand unshare -m {script}"


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0
    or not pathlib.Path("/usr/lib/openssh/sftp-server").exists(),
    reason="a board without a Python is made with unshare and Debian's sftp-server",
)
def test_a_board_without_a_python_of_its_own(
    bundles: dict[str, Bundle], job: ProvisioningJob, room: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """It gets the bundle's, unpacked by uv without a network; and nothing of it stays."""
    before = list_tree(room)
    with running_sshd(tmp_path / "sshd", hide_pythons(tmp_path)) as server:
        target = make_target("bare", server.pinned)
        report = provision(target, bundles["1"], job)
        assert report.outcome is ProvisioningOutcome.PROVISIONED
        assert "Python older than 3.10" in next(step.detail for step in report.steps if step.name == "check")
        assert "python" in changed_steps(report)
        (agent,) = find_agents(target)
        assert pathlib.Path(agent.exe()).is_relative_to(job.prefix)
        assert provision(target, bundles["1"], job).outcome is ProvisioningOutcome.UNCHANGED
        assert (
            provision(target, bundles["1"], dataclasses.replace(job, uninstall=True)).outcome
            is ProvisioningOutcome.REMOVED
        )
    assert list_tree(room) == before


def test_an_interpreter_is_fetched_from_a_mirror(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator's uv takes it from the configured index, and the archive is kept as it was published."""
    archive = make_interpreter(tmp_path)
    interpreter = interpreters.parse_interpreter(archive)
    downloads = interpreter.to_downloads(hash_file(archive)).replace(interpreters.FOLDER_MARK, str(tmp_path))
    (tmp_path / "downloads.json").write_text(downloads)
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", f"file://{tmp_path}/downloads.json")
    target = tmp_path / "fetched"
    target.mkdir()
    fetched = interpreters.fetch_interpreter(interpreter.series, interpreter.arch, target)
    assert (fetched.name, hash_file(fetched)) == (archive.name, hash_file(archive))


@pytest.fixture
def login(room: pathlib.Path) -> Iterator[pathlib.Path]:
    with made_user(room / "home") as home:
        yield home


def test_a_login_that_is_not_root(
    bundles: dict[str, Bundle], job: ProvisioningJob, room: pathlib.Path, login: pathlib.Path
) -> None:
    """The agent is installed below its home and runs as the login; what is lacking is said."""
    folder = room / "sshd"
    folder.mkdir(mode=0o755)
    before = list_tree(login)
    with running_sshd(folder) as server:
        address = dataclasses.replace(server.pinned, user=login.owner())
        target = make_target("humble", address)
        job = dataclasses.replace(job, prefix="")
        report = provision(target, bundles["1"], job)
        assert report.outcome is ProvisioningOutcome.PROVISIONED
        assert any("no clock helper" in note for note in report.notes)
        (agent,) = find_agents(target)
        assert agent.username() == login.owner()
        assert (login / ".local/share/tvm-farm-board/current").exists()
        assert provision(target, bundles["1"], job).outcome is ProvisioningOutcome.UNCHANGED
        assert (
            provision(target, bundles["1"], dataclasses.replace(job, uninstall=True)).outcome
            is ProvisioningOutcome.REMOVED
        )
    assert list_tree(login) == before
