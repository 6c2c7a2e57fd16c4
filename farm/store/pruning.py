"""Pruning: old or excessive events are deleted automatically; trials only on request, and never those that a record
rests on.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator
from typing import Any

import sqlalchemy as sa

from farm.errors import UsageError
from farm.store import database, expressions, schema
from farm.store.session import StorePart
from farm.values import WINNER_TRIAL

# A season: an operator may look for a board's last repair.
EVENTS_KEPT_S = 90 * 86400.0
# A board probed every ten minutes has some 300 events a day; a campaign rarely a thousand in all.
EVENTS_KEPT = 2000
# Of any age: the last events are worth their rows, even with a wall clock set far ahead.
EVENTS_ALWAYS_KEPT = 100
# Over all boards, removed ones included, and over all subjects together.
EVENTS_KEPT_IN_ALL = 500_000
# Trials per transaction: first so many, then as many as fit in this time (s), which bounds how long others wait.
_FIRST_CHUNK, _LARGEST_CHUNK = 500, 20_000
_CHUNK_S = 0.25
# Size of a trial besides its outcome and trace: other columns, and five indexes (measured).
_REST_BYTES = 900
# Trials sampled for their length: they are much alike.
_SAMPLE = 200


@dataclasses.dataclass(frozen=True)
class Forgettable:
    """A finished campaign and its prunable trials: `trials` of them, while `kept` stay."""

    campaign: int
    name: str
    finished_at: float
    trials: int
    kept: int


@dataclasses.dataclass(frozen=True)
class PruningPlan:
    """What would be deleted, oldest first; `bytes` is the approximate size."""

    campaigns: tuple[Forgettable, ...]
    bytes: int

    @property
    def trials(self) -> int:
        return sum(each.trials for each in self.campaigns)


class Pruning(StorePart):
    """Deletes in many small transactions, so that no other writer waits long."""

    def prune_events(self) -> int:
        """Delete events older than `EVENTS_KEPT_S` or beyond the newest `EVENTS_KEPT`, per board and subject.

        The newest `EVENTS_ALWAYS_KEPT` of each stay, if among the last `EVENTS_KEPT_IN_ALL`. Returns how many were
        deleted.
        """
        return sum(
            self._prune(table, column)
            for table, column in (
                (schema.board_events, schema.board_events.c.board),
                (schema.events, schema.events.c.subject),
            )
        )

    def _prune(self, table: sa.Table, column: sa.Column[Any]) -> int:
        count = sa.func.count().label("count")
        oldest = sa.func.min(table.c.at).label("oldest")
        rows = self._db.rows(sa.select(column.label("name"), count, oldest).group_by(column))
        old = self._db.wall_clock() - EVENTS_KEPT_S
        with self._db.writing() as connection:
            last = sa.select(sa.func.max(table.c.id)).scalar_subquery()
            gone = connection.execute(table.delete().where(table.c.id <= last - EVENTS_KEPT_IN_ALL)).rowcount
        for row in rows:
            if row["count"] <= EVENTS_ALWAYS_KEPT or (row["count"] <= EVENTS_KEPT and row["oldest"] >= old):
                continue
            named = column == row["name"]
            newest = sa.select(table.c.id).where(named).order_by(table.c.id.desc()).limit(1)
            last_kept = newest.offset(EVENTS_KEPT - 1).scalar_subquery()
            last_sure = newest.offset(EVENTS_ALWAYS_KEPT - 1).scalar_subquery()
            aged = (table.c.at < old) & (table.c.id < last_sure)
            with self._db.writing() as connection:
                gone += connection.execute(table.delete().where(named, (table.c.id < last_kept) | aged)).rowcount
        return gone

    def plan(self, before: float | None = None, names: Collection[str] = ()) -> PruningPlan:
        """Plan the pruning of campaigns that ended before a time (s since the epoch) and have one of these names (a
        number for an unnamed campaign), each if given. Reads indexes and a few rows.

        Raises UsageError for an unknown campaign, or one that is not over.
        """
        trials, common, fleet = schema.trials, schema.campaigns, schema.fleet_campaigns
        about = sa.select(common.c.id, common.c.state, common.c.finished_at, fleet.c.name)
        about = about.outerjoin(fleet, fleet.c.campaign == common.c.id).order_by(common.c.finished_at, common.c.id)
        rows = {row["name"] or str(row["id"]): row for row in self._db.rows(about)}
        for name in names:
            if name not in rows:
                raise UsageError(f"there is no campaign {name!r}", "`farm campaign list` shows those that there are.")
            if rows[name]["finished_at"] is None:
                raise UsageError(
                    f"campaign {name!r} is not over ({rows[name]['state']})", "Its trials are what it goes on from."
                )
        chosen = {
            row["id"]: (name, row["finished_at"])
            for name, row in rows.items()
            if row["finished_at"] is not None
            and (not names or name in names)
            and (before is None or row["finished_at"] < before)
        }
        count = sa.func.count().label("n")
        # Three queries, each served by an index; a single one would read every trial.
        among = sa.select(common.c.id).where(common.c.finished_at.is_not(None))
        if before is not None:
            among = among.where(common.c.finished_at < before)
        if names:
            among = among.where(common.c.id.in_(list(chosen)))
        is_chosen = trials.c.campaign.in_(among)
        every = self._db.rows(sa.select(trials.c.campaign, count).where(is_chosen).group_by(trials.c.campaign))
        winners = sa.select(trials.c.campaign, count).where(trials.c.purpose == WINNER_TRIAL, is_chosen)
        # Trials of candidates with a record where they were measured.
        proven = sa.select(trials.c.id).join(schema.records, _proves())
        proofs = sa.select(trials.c.campaign, count).where(
            trials.c.id.in_(sa.union(proven, sa.select(trials.c.id).where(expressions.is_wrong()))),
            trials.c.purpose != WINNER_TRIAL,
        )
        kept: dict[int, int] = {}
        for query in (winners, proofs):
            for row in self._db.rows(query.group_by(trials.c.campaign)):
                kept[row["campaign"]] = kept.get(row["campaign"], 0) + row["n"]
        found = {row["campaign"]: row["n"] for row in every}
        campaigns = tuple(
            Forgettable(number, name, ended, found.get(number, 0) - kept.get(number, 0), kept.get(number, 0))
            for number, (name, ended) in chosen.items()
            if found.get(number, 0) > kept.get(number, 0)
        )
        size = self._measure_trial([each.campaign for each in campaigns]) if campaigns else 0.0
        return PruningPlan(campaigns, round(size * sum(each.trials for each in campaigns)))

    def forget_trials(self, campaign: int, by: str) -> Iterator[int]:
        """Delete a campaign's prunable trials, some per transaction; yield how many were deleted.

        Keeps trials of candidates with a record where they were measured, all verification trials, and wrong results. A
        campaign that is not over loses none. May be stopped at any time.
        """
        size, told = _FIRST_CHUNK, False
        while True:
            began = time.monotonic()
            with self._db.writing() as connection:
                gone = self._forget_some(connection, campaign, size)
                if gone and not told:
                    self._tell(connection, campaign, by)
            if not gone:
                return
            told = True
            took_s = time.monotonic() - began
            yield gone
            size = max(1, min(2 * size, int(size * _CHUNK_S / max(took_s, 1e-3)), _LARGEST_CHUNK))
            # SQLite's lock has no queue: waiting writers need a gap.
            time.sleep(took_s)

    def fetch_room(self) -> tuple[int, int | None]:
        """The database's size in bytes, and how much of it is free; None if unknown."""
        with self._db.engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                query = sa.text("SELECT pg_database_size(current_database())")
                return int(connection.execute(query).scalar_one()), None
            page, pages, free = (
                int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
                for name in ("page_size", "page_count", "freelist_count")
            )
        return page * pages, page * free

    def _forget_some(self, connection: sa.Connection, campaign: int, most: int) -> int:
        trials, common = schema.trials, schema.campaigns
        over = sa.select(common.c.id).where(common.c.id == campaign, common.c.finished_at.is_not(None))
        if connection.execute(over).first() is None:
            return 0
        query = sa.select(trials.c.id).where(trials.c.campaign == campaign, ~_is_kept()).limit(most)
        with database.deletable(connection):
            return connection.execute(trials.delete().where(trials.c.id.in_(query))).rowcount

    def _tell(self, connection: sa.Connection, campaign: int, by: str) -> None:
        fleet = schema.fleet_campaigns
        name = connection.execute(sa.select(fleet.c.name).where(fleet.c.campaign == campaign)).scalar()
        message = f"those that no record rests on, by {by}"
        self._db.add_event(connection, "trials_forgotten", name or f"campaign {campaign}", message, by)

    def _measure_trial(self, campaigns: Collection[int]) -> float:
        """The approximate size of a trial of these campaigns, in bytes."""
        trials = schema.trials
        long = sa.func.length(sa.cast(trials.c.outcome, sa.Text)) + sa.func.length(trials.c.trace_json)
        some = sa.select(long.label("long")).where(trials.c.campaign.in_(campaigns)).limit(_SAMPLE).subquery()
        [row] = self._db.rows(sa.select(sa.func.avg(some.c.long).label("long")))
        return float(row["long"] or 0.0) + _REST_BYTES


def _proves() -> sa.ColumnElement[bool]:
    trials, records = schema.trials, schema.records
    return sa.and_(*(trials.c[name] == records.c[name] for name in expressions.OF_CANDIDATE))


def _is_kept() -> sa.ColumnElement[bool]:
    return (schema.trials.c.purpose == WINNER_TRIAL) | expressions.is_wrong() | sa.exists().where(_proves())
