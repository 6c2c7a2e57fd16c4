"""A TX2 as L4T R32 has it: two clusters, and two sensors behind the files of NVIDIA's own driver."""

from __future__ import annotations

import json
import pathlib

from tests.acceptance.conftest import Home
from tests.real_kernel.conftest import AGENT, Site, guests, require_image

RAILS_W = {
    "VDD_SYS_GPU": 0.6,
    "VDD_SYS_SOC": 0.9,
    "VDD_4V0_WIFI": 0.2,
    "VDD_IN": 5.7,
    "VDD_SYS_CPU": 1.9,
    "VDD_SYS_DDR": 1.3,
}


def test_a_tx2_is_provisioned_known_held_and_measured(bundle: pathlib.Path, home: Home, tmp_path: pathlib.Path) -> None:
    """Its type, both clusters' clocks, names that only root may read, and power that only the driver multiplies."""
    with guests.Guest("jetson-tx2", require_image("jetson-tx2"), tmp_path / "tx2") as board:
        board.load(guests.FRESH)
        board.set_clock()
        site = Site(board, home, bundle)
        site.add()
        done = site.provision()
        assert done.code == 0, done.out + done.err
        said = json.loads(board.run(f"{AGENT} describe --json").stdout)
        assert said["detected_type"] == "jetson-tx2"
        assert [(cluster["cpus"], len(cluster["available_hz"])) for cluster in said["clocks"]["clusters"]] == [
            ([0, 3, 4, 5], 12),
            ([1, 2], 12),
        ]
        assert said["clocks"]["memory"]["max_hz"] == 1_866_000_000
        assert set(said["rails"]) >= {"VDD_IN", "VDD_SYS_CPU", "VDD_SYS_GPU", "VDD_SYS_SOC", "VDD_SYS_DDR"}
        pinned = board.run(f"{AGENT} clocks pin --cpu-freq 960MHz --memory-freq 1331.2MHz --for 0.1 --json")
        report = json.loads(pinned.stdout.splitlines()[0])
        assert report["status"] == "ok", report["message"]
        assert [cluster["current_hz"] for cluster in report["clocks"]["clusters"]] == [960_000_000] * 2
        told_mw = ",".join(f"{1000 * watts - 50:.0f}" for watts in RAILS_W.values())
        board.set_fault(rail_mw=told_mw, swing_mw=100, swing_ms=1300)
        seen = json.loads(board.run(f"{AGENT} power --json --rate-hz 20 --seconds 5").stdout)
        for rail in seen["window"]["rails"]:
            low_w, high_w = rail["power_ci_w"]
            assert low_w <= RAILS_W[rail["rail"]] <= high_w, rail
