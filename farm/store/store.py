"""Campaigns, trials, records and events, and with boards, leases and sweeps the whole store: every query of the farm.

Methods take and give the farm's own values. Each write is one transaction.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from device_agent.protocol import FaultSide, Status
from farm.store import schema
from farm.store.coverage import CoverageQueries
from farm.store.golden import GoldenQueries
from farm.store.leases import LeaseQueries
from farm.store.sweeps import SweepQueries
from farm.values import Record, Trial


class Store(LeaseQueries, GoldenQueries, SweepQueries, CoverageQueries):
    """The farm's memory in one SQLite file. Safe for several processes; one thread per instance."""

    # Campaigns

    def start_campaign(
        self,
        command: str,
        model: str,
        model_sha256: str,
        board_type: str,
        trials_budget: int,
        settings: Mapping[str, Any],
    ) -> int:
        """Note that a campaign begins; returns its number."""
        with self._writing() as connection:
            done = connection.execute(
                schema.campaigns.insert().values(
                    command=command,
                    model=model,
                    model_sha256=model_sha256,
                    board_type=board_type,
                    trials_budget=trials_budget,
                    settings=dict(settings),
                    started_at=time.time(),
                    state="running",
                )
            )
            # SQLite gives every row of this table a number; the type allows for tables without one.
            return int(done.inserted_primary_key[0]) if done.inserted_primary_key else 0

    def finish_campaign(self, campaign: int, state: str) -> None:
        """Note how a campaign ended: `finished`, `interrupted` or `failed`."""
        with self._writing() as connection:
            table = schema.campaigns
            connection.execute(
                table.update().where(table.c.id == campaign).values(state=state, finished_at=time.time())
            )

    def fetch_campaigns(self) -> list[dict[str, Any]]:
        """All campaigns, the newest first."""
        return self._rows(sa.select(schema.campaigns).order_by(schema.campaigns.c.id.desc()))

    def save_workloads(self, campaign: int, workloads: Sequence[Mapping[str, Any]]) -> None:
        """Add the workloads of a campaign: mappings with the columns of `workloads` and a `weight`."""
        with self._writing() as connection:
            for workload in workloads:
                row = {key: value for key, value in workload.items() if key != "weight"}
                connection.execute(
                    schema.workloads.insert().prefix_with("OR IGNORE").values(**row, added_at=time.time())
                )
                connection.execute(
                    schema.campaign_workloads.insert()
                    .prefix_with("OR IGNORE")
                    .values(campaign=campaign, workload=workload["hash"], weight=workload["weight"])
                )

    # Trials

    def add_trial(self, trial: Trial) -> bool:
        """Write a trial once. Returns False where its identity is there already: a second delivery changes nothing."""
        outcome = trial.outcome
        side = outcome.status.fault_side
        row = {
            "campaign": trial.campaign,
            "workload": trial.workload,
            "candidate": trial.candidate,
            "operating_point": trial.operating_point,
            "attempt": trial.attempt,
            "status": str(outcome.status),
            "fault_side": None if side is None else str(side),
            "median_s": trial.median_s,
            "board": outcome.board or None,
            "simulated": outcome.simulated,
            "outcome": outcome.to_dict(),
            "trace_json": trial.trace_json,
            "library_sha256": trial.library_sha256,
            "build_s": trial.build_s,
            "held_s": trial.held_s,
            "recorded_at": time.time(),
        }
        identity = ["campaign", "workload", "candidate", "operating_point", "attempt"]
        with self._writing() as connection:
            insert = sqlite.insert(schema.trials).values(**row).on_conflict_do_nothing(index_elements=identity)
            return connection.execute(insert).rowcount == 1

    def count_trials(self, campaign: int) -> dict[str, int]:
        """Trials by side: `ok`, `candidate_faults`, `board_faults`, `farm_faults`, `sample_faults`."""
        table = schema.trials
        rows = self._rows(
            sa.select(table.c.fault_side, sa.func.count().label("n"))
            .where(table.c.campaign == campaign)
            .group_by(table.c.fault_side)
        )
        by_side = {row["fault_side"]: row["n"] for row in rows}
        return {"ok": by_side.get(None, 0)} | {f"{side}_faults": by_side.get(str(side), 0) for side in FaultSide}

    def count_statuses(self) -> dict[str, int]:
        """All trials by status; statuses that none has are missing. Reads the whole table."""
        table = schema.trials
        rows = self._rows(sa.select(table.c.status, sa.func.count().label("n")).group_by(table.c.status))
        return {row["status"]: row["n"] for row in rows}

    def fetch_trials(self, campaign: int | None = None) -> list[dict[str, Any]]:
        """Trials in the order in which they were written, of one campaign or of all."""
        query = sa.select(schema.trials).order_by(schema.trials.c.id)
        if campaign is not None:
            query = query.where(schema.trials.c.campaign == campaign)
        return self._rows(query)

    def fetch_known_candidates(
        self, workload: str, board_type: str, operating_point: str, simulated: bool
    ) -> list[dict[str, Any]]:
        """What is known of a workload's candidates on a board type: `candidate`, `trace_json`, `median_s`.

        `median_s` is the least median of the candidate's good trials, or None where the candidate itself failed.
        Trials that failed through no fault of the candidate say nothing and are left out.
        """
        trials, campaigns = schema.trials, schema.campaigns
        wrong = sa.func.max(sa.case((trials.c.status == str(Status.WRONG_RESULT), 1), else_=0))
        query = (
            sa.select(
                trials.c.candidate,
                sa.func.min(trials.c.trace_json).label("trace_json"),
                sa.case((wrong == 1, None), else_=sa.func.min(trials.c.median_s)).label("median_s"),
            )
            .join(campaigns, campaigns.c.id == trials.c.campaign)
            .where(
                trials.c.workload == workload,
                campaigns.c.board_type == board_type,
                trials.c.operating_point == operating_point,
                trials.c.simulated == simulated,
                sa.or_(trials.c.fault_side.is_(None), trials.c.fault_side == str(FaultSide.CANDIDATE)),
            )
            .group_by(trials.c.candidate)
            .order_by(sa.func.min(trials.c.id))
        )
        return self._rows(query)

    # Records

    def save_record(self, record: Record) -> bool:
        """Keep a verified record where it beats the one that is there. Returns whether it did."""
        table = schema.records
        key = (
            (table.c.workload == record.workload)
            & (table.c.board_type == record.board_type)
            & (table.c.operating_point == record.operating_point)
            & (table.c.simulated == record.simulated)
        )
        with self._writing() as connection:
            known = connection.execute(sa.select(table.c.median_s).where(key)).scalar()
            if known is not None and known <= record.median_s:
                return False
            connection.execute(table.delete().where(key))
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
                    verified_at=time.time(),
                )
            )
        return True

    def fetch_records(
        self,
        *,
        workloads: Sequence[str] | None = None,
        board_type: str | None = None,
        operating_point: str | None = None,
        simulated: bool | None = False,
    ) -> list[Record]:
        """Records, by board type and falling FLOP. `simulated` None asks for both kinds."""
        table, about = schema.records, schema.workloads
        query = sa.select(table, about.c.name, about.c.flop, about.c.pipeline).join(
            about, about.c.hash == table.c.workload
        )
        if workloads is not None:
            query = query.where(table.c.workload.in_(list(workloads)))
        if board_type is not None:
            query = query.where(table.c.board_type == board_type)
        if operating_point is not None:
            query = query.where(table.c.operating_point == operating_point)
        if simulated is not None:
            query = query.where(table.c.simulated == simulated)
        rows = self._rows(query.order_by(table.c.board_type, about.c.flop.desc(), about.c.name))
        return [
            Record(
                **{key: value for key, value in row.items() if key != "name"},
                workload_name=row["name"],
            )
            for row in rows
        ]

    # Events

    def add_event(self, kind: str, subject: str, message: str) -> None:
        """Append one line to the log of what happened."""
        with self._writing() as connection:
            connection.execute(
                schema.events.insert().values(at=time.time(), kind=kind, subject=subject, message=message)
            )

    def fetch_events(self) -> list[dict[str, Any]]:
        """All events, oldest first."""
        return self._rows(sa.select(schema.events).order_by(schema.events.c.id))
