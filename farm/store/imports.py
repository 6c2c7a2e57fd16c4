"""Records and trials of another farm: exported as plain data, imported beside one's own and always distinguished.

`farm.metaschedule` decides on the files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from device_agent.protocol import Outcome
from farm.store import expressions, schema
from farm.store.records import StoredRecords, is_of
from farm.store.session import StorePart, StoreSession
from farm.store.trials import Trials, to_row
from farm.store.workloads import Workloads
from farm.values import Record, Trial, Workload


@dataclasses.dataclass(frozen=True)
class RecordBundle:
    """A part of a farm's memory: records, the trials of their candidates, and the workloads of both.

    `trials` have their campaign's number there and `recorded_at`. `store` is the identity of their
    store.
    """

    store: str
    records: tuple[Record, ...]
    trials: tuple[tuple[Trial, float], ...]
    workloads: tuple[Workload, ...]
    # Models by number of the named campaigns.
    models: Mapping[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Taken:
    """The result of an import: how many were new, and which records replaced others."""

    workloads: int = 0
    trials: int = 0
    records: int = 0
    ours_stayed: int = 0
    theirs_won: int = 0
    refused: int = 0


def is_better(one: Record, other: Record) -> bool:
    """Whether a record is better verified: re-measured as a finalist first, then by the lower time."""
    return (one.evidence is None, one.median_s) < (other.evidence is None, other.median_s)


class Imports(StorePart):
    """Queries that give a bundle and take one in."""

    def __init__(self, db: StoreSession, workloads: Workloads, trials: Trials, records: StoredRecords) -> None:
        super().__init__(db)
        self._workloads, self._trials, self._records = workloads, trials, records

    def fetch_identity(self) -> str:
        """Return this store's unique identity."""
        [row] = self._db.rows(sa.select(schema.identity.c.id))
        return str(row["id"])

    def fetch_bundle(self, records: Sequence[Record]) -> RecordBundle:
        """Records with the good trials of their candidates, and the failed ones of wrong results."""
        table = schema.trials
        trials: list[tuple[Trial, float]] = []
        for record in records:
            same = (table.c[name] == getattr(record, name) for name in expressions.OF_CANDIDATE)
            rows = self._db.rows(sa.select(table).where(*same).order_by(table.c.id))
            trials += self._db.read_each("the trial", rows, lambda row: (_to_trial(row), float(row["recorded_at"])))
        hashes = sorted({record.workload for record in records})
        workloads = tuple(self._workloads.fetch_by_hash(hashes).values())
        campaigns = schema.campaigns
        named = sa.select(campaigns.c.id, campaigns.c.model).where(
            campaigns.c.id.in_(sorted({trial.campaign for trial, _ in trials}))
        )
        models = {row["id"]: row["model"] for row in self._db.rows(named)}
        return RecordBundle(self.fetch_identity(), tuple(records), tuple(trials), workloads, models)

    def take_in(self, bundle: RecordBundle, source: str, by: str) -> Taken:
        """Import a bundle in one transaction, idempotently.

        Trials go to separate campaigns, one for each of the other farm's, except those of candidates that were tried
        here. A record verified here stays: the next campaign measures the other farm's candidate beside it. Of two
        imported records the better verified one stays (`is_better`). A record whose candidate computed a wrong result
        here is refused. `source` names the bundle's origin for people.
        """
        taken = Taken()
        with self._db.writing() as connection:
            now = self._db.wall_clock()
            for workload in bundle.workloads:
                taken.workloads += self._db.insert_new(
                    connection, schema.workloads, {**workload.to_row(), "added_at": now}
                )
            origin = {"store": bundle.store, "source": source, "by": by, "at": now}
            campaigns: dict[int, int] = {}
            rows = []
            tried = {key: self._was_tried(connection, *key) for key in {_place(each) for each, _ in bundle.trials}}
            for trial, recorded_at in bundle.trials:
                if tried[_place(trial)]:
                    continue
                if trial.campaign not in campaigns:
                    model = bundle.models.get(trial.campaign, "")
                    campaigns[trial.campaign] = self._require_import(connection, trial.campaign, model, origin)
                row = to_row(dataclasses.replace(trial, campaign=campaigns[trial.campaign]), recorded_at)
                rows.append(row)
            taken.trials = self._trials.insert(connection, rows)
            for record in bundle.records:
                self._take_record(connection, record, origin, bundle.store, taken)
        return taken

    def _take_record(
        self, connection: sa.Connection, record: Record, origin: Mapping[str, Any], store: str, taken: Taken
    ) -> None:
        trials, table = schema.trials, schema.records
        wrong = sa.select(trials.c.id).where(
            trials.c.workload == record.workload, trials.c.candidate == record.candidate, expressions.is_wrong()
        )
        if connection.execute(wrong.limit(1)).first() is not None:
            taken.refused += 1
            return
        row = (
            connection.execute(sa.select(table).where(is_of(record), expressions.is_sound(table.c.median_s)))
            .mappings()
            .first()
        )
        if row is not None:
            own = Record(**row, workload_name=record.workload_name, flop=record.flop, pipeline=record.pipeline)
            if own.origin is None or not is_better(record, own):
                taken.ours_stayed += own.candidate != record.candidate or own.median_s != record.median_s
                return
            taken.theirs_won += 1
        # The first origin counts: a record may have passed through several farms. Only a final here makes one ours.
        first = dict(record.origin or origin)
        if first["store"] == str(connection.execute(sa.select(schema.identity.c.id)).scalar_one()):
            first = dict(origin)
        kept = dataclasses.replace(record, origin=first)
        self._records.put(connection, kept, record.verified_at or self._db.wall_clock())
        taken.records += 1

    def _was_tried(self, connection: sa.Connection, *place: Any) -> bool:
        """Whether a candidate was tried here, with any result."""
        table = schema.trials
        same = (table.c[name] == value for name, value in zip(expressions.OF_CANDIDATE, place, strict=True))
        query = sa.select(table.c.id).where(*same, expressions.is_own_trial()).limit(1)
        return connection.execute(query).first() is not None

    def _require_import(self, connection: sa.Connection, number: int, model: str, origin: Mapping[str, Any]) -> int:
        """The campaign for trials imported from one of another farm's campaigns."""
        table = schema.campaigns
        rows = connection.execute(sa.select(table.c.id, table.c.settings).where(table.c.state == expressions.IMPORTED))
        for campaign, settings in rows:
            known = settings.get("origin") or {}
            if (known.get("store"), known.get("campaign")) == (origin["store"], number):
                return int(campaign)
        return self._db.insert(
            connection,
            table,
            command="farm record import",
            model=model,
            model_sha256="",
            board_type="",
            trials_budget=0,
            settings={"origin": {**origin, "campaign": number}},
            started_at=origin["at"],
            finished_at=origin["at"],
            state=expressions.IMPORTED,
        )


def _place(trial: Trial) -> tuple[str, str, str, bool, str]:
    return trial.workload, trial.board_type, trial.operating_point, trial.outcome.simulated, trial.candidate


def _to_trial(row: Mapping[str, Any]) -> Trial:
    names = {field.name for field in dataclasses.fields(Trial)}
    kept = {key: value for key, value in row.items() if key in names}
    return Trial(**kept | {"outcome": Outcome.from_dict(row["outcome"])})
