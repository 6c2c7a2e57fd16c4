"""A verification's data in the store: trials, records, events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from device_agent.protocol import Outcome
from farm.campaign.verify.programs import Program, RecordKey
from farm.store import Store
from farm.store.campaign_rows import KnownCandidate
from farm.types.campaigns import Order
from farm.values import WINNER_TRIAL, Record, Trial

# The columns of a finalist's trial that are kept in memory.
_KEPT = ("candidate", "attempt", "status", "fault_side", "median_s", "board")


class VerificationJournal:
    """One campaign's verification in the store."""

    def __init__(self, campaign: int, order: Order, store: Store) -> None:
        self._campaign, self._store = campaign, store
        # Outcomes are large, and read only for energy.
        self._kept = _KEPT if order.objective == "latency" else (*_KEPT, "outcome")
        self._simulated = {each.board_type: each.simulated for each in order.types}

    def fetch_trials(self) -> dict[RecordKey, list[dict[str, Any]]]:
        """Return earlier measurements of each task's finalists: some columns, in the order of writing."""
        found: dict[RecordKey, list[dict[str, Any]]] = defaultdict(list)
        columns = ("board_type", "workload", "operating_point", *self._kept)
        for row in self._store.trials.fetch(self._campaign, purpose=WINNER_TRIAL, columns=columns):
            key = RecordKey(row["board_type"], row["workload"], row["operating_point"])
            found[key].append({name: row[name] for name in self._kept})
        return dict(found)

    def fetch_known(self, key: RecordKey) -> list[KnownCandidate]:
        return self._store.trials.fetch_known_candidates(
            key.workload, key.board_type, key.point, self._simulated[key.board_type]
        )

    def find_record(self, key: RecordKey) -> Record | None:
        """Return the present record. An imported one does not count: its candidate takes part like any other."""
        found = self._store.records.fetch(
            workloads=[key.workload],
            board_type=key.board_type,
            operating_point=key.point,
            simulated=self._simulated[key.board_type],
        )
        return found[0] if found and found[0].origin is None else None

    def find_own_record(self, key: RecordKey) -> Record | None:
        """Return the record, where this campaign's verification wrote it."""
        record = self.find_record(key)
        return record if record is not None and (record.evidence or {}).get("campaign") == self._campaign else None

    def save_record(self, record: Record, compared: Collection[str]) -> bool:
        """Write a record; return whether it is kept.

        It replaces any candidate that it was compared with. A record that another process wrote meanwhile is replaced
        only by a faster one.
        """
        key = RecordKey(record.board_type, record.workload, record.operating_point)
        present = self.find_record(key)
        return self._store.records.save(record, replace=present is None or present.candidate in compared)

    def event(self, kind: str, key: RecordKey, name: str, message: str) -> None:
        """Write an event of a task, whose workload has a name."""
        self.note(kind, f"{name} on {key.board_type} at {key.point}", message)

    def note(self, kind: str, subject: str, message: str) -> None:
        """Write an event of a subject."""
        self._store.events.add(kind, subject, message)

    def write(
        self, key: RecordKey, program: Program, attempt: int, outcome: Outcome, held_s: float | None
    ) -> float | None:
        """Write a check or a measurement in a round; return its median in seconds, None where it failed."""
        trial = Trial(
            campaign=self._campaign,
            workload=key.workload,
            candidate=program.candidate or "",
            operating_point=key.point,
            attempt=attempt,
            outcome=outcome,
            trace_json=program.trace_json,
            library_sha256=program.sha256,
            build_s=program.build_s,
            held_s=held_s,
            board_type=key.board_type,
            purpose=WINNER_TRIAL,
        )
        self._store.trials.add(trial)
        return trial.median_s
