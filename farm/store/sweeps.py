"""Sweeps and the visits to their points: begun, resumed, ended, measured. What they say is `farm.sweep`'s business.

A visit is written once and never changed, so a sweep that was killed at any moment holds all it had measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from farm.errors import InternalError, TransientError, UsageError
from farm.store import schema
from farm.store.base import Base
from farm.store.standing import note_seen

RUNNING = "running"
INTERRUPTED = "interrupted"
# How a sweep ends; `voided` is one whose board drifted too far for its points to be compared.
ENDED = frozenset({"finished", INTERRUPTED, "failed", "voided"})

# SQLite's integers end here, and its driver takes no greater one; no sweep has such a number.
_MAX_ID = 2**63 - 1


class SweepQueries(Base):
    """Queries on `sweeps` and `sweep_points`."""

    def start_sweep(
        self,
        *,
        command: str,
        model: str,
        model_sha256: str,
        board_type: str,
        simulated: bool,
        request: Mapping[str, Any],
        goal: Mapping[str, Any],
        grid: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> int:
        """Note that a sweep begins; returns its number. `settings["process"]` says which process runs it."""
        with self._writing() as connection:
            done = connection.execute(
                schema.sweeps.insert().values(
                    command=command,
                    model=model,
                    model_sha256=model_sha256,
                    board_type=board_type,
                    simulated=simulated,
                    request=dict(request),
                    goal=dict(goal),
                    grid=dict(grid),
                    settings=dict(settings),
                    started_at=self._wall_clock(),
                    state=RUNNING,
                )
            )
            assert done.inserted_primary_key
            return int(done.inserted_primary_key[0])

    def resume_sweep(self, sweep: int, process: Mapping[str, Any]) -> dict[str, Any]:
        """Have an ended sweep go on in `process`, without its summary; returns it as `require_sweep` does.

        Of several callers one gets it. Raises TransientError where it is running, UsageError where there is none.
        """
        with self._writing() as connection:
            row = _require_row(connection, sweep)
            if row["state"] == RUNNING:
                holder = row["settings"].get("process") or {}
                where = f" (process {holder.get('pid')} on {holder.get('host')})" if holder else ""
                raise TransientError(f"sweep {sweep} is running{where}", "Wait until it has ended, or end it there.")
            self._update_sweep(
                connection,
                sweep,
                state=RUNNING,
                finished_at=None,
                summary=sa.null(),
                settings=row["settings"] | {"process": dict(process)},
            )
            return _require_row(connection, sweep)

    def finish_sweep(self, sweep: int, state: str, summary: Mapping[str, Any] | None = None) -> None:
        """Note how a sweep ended, one of `ENDED`, and what it says; without a summary the one that is there stays.

        Raises UsageError where there is no such sweep.
        """
        if state not in ENDED:
            raise InternalError(f"a sweep cannot end as {state!r}")
        values: dict[str, Any] = {} if summary is None else {"summary": dict(summary)}
        with self._writing() as connection:
            _require_row(connection, sweep)
            self._update_sweep(connection, sweep, state=state, finished_at=self._wall_clock(), **values)

    def keep_sweep_goal(self, sweep: int, goal: Mapping[str, Any]) -> None:
        """Keep what a sweep's pick is asked for from now on. Raises UsageError where there is no such sweep."""
        with self._writing() as connection:
            _require_row(connection, sweep)
            self._update_sweep(connection, sweep, goal=dict(goal))

    def interrupt_sweeps(self, is_abandoned: Callable[[Mapping[str, Any]], bool]) -> list[int]:
        """Note as `interrupted` the running sweeps whose settings `is_abandoned` says nobody works on; returns them.

        One transaction, so that a sweep which is resumed meanwhile is left alone. `is_abandoned` must be quick.
        """
        table = schema.sweeps
        with self._writing() as connection:
            running = connection.execute(
                sa.select(table.c.id, table.c.settings).where(table.c.state == RUNNING).order_by(table.c.id)
            ).all()
            abandoned = [int(sweep) for sweep, settings in running if is_abandoned(settings)]
            for sweep in abandoned:
                self._update_sweep(connection, sweep, state=INTERRUPTED, finished_at=self._wall_clock())
        return abandoned

    def fetch_sweeps(self) -> list[dict[str, Any]]:
        """All sweeps, the newest first, each with how many `visits` it holds.

        `started_at` and `finished_at` are seconds since the epoch, the latter None while it runs; `summary` is None
        until there is one.
        """
        return self._rows(select_sweeps().order_by(schema.sweeps.c.id.desc()))

    def require_sweep(self, sweep: int) -> dict[str, Any]:
        """One sweep, as `fetch_sweeps` shows it. Raises UsageError where there is none."""
        rows = self._rows(select_sweeps().where(_is(schema.sweeps.c.id, sweep)))
        if not rows:
            raise _unknown_sweep(sweep)
        return rows[0]

    def add_sweep_point(
        self,
        sweep: int,
        *,
        variant: str,
        batch: int,
        key: str,
        visit: int,
        board: str,
        measurement: Mapping[str, Any],
        outcome: Mapping[str, Any],
    ) -> bool:
        """Write one visit to the grid point `key`; `visit` counts those of a variant and batch.

        Returns False where that visit is there already: a second delivery changes nothing. Raises InternalError where
        there is no such sweep.
        """
        at = self._wall_clock()
        row = {
            "sweep": sweep,
            "variant": variant,
            "batch": batch,
            "key": key,
            "visit": visit,
            "board": board,
            "measurement": dict(measurement),
            "outcome": dict(outcome),
            "recorded_at": at,
        }
        with self._writing() as connection:
            note_seen(connection, [board], at)
            return self._insert_new(connection, schema.sweep_points, row)

    def fetch_sweep_points(self, sweep: int) -> list[dict[str, Any]]:
        """The visits of a sweep in the order in which they were written; none where there is no such sweep."""
        table = schema.sweep_points
        return self._rows(sa.select(table).where(_is(table.c.sweep, sweep)).order_by(table.c.id))

    def _update_sweep(self, connection: sa.Connection, sweep: int, **values: Any) -> None:
        connection.execute(schema.sweeps.update().where(schema.sweeps.c.id == sweep).values(**values))


def select_sweeps() -> sa.Select[Any]:
    """Sweeps, each with how many `visits` it holds."""
    points, sweeps = schema.sweep_points, schema.sweeps
    visits = sa.select(sa.func.count()).where(points.c.sweep == sweeps.c.id).scalar_subquery()
    return sa.select(sweeps, visits.label("visits"))


def _require_row(connection: sa.Connection, sweep: int) -> dict[str, Any]:
    row = connection.execute(select_sweeps().where(_is(schema.sweeps.c.id, sweep))).mappings().first()
    if row is None:
        raise _unknown_sweep(sweep)
    return dict(row)


def _is(column: sa.Column[int], sweep: int) -> sa.ColumnElement[bool]:
    return column == sweep if abs(sweep) <= _MAX_ID else sa.false()


def _unknown_sweep(sweep: int) -> UsageError:
    return UsageError(f"there is no sweep {sweep}", "`farm sweep list` shows those that there are.")
