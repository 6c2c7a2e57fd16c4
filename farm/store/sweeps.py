"""Sweeps and the visits to their points: start, resume, end, record. `farm.sweep` interprets them.

A visit is written once and never changed, so a killed sweep keeps all that it measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import sqlalchemy as sa

from farm.errors import InternalError, TransientError, UsageError
from farm.store import schema
from farm.store.session import StorePart
from farm.store.standing import note_seen
from farm.types import documents

if TYPE_CHECKING:
    from typing_extensions import Unpack

RUNNING = "running"
INTERRUPTED = "interrupted"
# The final states of a sweep; `voided`: its board drifted too far for points to be comparable.
ENDED = frozenset({"finished", INTERRUPTED, "failed", "voided"})

# The largest SQLite integer; its driver refuses larger ones, and no sweep has such a number.
_MAX_ID = 2**63 - 1


class StoredVisit(NamedTuple):
    """A visit to a sweep's grid point; `farm.sweep.stored` reads its measurement."""

    variant: str
    batch: int
    visit: int
    key: str
    board: str
    measurement: Mapping[str, Any]
    outcome: Mapping[str, Any]
    recorded_at: float


class NewSweep(TypedDict):
    """A sweep that begins; `settings["process"]` identifies the process that runs it."""

    command: str
    model: str
    model_sha256: str
    board_type: str
    simulated: bool
    request: Mapping[str, Any]
    goal: Mapping[str, Any]
    grid: Mapping[str, Any]
    settings: Mapping[str, Any]


class NewVisit(TypedDict):
    """A visit to the grid point `key`; `visit` numbers those of a variant and batch."""

    variant: str
    batch: int
    key: str
    visit: int
    board: str
    measurement: Mapping[str, Any]
    outcome: Mapping[str, Any]


class Sweeps(StorePart):
    """Queries on `sweeps` and `sweep_points`."""

    def start(self, **sweep: Unpack[NewSweep]) -> int:
        """Start a sweep; return its number."""
        with self._db.writing() as connection:
            at = self._db.wall_clock()
            return self._db.insert(connection, schema.sweeps, **sweep, started_at=at, state=RUNNING)

    def resume(self, sweep: int, process: Mapping[str, Any]) -> documents.StoredSweep:
        """Resume an ended sweep in `process`, without its summary; return it as `require`.

        Only one of several callers gets it. Raises TransientError if it is running, UsageError for an unknown one.
        """
        with self._db.writing() as connection:
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
            return documents.StoredSweep(**_require_row(connection, sweep))

    def finish(self, sweep: int, state: str, summary: Mapping[str, Any] | None = None) -> None:
        """Record how a sweep ended, one of `ENDED`, with its summary; without one the present summary stays.

        Raises UsageError for an unknown sweep.
        """
        if state not in ENDED:
            raise InternalError(f"a sweep cannot end as {state!r}")
        values: dict[str, Any] = {} if summary is None else {"summary": dict(summary)}
        with self._db.writing() as connection:
            _require_row(connection, sweep)
            self._update_sweep(connection, sweep, state=state, finished_at=self._db.wall_clock(), **values)

    def keep_goal(self, sweep: int, goal: Mapping[str, Any]) -> None:
        """Store the goal of a sweep's pick from now on. Raises UsageError for an unknown sweep."""
        with self._db.writing() as connection:
            _require_row(connection, sweep)
            self._update_sweep(connection, sweep, goal=dict(goal))

    def interrupt(self, is_abandoned: Callable[[Mapping[str, Any]], bool]) -> list[int]:
        """Mark running sweeps as `interrupted` if `is_abandoned` says so of their settings; return them.

        One transaction, so that a sweep resumed meanwhile is left alone. `is_abandoned` must be quick.
        """
        table = schema.sweeps
        with self._db.writing() as connection:
            running = connection.execute(
                sa.select(table.c.id, table.c.settings).where(table.c.state == RUNNING).order_by(table.c.id)
            ).all()
            abandoned = [int(sweep) for sweep, settings in running if is_abandoned(settings)]
            for sweep in abandoned:
                self._update_sweep(connection, sweep, state=INTERRUPTED, finished_at=self._db.wall_clock())
        return abandoned

    def fetch(self) -> list[documents.StoredSweep]:
        """All sweeps, newest first."""
        return self._list(select_sweeps().order_by(schema.sweeps.c.id.desc()))

    def fetch_page(self, limit: int, offset: int) -> tuple[list[documents.StoredSweep], int]:
        """A page of sweeps, newest first, as in `fetch`, and their total."""
        query = select_sweeps().order_by(schema.sweeps.c.id.desc()).limit(limit).offset(offset)
        return self._list(query), self._db.count(schema.sweeps)

    def _list(self, query: sa.Select[Any]) -> list[documents.StoredSweep]:
        return self._db.read_each("the sweep", self._db.rows(query), lambda row: documents.StoredSweep(**row))

    def require(self, sweep: int) -> documents.StoredSweep:
        """One sweep, as in `fetch`. Raises UsageError for an unknown one."""
        for found in self._list(select_sweeps().where(_is(schema.sweeps.c.id, sweep))):
            return found
        raise _unknown_sweep(sweep)

    def add_point(self, sweep: int, **visit: Unpack[NewVisit]) -> bool:
        """Record one visit.

        Returns False for a repeated visit, which changes nothing. Raises InternalError for an unknown sweep.
        """
        at = self._db.wall_clock()
        row = {"sweep": sweep, **visit, "recorded_at": at}
        with self._db.writing() as connection:
            note_seen(connection, [visit["board"]], at)
            return self._db.insert_new(connection, schema.sweep_points, row)

    def fetch_points(self, sweep: int) -> list[StoredVisit]:
        """The visits of a sweep in order of writing; none for an unknown sweep."""
        table = schema.sweep_points
        columns = (table.c[name] for name in StoredVisit._fields)
        return self._db.read(sa.select(*columns).where(_is(table.c.sweep, sweep)).order_by(table.c.id), StoredVisit)

    def _update_sweep(self, connection: sa.Connection, sweep: int, **values: Any) -> None:
        connection.execute(schema.sweeps.update().where(schema.sweeps.c.id == sweep).values(**values))


def select_sweeps() -> sa.Select[Any]:
    """Sweeps with their number of `visits`."""
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
