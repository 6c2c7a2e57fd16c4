"""What `farm board list --types` and `farm board show` print of the inventory."""

from __future__ import annotations

import json
import pathlib

import pytest

from farm.cli import board, board_types, output
from farm.inventory import documents
from farm.inventory.board_types import EXTRA_FOLDER_VARIABLE, load_board_types

SHIPPED = sorted(path.stem for path in (documents.require_inventory_folder() / "board_types").glob("*.yaml"))


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Only what is shipped, a farm without boards, and wide enough that no cell is folded."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    monkeypatch.delenv(EXTRA_FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(output, "stdout", output.Console(highlight=False, width=140))


def rows(out: str) -> dict[str, str]:
    return {line.split()[0]: line for line in out.splitlines() if line[:1].strip()}


def test_every_type_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The table names each type with its cores and highest clocks, in one line of 80 columns."""
    board.list_boards(types=True)
    shown = rows(capsys.readouterr().out)
    assert set(load_board_types()) <= set(shown)
    assert "4× a57, 2× denver2" in shown["jetson-tx2"]
    assert "2035.2 / 1300.5 / 1866" in shown["jetson-tx2"]
    assert "– / – / –" in shown["local"]
    assert max(len(line.rstrip()) for line in shown.values()) <= 80


def test_a_type_is_shown_with_all_that_can_be_asked_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Clusters, isolation, clocks, rails, what the total covers, and power modes are there."""
    board_types.show("jetson-tx2")
    out = capsys.readouterr().out
    shown = rows(out)
    assert "0,3-5" in shown["a57"]
    assert "1-2 (isolated)" in shown["denver"]
    assert shown["gpu"].split()[-3:] == ["114.75", "1300.5", "13"]
    assert "VDD_IN (module); with VDD_MUX, where fitted, the whole board" in shown["Total"]
    assert "1866 MHz from 1400 MHz on" in shown["Memory"]
    assert "PMIC-Die (ignored)" in shown["Zones"]
    assert "VDD_IN, VDD_SYS_CPU, VDD_SYS_DDR" in out
    assert "a57 1400, denver 1400" in out
    assert "on some carriers" in out


def test_the_default_mode_and_one_that_reboots_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """A mode with GPU units off cannot be set in the middle of a run, and the table says so."""
    board_types.show("jetson-agx-xavier")
    assert [line for line in capsys.readouterr().out.splitlines() if "needs a reboot" in line and " 10W " in line]
    board_types.show("jetson-orin-nx-16gb")
    assert [line for line in capsys.readouterr().out.splitlines() if "default" in line and " 15W " in line]


def test_what_is_not_known_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A type without tables shows no table, and no zero."""
    board_types.show("local")
    out = capsys.readouterr().out
    assert "Clock" not in out
    assert "Total power" not in out
    assert "the machine it is compiled on" in out


@pytest.mark.parametrize("name", SHIPPED)
def test_json_holds_the_whole_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One type, or the list of all, as JSON, under the file's own keys."""
    board_types.show(name, json=True)
    document = json.loads(capsys.readouterr().out)
    assert document == load_board_types()[name].model_dump(mode="json", by_alias=True)
    board.list_boards(types=True, json=True)
    assert document in json.loads(capsys.readouterr().out)


def test_an_unknown_type_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest name is suggested, and the exit code says that the user can mend it."""
    with pytest.raises(SystemExit) as end:
        board_types.show("jetson-nan0")
    assert end.value.code == 2
