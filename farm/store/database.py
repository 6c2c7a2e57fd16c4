"""Open the database: pragmas, migration to the current schema, and SQL errors in the words of `farm.errors`."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from farm.errors import InternalError, PermanentError, TransientError, UnavailableError
from farm.store import copying

# The newest revision under migrations/; checked by a test against Alembic's own idea of the head.
HEAD = "0005"
# Two commands may run at once; a writer waits this long for the other one's transaction.
BUSY_TIMEOUT_S = 30.0

_HOME_HINT = "Set FARM_HOME to a folder that you can write to and that has space."


def open_engine(path: Path) -> sa.Engine:
    """An engine on the SQLite file at `path`, made and migrated as needed.

    Raises UnavailableError where the folder cannot be written or the disk is full, and where the file is no database
    of ours or comes from a newer version; TransientError where another command holds it for `BUSY_TIMEOUT_S`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(f"cannot make the folder {path.parent}: {error.strerror}", _HOME_HINT) from error
    _keep_private(path)
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)), connect_args={"timeout": BUSY_TIMEOUT_S, "isolation_level": None}
    )
    sa.event.listen(engine, "connect", _set_pragmas)
    sa.event.listen(engine, "begin", _begin)
    try:
        with translated(path):
            with engine.connect() as connection:
                current = _revision(connection, path)
            if current != HEAD:
                _migrate(engine, path)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _keep_private(path: Path) -> None:
    """Nobody but its owner reads a new store; other users, but not a group that was let in, are kept out of an old one.

    SQLite gives the files beside it the same mode.
    """
    with contextlib.suppress(OSError):  # opening it says what is wrong
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(OSError):
            file = path.with_name(path.name + suffix)
            mode = stat.S_IMODE(file.stat().st_mode)
            if mode & 0o007:
                file.chmod(mode & ~0o007)


@contextlib.contextmanager
def writing(engine: sa.Engine, durably: bool = False) -> Iterator[sa.Connection]:
    """One transaction that holds the write lock from its start, so that what it reads stays true until it writes.

    `durably`: it is on the disk, not only in the kernel's hands, once this has returned.
    """
    options = {"farm_writes": True, "farm_durably": durably}
    with engine.connect().execution_options(**options) as connection, connection.begin():
        yield connection


def _begin(connection: sa.Connection) -> None:
    # Python's sqlite3 begins transactions late, and never for DDL; the driver is told not to, and this does instead.
    options = connection.get_execution_options()
    writes = options.get("farm_writes", False)
    if writes:
        connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if options.get('farm_durably') else 'NORMAL'}")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _set_pragmas(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    # Two commands that make the same file at once: SQLite does not let its busy time-out wait for this one change.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if not _is_busy(str(error)) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    # With WAL, NORMAL never corrupts and can lose only what the last moments before a power cut wrote.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _revision(connection: sa.Connection, path: Path) -> str | None:
    """The schema's revision, or None for an empty file. Raises UnavailableError for a stranger's database."""
    tables = sa.inspect(connection).get_table_names()
    if "alembic_version" in tables:
        return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
    if tables:
        raise UnavailableError(
            f"{path} is a database, but not one of tvm-farm: it holds {', '.join(tables[:3])}", _HOME_HINT
        )
    return None


def _migrate(engine: sa.Engine, path: Path) -> None:
    # Alembic takes 0.3 s to import, and nearly every command finds the schema current.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    config = Config()
    # ConfigParser reads %( as the start of a substitution.
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    # All or nothing, and by one command only: whoever comes second finds the work done.
    with writing(engine) as connection:
        current = _revision(connection, path)
        if current == HEAD:
            return
        if current is not None and current not in known:
            raise UnavailableError(
                f"{path} has schema {current}, which this version does not know",
                "A newer tvm-farm wrote it: update this one.",
            )
        if current is not None:
            # Within the write lock: what is kept is what is changed, and whoever comes second has nothing to do.
            copying.copy_store(path, path.with_name(f"{path.name}.{current}"))
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise PermanentError(f"cannot migrate {path}: {error}") from error


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn database errors inside the block into the farm's own."""
    try:
        yield
    except (sa.exc.IntegrityError, sqlite3.IntegrityError) as error:
        raise InternalError(f"the store {path} refused a row: {_cause(error)}") from error
    except (sa.exc.DatabaseError, sqlite3.DatabaseError) as error:
        cause = _cause(error)
        if _is_busy(cause):
            raise TransientError(f"the store {path} was locked by another command for {BUSY_TIMEOUT_S:g} s") from error
        raise UnavailableError(f"the store {path} cannot be used: {cause}", _HOME_HINT) from error


def _cause(error: Exception) -> str:
    # SQLAlchemy wraps what its cursors raise, not what a new connection's pragmas do.
    return str(getattr(error, "orig", error))


def _is_busy(cause: str) -> bool:
    return "locked" in cause or "busy" in cause
