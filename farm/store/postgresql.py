"""The store in a PostgreSQL database, for coordinators on several hosts (ADR 0023).

It uses the server's clock, an advisory write lock, and connections shared by a process's threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from farm.errors import FarmError, InternalError, StoreFaultError, UnavailableError
from farm.foreign import find_first_line
from farm.store import database, expressions, schema
from farm.store.clock import Instant

try:
    import psycopg
    from psycopg.types.string import StrDumper
except ImportError as error:  # an optional dependency
    raise UnavailableError(
        f"a store on PostgreSQL needs psycopg: {error}", "Install it: pip install 'psycopg[binary]>=3.2'"
    ) from error

# Partial indexes, here too. In the schema they would load this dialect for every store.
for _table in schema.metadata.tables.values():
    for _index in _table.indexes:
        _index.dialect_options["postgresql"]["where"] = _index.dialect_options["sqlite"]["where"]

# The name of its clock: all users share it, and a restart of the server does not change it.
CLOCK = "postgresql"
# Any number unused by other locks in the database: this spells "tvm-farm".
_LOCK = int.from_bytes(b"tvm-farm", "big")
# libpq's own limit for one connection.
_CONNECT_TIMEOUT_S = 10
# A restarting server or pooler accepts connections within seconds; the caller waits out longer outages.
_RECONNECT_S = 3.0
_RECONNECT_PAUSE_S = 0.1
# A stopped writer, or one whose host is gone, is disconnected before those waiting for its lock give up.
_IDLE_WRITER_S = 10
_IDLE_READER_S = 120
# Reading millions of trials takes minutes.
_STATEMENT_TIMEOUT_S = 900
# Connections per process: the server has about a hundred in all.
_POOL, _OVERFLOW = 2, 6
_BEGIN = sa.text(
    "SELECT set_config('synchronous_commit', :commit, true),"  # noqa: S608
    " set_config('lock_timeout', :patience, true),"
    f" set_config('idle_in_transaction_session_timeout', '{_IDLE_WRITER_S}s', true),"
    f" pg_advisory_xact_lock({_LOCK}), CAST(extract(epoch FROM clock_timestamp()) AS double precision) AS now"
)
_NOW = sa.text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")
_SEQUENCE = "pg_get_serial_sequence('leases', 'token')"

_pools_lock = threading.Lock()
# By process and URL, with a use count: connections must not be used on both sides of a fork.
_pools: dict[tuple[int, str], tuple[sa.Engine, int]] = {}
# URLs reached at least once by this process: a refused connection is then a transient fault.
_reached: set[str] = set()


class PostgresqlDatabase:
    """A database used by the farm alone, in UTF-8."""

    errors: tuple[type[Exception], ...] = (psycopg.Error,)
    hint = "Is FARM_STORE right, does the server run, and may you connect? A new database is made with `createdb NAME`."

    def __init__(self, url: str) -> None:
        """Connects on first use. Raises UnavailableError without psycopg."""
        self.location = url
        self._key = (os.getpid(), url)
        with _pools_lock:
            engine, users = _pools.get(self._key) or (_make_engine(url), 0)
            _pools[self._key] = (engine, users + 1)
        self.engine = engine
        self._open = True

    def reading(self) -> sa.Connection:
        return self.engine.connect()

    @contextlib.contextmanager
    def writing(self, durably: bool) -> Iterator[sa.Connection]:
        """See `SqliteDatabase`. One statement takes the lock and reads the clock; later ones see all committed rows."""
        with (
            self.engine.connect().execution_options(isolation_level="READ COMMITTED") as connection,
            connection.begin(),
        ):
            patience = f"{database.BUSY_TIMEOUT_S * 1000:.0f}ms"
            row = connection.execute(_BEGIN, {"commit": "on" if durably else "off", "patience": patience}).one()
            connection.info["farm_now"] = (float(row.now), time.monotonic())
            yield connection

    def read_clock(self, connection: sa.Connection | None) -> Instant:
        return Instant(CLOCK, self.read_wall_clock(connection))

    def read_wall_clock(self, connection: sa.Connection | None) -> float:
        """The server's clock. In a transaction it advances from the time of the lock."""
        if connection is not None:
            then, read_at = connection.info["farm_now"]
            return float(then + time.monotonic() - read_at)
        with self.engine.connect() as own:
            return float(own.execute(_NOW).scalar_one())

    @staticmethod
    def insert(table: sa.Table) -> Any:
        return postgresql.insert(table)

    def fetch_last_token(self, connection: sa.Connection) -> int:
        """Sequences never repeat a number; transactions are serialised, so they follow the order of leases too."""
        name = connection.execute(sa.text(f"SELECT {_SEQUENCE}")).scalar_one()
        row = connection.execute(sa.text(f"SELECT last_value, is_called FROM {name}")).one()  # noqa: S608
        return int(row.last_value) if row.is_called else 0

    def set_last_token(self, connection: sa.Connection, token: int) -> None:
        connection.execute(sa.text(f"SELECT setval({_SEQUENCE}, :token)"), {"token": token})

    def translate(self, error: BaseException) -> FarmError:
        """See `SqliteDatabase`. Classes of SQLSTATE: PostgreSQL's documentation, appendix A."""
        state = getattr(error, "sqlstate", None) or ""
        text = find_first_line(error)
        if state.startswith(("22", "23")):  # an invalid value or row
            return InternalError(f"the store {self.location} refused a row: {text}")
        if state == "55P03":
            return StoreFaultError(
                f"the store {self.location} was locked by another command for {database.BUSY_TIMEOUT_S:g} s"
            )
        if isinstance(error, sa.exc.TimeoutError):
            return StoreFaultError(f"all connections of this process to {self.location} were busy for too long")
        # Deadlocks, timeouts, a server that shuts down, starts, or lacks resources, lost connections, and a standby
        # that is not promoted yet (25006).
        if state.startswith(("08", "40", "53", "57")) or state in ("25006", "25P03") or self._was_lost(error):
            return StoreFaultError(f"the store {self.location} failed just now: {text}", "It may work again soon.")
        return UnavailableError(f"the store {self.location} cannot be used: {text}", self.hint)

    def close(self) -> None:
        """Close the connections, unless others in this process use them."""
        if not self._open:
            return
        self._open = False
        with _pools_lock:
            engine, users = _pools[self._key]
            if users > 1:
                _pools[self._key] = (engine, users - 1)
                return
            del _pools[self._key]
        if os.getpid() == self._key[0]:
            engine.dispose()

    def _was_lost(self, error: BaseException) -> bool:
        """Whether a connection was lost, or cannot be re-established after an earlier success."""
        made = self.location in _reached or not str(error).startswith(("connection failed", "connection timeout"))
        return made and isinstance(error, psycopg.OperationalError) and error.sqlstate is None


