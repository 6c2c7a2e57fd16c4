"""Records: the best verified trial of each workload; store, select and remove them.

Imports from another farm are in `merging`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import sqlalchemy as sa

from farm.errors import InternalError
from farm.store import expressions, schema
from farm.store.session import StorePart
from farm.types.states import ModelDecision
from farm.values import UNTUNED, Record

if TYPE_CHECKING:
    from typing_extensions import Unpack

_KEY = ("model_sha256", "workloads", "board_type", "operating_point", "simulated")


class Decisions(StorePart):
    """Queries on `model_decisions`."""

    def save(self, decision: ModelDecision) -> None:
        """Store a decision; replaces an earlier one for the same model at the same place."""
        table = schema.model_decisions
        row = {
            **{name: getattr(decision, name) for name in _KEY},
            "refused": dict(decision.refused),
            "evidence": dict(decision.evidence),
            "campaign": decision.campaign,
        }
        with self._db.writing() as connection:
            connection.execute(table.delete().where(*(table.c[name] == row[name] for name in _KEY)))
            connection.execute(table.insert().values(**row, decided_at=self._db.wall_clock()))

    def fetch(
        self,
        *,
        model_sha256: str | None = None,
        board_type: str | None = None,
        simulated: bool | None = None,
        campaign: int | None = None,
    ) -> list[ModelDecision]:
        """Decisions, filtered by model, board type, whether boards are simulated, and campaign, each if given."""
        table = schema.model_decisions
        wanted = {"model_sha256": model_sha256, "board_type": board_type, "simulated": simulated, "campaign": campaign}
        query = sa.select(table).where(*(table.c[name] == value for name, value in wanted.items() if value is not None))
        return [ModelDecision(**row) for row in self._db.rows(query.order_by(table.c.decided_at))]


class BestTrial(NamedTuple):
    """A candidate's fastest good trial; `median_s` in seconds."""

    id: int
    candidate: str
    median_s: float
    board: str | None
    campaign: int
    recorded_at: float


class RecordCriteria(TypedDict, total=False):
    """A selection of records; None or a missing key means any, and for `simulated` both kinds.

    `campaign`: records whose candidate it tried. `target`: a text in one of the target's values. `since` and `until`
    bound the verification time in seconds since the epoch.
    """

    workloads: Sequence[str] | None
    board_type: str | None
    operating_point: str | None
    simulated: bool | None
    campaign: int | None
    target: str | None
    since: float | None
    until: float | None
    imported: bool | None


