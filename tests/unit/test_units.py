"""The units that boards get: root's process takes nothing from its surroundings, candidates reach no other user."""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).parents[2]


def read_unit(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (ROOT / "deploy/systemd" / name).read_text().replace("\\\n", " ").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_candidates_cannot_reach_the_network() -> None:
    """The agent is spoken to on loopback, through SSH; a candidate that calls home gets nowhere."""
    agent = read_unit("tvm-farm-agent.service")
    assert agent["IPAddressDeny"] == ["any"]
    assert agent["IPAddressAllow"] == ["localhost"]


def test_roots_helper_takes_nothing_from_its_surroundings() -> None:
    """Its Python is isolated, its tools are the system's, and it has no home; so it is where no systemd runs."""
    helper = read_unit("tvm-farm-clock-helper.service")
    assert all(" -I -m device_agent.clocks.helper" in command for command in helper["ExecStart"])
    assert helper["Environment"] == ["PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/"]
    supervisor = (ROOT / "deploy/board/supervisor.py").read_text()
    assert '"-I", "-m", "device_agent.clocks.helper"' in supervisor
