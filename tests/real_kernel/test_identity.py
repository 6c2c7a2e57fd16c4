"""What the agent and the farm take a machine for that is a board by its device tree and its kernel's files alone."""

from __future__ import annotations

import json

import pytest

from tests.real_kernel.conftest import AGENT, NAME, PROVISION_TIMEOUT_S, TYPE, Site


@pytest.mark.core
def test_the_device_tree_names_the_board_and_the_kernel_its_parts(provisioned: Site) -> None:
    """Type, clock tables, rails and zones are the Nano's; nothing is called simulated."""
    said = json.loads(provisioned.board.run(f"{AGENT} describe --json").stdout)
    assert said["detected_type"] == TYPE
    assert not said["simulated"]
    assert said["architecture"] == "aarch64"
    (cluster,) = said["clocks"]["clusters"]
    assert cluster["cpus"] == [0, 1, 2, 3]
    assert (len(cluster["available_hz"]), max(cluster["available_hz"])) == (15, 1_479_000_000)
    assert (len(said["clocks"]["gpu"]["available_hz"]), said["clocks"]["gpu"]["max_hz"]) == (12, 921_600_000)
    assert said["clocks"]["memory"]["max_hz"] == 1_600_000_000
    assert said["rails"] == ["POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU"]
    assert set(said["thermal_zones"]) == {"AO-therm", "CPU-therm", "GPU-therm"}


@pytest.mark.core
def test_every_hop_to_the_board_is_good(provisioned: Site) -> None:
    """`farm doctor` goes all the way to a kernel run on the board."""
    done = provisioned.home.run("doctor", NAME, timeout_s=PROVISION_TIMEOUT_S)
    assert done.code == 0, done.out + done.err
    assert "failed" not in done.out
