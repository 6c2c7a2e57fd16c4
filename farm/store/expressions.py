"""SQL expressions that several queries share."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from device_agent.protocol import Status
from farm.store.schema import campaigns, trials

# What a trial and the record of its candidate share.
OF_CANDIDATE = ("workload", "board_type", "operating_point", "simulated", "candidate")

# Imported trials may hold any number: a median outside these bounds is no time that a run takes.
SHORTEST_S, LONGEST_S = 1e-12, 1e9
# The state of the campaign that imported trials are kept under.
IMPORTED = "imported"


def is_sound(median_s: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Whether a median in seconds is a possible time."""
    return median_s.between(SHORTEST_S, LONGEST_S)


def is_own_trial(of: sa.FromClause = trials) -> sa.ColumnElement[bool]:
    """Whether a trial was made by this farm, not imported."""
    return ~sa.exists().where(campaigns.c.id == of.c.campaign, campaigns.c.state == IMPORTED)


def is_wrong(of: sa.FromClause = trials) -> sa.ColumnElement[bool]:
    """Whether a trial of this farm computed a wrong result; those of other farms condemn no candidate here."""
    # A literal: SQLite uses a partial index only if it can match the condition.
    return (of.c.status == sa.literal_column(f"'{Status.WRONG_RESULT}'")) & is_own_trial(of)


def load_json(text: str) -> Any:
    """The value of a JSON column; the text itself where Python cannot parse it, which no reader takes."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def total(column: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    """The sum of non-null values, 0 without any."""
    return sa.func.coalesce(sa.func.sum(column), 0.0)


sound_median_s = sa.case((is_sound(trials.c.median_s), trials.c.median_s)).label("median_s")