class _Text(StrDumper):
    """PostgreSQL texts hold any character except NUL."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\0", "\ufffd"))


def _dump_json(value: Any) -> str:
    """JSON for PostgreSQL: non-finite numbers become null, where SQLite keeps them."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None))


def _make_engine(url: str) -> sa.Engine:
    parsed = sa.make_url(url).set(drivername="postgresql+psycopg")
    wanted = {
        "idle_in_transaction_session_timeout": f"{_IDLE_READER_S}s",
        "statement_timeout": f"{_STATEMENT_TIMEOUT_S}s",
        # Both sides notice a dead host within half a minute.
        "tcp_keepalives_idle": "10",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "4",
    }
    given = parsed.query.get("options", "")
    options = " ".join([*(f"-c {name}={value}" for name, value in wanted.items()), str(given)])
    said = parsed.query
    ours = {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "application_name": f"tvm-farm {os.uname().nodename}:{os.getpid()}",
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 4,
        "tcp_user_timeout": 30_000,
    }
    engine = sa.create_engine(
        parsed.difference_update_query(["options"]),
        isolation_level="REPEATABLE READ",  # a block reads one moment's state
        pool_size=_POOL,
        max_overflow=_OVERFLOW,
        pool_timeout=database.BUSY_TIMEOUT_S,
        pool_pre_ping=True,
        json_serializer=_dump_json,
        json_deserializer=expressions.load_json,
        # Options in the URL take precedence.
        connect_args={"options": options.strip()} | {name: value for name, value in ours.items() if name not in said},
    )
    sa.event.listen(engine, "connect", lambda connection, _: connection.adapters.register_dumper(str, _Text))
    sa.event.listen(engine, "do_connect", lambda _dialect, _record, words, named: _connect(url, words, named))
    return engine


def _connect(url: str, words: Sequence[Any], named: Mapping[str, Any]) -> psycopg.Connection[Any]:
    """Connect; retry a server reached before for `_RECONNECT_S`. Raises psycopg.OperationalError."""
    deadline = time.monotonic() + _RECONNECT_S
    while True:
        try:
            connection = psycopg.connect(*words, **named)
        except psycopg.OperationalError:
            if url not in _reached or time.monotonic() >= deadline:
                raise
            time.sleep(_RECONNECT_PAUSE_S)
        else:
            _reached.add(url)
            return connection
