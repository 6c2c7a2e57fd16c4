"""Clocks held and put back by the services as systemd runs them, on a kernel that rounds, clamps and forgets."""

from __future__ import annotations

import json

import pytest

from tests.real_kernel.conftest import AGENT, Site

POLICY = "/sys/devices/system/cpu/cpufreq/policy0"
HELPER = "tvm-farm-clock-helper"
FREE, HELD = "102000 1479000", "921600 921600"


def hold(site: Site) -> None:
    """Have a client hold 921.6 MHz on three cores for as long as the test takes."""
    pin = f"{AGENT} clocks pin --cpu-freq 921.6MHz --cores 0-2 --for 600"
    site.board.run(f"setsid {pin} >/run/held 2>&1 </dev/null & echo $! >/run/holder")
    wait_for(site, HELD)


def wait_for(site: Site, limits: str, timeout_s: int = 120) -> None:
    """Wait until the CPU's limits are these."""
    read = f'"$(echo $(cat {POLICY}/scaling_min_freq {POLICY}/scaling_max_freq))"'
    turns = f"for i in $(seq {timeout_s * 5}); do [ {read} = '{limits}' ] && exit; sleep 0.2; done"
    site.board.run(f"{turns}; cat /run/held >&2; echo {read} >&2; exit 1", timeout_s=timeout_s + 60)


@pytest.mark.core
def test_a_clock_between_two_of_the_table_is_said_as_what_it_became(provisioned: Site) -> None:
    """The kernel rounds, and the report says the clock that is there; afterwards every limit is as it was."""
    done = provisioned.board.run(f"{AGENT} clocks pin --cpu-freq 921.6MHz --gpu-freq 460.8MHz --for 0.1 --json")
    report = json.loads(done.stdout.splitlines()[0])
    assert report["status"] == "ok"
    (cluster,) = report["clocks"]["clusters"]
    assert (cluster["min_hz"], cluster["max_hz"], cluster["current_hz"]) == (921_600_000,) * 3
    assert report["clocks"]["gpu"]["current_hz"] == 460_800_000
    wait_for(provisioned, FREE)


@pytest.mark.parametrize("victim", ["holder", "guardian", "child"])
def test_clocks_are_put_back_when_a_process_is_killed(provisioned: Site, victim: str) -> None:
    """After any process is killed, limits and cores come back within seconds, and the agent's sessions live on."""
    agent = provisioned.board.run("systemctl show -p MainPID --value tvm-farm-agent").stdout
    hold(provisioned)
    guardian = f"$(systemctl show -p MainPID --value {HELPER})"
    pid = {"holder": "$(cat /run/holder)", "guardian": guardian, "child": f"$(pgrep -P {guardian})"}[victim]
    provisioned.board.run(f"kill -9 {pid}")
    wait_for(provisioned, FREE)
    assert provisioned.board.read("/sys/devices/system/cpu/online") == "0-3"
    assert provisioned.board.run(f"systemctl is-active {HELPER}").stdout.strip() == "active"
    assert provisioned.board.run("systemctl show -p MainPID --value tvm-farm-agent").stdout == agent


def test_the_watchdog_replaces_a_guardian_that_stands_still(provisioned: Site) -> None:
    """Systemd hears nothing from a stopped guardian, starts another, and that one puts the clocks back."""
    hold(provisioned)
    provisioned.board.run(f"kill -STOP $(systemctl show -p MainPID --value {HELPER})")
    wait_for(provisioned, FREE)
    assert int(provisioned.board.run(f"systemctl show -p NRestarts --value {HELPER}").stdout) >= 1


@pytest.mark.core
def test_clocks_held_when_the_power_goes_are_free_after_the_boot(provisioned: Site) -> None:
    """A pulled plug: the board boots, helper and agent run, nothing is held and nothing is called unsafe."""
    hold(provisioned)
    provisioned.board.cut_power()
    provisioned.board.start()
    wait_for(provisioned, FREE)
    said = provisioned.board.run(f"{AGENT} doctor --json", check=False).stdout
    checks = {check["name"]: check for check in json.loads(said)["checks"]}
    assert checks["clock helper"]["message"].endswith("clocks free")
    assert checks["unsafe"]["level"] == "ok"
    assert provisioned.board.run("systemctl is-active tvm-farm-agent").stdout.strip() == "active"


@pytest.mark.core
def test_cores_that_somebody_took_offline_stay_so(provisioned: Site) -> None:
    """They are said, a point is held without them, and putting back does not bring them back."""
    board = provisioned.board
    board.run("echo 0 >/sys/devices/system/cpu/cpu3/online")
    assert json.loads(board.run(f"{AGENT} describe --json").stdout)["cores_online"] == [0, 1, 2]
    done = board.run(f"{AGENT} clocks pin --cpu-freq 921.6MHz --for 0.1 --json")
    assert json.loads(done.stdout.splitlines()[0])["status"] == "ok"
    assert board.read("/sys/devices/system/cpu/online") == "0-2"


@pytest.mark.core
def test_a_power_mode_is_set_and_put_back(provisioned: Site) -> None:
    """Nvpmodel's 5W takes two cores and limits the clock; afterwards MAXN is in force again."""
    done = provisioned.board.run(f"{AGENT} clocks pin --power-mode 5W --for 0.1 --json", check=False)
    report = json.loads(done.stdout.splitlines()[0])
    assert report["status"] == "ok", report["message"]
    (cluster,) = report["clocks"]["clusters"]
    assert cluster["online"] == [0, 1]
    assert cluster["max_hz"] == 825_600_000  # the entry below 918 MHz; NVIDIA's kernel takes the one above
    assert provisioned.board.run("nvpmodel -q").stdout.split()[-1] == "0"
    assert provisioned.board.read("/sys/devices/system/cpu/online") == "0-3"


@pytest.mark.core
def test_a_clock_that_firmware_holds_down_is_not_called_held(provisioned: Site) -> None:
    """The kernel says 1479 MHz, the clock itself says 921.6: only root's file tells, and the report does."""
    provisioned.board.set_fault(cap_khz=921600)
    done = provisioned.board.run(f"{AGENT} clocks pin --cpu-freq 1479MHz --for 0.1 --json", check=False)
    report = json.loads(done.stdout.splitlines()[0])
    assert report["status"] != "ok"
    assert "921.6" in report["message"]
