"""A store's database of either kind: open it, translate its errors, make its tables with the triggers that keep the
append-only ones.

The differences are in `sqlite` and `postgresql`; the reasons in ADR 0023.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import sqlalchemy as sa

from farm.errors import UnavailableError
from farm.settings import StoreLocation
from farm.store import postgresql, sqlite
from farm.store.schema import identity, metadata, trials

# The one schema that this version reads. A table or column more takes the next number.
HEAD = "0013"
# How long to wait for another command's transaction.
BUSY_TIMEOUT_S = 30.0

# One open database, safe for several threads and processes. A string: PostgreSQL's driver is an optional dependency.
Database: TypeAlias = "sqlite.SqliteDatabase | postgresql.PostgresqlDatabase"
# Append-only tables, with the name of their rows.
APPEND_ONLY = {"trials": "trials", "sweep_points": "sweep points"}
_FUNCTION = "farm_append_only"


def open_database(location: StoreLocation) -> Database:
    """Open the database at `location`; make its tables where it is empty.

    Raises UnavailableError if it is unreachable, is not a farm's, or has another version's schema; TransientError if
    another command holds it for `BUSY_TIMEOUT_S`.
    """
    database = connect(location)
    try:
        if fetch_revision(database) != HEAD:
            _make(database)
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


def _make(database: Database) -> None:
    """Make the tables of an empty database, all or nothing. Raises UnavailableError for another version's schema."""
    # One command makes them; a second one finds the work done.
    with translated(database), database.writing(durably=True) as connection:
        current = _revision(connection, database)
        if current is None:
            make_tables(connection, HEAD)
        elif current < HEAD:
            raise UnavailableError(
                f"{database.location} has schema {current}, of an earlier tvm-farm; this version does not read it",
                "With that version: farm record export DIR --board-type TYPE. Then here, with a new FARM_HOME or "
                "FARM_STORE: farm record import DIR.",
            )
        elif current > HEAD:
            raise UnavailableError(
                f"{database.location} has schema {current}, which this version does not know",
                "A newer tvm-farm wrote it: update this one.",
            )


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


def make_tables(connection: sa.Connection, revision: str) -> None:
    """Create all tables in an empty database, at `revision`."""
    metadata.create_all(connection, checkfirst=False)
    for table, words in APPEND_ONLY.items():
        _forbid_changes(connection, table, words)
    connection.execute(identity.insert(), {"id": uuid.uuid4().hex})
    # The name is Alembic's, which version 0.2 used: that version knows this store to be newer.
    connection.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    connection.execute(sa.text("INSERT INTO alembic_version (version_num) VALUES (:revision)"), {"revision": revision})


@contextlib.contextmanager
def deletable(connection: sa.Connection) -> Iterator[None]:
    """Allow deletion of trials within the enclosing transaction."""
    name = f"{trials.name}_no_delete"
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text(f"ALTER TABLE trials DISABLE TRIGGER {name}"))
        yield
        connection.execute(sa.text(f"ALTER TABLE trials ENABLE TRIGGER {name}"))
        return
    made = connection.execute(sa.text("SELECT sql FROM sqlite_master WHERE name = :name"), {"name": name}).scalar_one()
    connection.execute(sa.text(f"DROP TRIGGER {name}"))
    yield
    connection.exec_driver_sql(made)


def _forbid_changes(connection: sa.Connection, table: str, words: str) -> None:
    """Add triggers that refuse to change or delete a row."""
    on_server = connection.dialect.name == "postgresql"
    if on_server:
        connection.exec_driver_sql(
            f"CREATE OR REPLACE FUNCTION {_FUNCTION}() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE restrict_violation USING MESSAGE = TG_ARGV[0] || ' are append-only'; END $$"
        )
    for action in ("UPDATE", "DELETE"):
        name = f"{table}_no_{action.lower()}"
        connection.exec_driver_sql(
            f"CREATE TRIGGER {name} BEFORE {action} ON {table} FOR EACH ROW EXECUTE FUNCTION {_FUNCTION}('{words}')"
            if on_server
            else f"CREATE TRIGGER {name} BEFORE {action} ON {table}"
            f" BEGIN SELECT RAISE(ABORT, '{words} are append-only'); END"
        )
