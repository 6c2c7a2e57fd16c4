"""The report of a campaign: HTML, Markdown, charts and JSON. Results come first, then their basis, then the order."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from farm.artifacts.artifact_folder import list_artifacts
from farm.inventory.board_types import describe_watts
from farm.points.values import format_conditions
from farm.report import campaign_charts, campaign_rows, drawing, pages
from farm.report.campaign_rows import Gain
from farm.report.pages import CODE, Cell, Commands, Listing, PageAnswer, PageTable, ReportPage, Section, make_table
from farm.report.record_document import DECIDED
from farm.search.families.family import name_option
from farm.units import format_bytes, format_latency, format_minute

# By the kind of an event; the event's own message follows.
_SAID = {
    "campaign_submitted": "submitted",
    "campaign_running": "measuring",
    "campaign_waiting": "waiting for boards",
    "campaign_paused": "paused",
    "campaign_resumed": "resumed",
    "campaign_interrupted": "interrupted",
    "campaign_verifying": "the search is over, winners are measured again",
    "campaign_finished": "finished",
    "campaign_cancelled": "cancelled",
    "campaign_failed": "failed",
    "model_timed": "",
    "restarted": "started again",
    "search_failed": "a search failed",
    "search_remark": "",
}
# Each task's search says this at its start: dozens of lines that are summed up.
_SUMMED = "warm_start"
# The report has the last events; the JSON has all.
_MOST_EVENTS = 40
# Options named for a task; the JSON has all.
_MOST_OPTIONS = 4
# Models named at the top; all are in the table below.
_MOST_ANSWERS = 3
Document = Mapping[str, Any]


def tell(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, str]]:
    """Yield time (s since the epoch) and text of each event; the oldest first."""
    begun = [each for each in events if each["kind"] == _SUMMED]
    for each in events:
        if each["kind"] == _SUMMED:
            if each is begun[0]:
                tasks = "1 task" if len(begun) == 1 else f"{len(begun)} tasks"
                yield each["at"], f"{tasks} began with what is known from elsewhere (see Warm start)"
            continue
        said = _SAID.get(each["kind"], each["kind"].replace("_", " "))
        yield each["at"], ": ".join(part for part in (said, each["message"]) if part)


def write_page(document: Document, gains: Sequence[Gain]) -> ReportPage:
    """Return the report's page."""
    lines = [each.command for each in list_artifacts(document)] if document["winners"] else []
    sections = {
        "Models": _models(document, gains),
        "To the boards": [Commands(lines)] if lines else [],
        "Winners": _winners(document),
        "Options that mattered": _options(document),
        "Boards": _boards(document),
        "Trials": _trials(document),
        "Warm start": _warm_start(document),
        "What was ordered": _order(document),
        "What happened": _events(document),
    }
    simulated = _simulated(document)
    return ReportPage(
        title=f"Campaign {document['name']}{' (simulated)' if simulated else ''}",
        subtitle=_subtitle(document),
        simulated=simulated,
        answers=[*_doubts(document), *_answers(gains)],
        summary=[" ".join(_summarise(document))],
        sections=[Section(title, blocks) for title, each in sections.items() if (blocks := list(each))],
        footer=f"Written by farm campaign show {document['name']} --out DIR."
        + (" All figures are simulated." if simulated else ""),
    )


def _subtitle(document: Document) -> str:
    parts = [f"submitted {format_minute(document['started_at'])} by {document['owner']}"]
    if document["finished_at"] is not None:
        parts.append(f"ended {format_minute(document['finished_at'])}")
    return " · ".join(parts)


def _simulated(document: Document) -> str:
    kinds = [each["type"] for each in document["types"] if each["simulated"]]
    if not kinds:
        return ""
    which = "All boards" if len(kinds) == len(document["types"]) else f"Boards of type {', '.join(kinds)}"
    known = ", ".join(f"{kind} {describe_watts(kind)}" for kind in kinds)
    return f"{which} are models of hardware ({known}): none of their figures was measured on a real one."


def _doubts(document: Document) -> Iterator[PageAnswer]:
    """Return the models whose latency is doubtful."""
    for final in campaign_rows.list_finals(document["progress"]):
        if final.get("doubt"):
            where = f"{final['board_type']} @ {final['point']}"
            yield PageAnswer(f"Do not rely on the latency of {final['model']} on {where}", f"{final['doubt']}.")


