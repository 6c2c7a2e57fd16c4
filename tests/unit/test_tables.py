"""Tables on terminals of every width: no word is broken, no line is longer, and what is missing is named."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import pytest

from farm.cli import board, board_types, campaign, model, output, record, sweep, tables
from farm.report.record_document import describe_evidence
from farm.store import Store
from farm.types.documents import BoardEvent
from farm.values import Board, Record
from tests.unit import campaign_orders as orders

_LISTS: dict[str, Callable[[], None]] = {
    "board list": board.list_boards,
    "campaign list": campaign.list_campaigns,
    "model zoo": model.show_zoo,
    "sweep list": sweep.list_sweeps,
}


@pytest.fixture(autouse=True)
def _home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    with Store(tmp_path / "farm.db") as store:
        for number in range(8):
            name = f"rack-{number // 4}-nano-{number % 4:02d}"
            store.boards.save(Board(name, "jetson-nano", simulated=True))
            store.leases.acquire(name, "user@coordinator pid 4711", "campaign vision-of-the-year")
        for name in ("vision-of-the-year", "short"):
            orders.submit(store, orders.make_order(name))


def _render(
    show: Callable[[], None], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setattr(output.stdout, "width", width)
    show()
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("name", _LISTS)
def test_a_list_fits_the_terminal(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every word is there whole, as on a terminal without end."""
    words = set(_render(_LISTS[name], 1000, monkeypatch, capsys).split())
    assert len(words) > 5
    lines = _render(_LISTS[name], width, monkeypatch, capsys).splitlines()
    assert max(map(len, lines)) <= width
    table = list("\n".join(lines).partition("there is no room")[0].splitlines())
    assert {word for line in table for word in line.split()} - words <= {"─" * n for n in range(width + 1)}


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 140])
def test_numbers_are_whole_and_what_is_left_out_is_said(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first column always stays; of the others those go first that are said to matter least."""
    columns = ("Name", "Latency (us)", "Verified", "Note")
    note = "faster than what was tried first by more than rounds of both differ"
    rows = [("conv2d_add_relu", "1,234.5", "2026-11-23 22:49:02", note)]
    monkeypatch.setattr(output.stdout, "width", width)
    tables.print_table(columns, rows, left=(0, 2, 3), spare=("Verified", "Note"))
    said = capsys.readouterr()
    title = said.out.splitlines()[0]
    shown = [column for column in columns if column in title]
    assert shown == {20: ["Name"], 40: ["Name", "Latency (us)"], 60: ["Name", "Latency (us)", "Note"]}.get(
        width, list(columns)
    )
    assert ("no room for" in " ".join(said.out.split())) == (len(shown) < 4)
    for value, column in zip(rows[0][:3], columns, strict=False):
        assert (value in said.out) == (column in shown)


def test_why_and_who_stay_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 80 columns the list of boards keeps why and who, events keep why, records keep clocks."""
    listed = _render(board.list_boards, 80, monkeypatch, capsys)
    assert "Why" in listed
    assert "Held by" in listed
    held = Record(
        "w" * 16, "conv2d_add_relu 3x3", "jetson-nano", "a57=921.6MHz", "graph/2", "c", 1e-3, 1e6, 0.0, 0.0, True, ""
    )
    event = BoardEvent(
        id=1, board="b", at=1e9, kind="lease_taken", before="idle", after="leased", reason="a probe of it", by="x"
    )
    shown = _render(lambda: board_types._print_events([event], 5), 80, monkeypatch, capsys)
    assert "a probe of it" in " ".join(shown.split())
    found = _render(lambda: record._print_records([held], {}, ""), 80, monkeypatch, capsys)
    assert "a57=921.6MHz" in found


def test_evidence_is_told_in_words() -> None:
    """How a winner was measured again reads as a sentence, without names of fields or Python's brackets."""
    evidence = {
        "decided": "parted", "held": False, "replaced": None, "rounds": 2,
        "boards": {"nano": {"median_s": 1.0858e-5, "latency_s": [1.0e-5]}}, "failed": [],
        "rivals": [{"ratio": 1.2, "low": 1.1, "high": None}, {"ratio": 1.05, "low": 1.0, "high": 1.1}],
    }  # fmt: skip
    assert describe_evidence(evidence) == (
        "measured again as a winner: 2 rounds, nano 10.9 µs; clear; the nearest of 2 rivals takes 1.050 times as long"
    )
    assert describe_evidence(None) == "its output was checked; its time is a single trial's"


def test_a_narrow_column_stays_where_a_wide_one_has_no_room() -> None:
    """Of the columns left out, those that fit beside the others come back, the most useful first."""
    columns, least = ("Board", "Connection", "Probed", "Trouble"), (16, 10, 20, 30)
    assert tables.fit_columns(columns, least, 65, ("Connection", "Probed")) == [0, 1, 3]
    assert tables.fit_columns(columns, least, 55, ("Connection", "Probed")) == [0, 3]


def test_a_long_fact_goes_on_below_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The next line of a value begins where the value began, never under the name."""
    text = _render(lambda: tables.print_facts({"State": "word " * 30, "Health": "good"}), 80, monkeypatch, capsys)
    lines = text.splitlines()
    assert len(lines) == 4
    assert all(line.startswith(" " * 11 + "word") for line in lines[1:3])


@pytest.mark.parametrize(("columns", "lines"), [("", 1), ("60", 3)])
def test_a_piped_row_is_a_line(
    columns: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file has no width, unless `COLUMNS` is set; no line ends with spaces."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(output, "stdout", output.make_console(sys.stdout))
    tables.print_table(("Name", "Why"), [("nano-1", "the fan is replaced, " * 20), ("nano-2", "")], left=(0, 1))
    said = capsys.readouterr().out.splitlines()
    assert len([line for line in said if "the fan" in line]) >= lines
    assert (max(map(len, said)) > 400) is (lines == 1)
    assert [line for line in said if line != line.rstrip()] == []


def test_a_terminals_styles_are_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Titles are bold on a terminal: its own escape codes pass, and only those of others are shown."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output, "stdout", output.make_console(sys.stdout, force_terminal=True))
    tables.print_table(("Name", "Why"), [("nano-1", "a\x1b[2Jb")], left=(0, 1))
    said = capsys.readouterr().out
    assert "\x1b[1mName" in said
    assert "\\x1b[1m" not in said
    assert "\x1b[2J" not in said
