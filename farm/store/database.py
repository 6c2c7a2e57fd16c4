"""Open the database: pragmas, migration to the current schema, and SQL errors in the words of `farm.errors`."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from farm.errors import PermanentError, TransientError, UnavailableError

# The newest revision under migrations/; checked by a test against Alembic's own idea of the head.
HEAD = "0001"
# Two commands may run at once; a writer waits this long for the other one's transaction.
BUSY_TIMEOUT_S = 30.0


def open_engine(path: Path) -> sa.Engine:
    """An engine on the SQLite file at `path`, made and migrated as needed.

    Raises UnavailableError where the folder cannot be written or the disk is full, and where the file is no database
    of ours or comes from a newer version.
    """
    with translated(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnavailableError(f"cannot make the folder {path.parent}: {error.strerror}", _HOME_HINT) from error
        engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_TIMEOUT_S})
        sa.event.listen(engine, "connect", _set_pragmas)
        with engine.connect() as connection:
            current = _revision(connection)
        if current != HEAD:
            _migrate(engine, current, path)
        return engine


_HOME_HINT = "Set FARM_HOME to a folder that you can write to and that has space."


def _set_pragmas(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # With WAL, NORMAL never corrupts and can lose only what the last moments before a power cut wrote.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _revision(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def _migrate(engine: sa.Engine, current: str | None, path: Path) -> None:
    # Alembic takes 0.3 s to import, and nearly every command finds the schema current.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if current is not None and current not in known:
        raise UnavailableError(
            f"{path} has schema {current}, which this version does not know",
            "A newer tvm-farm wrote it: update this one.",
        )
    with engine.begin() as connection:
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
    except sa.exc.OperationalError as error:
        cause = str(error.orig)
        if "locked" in cause or "busy" in cause:
            raise TransientError(f"the store {path} was locked by another command for {BUSY_TIMEOUT_S:g} s") from error
        raise UnavailableError(f"the store {path} cannot be used: {cause}", _HOME_HINT) from error
    except (sa.exc.DatabaseError, sqlite3.DatabaseError) as error:
        if isinstance(error, sa.exc.IntegrityError):
            raise
        cause = str(getattr(error, "orig", error))
        raise UnavailableError(f"the store {path} cannot be used: {cause}", _HOME_HINT) from error
