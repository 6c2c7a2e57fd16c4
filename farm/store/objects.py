"""Whether a SQLite file has objects that no farm makes: views, triggers and expressions are code, which SQLite would
run. None of it runs while the objects are compared. Plain tables and indexes of a later schema are let through.
"""

from __future__ import annotations

import functools
import re
import sqlite3
from collections.abc import Iterator

import sqlalchemy as sa

from farm.store.making import make_tables

# Expressions in a table, which no table of ours has: they are computed when rows are read, checked or written.
_COMPUTED = re.compile(r"\b(CHECK|GENERATED|VIRTUAL)\b|\bAS\s*\(", re.IGNORECASE)
_MOST_OBJECTS = 1000


def find_foreign(connection: sqlite3.Connection) -> list[str]:
    """What a file of whatever schema has that no farm made, in words. To be asked before anything else is read."""
    known = _list_known()
    # The list itself is a table, which SQLite reads without running what it names.
    query = "SELECT type, name, sql FROM sqlite_master LIMIT ?"
    rows = connection.execute(query, (_MOST_OBJECTS,)).fetchall()
    if len(rows) == _MOST_OBJECTS:
        return [f"it has {_MOST_OBJECTS} tables, views, triggers and indexes or more"]
    return [problem for row in rows if (problem := _judge(known, *map(_to_text, row)))]


def find_missing_indexes(connection: sqlite3.Connection) -> list[str]:
    """The indexes of a store of the current schema that a file lacks."""
    there = {_to_text(row[0]) for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    return sorted(name for (kind, name) in _list_known() if kind == "index" and name not in there)


def _judge(known: dict[tuple[str, str], str], kind: str, name: str, sql: str) -> str:
    shown = f"the {kind} {name[:100]!r}"
    if kind == "table":
        if not re.match(r"CREATE\s+TABLE\b", sql, re.IGNORECASE):
            return f"{shown} is none of a farm's"
        return f"{shown} has computed columns or checks" if _COMPUTED.search(sql) else ""
    if kind == "index" and (not sql or ((kind, name) not in known and sql.count("(") == 1)):
        return ""  # of a primary key, or on plain columns
    if (kind, name) not in known:
        return f"{shown} is none of a farm's"
    return "" if _flatten(sql) == known[kind, name] else f"{shown} is not as a farm makes it"


@functools.cache
def _list_known() -> dict[tuple[str, str], str]:
    """Every object of a new store, with how it is made."""
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
    """The columns of a table, and whether a row can be written that does not know of each."""
    for row in connection.execute(f'PRAGMA table_xinfo("{table}")'):
        yield _to_text(row[1]), row[6] == 0 and not (row[3] and row[4] is None)
