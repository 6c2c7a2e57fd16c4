"""Assemble `report.md` from the document that `farm quickstart --json` prints. Charts are made in `plots.py`.

The document's keys: see `Document`. What is missing or null is left out of the report or said to be unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from farm import foreign, units

_VARIANTS = {
    "untuned": "untuned TVM",
    "predicted": "predicted, no trial",
    "recorded": "from all records",
    "tuned": "tuned TVM",
    "onnxruntime": "ONNX Runtime",
}
_SIDES = {
    "candidate_faults": "candidate: the schedule was at fault; the cost model learns from it",
    "board_faults": "board: measured again, the schedule not blamed",
    "farm_faults": "farm: measured again, nobody blamed",
    "sample_faults": "sample: too noisy or at wrong clocks, measured again",
}


class Latency(TypedDict, total=False):
    """Latency of one variant in milliseconds; `ci` is the median's 95 % confidence interval, `runs` a count."""

    median: float
    mean: float
    min: float
    max: float
    std: float
    ci: Sequence[float] | None
    runs: int


class WorkloadRow(TypedDict, total=False):
    """One row of the workload table; figures are of the best trial, null where there was none."""

    name: str
    flop: float
    weight: int
    best_gflops: float | None
    latency_us: float | None
    trials: int


class Document(TypedDict, total=False):
    """What `farm quickstart --json` prints. Only `model`, `board`, `trials` and `latency_ms` must be there.

    `board` has name, type and simulated. `trials` counts ok ones and faults per side, optionally `by_status`.
    `measurement` and `environment` hold what to list under "How it was measured": name -> text or number.
    `plots` maps a caption to a file beside the report.
    """

    model: str
    board: Mapping[str, Any]
    trials: Mapping[str, Any]
    seconds_to_first_trial: float | None
    seconds_total: float | None
    latency_ms: Mapping[str, Latency | None]
    gained: str
    speedup_vs_untuned: float | None
    ratio_to_onnxruntime: float | None
    max_abs_error: float | None
    max_rel_error: float | None
    outputs_match: bool | None
    report: Mapping[str, str]
    workloads: Sequence[WorkloadRow]
    records_reused: int
    measurement: Mapping[str, Any]
    environment: Mapping[str, Any]
    notes: Sequence[str]
    plots: Mapping[str, str]
    sweep: Mapping[str, Any] | None


def write_report(document: Document) -> str:
    """The report's text: what came out first, then how it was got."""
    document = foreign.escaped(document)
    board = document["board"]
    parts = [
        f"# {document['model']} on {board['type']}/{board['name']}",
        _simulated(board),
        _summary(document),
        "\n\n".join(f"![{caption}]({file})" for caption, file in document.get("plots", {}).items()),
        _section("Latency", _latency(document)),
        _section("Correctness", _correctness(document)),
        _section("Clocks", _clocks(document)),
        _section("Workloads", _workloads(document.get("workloads", ()))),
        _section("Trials", _trials(document)),
        _section("How it was measured", _pairs(document.get("measurement", {}))),
        _section("Environment", _pairs(document.get("environment", {}))),
        _section("Notes", "\n".join(f"- {note}" for note in document.get("notes", ()))),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, body: str) -> str:
    return f"## {title}\n{body}" if body else ""


def _simulated(board: Mapping[str, Any]) -> str:
    if not board["simulated"]:
        return ""
    return "> **Simulated.** This board is a model of hardware. No figure below was measured on a real one."


def _summary(document: Document) -> str:
    latency = document["latency_ms"]
    tuned, sentences = latency.get("tuned"), []
    if tuned:
        sentences.append(f"One inference takes **{_ms(tuned['median'])}** after tuning.")
    if gained := document.get("gained"):
        sentences.append(f"The model itself, beside the same without a trial: {gained}.")
    if (speedup := document.get("speedup_vs_untuned")) is not None:
        sentences.append(f"That is **{_figure(speedup)} times** as fast as untuned TVM.")
    if (ratio := document.get("ratio_to_onnxruntime")) is not None:
        if 0.995 <= ratio <= 1.005:
            sentences.append("ONNX Runtime takes the same time.")
        else:
            pace = f"{_figure(ratio)} times as long as" if ratio > 1 else f"{_figure(ratio)} of the time of"
            sentences.append(f"It takes {pace} ONNX Runtime.")
    if document.get("outputs_match") is False:
        sentences.append("**The output is wrong: do not use this artifact.**")
    if (total := document.get("seconds_total")) is not None:
        sentences.append(f"The whole run took {units.format_duration(total)}.")
    return " ".join(sentences)


