"""The first page's contents: the state of every board, of campaigns and of the farm, worst first. No HTML.

Rows are made one by one, so that live updates (`live.py`) make only those that changed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from farm import units
from farm.crew.health import Kind
from farm.report import campaign_rows
from farm.store import Store
from farm.store.standing import BoardFilters, find_cause
from farm.types import campaigns
from farm.types.documents import BoardEvent, BoardInfo
from farm.types.states import CampaignState
from farm.values import Health, State
from farm.web import series
from farm.web.series import Gauges, GoldenRuns

EVENTS = 20
# Events that are faults of a board.
FAULTS = frozenset(
    {
        Kind.FAULT, Kind.PROBE_FAILED, Kind.INVALID_REPLY, Kind.THROTTLED, Kind.DRIFTED, Kind.SLOW_SENSORS, Kind.MISFIT,
        Kind.UNSAFE, Kind.HOSTILE, Kind.LOST,
    }
)  # fmt: skip
_RANKS = {
    Health.UNSAFE: 0,
    Health.QUARANTINED: 1,
    Health.SUSPECT: 2,
    Health.GOOD: 4,
    Health.MAINTENANCE: 5,
    Health.RETIRED: 6,
}
# A reading or a campaign's progress older than this is stale.
_STALE_S = 900.0


@dataclasses.dataclass(frozen=True)
class KnownOfBoards:
    """Facts about boards beside the store's rows. `points` are the operating points that campaigns hold."""

    golden: GoldenRuns
    gauges: Gauges
    faults: Mapping[str, BoardEvent]
    points: Mapping[str, str]


def to_board_row(board: BoardInfo, known: KnownOfBoards, now: float) -> dict[str, Any]:
    """Return a board's row: the store's fields, and what else is known."""
    name = board.name
    reading, drift = known.gauges.find_latest(name), known.golden.find(name)
    fresh = reading is not None and now - reading.at < _STALE_S
    limit_c = series.find_limit_c(board.board_type)
    warm_c = reading.temperature_c if fresh and reading is not None else None
    margin_c = None if limit_c is None or warm_c is None else limit_c - warm_c
    lease = board.lease
    held = known.points.get(name, "") if lease else ""
    held_at = None
    if lease and not held and fresh and reading is not None and reading.at >= lease.acquired_at:
        held, held_at = reading.point, reading.at
    fault = known.faults.get(name)
    # The row of a good board shows its work under its holder.
    cause = find_cause(board)
    return {
        "name": name,
        "board_type": board.board_type,
        "simulated": board.simulated,
        "labels": board.labels,
        "state": board.state,
        "health": board.health,
        "why": "" if cause is None else cause.why,
        "since": board.state_since if cause is None else cause.since,
        "lease": lease,
        "temperature_c": warm_c,
        "read_at": None if warm_c is None or reading is None else reading.at,
        "margin_c": margin_c,
        "held": units.format_point(held) if held else "",
        "held_at": held_at if held else None,
        "drift": drift,
        "fault": fault,
        "rank": _rank(board, drift is not None and drift.is_large, margin_c),
    }


def _rank(board: BoardInfo, drifted: bool, margin_c: float | None) -> tuple[Any, ...]:
    rank = _RANKS[board.health]
    if board.health == Health.GOOD and board.state == State.OFFLINE:
        rank = 3
    order = {State.OFFLINE: 0, State.LEASED: 1, State.IDLE: 2}[board.state]
    return rank, not drifted, order, 1e9 if margin_c is None else margin_c, board.name


def list_rows(boards: Iterable[BoardInfo], known: KnownOfBoards, filters: BoardFilters) -> list[dict[str, Any]]:
    """Return the rows of the chosen boards, worst first."""
    now = time.time()
    rows = [to_board_row(board, known, now) for board in boards if filters.matches(board)]
    return sorted(rows, key=lambda row: row["rank"])


def count_boards(boards: Collection[BoardInfo]) -> dict[str, int]:
    """Count the boards: in all, at work, free, out of reach, in doubt, out of service."""
    healths = [str(board.health) for board in boards]
    good = [board for board in boards if board.health == Health.GOOD]
    return {
        "boards": len(boards),
        "at work": sum(board.state == State.LEASED for board in good),
        "free": sum(board.state == State.IDLE for board in good),
        "offline": sum(board.state == State.OFFLINE for board in good),
        "in doubt": sum(each in (Health.SUSPECT, Health.QUARANTINED, Health.UNSAFE) for each in healths),
        "out of service": sum(each in (Health.MAINTENANCE, Health.RETIRED) for each in healths),
    }