def _answers(gains: Sequence[Gain]) -> list[PageAnswer]:
    """Return the models that gained most."""
    known = [each for each in gains if each.factor is not None]
    return [
        PageAnswer(
            f"{each.model} takes {format_latency(each.last_s or 0.0)} on {each.board_type} @ {each.point}",
            f"{each.said[:1].upper()}{each.said[1:]}.",
        )
        for each in sorted(known, key=lambda each: each.factor or 0.0, reverse=True)[:_MOST_ANSWERS]
    ]


def _summarise(document: Document) -> Iterator[str]:
    progress = document["progress"] or {}
    reason = f": {document['reason']}" if document["reason"] else ""
    yield f"The campaign is {document['state']}{reason}."
    hours = campaign_rows.format_clock(progress.get("wall_clock_s", 0.0))
    boards = len(document["boards"])
    board_s = 3600 * sum(each["board_hours"] for each in document["boards"])
    energy = f", {progress['energy_j']:,.0f} J" if progress.get("energy_j") else ""
    yield (
        f"{progress.get('counted', 0):,} trials counted in {hours} on {boards} "
        f"board{'' if boards == 1 else 's'} (board time {campaign_rows.format_clock(board_s)}{energy})."
    )
    winners = document["winners"]
    found = sum(each["median_s"] is not None for each in winners)
    yield f"{found} of {len(winners)} tasks have a record."


def _models(document: Document, gains: Sequence[Gain]) -> Iterator[PageTable | Listing | str]:
    if not gains:
        return
    rows = [
        (
            *(each.model, each.board_type, each.point, _latency(each.predicted_s)),
            (
                f"{'' if each.timed or not each.guessed else '~'}{_latency(each.last_s)}",
                "" if each.verified or each.last_s is None else _describe_sources(each),
            ),
            "–" if each.factor is None else f"{each.factor:.2f}",
            each.said or "–",
            f"{each.recorded}/{each.workloads}",
        )
        for each in gains
    ]
    head = ("model", "board type", "point", "no trial", "compiled now", "times as fast", "what the trials gained")
    yield make_table((*head, "records"), rows, left=(0, 1, 2, 6))
    yield (
        "No trial and compiled now: the model itself, timed in turns on one board, scheduled by prediction "
        "alone and as farm model compile makes it from now on. Where it was not timed, compiled now is the sum over "
        "its workloads: of the record, else of the best trial, else of the prediction (~). A sum of functions timed "
        "one by one is not the latency of the model."
    )
    if costs := list(_list_costs(document)):
        titles = ("model", "board type", "point", "p50", "p90", "p99", "first inference", "peak memory", "size")
        yield make_table(titles, costs, left=(0, 1, 2))
        yield (
            "What was compiled, timed by itself: p50, p90 and p99 of all its runs; peak memory with Python and TVM's "
            "runtime; energy is what farm model bench measures."
        )
    if functions := list(_list_in_place(document)):
        columns = ("model", "board type", "point", "function", "with its record", "least", "most", "record")
        yield make_table(columns, functions, left=(0, 1, 2, 3, 7))
        yield (
            "Functions whose record is other code than the prediction, within the model: what one takes with its "
            "record over what it takes without, timed in turns (below 1: faster)."
        )
    conditions = [f"workloads on {each.title}" for each in campaign_rows.list_groups(document["progress"] or {})]
    conditions += [
        f"{each['model']} on {each['board_type']}/{each['board']} @ {each['point']}: "
        f"{format_conditions(each['threads'], each['clocks'], each['point'])}; {each['runs']}"
        for each in campaign_rows.list_finals(document["progress"])
        if each["taken"]
    ]
    if conditions:
        yield Listing(conditions, "What latencies were taken with:")


def _list_costs(document: Document) -> Iterator[tuple[str, ...]]:
    """Return the cost of each model that was timed: one inference, the first one, memory and bytes."""
    for final in campaign_rows.list_finals(document["progress"]):
        if not final["taken"]:
            continue
        taken = final["variants"][final["taken"]]
        sizes = [taken.get(key) for key in ("peak_memory_bytes", "bytes")]
        yield (
            *(final["model"], final["board_type"], final["point"]),
            *(_latency(taken.get(key)) for key in ("median", "p90", "p99", "first_s")),
            *("–" if size is None else format_bytes(size) for size in sizes),
        )


