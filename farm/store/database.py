"""A store's database of either kind: open and migrate it, and translate its errors.

The differences are in `sqlite` and `postgresql`; the reasons in ADR 0023.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa

from farm.errors import FarmError, UnavailableError
from farm.settings import StoreLocation
from farm.store import postgresql, schema, sqlite
from farm.store.clock import Instant

# The schema of version 0.3, and of this one.
FIRST, HEAD = "0013", "0013"
# By later revision, in order: what alters a store of the one before, inside the migration's transaction.
STEPS: Mapping[str, Callable[[sa.Connection], None]] = {}
# How long to wait for another command's transaction.
BUSY_TIMEOUT_S = 30.0


class Database(Protocol):
    """One open database. Safe for several threads and processes."""

    engine: sa.Engine
    # What to do about an unusable database.
    hint: str
    # The driver's exceptions.
    errors: tuple[type[Exception], ...]
    # Whether opening it may migrate an older schema: no other host can be using it.
    migrates_itself: bool

    @property
    def location(self) -> StoreLocation:
        """Its location, for messages."""

    def reading(self) -> contextlib.AbstractContextManager[sa.Connection]:
        """A connection for one statement, by one thread at a time."""

    def writing(self, durably: bool) -> contextlib.AbstractContextManager[sa.Connection]:
        """One transaction that holds the write lock from its start, so that its reads stay valid."""

    def read_clock(self, connection: sa.Connection | None) -> Instant:
        """The clock shared by all users of the database; `connection` is `writing`'s, inside it."""

    def read_wall_clock(self, connection: sa.Connection | None) -> float:
        """Seconds since the epoch, for people."""

    @staticmethod
    def insert(table: sa.Table) -> Any:
        """An INSERT with `on_conflict_do_nothing` and `on_conflict_do_update`."""

    def fetch_last_token(self, connection: sa.Connection) -> int:
        """The greatest lease token ever given; 0 without any."""

    def set_last_token(self, connection: sa.Connection, token: int) -> None:
        """Make the next lease get the token after this one."""

    def translate(self, error: BaseException) -> FarmError:
        """Translate a driver's error, or a timeout for a connection."""

    def keep_copy(self, revision: str) -> None:
        """Keep a copy before a migration, if the database can. Called inside `writing`."""

    def close(self) -> None: ...


def open_database(location: StoreLocation) -> Database:
    """Open the database at `location`; create or migrate it as needed.

    Raises UnavailableError if it is unreachable, is not a farm's, is newer, or is older and shared with other hosts;
    TransientError if another command holds it for `BUSY_TIMEOUT_S`.
    """
    database = connect(location)
    try:
        current = fetch_revision(database)
        if current != HEAD:
            if current is not None and not database.migrates_itself and FIRST <= current < HEAD:
                raise UnavailableError(
                    f"{location} has schema {current}, and this version needs {HEAD}",
                    "End what works with it on all hosts and update them, then once: farm db upgrade",
                )
            migrate(database)
    except BaseException:
        database.close()
        raise
    return database


def connect(location: StoreLocation) -> Database:
    """Open the database at `location` with any schema. Raises UnavailableError."""
    if isinstance(location, Path):
        return sqlite.SqliteDatabase(location)

    return postgresql.PostgresqlDatabase(location)


def fetch_revision(database: Database) -> str | None:
    """The schema's revision; None for an empty database. Raises UnavailableError for a foreign database."""
    with translated(database), database.engine.connect() as connection:
        return _revision(connection, database)


def has_store(location: StoreLocation) -> bool:
    """Whether a store of any schema is there; creates none. Raises UnavailableError."""
    database = connect(location)
    try:
        return fetch_revision(database) is not None
    finally:
        database.close()


def migrate(database: Database) -> str | None:
    """Migrate the schema to `HEAD`, all or nothing; return the previous revision, None for an empty database.

    Raises UnavailableError for a newer schema, or one of version 0.2 and before.
    """
    # One command migrates; a second one finds the work done.
    with translated(database), database.writing(durably=True) as connection:
        current = _revision(connection, database)
        if current is None:
            schema.make_tables(connection, HEAD)
        elif current < FIRST:
            raise UnavailableError(
                f"{database.location} has schema {current}, of tvm-farm 0.2 or before; this version does not read it",
                "With that version: farm record export DIR --board-type TYPE. Then here, with a new FARM_HOME or "
                "FARM_STORE: farm record import DIR.",
            )
        elif current > HEAD:
            raise UnavailableError(
                f"{database.location} has schema {current}, which this version does not know",
                "A newer tvm-farm wrote it: update this one.",
            )
        elif current != HEAD:
            # Within the write lock, so that the copy is what is migrated, and a second command finds nothing to do.
            database.keep_copy(current)
            for revision, alter in STEPS.items():
                if revision > current:
                    alter(connection)
            connection.execute(sa.text("UPDATE alembic_version SET version_num = :head"), {"head": HEAD})
        return current


def _revision(connection: sa.Connection, database: Database) -> str | None:
    tables = sa.inspect(connection).get_table_names()
    if "alembic_version" in tables:
        return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
    if tables:
        raise UnavailableError(
            f"{database.location} is a database, but not one of tvm-farm: it holds {', '.join(tables[:3])}",
            database.hint,
        )
    return None


@contextlib.contextmanager
def translated(database: Database) -> Iterator[None]:
    """Turn database errors inside the block into the farm's own."""
    errors: tuple[type[Exception], ...] = (sa.exc.DatabaseError, sa.exc.TimeoutError, *database.errors)
    try:
        yield
    except errors as error:
        # SQLAlchemy wraps errors of its cursors, but not those of a new connection's first statements.
        raise database.translate(getattr(error, "orig", None) or error) from error
