"""`farm board provision` on a system as boards have it: systemd, sudo, logins, power that goes, disks that fill."""

from __future__ import annotations

import signal
import time

import pytest

from farm.provision.bundle import open_bundle
from tests.acceptance.conftest import wait_until
from tests.integration.provisioning import BROKEN, change_agent
from tests.real_kernel.conftest import AGENT, NAME, PROVISION_TIMEOUT_S, Site, list_board

YEAR_S = 365.25 * 86400
VERSION = "/opt/tvm-farm/current/bin/python -c 'import device_agent; print(device_agent.__version__)'"


@pytest.mark.core
def test_provisioned_again_nothing_changes_and_removed_nothing_stays(provisioned: Site) -> None:
    """Twice is once; afterwards files, accounts and units are what they were before the first time."""
    again = provisioned.provision()
    assert again.code == 0, again.out + again.err
    assert "unchanged" in again.out
    removed = provisioned.provision("--uninstall")
    assert removed.code == 0, removed.out + removed.err
    assert list_board(provisioned.board) == provisioned.before


def test_a_version_that_does_not_start_is_rolled_back(provisioned: Site) -> None:
    """The board never loses its agent: the old one runs again after one that cannot be started."""
    before = provisioned.board.run(VERSION).stdout
    broken = change_agent(open_bundle(provisioned.bundle), "9.0.1", BROKEN)
    done = provisioned.provision(bundle=broken.path)
    assert done.code == 1, done.out + done.err
    assert provisioned.board.run(VERSION).stdout == before
    assert provisioned.board.run("systemctl is-active tvm-farm-agent").stdout == "active\n"


@pytest.mark.parametrize("login", ["asked", "terminal", "plain"])
def test_a_login_that_cannot_become_root_is_told_what_it_gets(fresh: Site, login: str) -> None:
    """A password, a terminal or no sudo at all: the plan is an agent of the login's own, and says what that lacks."""
    fresh.add(login, "other")
    done = fresh.provision("--dry-run", name="other")
    assert done.code == 0, done.out + done.err
    assert f"/home/{login}/" in done.err
    assert "neither root nor sudo without a password" in done.err


def test_a_login_without_sudo_gets_no_second_agent_beside_the_systems(provisioned: Site) -> None:
    """It learns what is installed and what sudo said; the agent's commands work for it, except holding clocks."""
    provisioned.add("asked", "other")
    done = provisioned.provision(name="other")
    assert done.code == 1, done.out + done.err
    assert "is installed for the whole system in /opt/tvm-farm" in done.err
    assert "a password is required" in done.err
    shown = provisioned.board.run(f"{AGENT} clocks show", login="asked")
    assert "a57" in shown.stdout


def test_power_that_goes_during_an_upgrade_leaves_a_board_that_serves_and_can_be_finished(provisioned: Site) -> None:
    """Cut while the new version is installed and while it starts: each boot ends with an agent, and then it goes on."""
    board, newer = provisioned.board, change_agent(open_bundle(provisioned.bundle), "9.0.2").path
    for step_before in ("send", "switch"):
        running = provisioned.home.start("board", "provision", NAME, "--bundle", str(newer))
        said = f"{NAME}: {step_before}: done"
        wait_until(lambda running=running, said=said: said in running.err, said, PROVISION_TIMEOUT_S)
        board.cut_power()
        running.send(signal.SIGINT)
        assert running.wait().code != 0
        board.start()
        provisioned.wait_for_services()
    done = provisioned.provision(bundle=newer)
    assert done.code == 0, done.out + done.err
    assert board.run(VERSION).stdout == "9.0.2\n"


def test_after_a_reboot_the_board_serves(provisioned: Site) -> None:
    """`sudo reboot` as the login: agent and helper come up by themselves, and a probe says good."""
    provisioned.board.run("sudo systemctl reboot", login="farm", check=False)
    provisioned.board.wait_for_reset()
    probe = provisioned.home.run("board", "probe", NAME, timeout_s=PROVISION_TIMEOUT_S)
    assert probe.code == 0, probe.out + probe.err


def test_a_clock_two_years_behind_is_said_and_does_no_harm(provisioned: Site) -> None:
    """Boards without a battery start in the past: provisioning says so, and a probe is good all the same."""
    provisioned.board.set_clock(time.time() - 2 * YEAR_S)
    done = provisioned.provision()
    assert done.code == 0, done.out + done.err
    assert "2.0 years behind" in done.err
    probe = provisioned.home.run("board", "probe", NAME, timeout_s=PROVISION_TIMEOUT_S)
    assert probe.code == 0, probe.out + probe.err


@pytest.mark.core
def test_a_full_disk_is_said_before_anything_is_sent(fresh: Site) -> None:
    """Nothing is put on a board without room for it."""
    fresh.board.run("fallocate -l $(($(stat -f -c '%a * %S' /) - (200 << 20))) /fill")
    done = fresh.provision()
    assert done.code == 1, done.out + done.err
    assert "the disk is full" in done.err
    assert fresh.board.run("ls /opt").stdout == ""
