"""One open database: a transaction per write, reads, and the two clocks. `StorePart` is the base of its parts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from farm.closing import Closing
from farm.errors import InternalError, PermanentError, StoreFaultError
from farm.settings import StoreLocation
from farm.store import database, schema
from farm.store.clock import Instant

# SQLite takes 32766 values in one statement; older builds of it take 999.
VALUES_AT_ONCE = 500
# What readers raise for values that no farm writes.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, InternalError, PermanentError)
R = TypeVar("R")
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Statement:
    """A statement that is built and compiled once: SQLAlchemy's own work takes longer than SQLite's.

    `of` has `sa.bindparam`s for what changes; an INSERT or UPDATE takes the columns `keys` too.
    """

    def __init__(self, of: Any, keys: Collection[str] = ()) -> None:
        self._of, self._keys = of, list(keys) or None
        columns = of.selected_columns if isinstance(of, sa.Select) else ()
        self.names = tuple(str(column.key) for column in columns)
        self._types = [column.type for column in columns]
        # SQL, the values in order (name, default, converter), and converters of columns by number.
        self._compiled: tuple[str, list[tuple[Any, ...]], list[tuple[int, Any]]] | None = None

    def fetch(self, connection: sa.Connection, **values: Any) -> list[dict[str, Any]]:
        """Fetch the rows of a SELECT."""
        return [dict(zip(self.names, row, strict=True)) for row in self.fetch_tuples(connection, values)]

    def fetch_tuples(self, connection: sa.Connection, values: Mapping[str, Any] | None = None) -> Sequence[Any]:
        """As `fetch`, in the order of `names`."""
        if connection.dialect.name != "sqlite":
            return connection.execute(self._of, values).all()
        sql, orders, columns = self._compile(connection.dialect)
        driver: Any = connection.connection.driver_connection
        rows = [list(row) for row in driver.execute(sql, _order(orders, values or {}))]
        for row in rows:
            for at, convert in columns:
                row[at] = convert(row[at])
        return rows

    def run(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> int:
        """Run it for each row of values; return how many rows it changed."""
        if not rows:
            return 0
        if connection.dialect.name != "sqlite":
            return connection.execute(self._of, rows, execution_options={"preserve_rowcount": True}).rowcount
        sql, orders, _ = self._compile(connection.dialect)
        driver: Any = connection.connection.driver_connection
        return int(driver.executemany(sql, [_order(orders, row) for row in rows]).rowcount)

    def _compile(self, dialect: sa.Dialect) -> tuple[str, list[tuple[Any, ...]], list[tuple[int, Any]]]:
        if self._compiled is None:
            compiled: Any = self._of.compile(dialect=dialect, column_keys=self._keys)
            binds = [compiled.binds[name] for name in compiled.positiontup]
            read = (each.dialect_impl(dialect).result_processor(dialect, None) for each in self._types)
            self._compiled = (
                str(compiled),
                [(bind.key, bind.value, bind.type.dialect_impl(dialect).bind_processor(dialect)) for bind in binds],
                [(at, convert) for at, convert in enumerate(read) if convert],
            )
        return self._compiled


def _order(orders: Sequence[tuple[Any, ...]], given: Mapping[str, Any]) -> list[Any]:
    values = ((given.get(name, default), convert) for name, default, convert in orders)
    return [value if convert is None else convert(value) for value, convert in values]


_ADD_EVENT = Statement(schema.events.insert(), ("at", "kind", "subject", "message", "by"))


class StoreSession(Closing):
    """An open store. Safe for several processes; one thread per instance."""

    def __init__(
        self,
        location: StoreLocation,
        clock: Callable[[], Instant] | None = None,
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        """Open or create the store: a file, or a database by its URL. Raises as `open_database`.

        Leases and cool-downs use `clock`; people are shown `wall_clock`. Both default to the database's, so that all
        its users agree.
        """
        self.location = location
        self._given_clock, self._given_wall_clock = clock, wall_clock
        self.database = database.open_database(location)
        self.engine = self.database.engine
        self._writer: sa.Connection | None = None
        # What `read_each` left out, in order.
        self.unreadable: dict[str, None] = {}

    def close(self) -> None:
        self.database.close()

    @contextlib.contextmanager
    def writing(self, durably: bool = False) -> Iterator[sa.Connection]:
        """`durably`: the write survives a power cut once this returns.

        Inside another block it is a part of that one, and undone alone where it raises.
        """
        if (outer := self._writer) is not None:
            with database.translated(self.database), outer.begin_nested():
                yield outer
            return
        with database.translated(self.database), self.database.writing(durably) as connection:
            self._writer = connection
            try:
                yield connection
            finally:
                self._writer = None

    def rows(self, query: sa.Select[Any] | Statement, connection: sa.Connection | None = None) -> list[dict[str, Any]]:
        """Fetch the rows of a query by column; inside a transaction on its `connection`."""
        if connection is None:
            names, rows = self._fetch(query)
        else:
            names, rows = _execute(query, connection)
        # Not `mappings()`, which is three times slower: campaigns have a hundred thousand trials.
        return [dict(zip(names, row, strict=True)) for row in rows]

    def rows_among(self, query: sa.Select[Any], column: sa.Column[Any], values: Sequence[Any]) -> list[dict[str, Any]]:
        """Fetch the rows with one of these values in a column, as few values at once as a statement takes."""
        parts = (values[first : first + VALUES_AT_ONCE] for first in range(0, len(values), VALUES_AT_ONCE))
        return [row for part in parts for row in self.rows(query.where(column.in_(list(part))))]

    def read_each(self, kind: str, rows: Iterable[R], read: Callable[[R], T]) -> list[T]:
        """What `read` makes of rows; one that it cannot read is left out, noted and logged as a `kind` of thing."""
        found = []
        for row in rows:
            try:
                found.append(read(row))
            except _UNREADABLE as error:
                name = (row.get("name") or row.get("id")) if isinstance(row, Mapping) else getattr(row, "id", "")
                text = f"{kind} {name} cannot be read: {' '.join(str(error).split())[:200]}"
                if text not in self.unreadable:
                    _log.warning("left out: %s (`farm store check` lists all)", text)
                self.unreadable[text] = None
        return found

    def read(self, query: sa.Select[Any] | Statement, kind: Callable[..., T]) -> list[T]:
        """Fetch the rows of a query as `kind`, which takes the columns in their order."""
        return list(itertools.starmap(kind, self._fetch(query)[1]))

    def _fetch(self, query: sa.Select[Any] | Statement) -> tuple[tuple[str, ...], Sequence[Sequence[Any]]]:
        """Fetch columns and rows; retry once on another connection if it was lost."""
        try:
            return self._fetch_once(query)
        except StoreFaultError as error:
            if not getattr(error.__cause__, "connection_invalidated", False):
                raise
            return self._fetch_once(query)

    def _fetch_once(self, query: sa.Select[Any] | Statement) -> tuple[tuple[str, ...], Sequence[Sequence[Any]]]:
        with database.translated(self.database), self.database.reading() as connection:
            try:
                return _execute(query, connection)
            except (sa.exc.OperationalError, sqlite3.OperationalError) as error:
                # In this order: a lost connection cannot be asked for.
                if "decode to UTF-8" not in str(error) or (raw := connection.connection.driver_connection) is None:
                    raise
                raw.text_factory = lambda data: data.decode(errors="replace")  # slower, so only where it has to be
            return _execute(query, connection)

    def count(self, table: sa.Table, *conditions: sa.ColumnElement[bool]) -> int:
        """The number of rows of a table that meet all conditions."""
        query = sa.select(sa.func.count().label("rows")).select_from(table).where(*conditions)
        return int(self.rows(query)[0]["rows"])

    def insert(self, connection: sa.Connection, table: sa.Table, **row: Any) -> int:
        """Insert a row; return its number."""
        done = connection.execute(table.insert().values(**row))
        assert done.inserted_primary_key
        return int(done.inserted_primary_key[0])

    def insert_new(self, connection: sa.Connection, table: sa.Table, row: dict[str, Any]) -> bool:
        """Insert a row unless it violates a unique constraint; return whether it was inserted."""
        return self.insert_all_new(connection, table, [row]) == 1

    def insert_all_new(self, connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> int:
        """As `insert_new`, for rows of the same columns; return how many were inserted."""
        return _make_insert(self.database.insert, table, tuple(rows[0]), False).run(connection, rows)

    def replace(self, connection: sa.Connection, table: sa.Table, *rows: dict[str, Any]) -> None:
        """Insert rows of the same columns; each replaces these columns of the row with its primary key."""
        if rows:
            _make_insert(self.database.insert, table, tuple(rows[0]), True).run(connection, rows)

    def add_event(self, connection: sa.Connection, kind: str, subject: str, message: str, by: str = "") -> None:
        """Append an event; `by` is who ordered it, if a person did."""
        about = {"at": self.wall_clock(), "kind": kind, "subject": subject, "message": message, "by": by}
        _ADD_EVENT.run(connection, [about])

    def clock(self) -> Instant:
        if self._given_clock is not None:
            return self._given_clock()
        with database.translated(self.database):
            return self.database.read_clock(self._writer)

    def wall_clock(self) -> float:
        if self._given_wall_clock is not None:
            return self._given_wall_clock()
        with database.translated(self.database):
            return self.database.read_wall_clock(self._writer)


def _execute(
    query: sa.Select[Any] | Statement, connection: sa.Connection
) -> tuple[tuple[str, ...], Sequence[Sequence[Any]]]:
    if isinstance(query, Statement):
        return query.names, query.fetch_tuples(connection)
    found = connection.execute(query)
    return tuple(found.keys()), found.all()


@functools.cache
def _make_insert(
    make: Callable[[sa.Table], Any], table: sa.Table, columns: tuple[str, ...], replaces: bool
) -> Statement:
    """An INSERT for rows of these columns that replaces, or leaves, rows with which one conflicts."""
    insert = make(table)
    if not replaces:
        return Statement(insert.on_conflict_do_nothing(index_elements=_find_conflict(table)).inline(), columns)
    key = [column.name for column in table.primary_key]
    changed = {name: insert.excluded[name] for name in columns if name not in key}
    return Statement(insert.on_conflict_do_update(index_elements=key, set_=changed), columns)


def _find_conflict(table: sa.Table) -> list[str] | None:
    """The columns whose conflict an insert expects; None where the schema has several kinds of conflict."""
    if any(index.unique for index in table.indexes):
        return None
    unique = next((each for each in table.constraints if isinstance(each, sa.UniqueConstraint)), table.primary_key)
    return [column.name for column in unique.columns]


class StorePart:
    """A part of the store: the queries on some of its tables."""

    def __init__(self, db: StoreSession) -> None:
        self._db = db
