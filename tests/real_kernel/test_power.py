"""Power through the kernel's own sensor driver, against the values set in the sensor."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.real_kernel.conftest import AGENT, Site

BIND = "/sys/bus/i2c/drivers/ina3221/bind"
HWMON = "/sys/bus/i2c/devices/6-0040/hwmon/hwmon*"


def watch(site: Site, seconds: float = 2.0) -> dict[str, Any]:
    done = site.board.run(f"{AGENT} power --json --rate-hz 50 --seconds {seconds:g}")
    return {rail["rail"]: rail for rail in json.loads(done.stdout)["window"]["rails"]}


@pytest.mark.core
def test_rails_are_what_the_sensor_was_told(provisioned: Site) -> None:
    """Mean power and energy of each rail, with what the sensor's steps leave open, hold the true ones."""
    told_w = {"POM_5V_IN": 4.1, "POM_5V_GPU": 0.53, "POM_5V_CPU": 1.77}
    # A sensor that shows one value for ever is not believed: half of the time 0.1 W more, so that it is seen to live.
    told_mw = ",".join(f"{1000 * watts - 50:.0f}" for watts in told_w.values())
    provisioned.board.set_fault(rail_mw=told_mw, swing_mw=100, swing_ms=70)
    rails = watch(provisioned, 3.0)
    for name, watts in told_w.items():
        low_w, high_w = rails[name]["power_ci_w"]
        assert low_w <= watts <= high_w, rails[name]
        assert high_w - low_w < 0.5
        low_j, high_j = rails[name]["energy_ci_j"]
        window_s = rails[name]["energy_j"] / rails[name]["power_w"]
        assert low_j <= watts * window_s <= high_j


def test_a_swing_is_averaged_by_the_sensor_and_by_the_window(provisioned: Site) -> None:
    """1 W that comes and goes three times a second: the window holds its mean whether the chip averages or not."""
    provisioned.board.set_fault(rail_mw="3000,500,900", swing_mw=1000, swing_ms=300)
    for samples, most_updates in ((1, 3.0 / 0.0066), (64, 3.0 / 0.42 + 1)):
        provisioned.board.run(f"echo {samples} | tee {HWMON}/samples")
        rail = watch(provisioned, 3.0)["POM_5V_IN"]
        low_w, high_w = rail["power_ci_w"]
        assert low_w <= 3.5 <= high_w, samples
        assert 3 <= rail["updates"] <= most_updates, samples


def test_load_and_clocks_move_the_rails(provisioned: Site) -> None:
    """Four busy cores take more at their highest clock than at their lowest, and more than idle ones."""
    policy = "/sys/devices/system/cpu/cpufreq/policy0"
    provisioned.board.run("for i in 1 2 3 4; do (timeout 60 sh -c 'while :; do :; done' >/dev/null 2>&1 &); done")
    fast_w = watch(provisioned)["POM_5V_CPU"]["power_w"]
    provisioned.board.run(f"echo 102000 >{policy}/scaling_max_freq")
    slow_w = watch(provisioned)["POM_5V_CPU"]["power_w"]
    assert fast_w > slow_w + 0.5


def test_a_sensor_that_dies_and_one_that_comes_late(provisioned: Site) -> None:
    """A rail that cannot be read is unknown, not zero; a sensor whose driver finds it later is found."""
    board = provisioned.board
    board.set_fault(dead_chips=1)
    dead = board.run(f"{AGENT} power --json --seconds 1", check=False)
    assert dead.returncode == 1
    assert all(rail["power_w"] is None for rail in json.loads(dead.stdout)["window"]["rails"])
    board.run(f"cd $(dirname {BIND}) && echo 6-0040 >unbind; echo 6-0040 >bind", check=False)
    assert json.loads(board.run(f"{AGENT} describe --json").stdout)["rails"] == []
    board.set_fault(dead_chips=0)
    board.run(f"echo 6-0040 >{BIND}")
    assert len(json.loads(board.run(f"{AGENT} describe --json").stdout)["rails"]) == 3
