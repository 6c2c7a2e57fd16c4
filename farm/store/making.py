"""A new store's tables: all of `schema.py`, and what keeps trials and visits as they are. Changing an old store's is
the business of `migrations/`.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import sqlalchemy as sa

from farm.store import schema

# Tables to which rows are only ever added, and what their rows are called.
APPEND_ONLY = {"trials": "trials", "sweep_points": "sweep points"}
_FUNCTION = "farm_append_only"


def make_tables(connection: sa.Connection, revision: str) -> None:
    """Make all tables in an empty database, which then counts as one of `revision`."""
    schema.metadata.create_all(connection, checkfirst=False)
    for table, words in APPEND_ONLY.items():
        _forbid_changes(connection, table, words)
    connection.execute(schema.identity.insert(), {"id": uuid.uuid4().hex})
    # As Alembic would: it goes on from here.
    connection.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    connection.execute(sa.text("INSERT INTO alembic_version (version_num) VALUES (:revision)"), {"revision": revision})


@contextlib.contextmanager
def deletable(connection: sa.Connection) -> Iterator[None]:
    """Lift what keeps trials from being deleted, within the transaction that the block is a part of."""
    name = f"{schema.trials.name}_no_delete"
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
    """Have triggers refuse to change or delete a row."""
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
