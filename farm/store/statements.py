"""Statements that are built and compiled once.

An engine runs the same few all the time, and SQLAlchemy's own work takes longer than SQLite's.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa


class _Compiled(NamedTuple):
    sql: str
    # The values in order: name, default, and what converts it.
    values: Sequence[tuple[str, Any, Any]]
    # What converts columns, by number.
    columns: Sequence[tuple[int, Any]]


class Statement:
    """A statement with `sa.bindparam`s; an INSERT or UPDATE takes the columns `keys` too."""

    def __init__(self, of: Any, keys: Collection[str] = ()) -> None:
        self._of, self._keys = of, list(keys) or None
        columns = of.selected_columns if isinstance(of, sa.Select) else ()
        self.names = tuple(str(column.key) for column in columns)
        self._types = [column.type for column in columns]
        self._compiled: _Compiled | None = None

    def fetch(self, connection: sa.Connection, values: Mapping[str, Any] | None = None) -> Sequence[Sequence[Any]]:
        """Fetch the rows of a SELECT: `names` in order."""
        if connection.dialect.name != "sqlite":
            return connection.execute(self._of, values).all()
        compiled = self._compile(connection.dialect)
        rows: list[tuple[Any, ...]] = _get_driver(connection).execute(compiled.sql, _order(compiled, values)).fetchall()
        if not compiled.columns:
            return rows
        found = [list(row) for row in rows]
        for row in found:
            for at, convert in compiled.columns:
                row[at] = convert(row[at])
        return found

    def fetch_rows(self, connection: sa.Connection, **values: Any) -> list[dict[str, Any]]:
        """As `fetch`; by name."""
        return [dict(zip(self.names, row, strict=True)) for row in self.fetch(connection, values)]

    def run(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> int:
        """Run it for each row of values; return how many rows it changed."""
        if not rows:
            return 0
        if connection.dialect.name != "sqlite":
            return connection.execute(self._of, rows, execution_options={"preserve_rowcount": True}).rowcount
        compiled = self._compile(connection.dialect)
        return _get_driver(connection).executemany(compiled.sql, [_order(compiled, row) for row in rows]).rowcount

    def _compile(self, dialect: sa.Dialect) -> _Compiled:
        if self._compiled is None:
            compiled: Any = self._of.compile(dialect=dialect, column_keys=self._keys)
            binds = [compiled.binds[name] for name in compiled.positiontup]
            kinds = [bind.type.dialect_impl(dialect).bind_processor(dialect) for bind in binds]
            values = [(bind.key, bind.value, kind) for bind, kind in zip(binds, kinds, strict=True)]
            read = (each.dialect_impl(dialect).result_processor(dialect, None) for each in self._types)
            columns = [(at, convert) for at, convert in enumerate(read) if convert]
            self._compiled = _Compiled(str(compiled), values, columns)
        return self._compiled


def _order(compiled: _Compiled, values: Mapping[str, Any] | None) -> list[Any]:
    given = values or {}
    ordered = []
    for name, default, convert in compiled.values:
        value = given.get(name, default)
        ordered.append(value if convert is None else convert(value))
    return ordered


def _get_driver(connection: sa.Connection) -> sqlite3.Connection:
    driver: Any = connection.connection.driver_connection
    return driver  # type: ignore[no-any-return]
