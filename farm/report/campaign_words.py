"""The text of a campaign's report, in Markdown: what came out first, then what it rests on, then what was ordered."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from farm import foreign
from farm.artifacts.listed import list_artifacts
from farm.points.conditions import format_conditions
from farm.report import campaign_history, campaign_rows
from farm.report.campaign_models import Gain
from farm.report.campaign_rows import format_latency

_SIDES = {
    "ok": "good",
    "candidate": "candidate: the schedule was at fault; the cost model learns from it",
    "board": "board: measured again elsewhere, the schedule not blamed",
    "farm": "farm: measured again, nobody blamed",
    "sample": "sample: too noisy or at wrong clocks, measured again",
}
_DECIDED = {"parted": "clear", "tie": "tie", "alone": "no rival", "kept": "first tried"}
# The events worth reading are the last ones; all of them are in the JSON.
_MOST_EVENTS = 40
Document = Mapping[str, Any]


def write_page(document: Document, gains: Sequence[Gain], pictures: Mapping[str, str]) -> str:
    """The report's text; `pictures` maps captions to files beside it."""
    commands = _commands(document)
    document, gains = foreign.escaped(document), foreign.escaped(gains)
    parts = [
        f"# Campaign {document['name']}",
        _simulated(document),
        " ".join(_summarise(document, gains)),
        "\n\n".join(f"![{caption}]({file})" for caption, file in pictures.items()),
        _section("Models", _models(gains) and f"{_models(gains)}\n\n{_conditions(document)}"),
        _section("To the boards", commands),
        _section("Winners", _winners(document)),
        _section("Boards", _boards(document)),
        _section("Trials", _trials(document)),
        _section("Warm start", _warm_start(document)),
        _section("What was ordered", _order(document)),
        _section("What happened", _events(document)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _commands(document: Document) -> str:
    # In a block of code nothing is markup; nothing ends the block but a line of its own.
    lines = [each.command.replace("\n", " ") for each in list_artifacts(document)] if document["winners"] else []
    return "\n".join(["```sh", *lines, "```"]) if lines else ""


def _section(title: str, body: str) -> str:
    return f"## {title}\n{body}" if body else ""


def _simulated(document: Document) -> str:
    kinds = [each["type"] for each in document["types"] if each["simulated"]]
    if not kinds:
        return ""
    which = "All boards" if len(kinds) == len(document["types"]) else f"Boards of type {', '.join(kinds)}"
    return f"> **Simulated.** {which} are models of hardware: none of their figures was measured on a real one."


def _summarise(document: Document, gains: Sequence[Gain]) -> Iterator[str]:
    progress = document["progress"] or {}
    reason = f": {document['reason']}" if document["reason"] else ""
    yield f"The campaign is **{document['state']}**{reason}."
    hours = campaign_rows.format_clock(progress.get("wall_clock_s", 0.0))
    boards = len(document["boards"])
    board_s = 3600 * sum(each["board_hours"] for each in document["boards"])
    yield (
        f"{progress.get('counted', 0):,} trials counted in {hours} on {boards} "
        f"board{'' if boards == 1 else 's'} (board time {campaign_rows.format_clock(board_s)})."
    )
    known = [each for each in gains if each.factor is not None]
    for gain in sorted(known, key=lambda each: each.factor or 0.0, reverse=True)[:3]:
        latency = format_latency(gain.last_s or 0.0)
        yield f"{gain.model} takes **{latency}** on {gain.board_type} @ {gain.point}: {gain.said}."
    winners = document["winners"]
    found = sum(each["median_s"] is not None for each in winners)
    yield f"{found} of {len(winners)} tasks have a record."


def _conditions(document: Document) -> str:
    """What the figures were taken with: workloads one by one, and whole models."""
    lines = [f"- workloads on {each.title}" for each in campaign_rows.list_groups(document["progress"] or {})]
    lines += [
        f"- {each['model']} on {each['board_type']}/{each['board']} @ {each['point']}: "
        f"{format_conditions(each['threads'], each['clocks'], each['point'])}; {each['runs']}"
        for each in campaign_rows.list_finals(document["progress"])
        if each["taken"]
    ]
    return "\n".join(["What latencies were taken with:", *lines])


def _models(gains: Sequence[Gain]) -> str:
    rows = [
        (
            each.model,
            each.board_type,
            each.point,
            _latency(each.predicted_s),
            _latency(each.last_s) + ("" if each.verified or each.last_s is None else " (not verified)"),
            "–" if each.factor is None else f"{each.factor:.2f}",
            each.said or "–",
            f"{each.recorded}/{each.workloads}",
        )
        for each in gains
    ]
    if not rows:
        return ""
    head = (
        "model",
        "board type",
        "point",
        "no trial",
        "compiled now",
        "times as fast",
        "what the trials gained",
        "records",
    )
    return (
        foreign.table(head, rows, left=(0, 1, 2, 6))
        + "\n\n*No trial* and *compiled now*: the model itself, timed in turns on one board, scheduled by prediction "
        "alone and as `farm model compile` makes it from now on. Where it was not timed, *compiled now* is the sum of "
        "the records of its workloads, or where one is missing, of the best measured."
    )


def _winners(document: Document) -> str:
    rows = []
    for each in document["winners"]:
        if each["median_s"] is None:
            continue
        evidence = each["evidence"] or {}
        boards = evidence.get("boards", {})
        rows.append(
            (
                f"`{each['name']}`",
                each["board_type"],
                each["point"],
                f"{each['weight']:g}",
                format_latency(each["median_s"]),
                _DECIDED.get(evidence.get("decided", ""), "one trial"),
                _nearest(evidence),
                ", ".join(f"{name} {format_latency(about['median_s'])}" for name, about in boards.items()) or "–",
                str(evidence.get("rounds", "–")),
                "–" if each["max_rel_error"] is None else f"{each['max_rel_error']:.1e}",
                "" if each["since"] else "earlier",
            )
        )
    head = ("workload", "board type", "point", "weight", "median", "decided", "nearest rival", "boards", "rounds")
    text = foreign.table((*head, "relative error", "found"), rows, left=(0, 1, 2, 5, 6, 7, 10)) if rows else ""
    verdict = (document["progress"] or {}).get("verdict") or {}
    contradictions = [str(each) for each in verdict.get("contradictions", ())]
    lines = [text, _tell_undecided(document)]
    if contradictions:
        lines.append("**Boards contradict each other:**\n" + "\n".join(f"- {each}" for each in contradictions))
    return "\n\n".join(line for line in lines if line)


def _nearest(evidence: Mapping[str, Any]) -> str:
    """How far behind the nearest rival is."""
    rivals = evidence.get("rivals") or ()
    if not rivals:
        return "–"
    rival = min(rivals, key=lambda each: float(each["ratio"]))
    high = "" if rival["high"] is None else f"{rival['high']:.3f}"
    return f"{rival['ratio']:.3f} ({rival['low']:.3f} to {high})"


def _tell_undecided(document: Document) -> str:
    """The tasks that have no record, and those that got no new one, with the reasons that are known."""
    verdict = (document["progress"] or {}).get("verdict") or {}
    reasons = {
        (each["board_type"], each["workload"], each["point"]): each["reason"] for each in verdict.get("undecided", ())
    }
    lines = []
    for each in document["winners"]:
        reason = reasons.get((each["board_type"], each["workload"], each["point"]), "")
        if each["median_s"] is None or reason:
            where = f"`{each['name']}` on {each['board_type']} @ {each['point']}"
            lines.append(f"- {where}: {reason}" if reason else f"- {where}")
    return "No winner:\n" + "\n".join(lines) if lines else ""


def _boards(document: Document) -> str:
    rows = [
        (
            each["board"],
            each["board_type"],
            f"{each['trials']:,}",
            f"{each['ok']:,}",
            *(f"{each['faults'].get(side, 0):,}" for side in ("candidate", "sample", "board", "farm")),
            campaign_rows.format_clock(3600 * each["board_hours"]),
        )
        for each in document["boards"]
    ]
    head = ("board", "type", "trials", "good", "candidate", "sample", "board's", "farm's", "board time")
    return foreign.table(head, rows, left=(0, 1)) if rows else ""


def _trials(document: Document) -> str:
    trials = document["trials"]
    rows = [(_SIDES[side], f"{trials['by_side'].get(side, 0):,}") for side in _SIDES]
    lines = [foreign.table(("trials by whose fault it was", "count"), rows)]
    statuses = {status: count for status, count in trials["by_status"].items() if status != "ok"}
    if statuses:
        lines.append("Not ok: " + ", ".join(f"{count:,} {status}" for status, count in sorted(statuses.items())) + ".")
    again = trials["by_purpose"].get("winner", 0)
    if again:
        lines.append(f"{again:,} of them measured the best candidates again; these are not charged to the budget.")
    return "\n\n".join(lines)


def _warm_start(document: Document) -> str:
    """What was said of each task, equal words once."""
    names = {each["workload"]: each["name"] for each in document["winners"]}
    said: dict[str, list[str]] = {}
    for task, text in ((document["progress"] or {}).get("warm_start") or {}).items():
        said.setdefault(text, []).append(task)
    lines = []
    for text, tasks in said.items():
        workload, _, where = tasks[0].partition(" ")
        whom = f"`{names.get(workload, workload)}` {where}" if len(tasks) == 1 else f"{len(tasks)} tasks"
        lines.append(f"- {whom}: {text}")
    return "\n".join(lines)


def _order(document: Document) -> str:
    models = [
        (each["name"], each["origin"], each["sha256"][:12], "–" if each["batch"] is None else str(each["batch"]))
        for each in document["models"]
    ]
    about = {
        "owner": document["owner"],
        "command": f"`farm {document['command']}`",
        "submitted": _date(document["started_at"]),
        "ended": None if document["finished_at"] is None else _date(document["finished_at"]),
        "priority": document["priority"] or None,
        "board types": ", ".join(f"{each['type']} at {', '.join(each['points'])}" for each in document["types"]),
        "labels": ", ".join(f"{key}={value}" for key, value in document["labels"].items()) or None,
        "budget": _pairs(document["budget"]),
        "search": _pairs(document["search"]),
        "measurement": _pairs(document["measure"]),
    }
    lines = "\n".join(f"- {key}: {value}" for key, value in about.items() if value is not None)
    return foreign.table(("model", "from", "SHA-256", "batch"), models, left=(0, 1, 2)) + f"\n\n{lines}"


def _events(document: Document) -> str:
    told = campaign_history.tell(document["events"])
    lines = [f"- {_date(at)} {text}" for at, text in told[-_MOST_EVENTS:]]
    if len(told) > len(lines):
        lines.insert(0, f"- {len(told) - len(lines)} earlier ones are in report.json")
    return "\n".join(lines)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items() if value is not None)


def _latency(seconds: float | None) -> str:
    return "–" if seconds is None else format_latency(seconds)


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