def _latency(document: Document) -> str:
    rows = []
    for key, label in _VARIANTS.items():
        figures = document["latency_ms"].get(key)
        if not figures:
            continue
        interval = figures.get("ci")
        rows.append(
            (
                label,
                _number(figures["median"]),
                f"{_number(interval[0])} – {_number(interval[1])}" if interval else "–",
                *map(_number, (figures["mean"], figures["min"], figures["max"], figures["std"])),
                str(figures.get("runs", "–")),
            )
        )
    head = ("variant", "median, ms", "95 % CI of it, ms", "mean, ms", "min, ms", "max, ms", "std, ms", "runs")
    table = foreign.table(head, rows)
    if not document["latency_ms"].get("onnxruntime"):
        table += "\n\nONNX Runtime was not timed: this board does not run it."
    return table


def _correctness(document: Document) -> str:
    match = document.get("outputs_match")
    if match is None:
        return "The output was **not checked** against a reference."
    verdict = "matches" if match else "does **not** match"
    errors = [
        f"largest {name} error {value:.2e}"
        for name, value in (("absolute", document.get("max_abs_error")), ("relative", document.get("max_rel_error")))
        if value is not None
    ]
    return f"The compiled model's output {verdict} the reference" + (f": {', '.join(errors)}." if errors else ".")


def _clocks(document: Document) -> str:
    """The sweep of a virtual board, where there was one."""
    sweep = document.get("sweep")
    if not sweep:
        return ""
    rows = []
    for series in sweep["series"]:
        for row in series["rows"]:
            if not row["measured"]:
                continue
            marks = ["pick"] if series["pick"] and series["pick"]["key"] == row["key"] else []
            marks += ["front"] if row["on_front"] else []
            power, energy = row["power_w"], row["energy_j"]
            rows.append(
                (
                    row["key"],
                    series["variant"],
                    f"{row['latency_s']['value'] * 1e3:.4g}",
                    "–" if power is None else f"{power['value']:.3g}",
                    "–" if energy is None else f"{energy['value'] * 1e3:.4g}",
                    ", ".join(marks),
                )
            )
    picks = [f"- {each['variant']}: {each['pick']['text']}" for each in sweep["series"] if each["pick"]]
    head = ("Clocks", "Code", "Latency (ms)", "Power (W)", "Energy (mJ)", "")
    return "\n\n".join(
        [
            "> **Simulated.** Both variants over the CPU clocks of a virtual Jetson Nano, which runs the code that was "
            "timed above at its own pace. No figure here was measured on a real board. The whole: "
            "[sweep/sweep.html](sweep/sweep.html).",
            foreign.table(head, rows, left=(0, 1, 5)),
            "\n".join(picks),
            "![Latency and energy at each clock](sweep/front.png)",
        ]
    )


def _workloads(workloads: Sequence[WorkloadRow]) -> str:
    if not workloads:
        return ""

    def share(workload: WorkloadRow) -> float:
        return (workload.get("latency_us") or 0.0) * workload["weight"]

    rows = [
        (
            str(number),
            f"`{workload['name']}`",
            _flop(workload["flop"]),
            str(workload["weight"]),
            _number(workload.get("best_gflops")),
            _number(workload.get("latency_us")),
            _number(share(workload) or None),
            str(workload.get("trials", 0)),
        )
        for number, workload in enumerate(workloads)
    ]
    head = ("ID", "name", "FLOP", "weight", "speed, GFLOPS", "latency, µs", "weighted latency, µs", "trials")
    total = sum(map(share, workloads))
    untried = sum(not workload.get("latency_us") for workload in workloads)
    text = foreign.table(head, rows, left=(1,)) + f"\n\nWeighted latencies add up to {_ms(total / 1e3)}"
    return text + (f"; {untried} of {len(workloads)} workloads have no valid trial." if untried else ".")


def _trials(document: Document) -> str:
    trials = document["trials"]
    sides = [(meaning, trials[key]) for key, meaning in _SIDES.items() if key in trials]
    rows = [("ok", str(trials["ok"])), *((meaning, str(count)) for meaning, count in sides)]
    lines = [foreign.table(("trials by fault side", "count"), rows)]
    statuses = {k: v for k, v in trials.get("by_status", {}).items() if v and k != "ok"}
    if statuses:
        lines.append("Not ok: " + ", ".join(f"{count} {status}" for status, count in sorted(statuses.items())) + ".")
    if (reused := document.get("records_reused", 0)) > 0:
        lines.append(f"The run started from {reused} records of earlier runs.")
    if (first := document.get("seconds_to_first_trial")) is not None:
        lines.append(f"The first trial was measured {_figure(first)} s after the start.")
    return "\n\n".join(lines)


def _pairs(values: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in values.items() if value is not None)


def _figure(value: float) -> str:
    """Three significant digits without exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _number(value: float | None) -> str:
    """As `_figure`, with a dash for what is unknown and enough digits for what is small."""
    if value is None:
        return "–"
    return f"{value:.3g}" if 0 < abs(value) < 1 else _figure(value)


def _ms(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{_figure(milliseconds / 1e3)} s"
    return f"{_figure(milliseconds)} ms" if milliseconds >= 1 else f"{_figure(milliseconds * 1e3)} µs"


def _flop(flop: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flop >= size:
            return f"{_figure(flop / size)} {unit}"
    return f"{flop:.0f}"
