"""Make the tables of a new store, and triggers that keep its append-only ones."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import sqlalchemy as sa

from farm.store.schema import identity, metadata, trials

# Append-only tables, with the name of their rows.
APPEND_ONLY = {"trials": "trials", "sweep_points": "sweep points"}

_FUNCTION = "farm_append_only"


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
