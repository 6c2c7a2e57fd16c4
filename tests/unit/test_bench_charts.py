"""What the charts of `farm model bench` show."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from farm.report import model_pages


def make_variant(label: str, median_s: float, batch: int) -> dict[str, Any]:
    spread = {"mean": 1.1, "std": 0.2, "min": 0.9, "max": 2.0, "ci_low": 0.95, "ci_high": 1.05, "median": 1.0}
    latency_s = {key: value * median_s for key, value in spread.items()} | {"count": 60.0}
    return {"label": label, "version": "", "latency_s": latency_s, "fps": batch / median_s}


def make_models() -> list[dict[str, Any]]:
    models = [
        {
            "model": "m",
            "batch": batch,
            "doubt": "",
            "variants": {"tvm-farm": make_variant("tvm-farm", 0.01 * batch, batch)},
        }
        for batch in (1, 4)
    ]
    models[0]["variants"]["ncnn"] = make_variant("ncnn", 0.02, 1)
    models[1]["variants"]["ncnn"] = {"label": "ncnn", "version": "", "latency_s": None, "reason": "one at a time"}
    return models


def test_batches_are_lines_of_what_was_timed() -> None:
    """Throughput and latency have a line for each program, with points at the batches that it takes."""
    chart = model_pages.plan_batches("b", make_models(), "title", "subtitle", simulated=False)
    throughput, latency = chart.panels
    assert [(each.name, each.x, each.y) for each in throughput.marks] == [
        ("tvm-farm", (1.0, 4.0), (100.0, 100.0)),
        ("ncnn", (1.0,), (50.0,)),
    ]
    assert [each.y for each in latency.marks] == [(10.0, 40.0), (20.0,)]


def test_a_report_has_the_statistics_of_the_runs(tmp_path: pathlib.Path) -> None:
    """Median with extremes and mean with deviation for each program; a chart for each batch, and one over all."""
    rows = [("tvm-farm", "#000000", make_models()[0]["variants"]["tvm-farm"]["latency_s"])]
    (panel,) = model_pages.plan_runs("r", rows, "title", "subtitle", simulated=False).panels
    assert [each.texts for each in panel.marks] == [("10.0 ms",), ("11.0 ± 2.00 ms",)]
    assert [each.x_ends[0] for each in panel.marks] == [pytest.approx((9.0, 20.0)), pytest.approx((9.0, 13.0))]
    board = {"name": "b", "type": "local", "simulated": False}
    document = {"board": board, "threads": 2, "clocks": "", "operating_point": "default", "models": make_models()}
    names = [pathlib.Path(each).name for each in model_pages.write_bench_report(document, tmp_path)]
    assert names == [
        *("bench.json", "latency-m.png", "runs-m.png", "latency-m-batch4.png", "runs-m-batch4.png", "batches-m.png")
    ]
    assert all((tmp_path / name).stat().st_size > 500 for name in names)
