"""Check whether a store is intact: a file's pages, the tables, the rows. Changes and repairs nothing."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from device_agent.protocol import Status
from farm.store import database, schema
from farm.store.database import APPEND_ONLY, make_tables
from farm.values import Health

# What no farm's table has: SQLite would evaluate expressions on reads and writes, and drop rows at conflicts.
_COMPUTED = re.compile(r"\b(CHECK|GENERATED|VIRTUAL)\b|\bAS\s*\(|\bON\s+CONFLICT\b", re.IGNORECASE)
_UNIQUE = re.compile(r"CREATE\s+UNIQUE\b", re.IGNORECASE)
_MOST_OBJECTS = 1000
# Enough to report: a damaged file has more errors than a person reads.
MOST_PROBLEMS = 20
_STEPS_PER_LOOK = 100_000
# Dates in seconds since 1970, up to the year 5138: calendars end there.
_LATEST_S = 1e11
# A farm's deepest document has ten levels; Python's parser recurses at each.
_MOST_NESTED = 50
_LONGEST_IDENTITY = 64
# In JSON: numbers that may be infinite or too long for Python, and halves of characters.
_SUSPECT = re.compile(rb"\d{300}|\d[eE]\+?\d{3}|\\u[dD][89a-fA-F]")
# The SQLite types accepted in a column; an integer is a valid float.
_TYPES: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (sa.JSON, ("text",)),
    (sa.Boolean, ("integer",)),
    (sa.Integer, ("integer",)),
    (sa.Float, ("real", "integer")),
    (sa.Text, ("text",)),
)
_LIST_COLUMNS = frozenset({"arguments", "samples_s"})
_WORDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("boards", "health"): tuple(map(str, Health)),
    ("trials", "status"): tuple(map(str, Status)),
}
# Without them trials could be changed or deleted.
_TRIGGERS = frozenset(f"{table}_no_{action}" for table in APPEND_ONLY for action in ("update", "delete"))


def find_foreign(connection: sqlite3.Connection) -> list[str]:
    """Describe objects in a file of any schema that no farm made. Call it before any other read."""
    known = _list_known()
    # The list itself is a table, which SQLite reads without running the objects in it.
    query = "SELECT type, name, sql FROM sqlite_master LIMIT ?"
    rows = connection.execute(query, (_MOST_OBJECTS,)).fetchall()
    if len(rows) == _MOST_OBJECTS:
        return [f"it has {_MOST_OBJECTS} tables, views, triggers and indexes or more"]
    return [problem for row in rows if (problem := _judge(known, *map(_to_text, row)))]


def _judge(known: dict[tuple[str, str], str], kind: str, name: str, sql: str) -> str:
    shown = f"the {kind} {name[:100]!r}"
    if kind == "table":
        if not re.match(r"CREATE\s+TABLE\b", sql, re.IGNORECASE):
            return f"{shown} is none of a farm's"
        return f"{shown} has computed columns, checks or conflict clauses" if _COMPUTED.search(sql) else ""
    is_plain = (kind, name) not in known and sql.count("(") == 1 and not _UNIQUE.match(sql)
    if kind == "index" and (not sql or is_plain):
        return ""  # of a constraint, or on plain columns; a unique one would drop rows
    if (kind, name) not in known:
        return f"{shown} is none of a farm's"
    return "" if _flatten(sql) == known[kind, name] else f"{shown} is not as a farm makes it"


@functools.cache
def _list_known() -> dict[tuple[str, str], str]:
    """Every object of a new store, with its SQL."""
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        make_tables(connection, "")
        rows = connection.exec_driver_sql("SELECT type, name, sql FROM sqlite_master").fetchall()
    engine.dispose()
    return {(kind, name): _flatten(sql or "") for kind, name, sql in rows}


def _flatten(sql: str) -> str:
    return " ".join(sql.split())


def _to_text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def columns_of(connection: sqlite3.Connection, table: str) -> Iterator[tuple[str, bool]]:
    """The columns of a table, and whether a row can be inserted without each."""
    for row in connection.execute(f'PRAGMA table_xinfo("{table}")'):
        yield _to_text(row[1]), row[6] == 0 and not (row[3] and row[4] is None)


def _list_unique(table: sa.Table) -> frozenset[frozenset[str | None]]:
    """The sets of columns that the current schema makes unique."""
    keys = [each for each in table.constraints if isinstance(each, sa.PrimaryKeyConstraint | sa.UniqueConstraint)]
    sets = [key.columns for key in keys] + [index.columns for index in table.indexes if index.unique]
    return frozenset(frozenset(column.name for column in columns) for columns in sets)


def _read_unique(connection: sqlite3.Connection, table: str) -> frozenset[frozenset[str]]:
    rows = connection.execute(f'PRAGMA index_list("{table}")').fetchall()
    names = [_to_text(row[1]) for row in rows if row[2]]
    return frozenset(
        frozenset(_to_text(row[2]) for row in connection.execute(f'PRAGMA index_info("{name}")')) for name in names
    )


# A disk reads at least 5 MB/s; a slower check is stuck in an endless computation.
_LEAST_S, _BYTES_PER_S = 60.0, 5e6
# Above all numbers of a farm, FLOP included; JSON and boards' counters hold integers up to 2^53.
_MOST_FLOAT, _MOST_INTEGER = 1e18, 2**53
# The shapes of JSON columns; a nullable one holds SQL's null or JSON's.
_LISTS, _OBJECTS, _NOTHING = "'array'", "'object'", ", 'null'"


def find_problems(path: Path) -> list[str]:
    """Describe what is wrong with a store of the current schema; empty if nothing is. Reads all of it.

    Raises sqlite3.Error if it is unreadable.
    """
    with _reading(path) as connection:
        problems = _find_damage(connection)
        if not problems:
            missing = [*_find_missing(connection)]
            problems = missing or [*_find_impossible(connection)]
    return problems[:MOST_PROBLEMS]


def find_damage(path: Path) -> list[str]:
    """Describe what is wrong with a SQLite file of any schema: pages, indexes, dangling references.

    Raises sqlite3.Error if it is unreadable.
    """
    with _reading(path) as connection:
        return _find_damage(connection)


def find_server_problems(url: str) -> list[str]:
    """Describe what is wrong with a store of the current schema on PostgreSQL, which checks pages and types itself.

    Raises UnavailableError if it is unreadable, or has another schema.
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
        indexes = [index["column_names"] for index in inspector.get_indexes(table.name) if index.get("unique")]
        if frozenset(map(frozenset, indexes)) - _list_unique(table):
            yield f"the table {table.name} has unique columns that are none of a farm's"
    query = "SELECT tgname FROM pg_trigger WHERE tgenabled = 'O' AND NOT tgisinternal"
    triggers = set(connection.scalars(sa.text(query)))
    for name in sorted(_TRIGGERS - triggers):
        yield f"the trigger {name} is missing or switched off"
    for name in sorted(triggers - _TRIGGERS):
        yield f"the trigger {name} is none of a farm's"


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
                wrong = ~column.between(*_find_bounds(column))  # NaN compares greater than all
            elif isinstance(column.type, sa.Integer) and not isinstance(column.type, sa.Boolean):
                wrong = ~column.between(-_MOST_INTEGER, _MOST_INTEGER)
            if wrong is None:
                continue
            count = connection.scalar(sa.select(sa.func.count()).select_from(table).where(wrong))
            if count:
                yield f"{table.name}.{column.name} cannot be right in {count} rows"
    identities = connection.scalar(sa.select(sa.func.count()).select_from(schema.identity))
    if identities != 1:
        yield f"it has {identities} identities where a store has one"


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    limit_s = _LEAST_S + path.stat().st_size / _BYTES_PER_S
    deadline = time.monotonic() + limit_s
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=database.BUSY_TIMEOUT_S)) as connection:
        # Invalid UTF-8 is reported here, not refused by the driver.
        connection.text_factory = bytes
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS_PER_LOOK)
        try:
            yield connection
        except sqlite3.OperationalError as error:
            if "interrupted" in str(error):
                raise sqlite3.OperationalError(f"it was not read within {limit_s:.0f} s") from error
            raise


