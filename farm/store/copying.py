"""A store's file copied whole while others write. Whose file it is, and when, is decided elsewhere."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

# Another command's transaction is waited for this long.
_BUSY_TIMEOUT_S = 30.0


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
