"""The store in a SQLite file, for one machine: its permissions and transactions."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from farm import folders
from farm.errors import FarmError, InternalError, StoreFaultError, UnavailableError
from farm.store import database, expressions
from farm.store.clock import Instant, read_clock

_TRIES = 5


def copy_store(source: Path, target: Path) -> None:
    """Copy a SQLite file between two transactions, without blocking writers; `target` is replaced atomically.

    The copy is readable by its owner alone. Raises sqlite3.Error or OSError; then `target` is as it was.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}")
    with _new_part(part) as new:
        _fill(new, source, "mode=ro")
        _finish(new, part, target)


def copy_others_store(source: Path, target: Path) -> None:
    """Copy another farm's file as `copy_store` does, writing nothing into its folder, not even SQLite's lock files.

    Raises sqlite3.Error or OSError, also if the file changed at every try.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}")
    for tried in itertools.count(1):
        before = _read_state(source)
        # Without a log beside it no process has the file open: SQLite need not lock it.
        words = "mode=ro" if before[-1] else "mode=ro&immutable=1"
        with _new_part(part) as new:
            _fill(new, source, words)
            if before[-1] or _read_state(source) == before:
                _finish(new, part, target)
                return
        if tried == _TRIES:
            raise OSError(f"{source} was written to whenever it was read")


def _read_state(source: Path) -> tuple[int, int, bool]:
    """What a write to a file changes: its date, its size, and whether SQLite's log exists."""
    status = source.stat()
    return status.st_mtime_ns, status.st_size, source.with_name(f"{source.name}-wal").exists()


@contextlib.contextmanager
def _new_part(part: Path) -> Iterator[sqlite3.Connection]:
    """An empty database, readable by its owner alone; removed with its side files after the block."""
    try:
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        with contextlib.closing(sqlite3.connect(part)) as new:
            yield new
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            part.with_name(part.name + suffix).unlink(missing_ok=True)


def _fill(new: sqlite3.Connection, source: Path, words: str) -> None:
    where = f"{source.absolute().as_uri()}?{words}"
    with contextlib.closing(sqlite3.connect(where, uri=True, timeout=database.BUSY_TIMEOUT_S)) as old:
        old.backup(new)


def _finish(new: sqlite3.Connection, part: Path, target: Path) -> None:
    """Move a finished copy into place."""
    new.execute("PRAGMA journal_mode=DELETE")  # no side files that could be left behind
    new.close()
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(target)