def _list_in_place(document: Document) -> Iterator[tuple[str, ...]]:
    """Return what records are worth within their models, where that was measured, and which are left out."""
    for final in campaign_rows.list_finals(document["progress"]):
        for each in final.get("in_place", ()):
            yield (
                *(final["model"], final["board_type"], final["point"], each["name"]),
                *(f"{each[key]:.2f}" for key in ("value", "low", "high")),
                "left out" if each["name"] in final["left_out"] else "taken",
            )


def _describe_sources(gain: Gain) -> str:
    """Describe which part of a sum was not measured again: `4 of 12 from one trial, 3 predicted`."""
    parts = [(gain.tried, "from one trial"), (gain.guessed, "predicted")]
    words = [f"{count} {what}" for count, what in parts if count]
    return f"{gain.workloads} workloads: " + ", ".join(words)


def _winners(document: Document) -> Iterator[PageTable | Listing]:
    rows: list[list[Any]] = []
    for each in document["winners"]:
        if each["median_s"] is None:
            continue
        evidence = each["evidence"] or {}
        boards = evidence.get("boards", {})
        rows.append(
            [
                Cell(each["name"], kind=CODE),
                *(each["board_type"], each["point"], f"{each['weight']:g}", format_latency(each["median_s"])),
                DECIDED.get(evidence.get("decided", ""), "one trial"),
                _nearest(evidence),
                ", ".join(f"{name} {format_latency(about['median_s'])}" for name, about in boards.items()) or "–",
                str(evidence.get("rounds", "–")),
                "–" if each["max_rel_error"] is None else f"{each['max_rel_error']:.1e}",
                "" if each["since"] else "earlier",
            ]
        )
    head = ("workload", "board type", "point", "weight", "median", "decided", "nearest rival", "boards", "rounds")
    if rows:
        yield make_table((*head, "relative error", "found"), rows, left=(1, 2, 5, 7, 10))
    if undecided := _list_undecided(document):
        yield Listing(undecided, "No winner:")
    verdict = (document["progress"] or {}).get("verdict") or {}
    if contradictions := [str(each) for each in verdict.get("contradictions", ())]:
        yield Listing(contradictions, "Boards contradict each other:")


def _nearest(evidence: Mapping[str, Any]) -> tuple[str, str]:
    """Return the ratio of the nearest rival's latency, with its interval."""
    rivals = evidence.get("rivals") or ()
    if not rivals:
        return "–", ""
    rival = min(rivals, key=lambda each: float(each["ratio"]))
    high = "" if rival["high"] is None else f"{rival['high']:.3f}"
    return f"{rival['ratio']:.3f}", f"{rival['low']:.3f} to {high}"


def _list_undecided(document: Document) -> list[str]:
    """Return the tasks without a record and those without a new one, with the known reasons."""
    verdict = (document["progress"] or {}).get("verdict") or {}
    reasons = {
        (each["board_type"], each["workload"], each["point"]): each["reason"] for each in verdict.get("undecided", ())
    }
    entries = []
    for each in document["winners"]:
        reason = reasons.get((each["board_type"], each["workload"], each["point"]), "")
        if each["median_s"] is None or reason:
            where = f"{each['name']} on {each['board_type']} @ {each['point']}"
            entries.append(f"{where}: {reason}" if reason else where)
    return entries


def _options(document: Document) -> Iterator[PageTable | str]:
    """Return what each task's trials tell about the options of its plans, where that was rated."""
    rated = document.get("importance", ())
    rows = [
        (
            *(Cell(each["name"], kind=CODE), each["board_type"], each["point"], each["family"], f"{each['trials']:,}"),
            f"{each['explained'] * 100:.0f} %",
            ", ".join(
                f"{name_option(name)} {share * 100:.0f} %"
                for name, share in itertools.islice(each["options"].items(), _MOST_OPTIONS)
            ),
        )
        for each in rated
    ]
    if rows:
        head = ("workload", "board type", "point", "family", "trials", "explained", "share of the variance by option")
        yield make_table(head, rows, left=(0, 1, 2, 3, 6))
        yield (
            "Of boosted trees fitted to each workload's good trials. Explained: the share of the variance of log "
            "latency that they predict of trials left out. An option's share includes its interactions, so the sum may "
            "exceed 100 %. It is about the tried plans, most of which are good."
        )