class StoredRecords(StorePart):
    """Queries on `records`."""

    def save(self, record: Record, *, replace: bool = False) -> bool:
        """Store a verified record if it beats the present one, or with `replace` in any case.

        One verified here replaces an imported one, whose time is another farm's claim.

        Returns whether it was stored. A record with evidence is not replaced by one without for the same candidate: the
        lower time is luck. `replace` is for a finalist that re-measured slower than a single trial.
        """
        table = schema.records
        with self._db.writing() as connection:
            query = sa.select(table).where(is_of(record), expressions.is_sound(table.c.median_s))
            known = connection.execute(query).mappings().first()
            if known is not None and not replace and known["origin"] is None:
                lucky = known["candidate"] == record.candidate and known["evidence"] and not record.evidence
                if lucky or known["median_s"] <= record.median_s:
                    return False
            self.put(connection, record, self._db.wall_clock())
        return True

    def fetch(self, **choice: Unpack[RecordCriteria]) -> list[Record]:
        """Selected records, by board type and falling FLOP; only real ones by default."""
        return self._read(self._choose(choice))

    def fetch_page(self, limit: int, offset: int, **choice: Unpack[RecordCriteria]) -> tuple[list[Record], int]:
        """A page of these, in the same order, and their total."""
        return self._read(self._choose(choice).limit(limit).offset(offset)), self.count(**choice)

    def _read(self, query: sa.Select[Any]) -> list[Record]:
        return self._db.read_each("the record of", self._db.rows(query), to_record)

    def count(self, **choice: Unpack[RecordCriteria]) -> int:
        count = sa.func.count().label("count")
        chosen = self._choose(choice).order_by(None).with_only_columns(count, maintain_column_froms=True)
        return int(self._db.rows(chosen)[0]["count"])

    def _choose(self, choice: RecordCriteria) -> sa.Select[Any]:
        table, about = schema.records, schema.workloads
        query = sa.select(table, about.c.name, about.c.flop, about.c.pipeline, about.c.target)
        query = query.join(about, about.c.hash == table.c.workload).where(expressions.is_sound(table.c.median_s))
        # Down to a unique key: pages of a list share no record and miss none.
        last = (table.c.operating_point, table.c.workload, table.c.simulated)
        query = query.order_by(table.c.board_type, about.c.flop.desc(), about.c.name, *last)
        workloads, simulated = choice.get("workloads"), choice.get("simulated", False)
        target, imported = choice.get("target"), choice.get("imported")
        # Filtered in Python: a target is JSON, and workloads are few compared with records.
        targets = self._db.rows(sa.select(about.c.hash, about.c.target)) if target is not None else []
        with_target = [r["hash"] for r in targets if any(str(target) in str(value) for value in r["target"].values())]
        conditions: list[tuple[Any, Any]] = [
            (workloads, lambda: table.c.workload.in_(list(workloads or ()))),
            (choice.get("board_type"), lambda: table.c.board_type == choice["board_type"]),
            (choice.get("operating_point"), lambda: table.c.operating_point == choice["operating_point"]),
            (simulated, lambda: table.c.simulated == simulated),
            (choice.get("campaign"), lambda: _was_tried(choice["campaign"])),
            (target, lambda: table.c.workload.in_(with_target)),
            (choice.get("since"), lambda: table.c.verified_at >= choice["since"]),
            (choice.get("until"), lambda: table.c.verified_at < choice["until"]),
            (imported, lambda: table.c.origin.is_not(None) if imported else table.c.origin.is_(None)),
        ]
        for value, condition in conditions:
            if value is not None:
                query = query.where(condition())
        return query

    def fetch_best_trials(
        self, workload: str, board_type: str, operating_point: str, *, simulated: bool, limit: int = 10
    ) -> list[BestTrial]:
        """The fastest good trials of a workload, each candidate once, best first; verified or not.

        Candidates that ever computed a wrong result here are left out. Reads the index, and no more table rows than it
        returns.
        """
        table, wrong = schema.trials, schema.trials.alias("wrong")
        is_wrong = sa.exists().where(
            wrong.c.workload == table.c.workload, wrong.c.candidate == table.c.candidate, expressions.is_wrong(wrong)
        )
        found: dict[str, BestTrial] = {}
        # A finalist was measured many times: read more rows until there are enough candidates.
        rows, step = 0, 4 * limit
        while len(found) < limit:
            query = (
                sa.select(*(table.c[name] for name in BestTrial._fields))
                .where(
                    table.c.workload == workload,
                    table.c.board_type == board_type,
                    table.c.operating_point == operating_point,
                    table.c.simulated == simulated,
                    expressions.is_sound(table.c.median_s),
                    table.c.candidate != UNTUNED,
                    ~is_wrong,
                )
                .order_by(table.c.median_s, table.c.candidate)
                .offset(rows)
                .limit(step)
            )
            some = self._db.read(query, BestTrial)
            for row in some:
                found.setdefault(row.candidate, row)
            rows += len(some)
            if len(some) < step:
                break
        return list(found.values())[:limit]

    def fetch_operating_points(self, workload: str, *, simulated: bool) -> list[tuple[str, str]]:
        """The board types and operating points with good trials of a workload."""
        table = schema.trials
        query = sa.select(table.c.board_type, table.c.operating_point).distinct()
        query = query.where(
            table.c.workload == workload, table.c.simulated == simulated, expressions.is_sound(table.c.median_s)
        )
        rows = self._db.rows(query.order_by(table.c.board_type, table.c.operating_point))
        return [(row["board_type"], row["operating_point"]) for row in rows]

    def remove(self, records: Sequence[Record]) -> int:
        """Remove records, all or none, if unchanged; trials stay. Returns how many were removed."""
        table = schema.records
        with self._db.writing() as connection:
            return sum(
                connection.execute(table.delete().where(is_of(record), table.c.candidate == record.candidate)).rowcount
                for record in records
            )

    def put(self, connection: sa.Connection, record: Record, verified_at: float) -> None:
        table = schema.records
        connection.execute(table.delete().where(is_of(record)))
        row = {each.name: getattr(record, each.name) for each in table.c} | {"verified_at": verified_at}
        row |= {name: row[name] and dict(row[name]) for name in ("evidence", "origin")}
        connection.execute(table.insert().values(**row))


def is_of(record: Record) -> sa.ColumnElement[bool]:
    """The condition for a record's own row."""
    return sa.and_(*(column == getattr(record, column.name) for column in schema.records.primary_key))


def to_record(row: dict[str, Any]) -> Record:
    """Convert a record's row with its workload's `name`, `flop` and `pipeline`."""
    kept = {key: value for key, value in row.items() if key not in ("name", "target")}
    if row["origin"] is not None and not isinstance(row["origin"]["store"], str):
        raise InternalError("its origin names no store")
    return Record(**kept, workload_name=row["name"])


def _was_tried(campaign: int | None) -> sa.ColumnElement[bool]:
    trials, table = schema.trials, schema.records
    same = (trials.c[name] == table.c[name] for name in expressions.OF_CANDIDATE)
    return sa.exists().where(trials.c.campaign == campaign, *same)
