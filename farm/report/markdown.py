"""`report.md` from the document that `farm quickstart --json` prints (`templates/quickstart.md`); charts: `plots.py`.

The document's keys: see `Document`. What is missing or null is left out of the report or said to be unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from farm import foreign
from farm.report import pages

_VARIANTS = {
    "untuned": "untuned TVM",
    "predicted": "predicted, no trial",
    "recorded": "from all records",
    "tuned": "tuned TVM",
    "onnxruntime": "ONNX Runtime",
}
_SIDES = {
    "ok": "ok",
    "candidate_faults": "candidate: the schedule was at fault; the cost model learns from it",
    "board_faults": "board: measured again, the schedule not blamed",
    "farm_faults": "farm: measured again, nobody blamed",
    "sample_faults": "sample: too noisy or at wrong clocks, measured again",
}


class Document(TypedDict, total=False):
    """What `farm quickstart --json` prints. Only `model`, `board`, `trials` and `latency_ms` must be there.

    `latency_ms` has by variant median, mean, min, max and std, `ci`, its 95 % interval, and the number of runs.
    `workloads` have name, flop, weight and trials, best_gflops and latency_us, null where no trial was good.
    `board` has name, type and simulated. `trials` counts ok ones and faults per side, optionally `by_status`.
    `measurement` and `environment` hold what to list under "How it was measured": name -> text or number.
    `plots` maps a caption to a file beside the report.
    """

    model: str
    board: Mapping[str, Any]
    trials: Mapping[str, Any]
    seconds_to_first_trial: float | None
    seconds_total: float | None
    latency_ms: Mapping[str, Mapping[str, Any] | None]
    gained: str
    speedup_vs_untuned: float | None
    ratio_to_onnxruntime: float | None
    max_abs_error: float | None
    max_rel_error: float | None
    outputs_match: bool | None
    report: Mapping[str, str]
    workloads: Sequence[Mapping[str, Any]]
    records_reused: int
    measurement: Mapping[str, Any]
    environment: Mapping[str, Any]
    notes: Sequence[str]
    plots: Mapping[str, str]
    sweep: Mapping[str, Any] | None


def write_report(document: Document) -> str:
    """The report's text: what came out first, then how it was got."""
    workloads = document.get("workloads") or ()
    times_ms = [(each.get("latency_us") or 0.0) * each["weight"] / 1e3 for each in workloads]
    facts = {
        "variants": _VARIANTS,
        "sides": _SIDES,
        "weighted_ms": sum(times_ms),
        "untried": times_ms.count(0.0),
    }
    whole = dict.fromkeys(Document.__annotations__) | foreign.escaped(dict(document)) | facts
    return pages.render_markdown("quickstart.md", whole)