def _boards(document: Document) -> Iterator[PageTable]:
    rows = [
        (
            *(each["board"], each["board_type"], f"{each['trials']:,}", f"{each['ok']:,}"),
            *(f"{each['faults'].get(side, 0):,}" for side in ("candidate", "sample", "board", "farm")),
            campaign_rows.format_clock(3600 * each["board_hours"]),
        )
        for each in document["boards"]
    ]
    if rows:
        head = ("board", "type", "trials", "good", "candidate", "sample", "board's", "farm's", "board time")
        yield make_table(head, rows, left=(0, 1))


def _trials(document: Document) -> Iterator[PageTable | str]:
    trials = document["trials"]
    yield make_table(("trials by fault side", "count"), campaign_rows.list_sides(trials["by_side"]))
    if said := campaign_rows.note_statuses(trials["by_status"]):
        yield said
    again = trials["by_purpose"].get("winner", 0)
    if again:
        yield f"{again:,} of them measured the best candidates again; these are not charged to the budget."


def _warm_start(document: Document) -> Iterator[Listing]:
    """Return what the search said of each task, equal words once."""
    names = {each["workload"]: each["name"] for each in document["winners"]}
    said: dict[str, list[str]] = {}
    for task, text in ((document["progress"] or {}).get("warm_start") or {}).items():
        said.setdefault(text, []).append(task)
    entries = []
    for text, tasks in said.items():
        workload, _, where = tasks[0].partition(" ")
        whom = f"{names.get(workload, workload)} {where}" if len(tasks) == 1 else f"{len(tasks)} tasks"
        entries.append(f"{whom}: {text}")
    if entries:
        yield Listing(entries)


def _order(document: Document) -> Iterator[PageTable | Listing]:
    models = [
        (each["name"], each["origin"], each["sha256"][:12], "–" if each["batch"] is None else str(each["batch"]))
        for each in document["models"]
    ]
    about = {
        "owner": document["owner"],
        "command": f"farm {document['command']}",
        "submitted": format_minute(document["started_at"]),
        "ended": None if document["finished_at"] is None else format_minute(document["finished_at"]),
        "priority": document["priority"] or None,
        "board types": ", ".join(f"{each['type']} at {', '.join(each['points'])}" for each in document["types"]),
        "labels": ", ".join(f"{key}={value}" for key, value in document["labels"].items()) or None,
        "budget": _pairs(document["budget"]),
        "search": _pairs(document["search"]),
        "measurement": _pairs(document["measure"]),
    }
    yield make_table(("model", "from", "SHA-256", "batch"), models, left=(0, 1, 2))
    yield Listing([f"{key}: {value}" for key, value in about.items() if value is not None])


def _events(document: Document) -> Iterator[Listing]:
    told = list(tell(document["events"]))
    entries = [f"{format_minute(at)} {text}" for at, text in told[-_MOST_EVENTS:]]
    if len(told) > len(entries):
        entries.insert(0, f"{len(told) - len(entries)} earlier ones are in report.json")
    if entries:
        yield Listing(entries)


def _pairs(values: Mapping[str, Any]) -> str:
    def say(key: str, value: Any) -> str:
        name, _, unit = key.rpartition("_")
        number = f"{value:,g}" if isinstance(value, float) else value
        return (
            f"{name.replace('_', ' ')} {number} {unit.upper()}" if unit == "j" else f"{key.replace('_', ' ')} {number}"
        )

    return ", ".join(say(key, value) for key, value in values.items() if value is not None)


def _latency(seconds: float | None) -> str:
    return "–" if seconds is None else format_latency(seconds)


def write_campaign_report(
    document: Mapping[str, Any], folder: pathlib.Path, note: Callable[[str], None] = lambda text: None
) -> dict[str, str]:
    """Write the report into `folder`, made if need be; return the paths of `page`, `markdown`, `json` and charts.

    `note` is called before each chart. `document` is what `farm campaign show NAME --json` prints. Raises OSError where
    the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    gains = campaign_rows.list_gains(document)
    planned, pictures = list(campaign_charts.plan_charts(document, gains)), []
    for number, chart in enumerate(planned, 1):
        note(f"drawing {chart.name} ({number} of {len(planned)})")
        pictures.append(drawing.save(chart, folder))
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    return pages.write_page(folder, "report", write_page(document, gains), pictures, {"json": text})
