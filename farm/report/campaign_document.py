"""A campaign from the store, as the document that `show --json` prints and that its report is made of.

`summarise` and `shorten` are quick; `make_document` reads all of the campaign's trials.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from farm.search import gpus
from farm.search.families.family import Plan, read_mark
from farm.search.tuners import cost_model
from farm.store import Store
from farm.store.totals import BoardTotal, CountedTrial
from farm.types import campaigns
from farm.values import DEFAULT_POINT, Record

# Board type, operating point, workload; counted trials so far and latency (s).
TaskId = tuple[str, str, str]
Gain = tuple[int, TaskId, float]
# The most points of a model's curve that a chart shows.
_MOST_STEPS = 400


def summarise(campaign: campaigns.FleetCampaign) -> dict[str, Any]:
    """Return a campaign as the store has it, without fields that only its engine needs."""
    order = campaign.order
    return {
        "campaign": campaign.id,
        "name": campaign.name,
        "owner": campaign.owner,
        "priority": order.priority,
        "state": str(campaign.state),
        **{name: getattr(campaign, name) for name in ("reason", "wanted", "command", "started_at", "finished_at")},
        "models": [model.model_dump(mode="json", exclude_unset=True) for model in order.models],
        "types": [
            {
                "type": each.board_type,
                "simulated": each.simulated,
                "device": gpus.device_of(each.target),
                "pipeline": each.pipeline,
                "points": list(each.points),
                "workloads": len(each.workloads),
            }
            for each in order.types
        ],
        "labels": dict(order.labels),
        "search": order.search.model_dump(exclude_unset=True),
        "measure": order.measure.model_dump(exclude_unset=True),
        "budget": campaign.budget.model_dump(exclude_unset=True),
        "progress": None if campaign.progress is None else dict(campaign.progress),
    }


def shorten(campaign: campaigns.FleetCampaign) -> dict[str, Any]:
    """Return a campaign for a list: without its tasks."""
    document = summarise(campaign)
    progress = document.pop("progress") or {}
    short = {key: progress.get(key) for key in ("phase", "counted", "board_s", "wall_clock_s", "eta_s", "faults")}
    return document | {"progress": short if progress else None}


def make_document(store: Store, name: str) -> dict[str, Any]:
    """Return a campaign with its `trials`, `boards`, `winners`, `curves` and `events`.

    Raises UsageError where there is none of this name.
    """
    campaign = store.campaigns.require(name)
    document = summarise(campaign)
    totals = store.totals.fetch_by_board(campaign.id)
    return document | {
        "trials": _count_statuses(totals),
        "boards": _list_boards(totals),
        "winners": fetch_winners(store, campaign),
        "curves": draw_curves(campaign.order, list_gains(store.totals.fetch_course(campaign.id))),
        "events": [{"at": row.at, "kind": row.kind, "message": row.message} for row in store.events.fetch(name)],
    }


def make_report(store: Store, name: str) -> dict[str, Any]:
    """Return `make_document` with the `importance` of options, which reads all traces."""
    return make_document(store, name) | {"importance": rate_options(store, name)}


def rate_options(store: Store, name: str) -> list[dict[str, Any]]:
    """Return for each task of a campaign how much each option of its plans mattered, where enough trials tell.

    A task's plans are of one family, that of most trials. Reads the traces of one task at a time.
    """
    campaign = store.campaigns.require(name)
    rated = []
    for kind in campaign.order.types:
        for each, point in itertools.product(kind.workloads, kind.points):
            by_family: dict[str, list[tuple[Plan, float]]] = {}
            for trial in store.trials.fetch_counted(campaign.id, (kind.board_type, each.hash, point)):
                mark = read_mark(json.loads(trial.trace_json)[0][0]) if trial.trace_json else None
                if mark is not None and trial.median_s is not None:
                    by_family.setdefault(mark[0], []).append((mark[1], trial.median_s))
            family, known = max(by_family.items(), key=lambda item: len(item[1]), default=("", []))
            found = cost_model.rate_options([plan for plan, _ in known], [median_s for _, median_s in known])
            if found is not None:
                where = {"board_type": kind.board_type, "point": point, "workload": each.hash, "name": each.name}
                rated.append(where | {"family": family} | dataclasses.asdict(found))
    return rated


def fetch_winners(store: Store, campaign: campaigns.FleetCampaign) -> list[dict[str, Any]]:
    """Return `list_winners` of the records there are."""
    hashes = sorted({each.hash for kind in campaign.order.types for each in kind.workloads})
    return list_winners(campaign, store.records.fetch(workloads=hashes, simulated=None))


def list_winners(campaign: campaigns.FleetCampaign, records: Iterable[Record]) -> list[dict[str, Any]]:
    """For each task of a campaign the record that there is, or None for its figures; `evidence` is how it was found.

    `since`: whether the record was written after the campaign began, by this campaign or another. `predicted_s`: what a
    call takes by prediction alone, where the point sets no clocks.
    """
    known = {(r.board_type, r.workload, r.operating_point, r.simulated): r for r in records}
    rows = []
    for kind in campaign.order.types:
        for point in kind.points:
            for each in kind.workloads:
                found = known.get((kind.board_type, each.hash, point, kind.simulated))
                rows.append(
                    {
                        "board_type": kind.board_type,
                        "point": point,
                        "workload": each.hash,
                        "name": each.name,
                        "weight": each.weight,
                        "flop": each.flop,
                        "candidate": found and found.candidate,
                        "median_s": found and found.median_s,
                        "predicted_s": each.predicted_s if point == DEFAULT_POINT else None,
                        "max_rel_error": found and found.max_rel_error,
                        "verified_at": found and found.verified_at,
                        "since": bool(found and found.verified_at >= campaign.started_at),
                        "evidence": None if found is None or found.evidence is None else dict(found.evidence),
                    }
                )
    return rows


def list_gains(course: Iterable[CountedTrial]) -> Iterator[Gain]:
    """Return the trials of a series that were better than all before them."""
    best: dict[TaskId, float] = {}
    for counted, row in enumerate(course, 1):
        key, median_s = (row.board_type, row.operating_point, row.workload), row.median_s
        if median_s is not None and median_s < best.get(key, float("inf")):
            best[key] = median_s
            yield counted, key, median_s


def draw_curves(order: campaigns.Order, gains: Iterable[Gain]) -> list[dict[str, Any]]:
    """The latency of every model over the campaign's counted trials, from the one on from which all is known.

    `steps` are pairs of counted trials and seconds; a model of which a workload has no good trial has none. `calls` are
    those of one inference, by workload; `best_s` is the best good trial of each that has one.
    """
    curves: list[dict[str, Any]] = []
    by_task: dict[TaskId, list[dict[str, Any]]] = {}
    for kind, model in itertools.product(order.types, order.models):
        mine = [each for each in kind.workloads if model.name in each.models]
        calls = {each.hash: float(each.calls[each.models.index(model.name)]) for each in mine}
        for point in kind.points if calls else ():
            where = {"model": model.name, "board_type": kind.board_type, "point": point}
            curves.append(where | {"calls": dict(calls), "best_s": {}, "steps": []})
            for workload in calls:
                by_task.setdefault((kind.board_type, point, workload), []).append(curves[-1])
    for counted, key, median_s in gains:
        for curve in by_task.get(key, ()):
            calls, best_s = curve["calls"], curve["best_s"]
            best_s[key[2]] = median_s
            if len(best_s) == len(calls):
                curve["steps"].append((counted, sum(calls[workload] * best_s[workload] for workload in calls)))
    return [curve | {"steps": _thin(curve["steps"])} for curve in curves]


def _thin(steps: list[tuple[int, float]]) -> list[list[float]]:
    """Return at most about `_MOST_STEPS` of the steps, the first and the last among them."""
    apart = max(1, len(steps) // _MOST_STEPS)
    kept = steps[::apart]
    if steps and kept[-1] != steps[-1]:
        kept.append(steps[-1])
    return [[counted, latency_s] for counted, latency_s in kept]


def _count_statuses(totals: Iterable[BoardTotal]) -> dict[str, Any]:
    """Count trials by purpose, by fault side and by status."""
    counts: dict[str, dict[str, int]] = {"by_side": {}, "by_status": {}, "by_purpose": {}}
    for row in totals:
        side = "ok" if row.fault_side is None else str(row.fault_side)
        for table, key in zip(counts.values(), (side, row.status, row.purpose), strict=True):
            table[key] = table.get(key, 0) + row.trials
    return counts


def _list_boards(totals: Iterable[BoardTotal]) -> list[dict[str, Any]]:
    """Return by board its trials, the good ones among them, and the hours for which it was held."""
    boards: dict[str, dict[str, Any]] = {}
    for row in totals:
        if not row.board:
            continue
        own = boards.setdefault(
            row.board,
            {"board": row.board, "board_type": row.board_type, "trials": 0, "ok": 0, "board_hours": 0.0}
            | {"faults": {}},
        )
        own["trials"] += row.trials
        own["board_hours"] += row.held_s / 3600
        if row.fault_side is None:
            own["ok"] += row.trials
        else:
            own["faults"][row.fault_side] = own["faults"].get(row.fault_side, 0) + row.trials
    return [boards[name] for name in sorted(boards)]
