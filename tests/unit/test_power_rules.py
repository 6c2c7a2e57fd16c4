"""When a board's power is cycled, what that makes of its health, and which commands a fleet file may name."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from farm.crew.health import HealthLimits, Kind, Observation, transition
from farm.errors import UsageError
from farm.inventory.fleet_plan import RegisteredBoard, plan
from farm.inventory.fleets import read_fleet
from farm.services.powering import LOST_S, PowerOrder, is_network_down, plan_power
from farm.services.probe_rules import ProbePast
from farm.types.documents import BoardInfo
from farm.values import Health, HealthHistory, Standing
from tests.board_rows import make_lease, make_quarantine, make_row

FAILED = ProbePast(100.0, passed=False, tries=2)
BOOT_S = 120.0


def row(**changes: Any) -> BoardInfo:
    return make_row(**{"health": "suspect", "seen_at": 1.7e9} | changes)


def test_only_what_hangs_and_is_nobodys_is_cycled() -> None:
    """Two probes that failed in a row, or three minutes out of reach; not what is held, new, or an operator's."""
    assert plan_power(row(), FAILED, None, BOOT_S) is PowerOrder.CYCLE
    assert plan_power(row(), ProbePast(100.0, passed=False, tries=1), None, BOOT_S) is None
    assert plan_power(row(), ProbePast(100.0, passed=False, skipped=True, tries=5), None, BOOT_S) is None
    assert plan_power(row(health="good"), None, LOST_S, BOOT_S) is PowerOrder.CYCLE
    assert plan_power(row(health="good"), None, LOST_S - 1, BOOT_S) is None
    for kept in (
        {"lease": make_lease("client")},
        {"seen_at": None},
        {"health": "maintenance"},
        {"health": "unsafe"},
        {"health": "quarantined", "quarantine": make_quarantine(held=True)},
    ):
        assert plan_power(row(**kept), FAILED, LOST_S, BOOT_S) is None


def test_what_is_not_cycled_now() -> None:
    """None is cycled while it may still boot; after three cycles in vain it is quarantined, and left alone then. Where
    most boards are out of reach at once, it is not they that hang.
    """
    assert plan_power(row(power_cycled_s=[BOOT_S - 1]), FAILED, None, BOOT_S) is None
    assert plan_power(row(power_cycled_s=[900.0, BOOT_S]), FAILED, None, BOOT_S) is PowerOrder.CYCLE
    thrice = [900.0, 600.0, 300.0]
    assert plan_power(row(power_cycled_s=thrice), FAILED, None, BOOT_S) is PowerOrder.GIVE_UP
    over = row(power_cycled_s=thrice, health="quarantined", quarantine=make_quarantine(held=False))
    assert plan_power(over, FAILED, None, BOOT_S) is None
    assert is_network_down(2, 3)
    assert not is_network_down(1, 1)
    assert not is_network_down(2, 4)


def test_cycles_count_until_the_board_works_and_for_an_hour_then() -> None:
    """Faults before a cycle are forgiven, cycles are not: the state machine from a hang to quarantine, and back."""
    standing, history, now = Standing(True, False, Health.GOOD), HealthHistory(), 0.0

    def see(kind: Kind, after_s: float = 60.0) -> Health:
        nonlocal standing, history, now
        now += after_s
        done = transition(standing, Observation(kind), history, HealthLimits(), now)
        standing, history = done.standing, done.history
        return standing.health

    assert [see(Kind.FAULT), see(Kind.PROBE_FAILED), see(Kind.PROBE_FAILED)][-1] is Health.QUARANTINED
    assert see(Kind.POWER_CYCLED) is Health.SUSPECT
    assert history.faults_s == ()
    assert see(Kind.PROBE_PASSED) is Health.GOOD
    assert len(history.cycles_s) == 1
    assert [see(Kind.PROBE_FAILED), see(Kind.POWER_CYCLED), see(Kind.POWER_FAILED)][-1] is Health.SUSPECT
    assert see(Kind.NOT_REVIVED) is Health.QUARANTINED
    assert len(history.cycles_s) == 3
    assert see(Kind.CLEAR) is Health.SUSPECT
    assert history.cycles_s == ()
    see(Kind.POWER_CYCLED)
    assert see(Kind.PROBE_PASSED, 4000.0) is Health.GOOD
    assert history.cycles_s == ()
    see(Kind.DRAIN)
    assert see(Kind.POWER_CYCLED) is Health.MAINTENANCE


def write(folder: pathlib.Path, power: str) -> pathlib.Path:
    path = folder / "fleet.yaml"
    path.write_text(
        f"vars: {{type: jetson-nano, transport: ssh, power: {power}}}\nhosts: {{nano-01: {{address: 192.0.2.1}}}}\n"
    )
    return path


def test_a_fleet_file_names_commands(tmp_path: pathlib.Path) -> None:
    """A path is taken from the file's folder, a name is left; a change of them is planned, also under a lease."""
    [board] = read_fleet(write(tmp_path, "{cycle: [./plug, '{board}'], off: [uhubctl, -a, 'off']}")).boards
    assert board.power.cycle == [str(tmp_path / "./plug"), "{board}"]
    assert board.power.off == ["uhubctl", "-a", "off"]
    known = RegisteredBoard(board.name, board.board_type, board.transport, {}, "client")
    fleet = read_fleet(tmp_path / "fleet.yaml")
    [change] = plan([known], fleet).changed
    assert {field.field for field in change.fields} >= {"power.cycle", "power.off"}
    same = RegisteredBoard(board.name, board.board_type, board.transport, {}, None, board.power.to_document())
    assert plan([same], fleet).unchanged == ("nano-01",)


@pytest.mark.parametrize(
    ("power", "complaint"),
    [
        ("{cycle: 'pdu cycle nano-01; rm -rf /'}", "no shell reads"),
        ("{cycle: []}", "at least 1"),
        ("{cycle: ['{board}']}", "first word is the program"),
        ('{cycle: [pdu, "a\\nb"]}', "cannot be printed"),
        ('{cycle: [pdu, "a\\0b"]}', "cannot be printed"),
        ("{timeout_s: 5}", "power needs"),
        ("{cycle: [pdu], timeout_s: 0}", "more than 0"),
        ("{reset: [pdu]}", "reset"),
        ("{cycle: [pdu, off]}", "power.cycle"),
    ],
)
def test_hostile_commands_are_refused(tmp_path: pathlib.Path, power: str, complaint: str) -> None:
    """What a shell would have to read, what cannot be printed, and what is no command: each is named with its line."""
    with pytest.raises(UsageError, match=complaint):
        read_fleet(write(tmp_path, power))
