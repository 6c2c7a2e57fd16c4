"""What earlier runs cover and cost, in numbers: what a plan is made from. The trials themselves are read in `store`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from device_agent.protocol import FaultSide
from farm.store import schema
from farm.store.base import Base

# Enough for a steady median; older trials were measured under other settings.
NEWEST_TRIALS = 2000
# SQLite takes 32766 values in one statement; older builds of it take 999.
_HASHES_AT_ONCE = 500


@dataclasses.dataclass(frozen=True)
class TrialCosts:
    """Medians over the newest trials, in seconds; None where no trial says: board held, compiler busy."""

    trials: int = 0
    held_s: float | None = None
    build_s: float | None = None


class CoverageQueries(Base):
    """Queries over `trials` and `records` that count."""

    def fetch_trial_costs(self, board_type: str, *, simulated: bool) -> TrialCosts:
        """What a trial costs on boards of a type, over the newest `NEWEST_TRIALS` that reached one."""
        trials = schema.trials
        rows = self._rows(
            sa.select(trials.c.held_s, trials.c.build_s)
            .where(
                trials.c.board_type == board_type,
                trials.c.simulated == simulated,
                trials.c.held_s.is_not(None),
            )
            .order_by(trials.c.id.desc())
            .limit(NEWEST_TRIALS)
        )
        held = [row["held_s"] for row in rows]
        built = [row["build_s"] for row in rows if row["build_s"] is not None]
        return TrialCosts(
            len(rows), statistics.median(held) if held else None, statistics.median(built) if built else None
        )

    def count_known_candidates(
        self, workloads: Sequence[str], board_type: str, *, simulated: bool
    ) -> Mapping[tuple[str, str], int]:
        """By workload and operating point, how many candidates trials speak of, good ones and bad; none: left out."""
        trials = schema.trials
        rows: list[dict[str, Any]] = []
        for first in range(0, len(workloads), _HASHES_AT_ONCE):
            rows += self._rows(
                sa.select(
                    trials.c.workload,
                    trials.c.operating_point,
                    sa.func.count(sa.distinct(trials.c.candidate)).label("n"),
                )
                .where(
                    trials.c.workload.in_(list(workloads[first : first + _HASHES_AT_ONCE])),
                    trials.c.board_type == board_type,
                    trials.c.simulated == simulated,
                    sa.or_(trials.c.fault_side.is_(None), trials.c.fault_side == str(FaultSide.CANDIDATE)),
                )
                .group_by(trials.c.workload, trials.c.operating_point)
            )
        return {(row["workload"], row["operating_point"]): row["n"] for row in rows}

    def fetch_recorded(self, workloads: Sequence[str], board_type: str, *, simulated: bool) -> set[tuple[str, str]]:
        """The workloads, each with an operating point, that have a record."""
        table = schema.records
        found: set[tuple[str, str]] = set()
        for first in range(0, len(workloads), _HASHES_AT_ONCE):
            rows = self._rows(
                sa.select(table.c.workload, table.c.operating_point).where(
                    table.c.workload.in_(list(workloads[first : first + _HASHES_AT_ONCE])),
                    table.c.board_type == board_type,
                    table.c.simulated == simulated,
                )
            )
            found |= {(row["workload"], row["operating_point"]) for row in rows}
        return found