def _find_damage(connection: sqlite3.Connection) -> list[str]:
    if foreign := find_foreign(connection):
        return foreign[:MOST_PROBLEMS]
    try:
        rows = connection.execute(f"PRAGMA integrity_check({MOST_PROBLEMS})")
        said = [row[0].decode(errors="replace") for row in rows]
    except UnicodeDecodeError:  # in SQLite's own message
        return ["its pages are not a database's"]
    problems = [] if said == ["ok"] else said
    for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check").fetchmany(MOST_PROBLEMS):
        problems.append(f"row {row} of {table.decode()} refers to a row of {parent.decode()} that is gone")
    return problems[:MOST_PROBLEMS]


def _find_missing(connection: sqlite3.Connection) -> Iterator[str]:
    for table in schema.metadata.sorted_tables:
        there = dict(columns_of(connection, table.name))
        known = {column.name for column in table.c}
        if not there:
            yield f"the table {table.name} is missing"
        elif missing := sorted(known - there.keys()):
            yield f"the table {table.name} has no {', '.join(missing)}"
        elif foreign := sorted(name for name, is_plain in there.items() if not is_plain and name not in known):
            yield f"the table {table.name} has columns that are none of a farm's: {', '.join(foreign)}"
        elif _read_unique(connection, table.name) - _list_unique(table):
            yield f"the table {table.name} has unique columns that are none of a farm's"
    indexes = {_to_text(row[0]) for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    for name in sorted({name for kind, name in _list_known() if kind == "index"} - indexes):
        yield f"the index {name} is missing"
    triggers = {row[0].decode() for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")}
    for name in sorted(_TRIGGERS - triggers):
        yield f"the trigger {name} is missing"


def _find_impossible(connection: sqlite3.Connection) -> Iterator[str]:
    """Values that no farm writes: wrong type, invalid JSON, non-finite numbers, invalid UTF-8."""
    connection.create_function("is_read", 2, _is_read, deterministic=True)
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
                wrong += f" OR {name} NOT BETWEEN {' AND '.join(map(repr, _find_bounds(column)))}"
            elif isinstance(column.type, sa.Integer) and not isinstance(column.type, sa.Boolean):
                wrong += f" OR {name} NOT BETWEEN {-_MOST_INTEGER} AND {_MOST_INTEGER}"
            if kinds == ("text",):
                wrong += f" OR NOT is_read(CAST({name} AS BLOB), {isinstance(column.type, sa.JSON)})"
            query = f'SELECT count(*), min(rowid) FROM "{table.name}" WHERE {name} IS NOT NULL AND ({wrong})'  # noqa: S608
            count, first = connection.execute(query).fetchone()
            if count:
                yield f"{table.name}.{column.name} cannot be right in {count} rows, the first of them {first}"
    (identities, longest) = connection.execute("SELECT count(*), max(length(id)) FROM identity").fetchone()
    if identities != 1 or not 0 < longest <= _LONGEST_IDENTITY:
        yield f"it has {identities} identities where a store has one"
    for (token,) in connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'leases'"):
        if not is_token(token):
            yield "its counter of leases is used up"


def _is_read(data: bytes, is_json: int) -> bool:
    """Whether Python reads a text, and writes the value of valid JSON again, which is not nested too deep."""
    with contextlib.suppress(ValueError, RecursionError):
        text = data.decode()
        if is_json and (data.count(b"{") + data.count(b"[") > _MOST_NESTED or _SUSPECT.search(data)):
            value = json.loads(text)
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
            return _is_flat(value)
        return True
    return False


def is_token(value: object) -> bool:
    """Whether a lease number is valid: an exhausted counter issues no more leases."""
    return isinstance(value, int) and 0 <= value < _MOST_INTEGER


def _find_bounds(column: sa.Column[Any]) -> tuple[float, float]:
    """The bounds of a number that a farm writes."""
    is_date = column.name.endswith(("_at", "state_since", "health_since")) or column.name in ("at", "since", "until")
    return (0.0, _LATEST_S) if is_date else (-_MOST_FLOAT, _MOST_FLOAT)


def _is_flat(value: Any) -> bool:
    depth, level = 0, [value]
    while level:
        depth += 1
        if depth > _MOST_NESTED:
            return False
        level = [
            each
            for value in level
            if isinstance(value, dict | list)
            for each in (value.values() if isinstance(value, dict) else value)
        ]
    return True
