"""The texts of quickstart's report, from the document that `farm quickstart --json` prints. `pages.py` renders them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from farm.inventory.board_types import describe_watts
from farm.report import campaign_rows, pages
from farm.report.charts import Picture
from farm.report.pages import CODE, Cell, Commands, Listing, PageAnswer, PageTable, ReportPage, Section, make_table
from farm.units import NOTHING, format_count, format_duration, format_latency, format_number, seconds_scale

# The variants that are timed, by one name everywhere: TVM's default schedules, no trial at all, all records, what is
# compiled from now on, and the engine to beat.
LABELS = {
    "untuned": "TVM, untuned",
    "predicted": "tvm-farm, no trial",
    "recorded": "tvm-farm, all records",
    "tuned": "tvm-farm, tuned",
    "onnxruntime": "ONNX Runtime",
}
# The row that stays where what is compiled equals another variant.
_SHOWN_AS = {"predicted": "predicted", "recorded": "tuned", "untuned": "untuned"}
# What `farm quickstart --json` prints. `latency_ms` has by variant median, mean, min, max and std, `ci`, its 95 %
# interval, and the number of runs. `measurement` and `environment` hold what to list under "How it was measured".
Document = Mapping[str, Any]


def write_report(document: Document, pictures: Sequence[Picture], folder: pathlib.Path, files: Sequence[str]) -> None:
    """Write the page as HTML and Markdown, and the document, into `folder`; `files` lie beside them already."""
    text = json.dumps(document, indent=2) + "\n"
    pages.write_page(folder, "report", write_page(document), pictures, {"json": text}, files)


def write_page(document: Document) -> ReportPage:
    """Return the report's page: doubts first, then the result, then its basis."""
    board = document["board"]
    sections = {
        "Latency": _latency(document),
        "Correctness": _correctness(document),
        "Clocks": _clocks(document),
        "Workloads": _workloads(document),
        "Trials": _trials(document),
        "How it was measured": _facts(document.get("measurement") or {}),
        "Environment": _facts(document.get("environment") or {}),
        "Notes": _notes(document),
    }
    watts = describe_watts(board["type"])
    simulated = f"this board is a model of hardware, its {watts}. No figure below was measured on a real one."
    return ReportPage(
        title=f"{document['model']} on {board['type']}/{board['name']}",
        subtitle=_subtitle(document),
        simulated=simulated if board["simulated"] else "",
        answers=list(_answers(document)),
        summary=[],
        sections=[Section(title, blocks) for title, each in sections.items() if (blocks := list(each))],
        footer="Written by farm quickstart.",
    )


def _subtitle(document: Document) -> str:
    trials = sum(_count_sides(document).values())
    took_s = document.get("seconds_total")
    return f"{trials} trials" + ("" if took_s is None else f"; the whole run took {format_duration(took_s)}")


