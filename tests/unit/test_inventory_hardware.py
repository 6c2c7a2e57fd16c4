"""The hardware sections of board types: both readers agree, and a file that contradicts itself is refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from device_agent import board_types as agent_side
from farm.errors import UsageError
from farm.inventory import board_types, documents

GOOD = pathlib.Path(__file__).with_name("board_type.yaml").read_text()
SHIPPED = sorted(path.stem for path in (documents.require_inventory_folder() / "board_types").glob("*.yaml"))


@pytest.fixture(autouse=True)
def only_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(board_types.EXTRA_FOLDER_VARIABLE, raising=False)


def write(folder: pathlib.Path, text: str = GOOD, name: str = "my-board") -> pathlib.Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def as_farm(board_type: board_types.BoardType) -> Any:
    document = board_type.model_dump(mode="json")
    return {field.name: document[field.name] for field in dataclasses.fields(agent_side.BoardType)}


def as_agent(board_type: agent_side.BoardType) -> Any:
    return json.loads(board_type.to_json())


@pytest.mark.parametrize("name", SHIPPED)
def test_both_sides_read_the_same(name: str) -> None:
    """Farm and agent agree on every field of every type that is shipped, defaults included."""
    assert as_agent(agent_side.load_board_types()[name]) == as_farm(board_types.load_board_types()[name])


def test_both_sides_know_the_same_types(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look into the same folders, the user's included, under the same variable."""
    write(tmp_path)
    monkeypatch.setenv(board_types.EXTRA_FOLDER_VARIABLE, str(tmp_path))
    assert agent_side.EXTRA_FOLDER_VARIABLE == board_types.EXTRA_FOLDER_VARIABLE
    farm, agent = board_types.load_board_types(), agent_side.load_board_types()
    assert sorted(farm) == sorted(agent) == sorted([*SHIPPED, "my-board"])
    assert as_agent(agent["my-board"]) == as_farm(farm["my-board"])


