"""Whether a store is whole: a file's pages, the tables, the rows. Nothing is changed, and nothing is mended, here."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from device_agent.protocol import Status
from farm.store import database, schema
from farm.store.making import APPEND_ONLY
from farm.values import Health

# Another command's transaction is waited for this long.
_BUSY_TIMEOUT_S = 30.0
# A damaged file has more errors than anybody reads.
MOST_PROBLEMS = 20
# What SQLite may hold in a column of ours; a whole number is a fine float.
_TYPES: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (sa.JSON, ("text",)),
    (sa.Boolean, ("integer",)),
    (sa.Integer, ("integer",)),
    (sa.Float, ("real", "integer")),
    (sa.Text, ("text",)),
)
# What JSON columns hold; one that may be empty holds SQL's null or JSON's.
_LISTS, _OBJECTS, _NOTHING = "'array'", "'object'", ", 'null'"
_LIST_COLUMNS = frozenset({"arguments", "samples_s"})
_WORDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("boards", "health"): tuple(map(str, Health)),
    ("trials", "status"): tuple(map(str, Status)),
}
# Without them trials could be changed or deleted.
_TRIGGERS = frozenset(f"{table}_no_{action}" for table in APPEND_ONLY for action in ("update", "delete"))


def find_problems(path: Path) -> list[str]:
    """What is wrong with a store of the current schema, in words; empty where nothing is. Reads all of it.

    Raises sqlite3.Error where it cannot be read at all.
    """
    with _reading(path) as connection:
        problems = _find_damage(connection)
        if not problems:
            missing = [*_find_missing(connection)]
            problems = missing or [*_find_impossible(connection)]
    return problems[:MOST_PROBLEMS]


def find_damage(path: Path) -> list[str]:
    """What is wrong with a SQLite file, whatever its schema: pages, indexes, rows whose rows are gone.

    Raises sqlite3.Error where it cannot be read at all.
    """
    with _reading(path) as connection:
        return _find_damage(connection)


def find_server_problems(url: str) -> list[str]:
    """What is wrong with a store of the current schema on PostgreSQL, which sees to pages and types itself.

    Raises UnavailableError where it cannot be read, or has another schema.
    """
    opened = database.open_database(url)
    try:
        with database.translated(opened), opened.engine.connect() as connection:
            problems = [*_find_missing_on_server(connection)] or [*_find_impossible_on_server(connection)]
    finally:
        opened.close()
    return problems[:MOST_PROBLEMS]


def _find_missing_on_server(connection: sa.Connection) -> Iterator[str]:
    inspector = sa.inspect(connection)
    there = set(inspector.get_table_names())
    for table in schema.metadata.sorted_tables:
        if table.name not in there:
            yield f"the table {table.name} is missing"
            continue
        known = {column["name"] for column in inspector.get_columns(table.name)}
        if missing := sorted({column.name for column in table.c} - known):
            yield f"the table {table.name} has no {', '.join(missing)}"
    triggers = connection.scalars(sa.text("SELECT tgname FROM pg_trigger WHERE tgenabled = 'O' AND NOT tgisinternal"))
    for name in sorted(_TRIGGERS - set(triggers)):
        yield f"the trigger {name} is missing or switched off"


def _find_impossible_on_server(connection: sa.Connection) -> Iterator[str]:
    for table in schema.metadata.sorted_tables:
        for column in table.c:
            wrong: sa.ColumnElement[bool] | None = None
            if isinstance(column.type, sa.JSON):
                kinds = ["array" if column.name in _LIST_COLUMNS else "object", *(["null"] if column.nullable else [])]
                wrong = sa.func.json_typeof(column).not_in(kinds)
            elif (table.name, column.name) in _WORDS:
                wrong = column.not_in(_WORDS[table.name, column.name])
            elif isinstance(column.type, sa.Float):
                wrong = sa.func.abs(column) >= float("inf")  # what is no number counts as greater than all
            if wrong is None:
                continue
            count = connection.scalar(sa.select(sa.func.count()).select_from(table).where(wrong))
            if count:
                yield f"{table.name}.{column.name} cannot be right in {count} rows"


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S)) as connection:
        # What is no UTF-8 is looked at here, not refused by the driver.
        connection.text_factory = bytes
        yield connection


def _find_damage(connection: sqlite3.Connection) -> list[str]:
    try:
        said = _ask_integrity(connection)
    except UnicodeDecodeError:  # in SQLite's own words about what it met
        return ["its pages hold what is no database"]
    problems = [] if said == ["ok"] else said
    for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check").fetchmany(MOST_PROBLEMS):
        problems.append(f"row {row} of {table.decode()} refers to a row of {parent.decode()} that is gone")
    return problems[:MOST_PROBLEMS]


def _ask_integrity(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute(f"PRAGMA integrity_check({MOST_PROBLEMS})")
    return [row[0].decode(errors="replace") for row in rows]


def _find_missing(connection: sqlite3.Connection) -> Iterator[str]:
    for table in schema.metadata.sorted_tables:
        there = {row[1].decode() for row in connection.execute(f'PRAGMA table_info("{table.name}")')}
        if not there:
            yield f"the table {table.name} is missing"
        elif missing := sorted({column.name for column in table.c} - there):
            yield f"the table {table.name} has no {', '.join(missing)}"
    triggers = {row[0].decode() for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")}
    for name in sorted(_TRIGGERS - triggers):
        yield f"the trigger {name} is missing"


def _find_impossible(connection: sqlite3.Connection) -> Iterator[str]:
    """Values that no farm writes: of another type, no JSON, no finite number, no UTF-8."""
    for table in schema.metadata.sorted_tables:
        for column in table.c:
            kinds = next(names for kind, names in _TYPES if isinstance(column.type, kind))
            allowed = ", ".join(f"'{name}'" for name in kinds)
            name = f'"{column.name}"'
            wrong = f"typeof({name}) NOT IN ({allowed})"
            if isinstance(column.type, sa.JSON):
                shapes = _LISTS if column.name in _LIST_COLUMNS else _OBJECTS
                shapes += _NOTHING if column.nullable else ""
                wrong += f" OR NOT json_valid({name}) OR json_type({name}) NOT IN ({shapes})"
            elif (table.name, column.name) in _WORDS:
                words = ", ".join(f"'{word}'" for word in _WORDS[table.name, column.name])
                wrong += f" OR {name} NOT IN ({words})"
            elif isinstance(column.type, sa.Float):
                wrong += f" OR abs({name}) >= 9e999"  # how SQLite writes what is infinite
            query = f'SELECT count(*), min(rowid) FROM "{table.name}" WHERE {name} IS NOT NULL AND ({wrong})'  # noqa: S608
            count, first = connection.execute(query).fetchone()
            if count:
                yield f"{table.name}.{column.name} cannot be right in {count} rows, the first of them {first}"