def list_variants(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List keys and labels of `latency_ms`, one for each program: what is compiled may be another variant as it is."""
    shipped = str(document.get("shipped", ""))
    hidden = {shipped, "tuned"} - {_SHOWN_AS.get(shipped, "tuned")} if shipped in LABELS else set()
    return [(key, label) for key, label in LABELS.items() if key not in hidden]


def _answers(document: Document) -> Iterator[PageAnswer]:
    if doubt := document.get("doubt"):
        yield PageAnswer("Do not rely on these latencies", f"{doubt}.")
    if document.get("outputs_match") is False:
        yield PageAnswer("The output is wrong: do not use this artifact")
    tuned = document["latency_ms"].get("tuned")
    if tuned:
        yield PageAnswer(
            f"One inference takes {format_latency(tuned['median'] / 1e3)} after tuning", " ".join(_compare(document))
        )


def _compare(document: Document) -> Iterator[str]:
    speedup, ratio = document.get("speedup_vs_untuned"), document.get("ratio_to_onnxruntime")
    if speedup is not None:
        yield f"That is {_figure(speedup)} times as fast as untuned TVM."
    if ratio is not None and 0.995 <= ratio <= 1.005:
        yield "ONNX Runtime takes the same time."
    elif ratio is not None:
        yield f"It takes {_figure(ratio)} {'times as long as' if ratio > 1 else 'of the time of'} ONNX Runtime."
    if gained := document.get("gained"):
        yield f"{gained[:1].upper()}{gained[1:]}."


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 1 else format_number(value)


def _number(value: float | None) -> str:
    return NOTHING if value is None else format_number(value)


def _latency(document: Document) -> Iterator[PageTable | str]:
    timed = {label: each for key, label in list_variants(document) if (each := document["latency_ms"].get(key))}
    if timed:
        scale = seconds_scale(each["median"] / 1e3 for each in timed.values())
        rows = []
        for label, each in timed.items():
            low_high = each.get("ci")
            interval = " – ".join(scale.number(end / 1e3) for end in low_high) if low_high else NOTHING
            numbers = (scale.number(each[name] / 1e3) for name in ("mean", "min", "max", "std"))
            rows.append((label, scale.number(each["median"] / 1e3), interval, *numbers, str(each.get("runs", NOTHING))))
        unit = scale.unit
        head = ("variant", f"median, {unit}", f"95 % CI of it, {unit}", *(f"{n}, {unit}" for n in ("mean", "min")))
        yield make_table((*head, f"max, {unit}", f"std, {unit}", "runs"), rows)
        yield "Each row is the whole model, timed in turns with the others."
    if LABELS["onnxruntime"] not in timed:
        yield "ONNX Runtime was not timed: this board does not run it."


def _correctness(document: Document) -> Iterator[str]:
    matches = document.get("outputs_match")
    if matches is None:
        yield "The output was not checked against a reference."
        return
    errors = [("absolute", document.get("max_abs_error")), ("relative", document.get("max_rel_error"))]
    said = ", ".join(f"largest {name} error {error:.2e}" for name, error in errors if error is not None)
    verdict = "matches" if matches else "does not match"
    yield f"The compiled model's output {verdict} the reference{said and ': ' + said}."


def _clocks(document: Document) -> Iterator[PageTable | Listing | Commands | str]:
    if left_out := document.get("left_out"):
        what, why = left_out["what"], left_out["why"]
        yield f"{what} not swept over the clocks of a virtual Jetson Nano: {why}. To sweep both:"
        yield Commands(list(left_out["commands"]))
    sweep = document.get("sweep")
    if not sweep:
        return
    yield (
        "Simulated: the model over the CPU clocks of a virtual Jetson Nano. No figure here was measured on a real "
        "board. The whole is in sweep/sweep.html."
    )
    rows: list[tuple[str, ...]] = []
    for series in sweep["series"]:
        for row in (each for each in series["rows"] if each["measured"]):
            power, energy = row["power_w"], row["energy_j"]
            marks = ["pick"] if series["pick"] and series["pick"]["key"] == row["key"] else []
            marks += ["front"] if row["on_front"] else []
            numbers = (
                f"{row['latency_s']['value'] * 1e3:.4g}",
                f"{power['value']:.3g}" if power else NOTHING,
                f"{energy['value'] * 1e3:.4g}" if energy else NOTHING,
            )
            rows.append((row["key"], series["variant"], *numbers, ", ".join(marks)))
    yield make_table(("clocks", "code", "latency, ms", "power, W", "energy, mJ", "mark"), rows, left=(0, 1, 5))
    about = [f"{each['variant']}: {each['about']}" for each in sweep["series"] if each.get("about")]
    yield Listing([*about, *(f"{each['variant']}: {each['pick']['text']}" for each in sweep["series"] if each["pick"])])


def _workloads(document: Document) -> Iterator[PageTable | str]:
    workloads = document.get("workloads") or ()
    if not workloads:
        return
    times_us = [(each.get("latency_us") or 0.0) * each["weight"] for each in workloads]
    rows = [
        (
            str(number),
            Cell(each["name"], kind=CODE),
            format_count(each["flop"]),
            f"{each['weight']:g}",
            *(_number(each["best_gflops"]), _number(each["latency_us"]), _number(time_us or None)),
            str(each.get("trials", 0)),
        )
        for number, (each, time_us) in enumerate(zip(workloads, times_us, strict=True))
    ]
    head = ("ID", "name", "FLOP", "weight", "speed, GFLOPS", "latency, µs", "weighted latency, µs", "trials")
    yield make_table(head, rows, left=(1,))
    untried = times_us.count(0.0)
    yield (
        f"Weighted latencies add up to {format_latency(sum(times_us) / 1e6)}"
        + (f"; {untried} of {len(workloads)} workloads have no valid trial" if untried else "")
        + ". Each workload was timed alone, so the sum is not the latency of the model."
    )
    if note := campaign_rows.note_flop(each["name"] for each in workloads):
        yield note


def _trials(document: Document) -> Iterator[PageTable | str]:
    yield make_table(("trials by fault side", "count"), campaign_rows.list_sides(_count_sides(document)))
    if said := campaign_rows.note_statuses(document["trials"].get("by_status") or {}):
        yield said
    if reused := document.get("records_reused"):
        yield f"The run started from {reused} records of earlier runs."
    first_s = document.get("seconds_to_first_trial")
    if first_s is not None:
        yield f"The first trial was measured {_figure(first_s)} s after the start."


def _count_sides(document: Document) -> dict[str, int]:
    return {side.removesuffix("_faults"): count for side, count in document["trials"].items() if side != "by_status"}


def _facts(facts: Mapping[str, Any]) -> Iterator[Listing]:
    known = {name: value for name, value in facts.items() if value not in (None, "")}
    if known:
        yield Listing([f"{name.replace('_', ' ')}: {value}" for name, value in known.items()])


def _notes(document: Document) -> Iterator[Listing]:
    if notes := document.get("notes"):
        yield Listing(list(notes))