@pytest.mark.parametrize("name", [name for name in SHIPPED if board_types.load_board_types()[name].simulation])
def test_a_jetson_says_all_that_a_virtual_board_needs(name: str) -> None:
    """Each shipped Jetson that can be virtual has detection, clocks of all three kinds, a total, zones, power modes."""
    board_type = board_types.load_board_types()[name]
    assert board_type.detect.compatible
    if not board_type.releases:  # no Jetson: what it lacks is lacking there, too
        return
    assert all(cluster.freqs_hz and cluster.zone for cluster in board_type.clusters)
    assert board_type.gpu.freqs_hz
    assert board_type.memory.freqs_hz
    assert board_type.power.total
    assert board_type.power_modes


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[100_000_000, 200_000_000]", "[200_000_000, 100_000_000]", r"clusters\.0\.freqs_hz: .*must ascend"),
        ("[100_000_000, 200_000_000]", "[100_000_000, 100_000_000]", r"100000000 follows 100000000"),
        ("[100_000_000, 200_000_000]", "[100_000_000, '200_000_000']", r"clusters\.0\.freqs_hz\.1: .*whole number"),
        ("[100_000_000, 200_000_000]", "[0, 200_000_000]", r"clusters\.0\.freqs_hz\.0: .*more than 0"),
        ("[200_000_000, 800_000_000]]", "[90_000_000, 800_000_000]]", r"memory_floor_hz: .*must ascend"),
        ("[200_000_000, 800_000_000]]", "[200_000_000, 300_000_000]]", r"memory_floor_hz: .*must ascend"),
        ("[200_000_000, 800_000_000]]", "[200_000_000, 900_000_000]]", r"big asks for a memory clock of 900000000"),
        ("zone: CPU-therm", "zone: GPU-therm", r"the zone of big, GPU-therm, is not among"),
        ("ignore: [PMIC-Die]", "ignore: [Board]", r"thermal: ignore names Board"),
        ("zones: [CPU-therm, PMIC-Die]", "zones: [CPU-therm, PMIC-Die, CPU-therm]", r"CPU-therm is listed twice"),
        ("name: small", "name: big", r"clusters: two are called big"),
        ("cpus: [2]", "cpus: [1]", r"a CPU is in two clusters"),
        ("total: [IN]", "total: [IM]", r"power: no chip has the total's rail IM; rails: IN, CPU, CARRIER"),
        ("board_total: [CARRIER]", "board_total: [VDD]", r"power: no chip has the total's rail VDD"),
        ("board_total: [CARRIER]", "board_total: [IN]", r"IN would be added to the total twice"),
        ("total: [IN]", "total: [CARRIER]", r"CARRIER .*twice"),
        ("  board_total: [CARRIER]\n", "  board_total: []\n  total: [CARRIER]\n", r"'total' is given twice"),
        ("  total_scope: module\n", "", r"total and total_scope must both be given"),
        ("rails: [CARRIER]", "rails: [CPU]", r"the rail CPU is connected twice"),
        ('"*-0041"', '"1-0040"', r"two chips have the address 1-0040"),
        ("1-0040", "0x40", r"power\.chips\.0\.address: "),
        ('[IN, CPU, ""]', "[IN, CPU, A, B]", r"power\.chips\.0\.rails: "),
        ("shunt_ohm: 0.005", "shunt_ohm: 0", r"shunt_ohm: .*more than 0"),
        ("cores_online: [0, 2]", "cores_online: [0, 7]", r"5W puts CPU 7 online"),
        ("cores_online: [0, 2]", "cores_online: []", r"power_modes\.1\.cores_online: "),
        ("{big: 150", "{huge: 150", r"5W limits the cluster huge"),
        ("id: 3", "id: 0", r"power_modes: two are called 0"),
        ("name: 5W", "name: MAXN", r"power_modes: two are called MAXN"),
        ("default_power_mode: 3", "default_power_mode: 1", r"default_power_mode is 1"),
        ("driver: bpmp", "driver: magic", r"memory\.driver: .*'override' or 'bpmp'"),
        ("devices: [1000.gpu]", "devices: []", r"gpu\.devices: "),
        ("[[20_000_000]]", "[[20_000_000, 10_000_000]]", r"gpu\.other_freqs_hz\.0: .*must ascend"),
        ("gpu_max_hz: 10", "gpu_max: 10", r"unknown key power_modes\.1\.gpu_max; did you mean gpu_max_hz\?"),
        ("/sys/devices/pwm-fan/target_pwm", "/etc/shadow", r"fan\.pwm: "),
        ("/sys/devices/pwm-fan/target_pwm", "/sys/../etc/shadow", r"fan\.pwm: "),
        ("releases: [R32]", "releases: [JetPack 4]", r"releases\.0: "),
        ("simulation: {anything: {goes: [1, 2]}}", "simulation: [1]", r"simulation: "),
        ('["acme,mine"]', '["nvidia,jetson-nano"]', r"jetson-nano and my-board both detect 'nvidia,jetson-nano'"),
    ],
)
def test_a_file_that_contradicts_itself(tmp_path: pathlib.Path, before: str, after: str, message: str) -> None:
    """Each contradiction is refused, naming the section and what would be right."""
    assert before in GOOD
    write(tmp_path, GOOD.replace(before, after, 1))
    with pytest.raises(UsageError, match=message):
        board_types.load_board_types(tmp_path)


def test_a_total_needs_sensors_that_every_board_has(tmp_path: pathlib.Path) -> None:
    """A total that depends on what only some carriers have would be missing on the others."""
    text = GOOD.replace("total: [IN]", "total: [CARRIER]", 1).replace("board_total: [CARRIER]", "board_total: [IN]")
    write(tmp_path, text)
    with pytest.raises(UsageError, match="CARRIER is on a chip that is not fitted everywhere"):
        board_types.load_board_types(tmp_path)
