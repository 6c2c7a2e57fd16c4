"""Records: the best verified trial of each workload; kept, chosen by what people ask for, forgotten.

Merging those of another farm is in `merging`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from device_agent.protocol import Status
from farm.store import schema
from farm.store.base import Base
from farm.values import UNTUNED, Record


class RecordQueries(Base):
    """Queries on `records`."""

    def save_record(self, record: Record, *, replace: bool = False) -> bool:
        """Keep a verified record where it beats the one that is there, or with `replace` in any case.

        Returns whether it is kept. A candidate's record with evidence gives way to none of the same candidate without:
        the lower time is luck. `replace` is for a winner that was measured again and came out slower than one trial.
        """
        table = schema.records
        with self._writing() as connection:
            query = sa.select(table).where(is_of(record), schema.is_sound(table.c.median_s))
            known = connection.execute(query).mappings().first()
            if known is not None and not replace:
                lucky = known["candidate"] == record.candidate and known["evidence"] and not record.evidence
                if lucky or known["median_s"] <= record.median_s:
                    return False
            self._put_record(connection, record, self._wall_clock())
        return True

    def fetch_records(
        self,
        *,
        workloads: Sequence[str] | None = None,
        board_type: str | None = None,
        operating_point: str | None = None,
        simulated: bool | None = False,
        campaign: int | None = None,
        target: str | None = None,
        since: float | None = None,
        until: float | None = None,
        imported: bool | None = None,
    ) -> list[Record]:
        """Records, by board type and falling FLOP. `simulated` None asks for both kinds.

        `campaign`: those whose candidate it tried. `target`: whose target has this text in one of its values.
        `since` and `until` bound when they were verified, in seconds since the epoch.
        """
        query = _select_records()
        table = schema.records
        conditions: list[tuple[Any, Any]] = [
            (workloads, lambda: table.c.workload.in_(list(workloads or ()))),
            (board_type, lambda: table.c.board_type == board_type),
            (operating_point, lambda: table.c.operating_point == operating_point),
            (simulated, lambda: table.c.simulated == simulated),
            (campaign, lambda: _was_tried(campaign)),
            (since, lambda: table.c.verified_at >= since),
            (until, lambda: table.c.verified_at < until),
            (imported, lambda: table.c.origin.is_not(None) if imported else table.c.origin.is_(None)),
        ]
        for value, condition in conditions:
            if value is not None:
                query = query.where(condition())
        rows = self._rows(query)
        if target is not None:
            rows = [row for row in rows if any(target in str(value) for value in row["target"].values())]
        return [to_record(row) for row in rows]

    def fetch_best_trials(
        self, workload: str, board_type: str, operating_point: str, *, simulated: bool, limit: int = 10
    ) -> list[dict[str, Any]]:
        """The fastest good trials of a workload, each candidate once, the best first; whether verified or not.

        Each has `candidate`, `median_s`, `board`, `campaign` and `recorded_at`. A candidate that ever computed a wrong
        result is left out. Reads the index, and of the table no more rows than it returns.
        """
        table, wrong = schema.trials, schema.trials.alias("wrong")
        is_wrong = sa.exists().where(
            wrong.c.workload == table.c.workload,
            wrong.c.candidate == table.c.candidate,
            # Not a bound value, so that the partial index can be taken.
            wrong.c.status == sa.literal_column(f"'{Status.WRONG_RESULT}'"),
        )
        found: dict[str, dict[str, Any]] = {}
        # A winner was measured many times: asked for more rows until enough candidates are among them.
        rows, step = 0, 4 * limit
        while len(found) < limit:
            some = self._rows(
                sa.select(
                    table.c.id,
                    table.c.candidate,
                    table.c.median_s,
                    table.c.board,
                    table.c.campaign,
                    table.c.recorded_at,
                )
                .where(
                    table.c.workload == workload,
                    table.c.board_type == board_type,
                    table.c.operating_point == operating_point,
                    table.c.simulated == simulated,
                    schema.is_sound(table.c.median_s),
                    table.c.candidate != UNTUNED,
                    ~is_wrong,
                )
                .order_by(table.c.median_s, table.c.candidate)
                .offset(rows)
                .limit(step)
            )
            for row in some:
                found.setdefault(row["candidate"], row)
            rows += len(some)
            if len(some) < step:
                break
        return list(found.values())[:limit]

    def fetch_operating_points(self, workload: str, *, simulated: bool) -> list[tuple[str, str]]:
        """The board types and operating points that a workload has good trials at."""
        table = schema.trials
        query = sa.select(table.c.board_type, table.c.operating_point).distinct()
        query = query.where(
            table.c.workload == workload, table.c.simulated == simulated, schema.is_sound(table.c.median_s)
        )
        rows = self._rows(query.order_by(table.c.board_type, table.c.operating_point))
        return [(row["board_type"], row["operating_point"]) for row in rows]

    def fetch_workload_rows(self, hashes: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Workloads as the store keeps them, by hash; those that are unknown are left out."""
        found: dict[str, dict[str, Any]] = {}
        for first in range(0, len(hashes), _AT_ONCE):
            some = list(hashes[first : first + _AT_ONCE])
            found |= {row["hash"]: row for row in self._rows(sa.select(_W).where(_W.c.hash.in_(some)))}
        return found

    def remove_records(self, records: Sequence[Record]) -> int:
        """Forget records, all or none, where they are still the same; their trials stay. Returns how many are gone."""
        table = schema.records
        with self._writing() as connection:
            return sum(
                connection.execute(table.delete().where(is_of(record), table.c.candidate == record.candidate)).rowcount
                for record in records
            )

    def _put_record(self, connection: sa.Connection, record: Record, verified_at: float) -> None:
        table = schema.records
        connection.execute(table.delete().where(is_of(record)))
        connection.execute(
            table.insert().values(
                workload=record.workload,
                board_type=record.board_type,
                operating_point=record.operating_point,
                simulated=record.simulated,
                candidate=record.candidate,
                median_s=record.median_s,
                max_abs_error=record.max_abs_error,
                max_rel_error=record.max_rel_error,
                trace_json=record.trace_json,
                verified_at=verified_at,
                evidence=None if record.evidence is None else dict(record.evidence),
                origin=None if record.origin is None else dict(record.origin),
            )
        )