class SqliteDatabase:
    """A file in WAL mode. All its users share one kernel, and so its clocks."""

    # The driver's exceptions. SQLite's message about a damaged file may quote bytes that are no text.
    errors: tuple[type[Exception], ...] = (sqlite3.DatabaseError, UnicodeDecodeError)
    # What to do about an unusable database.
    hint = "Set FARM_HOME to a folder that you can write to and that has space."

    def __init__(self, path: Path) -> None:
        """Create the file if missing. Raises UnavailableError for an unwritable folder."""
        self.location = self._path = path
        try:
            folders.require_private(path.parent)
        except OSError as error:
            raise UnavailableError(f"cannot make the folder {path.parent}: {error.strerror}", self.hint) from error
        _keep_private(path)
        self.engine = sa.create_engine(
            sa.URL.create("sqlite", database=str(path)),
            creator=lambda: _connect(path),
            poolclass=sa.QueuePool,
            json_deserializer=expressions.load_json,
        )
        sa.event.listen(self.engine, "begin", _begin)
        sa.event.listen(self.engine, "checkin", _drop_if_still)
        self._reader: sa.Connection | None = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection for one statement, by one thread at a time.

        It stays open: a loan and a transaction take longer than most reads.
        """
        if self._reader is None:
            self._reader = self.engine.connect().execution_options(farm_reads=True)
        is_kept = False
        try:
            yield self._reader
            is_kept = not isinstance(self._reader.connection.driver_connection, _Still)
        finally:
            if not is_kept:
                reader, self._reader = self._reader, None
                reader.close()

    @contextlib.contextmanager
    def writing(self, durably: bool) -> Iterator[sa.Connection]:
        """One transaction that holds the write lock from its start, so that its reads stay valid.

        `durably`: on disk, not only in the kernel's cache, once this returns.
        """
        options = {"farm_writes": True, "farm_durably": durably}
        with self.engine.connect().execution_options(**options) as connection, connection.begin():
            yield connection

    def read_clock(self, connection: sa.Connection | None) -> Instant:
        """The clock shared by all users of the database, the kernel's; `connection` is `writing`'s, inside it."""
        return read_clock()

    def read_wall_clock(self, connection: sa.Connection | None) -> float:
        """Seconds since the epoch, for people."""
        return time.time()

    @staticmethod
    def insert(table: sa.Table) -> Any:
        """An INSERT with `on_conflict_do_nothing` and `on_conflict_do_update`."""
        return sqlite.insert(table)

    def fetch_last_token(self, connection: sa.Connection) -> int:
        """The greatest lease token ever given; 0 without any. AUTOINCREMENT stores its last number here."""
        return int(connection.execute(sa.text("SELECT seq FROM sqlite_sequence WHERE name = 'leases'")).scalar() or 0)

    def set_last_token(self, connection: sa.Connection, token: int) -> None:
        """Make the next lease get the token after this one."""
        there = sa.text("UPDATE sqlite_sequence SET seq = :token WHERE name = 'leases'")
        if not connection.execute(there, {"token": token}).rowcount:
            first = sa.text("INSERT INTO sqlite_sequence (name, seq) VALUES ('leases', :token)")
            connection.execute(first, {"token": token})

    def translate(self, error: BaseException) -> FarmError:
        """Translate a driver's error, or a timeout for a connection."""
        if isinstance(error, sqlite3.IntegrityError):
            return InternalError(f"the store {self.location} refused a row: {error}")
        if isinstance(error, sa.exc.TimeoutError) or "locked" in str(error) or "busy" in str(error):
            return StoreFaultError(
                f"the store {self.location} was locked by another command for {database.BUSY_TIMEOUT_S:g} s"
            )
        if "readonly" in str(error):
            return UnavailableError(
                f"the store {self.location} cannot be used for writing: its disk is full or read-only", self.hint
            )
        return UnavailableError(f"the store {self.location} cannot be used: {error}", self.hint)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self.engine.dispose()


def _keep_private(path: Path) -> None:
    """Make a new store private to its owner; close an old one to other users, but not to an admitted group.

    SQLite gives its side files the same mode.
    """
    with contextlib.suppress(OSError):  # opening it reports the problem
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(OSError):
            file = path.with_name(path.name + suffix)
            mode = stat.S_IMODE(file.stat().st_mode)
            if mode & 0o007:
                file.chmod(mode & ~0o007)


def _begin(connection: sa.Connection) -> None:
    # Python's sqlite3 begins transactions late, and never for DDL: its own handling is off, and this replaces it.
    options = connection.get_execution_options()
    if options.get("farm_reads", False):
        return  # statement by statement
    writes = options.get("farm_writes", False)
    driver: Any = connection.connection.driver_connection
    if writes:
        driver.execute(f"PRAGMA synchronous={'FULL' if options.get('farm_durably') else 'NORMAL'}")
    driver.execute("BEGIN IMMEDIATE" if writes else "BEGIN")


class _Still(sqlite3.Connection):
    """Reads a file as an immutable snapshot."""


def _connect(path: Path) -> sqlite3.Connection:
    """Connect; if the disk is full, to the file as it is, so that it is at least readable."""
    connection = sqlite3.connect(path, database.BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        _set_pragmas(connection)
    except sqlite3.OperationalError as error:
        connection.close()
        beside = path.with_name(f"{path.name}-wal")
        # The log beside it is part of the data, and cannot be read without space for an index.
        if "locked" in str(error) or not path.stat().st_size or (beside.exists() and beside.stat().st_size):
            raise
        still = sqlite3.connect(
            f"{path.absolute().as_uri()}?immutable=1", isolation_level=None, check_same_thread=False, uri=True,
            factory=_Still,
        )  # fmt: skip
        try:
            still.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.DatabaseError:
            still.close()
            raise error from None
        return still
    return connection


def _drop_if_still(connection: Any, record: Any) -> None:
    # Once there is space, other writers may commit what this snapshot would never see.
    if isinstance(connection, _Still):
        record.invalidate()


def _set_pragmas(connection: sqlite3.Connection) -> None:
    cursor = connection.cursor()
    # Two commands create one file: SQLite's busy timeout does not cover this change.
    deadline = time.monotonic() + database.BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    # With WAL, NORMAL never corrupts; a power cut can lose only the last moments' writes.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
