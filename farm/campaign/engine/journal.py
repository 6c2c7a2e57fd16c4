"""The engine's writing: every trial goes to the store before anything rests on it.

What is not written when the engine dies was not measured; what is written is never measured again. A trial that does
not count (a fault of board, farm or sample) is written too, under the number of its attempt.
"""

from __future__ import annotations

import statistics

from device_agent.protocol import Outcome
from farm.campaign.engine.active import Active, Work
from farm.errors import InternalError
from farm.store import Store
from farm.values import Trial


class Journal:
    """Writes trials. Raises what the store raises: without it the engine cannot go on."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @staticmethod
    def find_median_s(outcome: Outcome) -> float | None:
        """The median latency of a good outcome in seconds."""
        if outcome.status.fault_side is not None or not outcome.latency_s:
            return None
        return statistics.median(outcome.latency_s)

    def write_counted(self, active: Active, work: Work, outcome: Outcome, held_s: float | None) -> None:
        """A trial that ended well or by its candidate's fault. Raises InternalError where it was counted before."""
        if not self._write(active, work, outcome, held_s):
            raise InternalError(f"trial {work.task} {work.candidate.hash} was counted already")
        active.forget(work.task, work.candidate.hash)

    def write_attempt(self, active: Active, work: Work, outcome: Outcome, held_s: float | None) -> None:
        """A trial that failed through no proven fault of its candidate."""
        self._write(active, work, outcome, held_s)

    def _write(self, active: Active, work: Work, outcome: Outcome, held_s: float | None) -> bool:
        side = outcome.status.fault_side
        if side is not None:
            active.count_fault(side)
        return self._store.add_trial(
            Trial(
                campaign=active.id,
                workload=work.task.workload,
                candidate=work.candidate.hash,
                operating_point=work.task.point,
                attempt=active.next_attempt(work.task, work.candidate.hash),
                outcome=outcome,
                trace_json=work.candidate.trace_json,
                library_sha256=work.sha256,
                build_s=work.build_s,
                held_s=held_s,
                board_type=work.task.board_type,
            )
        )