_W = schema.workloads
# SQLite takes 32766 values in one statement; older builds of it take 999.
_AT_ONCE = 500


def is_of(record: Record) -> sa.ColumnElement[bool]:
    """The condition for the row that a record has, or would take."""
    table = schema.records
    return (
        (table.c.workload == record.workload)
        & (table.c.board_type == record.board_type)
        & (table.c.operating_point == record.operating_point)
        & (table.c.simulated == record.simulated)
    )


def to_record(row: dict[str, Any]) -> Record:
    """A row of a record with its workload's `name`, `flop` and `pipeline`."""
    kept = {key: value for key, value in row.items() if key not in ("name", "target")}
    return Record(**kept, workload_name=row["name"])


def _select_records() -> sa.Select[Any]:
    table, about = schema.records, schema.workloads
    query = sa.select(table, about.c.name, about.c.flop, about.c.pipeline, about.c.target)
    query = query.join(about, about.c.hash == table.c.workload).where(schema.is_sound(table.c.median_s))
    return query.order_by(table.c.board_type, about.c.flop.desc(), about.c.name, table.c.operating_point)


def _was_tried(campaign: int | None) -> sa.ColumnElement[bool]:
    trials, table = schema.trials, schema.records
    return sa.exists().where(
        trials.c.campaign == campaign,
        trials.c.board_type == table.c.board_type,
        trials.c.workload == table.c.workload,
        trials.c.operating_point == table.c.operating_point,
        trials.c.candidate == table.c.candidate,
    )
