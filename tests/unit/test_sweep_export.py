"""A point taken out of a sweep: which may be, its evidence, the stanza as nvpmodel reads it, the script's settings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from device_agent.clocks.platform import Mode, parse_configuration
from device_agent.protocol import OperatingPoint
from farm.errors import UsageError
from farm.inventory.board_types import BoardType, require_board_type
from farm.sweep.export import chosen
from farm.sweep.export import chosen as export
from farm.sweep.export.chosen import Chosen, export_nvpmodel
from farm.virtual.power_modes import render_configuration
from tests.unit import sweep_documents
from tests.unit.sweep_documents import chosen_point
from tests.unit.virtual_boards import make_board


def parse_stanza(chosen: Chosen, board_type: BoardType) -> Mode:
    """What nvpmodel makes of the stanza behind the board's own configuration."""
    board, _ = make_board(board_type.name)
    return parse_configuration(render_configuration(board) + "\n" + export_nvpmodel(chosen, board_type))[-1]


def test_stanza_of_a_nano_holds_cpu_and_gpu() -> None:
    """All cores online, both limits at the clock, the memory capped, with an ID that stock modes leave free."""
    kind = require_board_type("jetson-nano")
    domains = {"a57": (1_036_800_000, 4, True), "gpu": (460_800_000, 1, True), "memory": (1_600_000_000, 1, True)}
    chosen = chosen_point(
        kind.name, domains, cpu_freq_hz={"a57": 1_036_800_000}, gpu_freq_hz=460_800_000, memory_freq_hz=1_600_000_000
    )
    mode = parse_stanza(chosen, kind)
    assert (mode.id, mode.name) == (2, "FARM_SWEEP_3")
    assert mode.online == dict.fromkeys(range(4), True)
    assert (mode.cpu_max_hz, mode.gpu_max_hz, mode.memory_max_hz) == ({0: 1_036_800_000}, 460_800_000, 1_600_000_000)
    text = export_nvpmodel(chosen, kind)
    assert "CPU_A57 MIN_FREQ 1036800\nCPU_A57 MAX_FREQ 1036800\n" in text
    assert "GPU_PWR_CNTL_EN on\nGPU MIN_FREQ 460800000\nGPU MAX_FREQ 460800000\n" in text
    assert "cannot hold it" in text


def test_stanza_of_a_tx2_leaves_out_a_cluster_that_is_offline() -> None:
    """As in NVIDIA's own modes there is no line for Denver's clock without Denver, and none for the boot core."""
    kind = require_board_type("jetson-tx2")
    domains = {"a57": (1_267_200_000, 4, True), "denver": (None, 0, False), "gpu": (1_300_500_000, 1, False)}
    chosen = chosen_point(kind.name, domains, cores_online=(0, 3, 4, 5), cpu_freq_hz={"a57": 1_267_200_000})
    text = export_nvpmodel(chosen, kind)
    assert "CPU_DENVER" not in text
    assert "CORE_0" not in text
    assert "GPU MIN_FREQ 0\nGPU MAX_FREQ -1\n" in text
    mode = parse_stanza(chosen, kind)
    assert mode.plan_online(range(6), range(6)) == (0, 3, 4, 5)


def test_stanza_of_a_power_mode_takes_over_its_limits() -> None:
    """What a point leaves to its power mode is written as that mode has it, gated units too."""
    kind = require_board_type("jetson-agx-xavier")
    chosen = chosen_point(kind.name, {"carmel0": (1_190_400_000, 2, False)}, power_mode="10W", gpu_freq_hz=318_750_000)
    text = export_nvpmodel(chosen, kind)
    assert "< POWER_MODEL ID=8 NAME=FARM_SWEEP_3 >" in text
    assert "TPC_POWER_GATING TPC_PG_MASK 5\n" in text
    assert "CPU_DENVER_0 MIN_FREQ 1190400\nCPU_DENVER_0 MAX_FREQ 1200000\n" in text
    assert "GPU MAX_FREQ 318750000\n" in text
    assert "EMC MAX_FREQ 1065600000\n" in text
    mode = parse_stanza(chosen, kind)
    assert [cpu for cpu, on in mode.online.items() if on] == [0, 1]


