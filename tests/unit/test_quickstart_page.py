"""Quickstart's report: every figure it is given stands in it, and what is missing is said."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import pytest

from farm.report import pages, quickstart_page
from farm.report.charts import Picture
from farm.report.quickstart_page import Document


def latency(median: float) -> dict[str, Any]:
    """Figures around a median in milliseconds."""
    return {
        "median": median,
        "mean": median * 1.01,
        "min": median * 0.9,
        "max": median * 1.5,
        "std": median * 0.05,
        "ci": [median * 0.98, median * 1.02],
        "runs": 60,
    }


def document() -> Document:
    """A complete run."""
    return {
        "model": "squeezenet1.1",
        "board": {"name": "bench", "type": "local", "simulated": False},
        "trials": {
            "ok": 120,
            "candidate_faults": 5,
            "board_faults": 2,
            "farm_faults": 1,
            "by_status": {"ok": 120, "crashed": 5, "board_lost": 2, "farm_error": 1},
        },
        "seconds_to_first_trial": 21.4,
        "seconds_total": 301.2,
        "latency_ms": {"untuned": latency(396.0), "tuned": latency(9.82), "onnxruntime": latency(4.63)},
        "speedup_vs_untuned": 40.33,
        "ratio_to_onnxruntime": 2.121,
        "max_abs_error": 3.1e-6,
        "max_rel_error": 2.2e-6,
        "outputs_match": True,
        "report": {"markdown": "report.md"},
        "workloads": [
            {"name": "conv2d|add", "flop": 2.1e7, "weight": 2, "best_gflops": 100.0, "latency_us": 210.0, "trials": 12},
            {"name": "softmax", "flop": 4e3, "weight": 1, "best_gflops": None, "latency_us": None, "trials": 0},
        ],
        "records_reused": 3,
        "measurement": {"threads": 2, "graph_pipeline": "graph/2"},
        "environment": {"tvm": "0.27.0.post1"},
        "notes": ["tracker port 9190 was in use; took 9191"],
        "doubt": "",
        "gained": "1.13 times as fast as the untuned prediction",
    }


def write(changed: Document) -> str:
    """The report as Markdown, with one picture."""
    return pages.write_markdown(quickstart_page.write_page(changed), [Picture("progress", "Progress", "<svg/>")])


@pytest.mark.parametrize(
    ("shipped", "shown"),
    [
        ("predicted", ["no trial", "all records"]),
        ("recorded", ["no trial", "tuned"]),
        ("chosen", ["no trial", "all records", "tuned"]),
    ],
)
def test_each_program_has_one_row(shipped: str, shown: list[str]) -> None:
    """What is compiled may be another variant as it is; then its figures stand in one row."""
    latencies = {each: latency(1.0) for each in ("untuned", "predicted", "recorded", "tuned")}
    text = write(document() | {"shipped": shipped, "latency_ms": latencies})  # type: ignore[typeddict-item]
    assert [line.split(" |")[0][12:] for line in text.splitlines() if line.startswith("| tvm-farm")] == shown


@pytest.mark.parametrize(
    "text",
    [
        "# squeezenet1.1 on local/bench",
        "**One inference takes 9.82 ms after tuning**",
        "40.3 times as fast as untuned TVM. It takes",
        "2.12 times as long as ONNX Runtime",
        "5 min 1 s",
        "| tvm-farm, tuned | 9.82 | 9.62 – 10.0 | 9.92 | 8.84 | 14.7 | 0.491 | 60 |",
        "matches the reference: largest absolute error 3.10e-06, largest relative error 2.20e-06",
        r"`conv2d\|add` | 21.0 M | 2 | 100 | 210 | 420 | 12 |",
        "| 1 | `softmax` | 4.00 k | 1 | – | – | – | 0 |",
        "add up to 420 µs; 1 of 2 workloads have no valid trial. Each workload was timed alone, so the sum is not the",
        "learns from it | 5 |",
        "2 board_lost, 5 crashed, 1 farm_error",
        "3 records of earlier runs",
        "first trial was measured 21.4 s",
        "- graph pipeline: graph/2",
        "- tvm: 0.27.0.post1",
        "- tracker port 9190 was in use; took 9191",
        "![Progress](progress.png)",
    ],
)
def test_holds_every_figure(text: str) -> None:
    """What the run found is in the report, in words a person reads."""
    assert text in write(document())


def test_least_document() -> None:
    """The required keys alone make a report without empty sections, and say that nothing was checked."""
    text = write(
        {
            "model": "mlp",
            "board": {"name": "bench", "type": "local", "simulated": False},
            "trials": {"ok": 0},
            "latency_ms": {},
        }
    )
    assert "## Workloads" not in text
    assert "None" not in text
    assert "not checked" in text
    assert "ONNX Runtime was not timed" in text


def test_nulls_are_not_figures() -> None:
    """Null values never print as None or as zero."""
    full = document()
    full["latency_ms"] = {**full["latency_ms"], "onnxruntime": None}
    for key in ("ratio_to_onnxruntime", "speedup_vs_untuned", "max_abs_error", "max_rel_error", "seconds_total"):
        full[key] = None
    text = write(full)
    assert "None" not in text
    assert "| ONNX Runtime |" not in text


def test_doubts_come_first_and_what_was_left_out_can_be_typed() -> None:
    """Why latencies are in doubt stands before the headline; a sweep that was not made has its commands, unescaped."""
    doubted = document()
    doubted["doubt"] = "the board was too busy: the load average was 9.0"
    commands = ["farm board add nano --virtual jetson-nano", "farm sweep run m --board nano --variants a,b"]
    doubted["left_out"] = {"what": "Untuned code was", "why": "untuned code takes 0.7 s a run", "commands": commands}
    text = write(doubted)
    assert text.index("load average was 9.0") < text.index("9.82")
    assert "```sh\n" + "\n".join(commands) + "\n```" in text
    assert "Untuned code was not swept" in text


def test_the_page_needs_no_other_file(tmp_path: pathlib.Path) -> None:
    """HTML, Markdown and JSON say the same; the pictures are in the HTML."""
    picture = Picture("latency", "Latency of the whole model", "<svg/>")
    quickstart_page.write_report(document(), [picture], tmp_path, ["model.so"])
    page = (tmp_path / "report.html").read_text()
    assert "One inference takes 9.82 ms after tuning" in page
    assert "data:image/svg+xml;base64," in page
    assert 'href="model.so"' in page
    assert "![Latency of the whole model](latency.png)" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.json").stat().st_size > 1000


def test_simulated_is_said_first() -> None:
    """A simulated board is announced before any figure; a real one is not mentioned as such."""
    simulated = document()
    simulated["board"] = {"name": "virtual-1", "type": "jetson-nano", "simulated": True}
    text = write(simulated)
    assert text.index("Simulated") < text.index("9.82")
    assert "imulated" not in write(document())


def test_wrong_output_is_said_first() -> None:
    """When the output is wrong the summary says so before the tables."""
    wrong = document()
    wrong["outputs_match"] = False
    text = write(wrong)
    assert text.index("do not use this artifact") < text.index("## Latency")
    assert "does not match" in text


@pytest.mark.parametrize(
    ("ratio", "words"), [(2.121, "2.12 times as long as"), (0.8, "0.80 of the time of"), (1.001, "takes the same time")]
)
def test_ratio_in_words(ratio: float, words: str) -> None:
    """Slower, faster and equal are distinguished in the sentence, not left to the reader."""
    changed = document()
    changed["ratio_to_onnxruntime"] = ratio
    assert words in write(changed)


def test_tables_are_rectangular() -> None:
    """Every row of every table has as many cells as its head."""
    lines = [line.replace(r"\|", "") for line in write(document()).splitlines()]
    for before, line in itertools.pairwise(lines):
        if before.startswith("|") and line.startswith("|"):
            assert before.count("|") == line.count("|")
