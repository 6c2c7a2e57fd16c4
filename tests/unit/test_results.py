"""Figures of kept results: comparisons, costs and the matrix."""

from __future__ import annotations

import csv
import io
import pathlib
from typing import Any

import pytest

from farm.errors import UsageError
from farm.report import matrix, results
from farm.store.results import StoredResult


def make_row(label: str, median_s: float, energy_j: float | None = None) -> dict[str, Any]:
    latency = {"median": median_s, "ci_low": median_s * 0.99, "ci_high": median_s * 1.01}
    return {"label": label, "latency_s": latency, "energy_j": energy_j, "bytes": 1000}


def make_result(number: int = 1, ours_s: float = 0.010, rival_s: float = 0.020, **about: Any) -> StoredResult:
    variants = {
        "tvm-farm": make_row("tvm-farm", ours_s, 0.05),
        "onnxruntime": make_row("ONNX Runtime", rival_s),
        "untuned": make_row("TVM, untuned", 0.001),
        "ncnn": {"label": "ncnn", "latency_s": None, "reason": "not installed"},
    }
    model = {"precision": about.pop("precision", "float32"), "variants": variants, "doubt": about.pop("doubt", "")}
    document = {"models": [model], "operating_point": about.pop("point", "default"), "threads": 4}
    values = {"kind": "bench", "model": "net", "board": "n-1", "board_type": "jetson-nano", "simulated": True}
    return StoredResult(
        number, **values | {"device": "cpu", "document": document, "by": "", "recorded_at": 0.0} | about
    )


def make_run(number: int, median_s: float, doubt: str = "") -> StoredResult:
    row = make_row("", median_s)
    document = {"latency": row["latency_s"], "energy_j": None, "bytes": 10, "precision": "float32", "doubt": doubt}
    return make_result(number, kind="run", document=document)


def test_a_comparison_is_a_tie_where_intervals_allow_both() -> None:
    """Programs of both results are compared; their ratio has the ends of both intervals."""
    ours, rival, untuned = results.compare(make_result(ours_s=0.010), make_result(2, ours_s=0.008, rival_s=0.0203))
    assert (ours.verdict, rival.verdict, untuned.ratio) == ("faster", "tie", 1.0)
    assert (ours.ratio, ours.energy) == (pytest.approx(0.8), pytest.approx(1.0))
    assert ours.low == pytest.approx(0.8 * 0.99 / 1.01)
    assert [each.one.code for each in results.compare(make_run(1, 0.01), make_run(2, 0.03))] == ["tvm-farm"]
    with pytest.raises(UsageError, match="no program in common"):
        results.compare(make_result(), make_result(2, precision="int8", document={"models": [{"variants": {}}]}))


def test_doubtful_results_are_marked_and_not_counted() -> None:
    """A doubtful latency is no win in matrix or comparison, and gives way to any other."""
    doubtful = make_result(5, doubt="equal runs differ too much: by 4,635 %")
    (cell,) = matrix.make_matrix([doubtful])
    assert (cell.gain, cell.is_faster, matrix.plan_chart([cell])) == (None, False, None)
    assert matrix.say_doubts([cell]) == ["Doubtful, and not counted: results 5; `farm result show` says why"]
    assert "equal runs differ" in matrix.write_csv([cell], results.Costs())
    assert next(map(results.say_latency, results.list_figures(doubtful))) == "10.000 (doubtful)"
    assert {each.verdict for each in results.compare(doubtful, make_result(6, ours_s=0.001))} == {"doubtful"}
    assert [each.result for each in matrix.make_matrix([doubtful, make_run(4, 0.01)])] == [4]
    assert results.list_figures(make_run(4, 0.01, doubt="busy"))[0].doubt == "busy"


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"point": "mode=5W"}, "operating point: default, mode=5W"),
        ({"model": "other"}, "model: net, other"),
        ({"board_type": "jetson-tx2"}, "board type: jetson-nano, jetson-tx2"),
        ({"device": "gpu"}, "device: cpu, gpu"),
    ],
)
def test_only_like_results_are_judged(about: dict[str, Any], said: str) -> None:
    """Where more differs than latencies, the difference is named and no program is called faster or slower."""
    one, other = make_result(), make_result(2, ours_s=0.001, **about)
    assert results.list_differences(one, other) == [said]
    assert {each.verdict for each in results.compare(one, other)} == {"not judged"}


