"""What revisions need so that SQLite and PostgreSQL end up with the same tables. Frozen like them: it may only grow."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

_FUNCTION = "farm_append_only"


def on_postgresql() -> bool:
    """Whether that is what is being migrated."""
    return op.get_bind().dialect.name == "postgresql"


def make_append_only(table: str, words: str) -> None:
    """Have triggers refuse to change or delete a row of a table; `words` say what its rows are."""
    if on_postgresql():
        op.execute(
            f"CREATE OR REPLACE FUNCTION {_FUNCTION}() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE restrict_violation USING MESSAGE = TG_ARGV[0] || ' are append-only'; END $$"
        )
    for action in ("UPDATE", "DELETE"):
        name = f"{table}_no_{action.lower()}"
        op.execute(
            f"CREATE TRIGGER {name} BEFORE {action} ON {table} FOR EACH ROW EXECUTE FUNCTION {_FUNCTION}('{words}')"
            if on_postgresql()
            else f"CREATE TRIGGER {name} BEFORE {action} ON {table}"
            f" BEGIN SELECT RAISE(ABORT, '{words} are append-only'); END"
        )


def put_aside(table: str, name: str) -> None:
    """Rename a table that another one is to follow. On PostgreSQL its indexes would keep their names from that."""
    if on_postgresql():
        for index in op.get_bind().scalars(
            sa.text("SELECT indexname FROM pg_indexes WHERE schemaname = current_schema AND tablename = :table"),
            {"table": table},
        ):
            op.execute(f'ALTER INDEX "{index}" RENAME TO "{index}_{name}"')
    op.rename_table(table, name)


def go_on_counting(table: str) -> None:
    """Have the next row of a table numbered after those that were copied into it; SQLite does so by itself."""
    if on_postgresql():
        op.execute(
            f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), coalesce(max(id), 1), max(id) IS NOT NULL)"  # noqa: S608
            f" FROM {table}"
        )
