"""Rows of campaigns: select, read and update them inside a transaction; and what the store returns of trials."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from farm import foreign
from farm.errors import InternalError, PermanentError, UsageError
from farm.store import schema
from farm.store.session import Statement
from farm.types import campaigns
from farm.types.states import CampaignState
from farm.values import Workload

# How the reason of an interrupted campaign begins whose engine was killed, or ended by a fault of its host or store.
KILLED = "its engine was killed while it was"

ENDED_BY_FAULT = "its engine ended: "

NOT_TAKEN = "no engine began with it"

_IS_OVER = sa.or_(*(schema.campaigns.c.state == str(state) for state in CampaignState if state.over))


@functools.cache  # engines read them twice a second
def _select_by_age(over: bool | None) -> Statement:
    query = select_fleet().order_by(schema.campaigns.c.id)
    return Statement(query if over is None else query.where(_IS_OVER if over else ~_IS_OVER))


@functools.cache
def _select_by_id() -> Statement:
    return Statement(select_fleet().where(schema.campaigns.c.id == sa.bindparam("number")))


@functools.cache
def select_fleet() -> sa.Select[Any]:
    """Fleet campaigns with their progress, for `FleetCampaign.from_row`."""
    common, fleet, progress = schema.campaigns, schema.fleet_campaigns, schema.campaign_progress
    columns = (common.c.id, common.c.command, common.c.state, common.c.started_at, common.c.finished_at)
    own = [column for column in fleet.c if column.name != "campaign"]
    return (
        sa.select(*columns, *own, progress.c.progress)
        .join(fleet, fleet.c.campaign == common.c.id)
        .outerjoin(progress, progress.c.campaign == common.c.id)
    )


def find_open(connection: sa.Connection, campaign: int) -> campaigns.FleetCampaign | None:
    """An open campaign by its number; None if it is unknown or over."""
    rows = _select_by_id().fetch(connection, number=campaign)
    found = campaigns.FleetCampaign.from_row(rows[0]) if rows else None
    return None if found is None or found.over else found


def list_open(connection: sa.Connection) -> list[campaigns.FleetCampaign]:
    """Campaigns that are not over, oldest first."""
    found = []
    for row in _select_by_age(False).fetch(connection):
        with contextlib.suppress(PermanentError):  # `fetch` says which cannot be read
            found.append(campaigns.FleetCampaign.from_row(row))
    return found


def _find(connection: sa.Connection, name: str) -> campaigns.FleetCampaign | None:
    row = connection.execute(select_fleet().where(schema.fleet_campaigns.c.name == name)).mappings().first()
    return None if row is None else campaigns.FleetCampaign.from_row(row)


def _require(connection: sa.Connection, name: str) -> campaigns.FleetCampaign:
    campaign = _find(connection, name)
    if campaign is None:
        raise _unknown(name, connection.execute(sa.select(schema.fleet_campaigns.c.name)).scalars().all())
    return campaign


def _require_open(connection: sa.Connection, name: str) -> campaigns.FleetCampaign:
    campaign = _require(connection, name)
    if campaign.over:
        raise UsageError(
            f"campaign {name!r} is over ({campaign.state}: {campaign.reason})",
            "A new campaign starts from all that it measured: `farm campaign run --from NAME --name NEW`.",
        )
    return campaign


def _was_left(campaign: campaigns.FleetCampaign) -> bool:
    """Whether a campaign's engine was killed, or ended by a fault of its host or store: another may continue."""
    return campaign.state is CampaignState.INTERRUPTED and campaign.reason.startswith(
        (KILLED, ENDED_BY_FAULT, NOT_TAKEN)
    )


def set_state(connection: sa.Connection, campaign: int, state: str, finished_at: float | None) -> None:
    """Change a campaign's state."""
    table = schema.campaigns
    connection.execute(table.update().where(table.c.id == campaign).values(state=str(state), finished_at=finished_at))


def update_fleet(connection: sa.Connection, campaign: int, **values: Any) -> None:
    """Change columns of a fleet campaign."""
    table = schema.fleet_campaigns
    connection.execute(table.update().where(table.c.campaign == campaign).values(**values))


def _read_state(state: str) -> CampaignState:
    try:
        return CampaignState(state)
    except ValueError:
        raise InternalError(f"a campaign cannot be {state!r}") from None


def _unknown(name: str, names: Sequence[str]) -> UsageError:
    there = "There is none yet: `farm campaign run FILE`."
    if names:
        there = f"{foreign.suggest(name, names)} There are: {', '.join(sorted(names))}.".strip()
    return UsageError(f"there is no campaign {name!r}", there)


class CandidateKey(NamedTuple):
    """A candidate of a task."""

    board_type: str
    workload: str
    operating_point: str
    candidate: str


class KnownCandidate(NamedTuple):
    """A candidate that was tried on a board type, and `board`, one that measured it.

    `median_s` is None if the candidate itself failed. `doubted`: all trials were measured on boards that drifted then.
    """

    candidate: str
    trace_json: str
    board: str | None
    median_s: float | None
    doubted: bool = False


class TrialOutcome(NamedTuple):
    """What a board answered about a trial."""

    board: str
    recorded_at: float
    operating_point: str
    outcome: Mapping[str, Any]


class SimilarTrial(NamedTuple):
    """A good trial that another search learns from, and its workload; `median_s` in seconds."""

    workload: Workload
    board_type: str
    operating_point: str
    candidate: str
    trace_json: str
    median_s: float
