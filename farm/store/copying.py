"""A store's file copied whole while others write, and looked over. Whose file it is, and when, is decided elsewhere."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

# Another command's transaction is waited for this long.
_BUSY_TIMEOUT_S = 30.0
# A damaged file has as many errors as one likes to read.
_MOST_PROBLEMS = 20


def copy_store(source: Path, target: Path) -> None:
    """Copy a SQLite file as it stands between two transactions; nobody has to wait. `target` is replaced in one step.

    The copy is one file that its owner alone may read. Raises sqlite3.Error or OSError; then `target` is as it was.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        with (
            contextlib.closing(
                sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT_S)
            ) as old,
            contextlib.closing(sqlite3.connect(part)) as new,
        ):
            old.backup(new)
            new.execute("PRAGMA journal_mode=DELETE")  # nothing beside it that could be forgotten
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            part.with_name(part.name + suffix).unlink(missing_ok=True)


def find_damage(path: Path) -> list[str]:
    """What is wrong with a SQLite file: its pages, its indexes, rows that refer to rows that are gone. Reads all of it.

    Raises sqlite3.Error where it cannot be read at all.
    """
    with contextlib.closing(
        sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT_S)
    ) as connection:
        said = [str(row[0]) for row in connection.execute(f"PRAGMA integrity_check({_MOST_PROBLEMS})")]
        problems = [] if said == ["ok"] else said
        orphans = connection.execute("PRAGMA foreign_key_check").fetchmany(_MOST_PROBLEMS)
        problems += [f"row {row[1]} of {row[0]} refers to a row of {row[2]} that is gone" for row in orphans]
    return problems[:_MOST_PROBLEMS]
