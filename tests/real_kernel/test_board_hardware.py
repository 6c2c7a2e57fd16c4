"""`farm doctor --hardware` on a kernel's own clocks, sensor and evidence: what is right there."""

from __future__ import annotations

import json

import pytest

from tests.real_kernel.conftest import NAME, PROVISION_TIMEOUT_S, TYPE, Site

# Of the golden kernel at its highest clock over half of that; the documented least.
LEAST_GAIN = 1.15


@pytest.mark.core
def test_only_its_speed_gives_an_emulated_processor_away(provisioned: Site) -> None:
    """Tables, holding, rails, power and putting back pass on a real kernel; that no clock makes it faster is found.

    Unless the host's other programs have made its first runs the slow ones: what the report measured decides.
    """
    words = ("doctor", NAME, "--hardware", "--report", "report.json", "--json")
    done = provisioned.home.run(*words, timeout_s=PROVISION_TIMEOUT_S)
    document = json.loads((provisioned.home.path / "report.json").read_text())
    wanted = ["speed"] if document["facts"]["speed"]["gain"] < LEAST_GAIN else []
    assert done.code == (3 if wanted else 0), done.out + done.err
    levels = {check["name"]: check["level"] for check in document["checks"]}
    assert [name for name, level in levels.items() if level not in ("ok", "warning")] == wanted, document["checks"]
    assert (document["board_type"], document["simulated"]) == (TYPE, False)
    [told] = done.json()
    assert told["checks"][-1]["name"] == document["checks"][-1]["name"] == "restored"
