"""Trials of other workloads, points and board types that may help a search: which ones, spread how.

Whether workloads are alike, and whether their trials help, is judged in `farm.search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from device_agent.protocol import Status
from farm.store import database, schema
from farm.store.base import Base
from farm.values import UNTUNED

# SQLite takes 32766 values in one statement; older builds of it take 999.
_AT_ONCE = 500


class SimilarQueries(Base):
    """Queries over `trials` that choose."""

    def fetch_similar_trials(
        self,
        workloads: Sequence[str],
        *,
        simulated: bool,
        exclude: tuple[str, str, str] | None = None,
        limit: int = 2000,
        per_task: int = 200,
    ) -> list[dict[str, Any]]:
        """Good trials of these workloads (hashes) on any board type at any operating point, the best of each first.

        A task is a workload on a board type at an operating point; `exclude` names one to leave out. A task gives at
        most `per_task` candidates, and all together at most `limit`, shared evenly: half are its best, the others are
        spread over the rest, since a model that has seen none but good candidates cannot tell them from bad ones.
        A candidate that ever computed a wrong result is left out. Each row has the trial's `workload`, `board_type`,
        `operating_point`, `candidate`, `trace_json` and `median_s` (seconds), and the workload's `name`, `flop`,
        `arguments`, `target`, `pipeline` and `module_json`, which rows of one workload share. Ordered by rank in the
        task, so that a prefix is a fair choice too.
        """
        tasks = self._fetch_tasks(workloads, simulated)
        if exclude is not None:
            tasks.pop(exclude, None)
        share = min(per_task, max(1, limit // max(1, len(tasks))))
        ranked = sorted((rank, trial) for trials in tasks.values() for rank, trial in enumerate(_choose(trials, share)))
        chosen = [trial for _, trial in ranked[:limit]]
        rows = self._fetch_by("id", schema.trials, chosen, _WANTED)
        about = self._fetch_by("hash", schema.workloads, sorted({row["workload"] for row in rows.values()}), _ABOUT)
        return [
            {key: value for key, value in row.items() if key != "id"}
            | {key: value for key, value in about[row["workload"]].items() if key != "hash"}
            for row in (rows[trial] for trial in chosen)
        ]

    def _fetch_tasks(self, workloads: Sequence[str], simulated: bool) -> dict[tuple[str, str, str], list[int]]:
        """By task, the good trials by rising median, each candidate once. Reads nothing but indexes."""
        table = schema.trials
        tasks: dict[tuple[str, str, str], list[int]] = {}
        seen: set[tuple[str, str, str, str]] = set()
        for first in range(0, len(workloads), _AT_ONCE):
            some = list(workloads[first : first + _AT_ONCE])
            with database.translated(self._database), self._engine.connect() as connection:
                wrong = {tuple(row) for row in connection.execute(_select_wrong().where(table.c.workload.in_(some)))}
                found = connection.execute(
                    _select_good().where(table.c.workload.in_(some), table.c.simulated == simulated)
                )
                for workload, board_type, point, candidate, trial in found:
                    task = (workload, board_type, point)
                    if (*task, candidate) not in seen and (workload, candidate) not in wrong:
                        seen.add((*task, candidate))
                        tasks.setdefault(task, []).append(trial)
        return tasks

    def _fetch_by(
        self, key: str, table: sa.Table, values: Sequence[Any], columns: Sequence[str]
    ) -> dict[Any, dict[str, Any]]:
        rows: dict[Any, dict[str, Any]] = {}
        for first in range(0, len(values), _AT_ONCE):
            query = sa.select(*(table.c[name] for name in columns)).where(
                table.c[key].in_(list(values[first : first + _AT_ONCE]))
            )
            rows |= {row[key]: row for row in self._rows(query)}
        return rows


_WANTED = ("id", "workload", "board_type", "operating_point", "candidate", "trace_json", "median_s")
_ABOUT = ("hash", "name", "flop", "arguments", "target", "pipeline", "module_json")


def _select_wrong() -> sa.Select[Any]:
    table = schema.trials
    # Not a bound value: SQLite takes a partial index only where it can see that the condition is the index's.
    return sa.select(table.c.workload, table.c.candidate).where(
        table.c.status == sa.literal_column(f"'{Status.WRONG_RESULT}'")
    )


def _select_good() -> sa.Select[Any]:
    table = schema.trials
    task = (table.c.workload, table.c.board_type, table.c.operating_point)
    return (
        sa.select(*task, table.c.candidate, table.c.id)
        .where(schema.is_sound(table.c.median_s), table.c.candidate != UNTUNED)
        .order_by(*task, table.c.median_s, table.c.candidate)
    )


def _choose(trials: Sequence[int], share: int) -> list[int]:
    """At most `share` of what is sorted best first: the best half of that, and the rest at even distances."""
    if len(trials) <= share:
        return list(trials)
    best = (share + 1) // 2
    rest, more = trials[best:], share - best
    # The last step ends at the worst: what bad looks like is worth knowing.
    return [*trials[:best], *(rest[(step + 1) * len(rest) // more - 1] for step in range(more))]
