"""What a login may do on a board decides where an agent goes: one that lost sudo, beside what stands already."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import socket
from collections.abc import Iterator

import pytest

from farm.provision import board as provision_board
from farm.provision.board import ProvisioningJob
from farm.provision.boards import provision_boards
from farm.provision.bundle_build import BundleCache
from farm.provision.plan import ProvisioningOutcome
from tests.integration.provisioning import accounts, find_failed, list_tree, made_user, make_target, open_folder
from tests.integration.sshd import running_sshd

__all__ = ["accounts"]  # a fixture
pytestmark = [
    pytest.mark.usefixtures("accounts"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a login of its own takes root"),
]


@pytest.fixture
def room() -> Iterator[pathlib.Path]:
    with open_folder() as folder:
        yield folder


@pytest.mark.parametrize("wanted", [{"dry_run": True}, {}, {"uninstall": True}], ids=["plan", "provision", "uninstall"])
def test_a_system_installation_and_a_login_without_sudo(
    room: pathlib.Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, bool]
) -> None:
    """It is said that one stands, and in sudo's words why it cannot be changed; no second one is planned or made."""
    system, programs = room / "system", room / "bin"
    programs.mkdir(mode=0o755)
    sudo = programs / "sudo"
    sudo.write_text("#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n")
    sudo.chmod(0o755)
    system.mkdir(mode=0o755)
    (system / "tvm-farm-board").touch()
    (system / "current").symlink_to("versions/0.1.0-abc")
    monkeypatch.setattr(provision_board, "ROOT_PREFIX", str(system))
    with made_user(room / "home") as home:
        before = list_tree(home)
        with running_sshd(room / "sshd", f"SetEnv PATH={programs}:/usr/bin:/bin") as server:
            (room / "sshd").chmod(0o755)
            target = make_target("lost", dataclasses.replace(server.pinned, user=home.owner()))
            (report,) = provision_boards([target], ProvisioningJob(BundleCache(room), lambda target: "", **wanted))
        assert list_tree(home) == before
    assert report.outcome is ProvisioningOutcome.FAILED
    assert f"0.1.0-abc is installed for the whole system in {system}" in find_failed(report)
    assert "sudo: a password is required" in find_failed(report)
    assert report.state == f"as before: 0.1.0-abc in {system}"


def test_a_taken_port_and_deployed_models_are_named(room: pathlib.Path) -> None:
    """A program on the agent's port ends the installation at its check; a removal names models."""
    with made_user(room / "home") as home, socket.create_server(("127.0.0.1", 0)) as taken:
        (home / "tvm-farm-models").mkdir()
        with running_sshd(room / "sshd", "SetEnv PATH=/nothing:/usr/bin:/bin") as server:
            (room / "sshd").chmod(0o755)
            target = make_target("held", dataclasses.replace(server.pinned, user=home.owner()))
            held = dataclasses.replace(target.options, agent_port=taken.getsockname()[1])
            job = ProvisioningJob(BundleCache(room), lambda target: "")
            (report,) = provision_boards([dataclasses.replace(target, options=held)], job)
            (removed,) = provision_boards([target], dataclasses.replace(job, uninstall=True))
    assert find_failed(report).startswith("check: another program has the agent's port")
    assert removed.outcome is ProvisioningOutcome.UNCHANGED
    assert any(f"deployed models stay in {home}/tvm-farm-models" in note for note in removed.notes)
