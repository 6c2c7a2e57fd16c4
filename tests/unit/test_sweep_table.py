"""A sweep's table on terminals of any width; tuned code against untuned in one table, and in one picture."""

from __future__ import annotations

import pathlib
import re

import pytest

from farm.cli import output, sweep_report
from farm.report import sweep_page
from tests.unit import sweep_documents


def table(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What is printed of a sweep of two variants, on a terminal of so many characters."""
    monkeypatch.setattr(output.stdout, "width", width)
    serieses = [
        sweep_documents.series(
            [
                sweep_documents.row(f"a57={hz / 1e6:.9g}MHz", [("a57", hz, 4, True)], work)
                for hz in sweep_documents.NANO_HZ[::3]
            ],
            variant,
        )
        for variant, work in (("untuned", 98e6), ("tuned", 41e6))
    ]
    document = sweep_documents.document(serieses)
    sweep_report.print_sweep(document | {"notes": []})
    return capsys.readouterr().out


def test_a_wide_terminal_gets_every_column(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rails, intervals and throughput are there, and nothing is said to be missing."""
    text = table(200, capsys, monkeypatch)
    assert all(word in text for word in ("POM_5V_IN", "p95", "Inf./J", "Above idle", "95 % CI"))
    assert "no room" not in text


def test_a_narrow_terminal_loses_whole_columns_and_says_which(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Point, latency, power and energy stay on one line each; no cell is broken."""
    text = table(80, capsys, monkeypatch)
    assert "no room for" in text
    assert "POM_5V_IN" in text.partition("no room for")[2].splitlines()[0]
    rows = [line for line in text.splitlines() if re.match(r"a57=[0-9.]+MHz ", line)]
    assert len(rows) == 15  # five points of two variants, and both beside each other
    assert all(len(line) <= 80 for line in rows)
    header = text.partition("───")[0]  # titles may be broken between words
    assert all(word in header for word in ("Operating point", "Latency", "Power", "Energy"))


def test_tuned_and_untuned_stand_in_one_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each point has one row with both variants' latency, power and energy, and tuned over untuned."""
    text = table(120, capsys, monkeypatch).partition("tuned against untuned")[2]
    header = next(line for line in text.splitlines() if line.startswith("Operating point"))
    assert header.count("untuned") == header.count("ratio") == 3
    rows = [line.split() for line in text.splitlines() if re.match(r"a57=[0-9.]+MHz ", line)]
    assert len(rows) == len(sweep_documents.NANO_HZ[::3])
    for _, untuned, tuned, ratio, *_ in rows:
        assert float(ratio) == pytest.approx(float(tuned) / float(untuned), abs=0.01)


def test_both_variants_are_in_one_picture_and_one_table_of_the_page(tmp_path: pathlib.Path) -> None:
    """The picture over the clock has a line for each, the table a row per point with both, and the ratio's interval."""
    document = sweep_documents.nano()
    page = pathlib.Path(sweep_page.write_sweep_report(document, tmp_path)["page"]).read_text()
    picture = next(each for each in page.split("<figure") if "over the clock of a57" in each)
    assert "Latency and power over the clock of a57: tuned and untuned" in picture
    section = page.partition("Tuned against untuned</h2>")[2].partition("<h2")[0]
    assert section.count("<table") == 1
    assert section.count("<tr") == 1 + len({row["key"] for row in document["series"][0]["rows"] if row["measured"]})
    assert "untuned" in section
    assert " – " in section


def test_a_gpus_sweep_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The table and the page say that it was the board's GPU; a processor is not named."""
    own = sweep_documents.document([sweep_documents.series([sweep_documents.row("gpu=76.8MHz", [], 98e6)], "untuned")])
    for device, where in (("gpu", "on jetson-nano/n-1 GPU (simulated"), ("cpu", "on jetson-nano/n-1 (simulated")):
        document = own | {"board": own["board"] | {"device": device}, "notes": []}
        sweep_report.print_sweep(document)
        assert where in capsys.readouterr().out
    assert "on jetson-nano GPU (simulated)" in sweep_page.write_page(
        own | {"board": own["board"] | {"device": "gpu"}}, []
    )