def test_a_simulated_result_meets_a_real_one_on_request() -> None:
    """Figures of a model of hardware and of a real board are put side by side only with --mixed, and not judged."""
    pair = make_result(), make_result(2, simulated=False)
    with pytest.raises(UsageError, match="result 1 is of a simulated board, result 2 of a real one"):
        results.compare(*pair)
    assert {each.verdict for each in results.compare(*pair, mixed=True)} == {"not judged"}


def test_costs_are_of_a_million_inferences() -> None:
    """10 ms at 0.36 an hour cost 1; 0.05 J are 13.9 Wh for a million; 50 Wh last for 3.6 million."""
    ours, rival, _ = results.list_figures(make_result())
    costs = results.read_costs("0.36eur", "0.30 EUR", "50Wh")
    assert costs.price(ours) == pytest.approx(1.0 + 0.3 * 0.05e6 / 3.6e6)
    assert (costs.price(rival), costs.count(rival)) == (None, None)  # its energy is not known
    assert costs.count(ours) == pytest.approx(3.6e6)
    assert results.read_costs("0.36EUR", "", "").price(rival) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("0.05", "", ""), "--cost PRICE/h '0.05' is no price with its currency"),
        (("", "cheap EUR", ""), "--cost PRICE/kWh"),
        (("1EUR", "1USD", ""), "prices are in EUR and USD"),
        (("", "", "50"), "--cost '50' is no energy"),
    ],
)
def test_prices_need_units(texts: tuple[str, str, str], said: str) -> None:
    """A price without a currency and a battery without a unit are refused."""
    with pytest.raises(UsageError, match=said):
        results.read_costs(*texts)


def test_the_matrix_has_the_newest_result_with_a_rival(tmp_path: pathlib.Path) -> None:
    """Cells are sorted by gain; untuned code is no rival; a bare run does not hide a comparison; ties are no gains."""
    found = [
        make_run(9, 0.001),
        make_result(4, ours_s=0.040, board_type="jetson-tx2"),
        make_result(3),
        make_result(2, ours_s=0.9),
        make_result(1, kind="run", document=make_run(1, 0.5).document, model="<b>other"),
    ]
    cells = matrix.make_matrix(found)
    assert [(each.result, each.gain) for each in cells] == [(3, 1.0), (4, -1.0), (1, None)]
    assert [each.is_faster for each in cells] == [True, False, False]
    assert not matrix.make_matrix([make_result(ours_s=0.0199)])[0].is_faster
    costs = results.read_costs("0.36EUR", "", "")
    paths = matrix.write_matrix(cells, costs, tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "matrix.csv").read_text())))
    assert (rows[0]["rival"], rows[0]["fps"], float(rows[0]["per_million"])) == (
        "ONNX Runtime",
        "100",
        pytest.approx(1.0),
    )
    assert "&lt;b&gt;other" in (tmp_path / "matrix.html").read_text()
    assert set(paths) == {"csv", "markdown", "page", "matrix"}


def test_columns_without_a_value_are_left_out() -> None:
    """A bare run has no rival, gain, energy or score; every row has a text or None for each heading."""
    heads, rows = matrix.list_columns(matrix.make_matrix([make_run(1, 0.01)]), results.Costs())
    assert heads == ["Model", "Precision", "Batch", "Board", "Latency (ms)", "FPS"]
    assert [len(row) for row in rows] == [6]
    assert matrix.plan_chart(matrix.make_matrix([make_run(1, 0.01)])) is None


def test_scores_of_an_evaluation_are_in_the_matrix() -> None:
    """An evaluation of the same model, board and precision adds its scores to the cell of a comparison."""
    row = {"precision": "float32", **make_row("tvm-farm", 0.01), "scores": {"top1": 0.75, "top5": None}}
    cells = matrix.make_matrix([make_result(2), make_result(1, kind="evaluate", document={"rows": [row]})])
    assert [(each.result, each.scores) for each in cells] == [(2, {"top1": 0.75})]