def to_campaign_row(campaign: campaigns.FleetCampaign, boards: Sequence[BoardInfo]) -> dict[str, Any]:
    """Return a campaign's row; `boards` are all boards of the farm."""
    progress = campaign.progress or {}
    used_s, counted = progress.get("wall_clock_s") or 0.0, progress.get("counted") or 0
    mine = progress.get("boards") or []
    limit = campaign.budget.trials
    if limit is None and campaign.budget.per_workload is not None:
        limit = campaign.budget.per_workload * len(progress.get("tasks") or ()) or None
    return {
        "name": campaign.name,
        "owner": campaign.owner,
        "state": str(campaign.state),
        "wanted": campaign.wanted,
        "models": [each.name for each in campaign.order.models],
        "types": [each.board_type for each in campaign.order.types],
        "simulated": any(each.simulated for each in campaign.order.types),
        "counted": counted,
        "limit": limit,
        "share": min(1.0, counted / limit) if limit and not campaign.over else None,
        "limits": campaign_rows.list_limits(progress, campaign.budget),
        "per_minute": counted / used_s * 60 if used_s else None,
        "faults": campaign_rows.list_faults(progress),
        "busy": sum(each["doing"] != "idle" for each in mine),
        "boards": len(mine),
        "eta_s": progress.get("eta_s") if campaign.state in (CampaignState.RUNNING, CampaignState.VERIFYING) else None,
        "why_idle": explain_idle(campaign, boards),
        "started_at": campaign.started_at,
        "finished_at": campaign.finished_at,
        "reason": campaign.reason,
        "over": campaign.over,
    }


def explain_idle(campaign: campaigns.FleetCampaign, boards: Sequence[BoardInfo]) -> str:
    """Say why a campaign, or some of its boards, stands still; empty where all boards work."""
    if campaign.over:
        return ""
    if campaign.engine is None and campaign.state not in (CampaignState.PAUSED, CampaignState.SUBMITTED):
        return f"{campaign.reason}; `farm campaign resume {campaign.name}` goes on"
    if campaign.state not in (CampaignState.RUNNING, CampaignState.VERIFYING):
        return campaign.reason
    mine = {each["name"]: each["doing"] for each in (campaign.progress or {}).get("boards") or ()}
    kinds = {(each.board_type, each.simulated) for each in campaign.order.types}
    counts: dict[str, int] = {}
    for board in boards:
        if (board.board_type, board.simulated) not in kinds or mine.get(board.name, "idle") != "idle":
            continue
        lease = board.lease
        if board.health != Health.GOOD:
            why = str(board.health)
        elif board.state == State.OFFLINE:
            why = "offline"
        elif lease and board.name not in mine:
            why = f"held by {lease.owner} for {lease.purpose}"
        elif board.name in mine:
            why = "waiting for candidates"
        else:
            why = "not taken"
        counts[why] = counts.get(why, 0) + 1
    return ", ".join(f"{count} {why}" for why, count in sorted(counts.items(), key=lambda each: -each[1])[:4])


def list_points(campaigns: Iterable[campaigns.FleetCampaign], now: float) -> dict[str, str]:
    """Return by board the operating point that a running campaign holds."""
    return {
        each["name"]: each["point"]
        for campaign in campaigns
        if campaign.engine is not None and now - (campaign.progress or {}).get("at", 0.0) < _STALE_S
        for each in (campaign.progress or {}).get("boards") or ()
        if not campaign.over and each.get("point") not in (None, "", "default")
    }


def list_events(store: Store, subject: str | None = None, limit: int = EVENTS) -> list[dict[str, Any]]:
    """Return the newest events, each with the page that it links to."""
    rows = []
    for event in store.events.fetch_newest(limit, subject):
        # Board events name their author; only some other events are about a board or a campaign.
        of_board = event.by or event.kind in ("stopped", "board_lied")
        of_campaign = event.kind.startswith(("campaign_", "search_", "model_"))
        shown = {
            "page": "campaigns" if of_campaign else "boards" if of_board else "",
            "name": event.subject.rpartition("/")[2],
            "said": event.kind.removeprefix("campaign_").replace("_", " "),
            "bad": event.kind in FAULTS or event.kind in ("campaign_failed", "campaign_interrupted"),
        }
        rows.append(event.model_dump() | shown)
    return rows