def test_orin_clusters_are_numbered() -> None:
    """Both clusters of an Orin Nano are named as its file names them."""
    kind = require_board_type("jetson-orin-nano-8gb")
    domains = {"a78-0": (960_000_000, 4, True), "a78-1": (960_000_000, 2, True)}
    text = export_nvpmodel(chosen_point(kind.name, domains, cpu_freq_hz={"*": 960_000_000}), kind)
    assert "CPU_A78_0 MAX_FREQ 960000\n" in text
    assert "CPU_A78_1 MIN_FREQ 960000\n" in text
    assert "FBP_PG_MASK" in text


@pytest.mark.parametrize(
    ("board_type", "point", "reason"),
    [
        ("raspberry-pi-4", {"cpu_freq_hz": {"*": 600_000_000}}, "no nvpmodel"),
        ("jetson-nano", {}, "nothing to set"),
        ("jetson-nano", {"power_mode": "30W"}, "30W"),
    ],
)
def test_what_nvpmodel_cannot_say_is_refused(board_type: str, point: dict[str, Any], reason: str) -> None:
    """No modes, nothing to set, an unknown mode: each refusal says why."""
    with pytest.raises(UsageError, match=reason):
        export_nvpmodel(chosen_point(board_type, **point), require_board_type(board_type))


def test_what_a_script_may_not_say_is_refused() -> None:
    """A cluster that the type does not know is refused, since its CPUs are unknown."""
    with pytest.raises(UsageError, match="big"):
        chosen.export_script(
            chosen_point("jetson-nano", cpu_freq_hz={"big": 600_000_000}), require_board_type("jetson-nano")
        )


def test_only_what_was_measured_is_exported() -> None:
    """Predicted points, throttled ones and ones that are not there are refused, with what to do."""
    document = sweep_documents.nano(every=3)
    tuned = document["series"][1]
    with pytest.raises(UsageError, match="only predicted"):
        export.choose_point(document, tuned, key="a57=204MHz")
    with pytest.raises(UsageError, match="no operating point"):
        export.choose_point(document, tuned, key="a57=205MHz")
    tuned["rows"][0] |= {"throttled": True, "invalid": "throttled: too warm"}
    with pytest.raises(UsageError, match="too warm"):
        export.choose_point(document, tuned, key="a57=102MHz")
    tuned |= {"pick": None, "no_pick": "no point keeps 1 ms"}
    with pytest.raises(UsageError, match="no point keeps 1 ms"):
        export.choose_point(document, tuned)


def test_the_point_that_is_exported_is_chosen_and_whole() -> None:
    """The pick unless another is named. The exported point is the protocol's, and null stays null."""
    document = sweep_documents.nano()
    tuned = document["series"][1]
    assert export.choose_point(document, tuned).is_pick
    runner_up = tuned["pick"]["runners_up"][0]["key"]
    assert export.choose_point(document, tuned, runner_up).row["key"] == runner_up
    kind = require_board_type("jetson-nano")
    chosen = chosen_point(kind.name, cpu_freq_hz={"a57": 921_600_000})
    content = json.loads(export.export_json(chosen, kind))
    assert OperatingPoint.from_dict(content["operating_point"]) == chosen.point
    assert content["evidence"]["latency_s"]["low"] < content["evidence"]["latency_s"]["value"]
    assert content["simulated"] is False


def test_comments_carry_the_evidence_in_ascii_and_one_line_each() -> None:
    """A model's name cannot end a comment, and a simulated point says that it is."""
    chosen = chosen_point("jetson-nano", cpu_freq_hz={"a57": 921_600_000})
    chosen.document["model"] = "réseau\nrm -rf /"  # type: ignore[index]
    chosen.document["board"]["simulated"] = True
    lines = export.write_comments(chosen)
    assert all(line.isascii() and "\n" not in line for line in lines)
    text = "\n".join(lines)
    for word in ("sweep 3", "SIMULATED", "latency", "power", "energy per inference", " to ", "pick"):
        assert word in text
