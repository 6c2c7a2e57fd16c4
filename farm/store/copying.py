"""A store's file copied whole while others write. Whose file it is, and when, is decided elsewhere."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

# Another command's transaction is waited for this long.
_BUSY_TIMEOUT_S = 30.0
_TRIES = 5


def copy_store(source: Path, target: Path) -> None:
    """Copy a SQLite file as it stands between two transactions; nobody has to wait. `target` is replaced in one step.

    The copy is one file that its owner alone may read. Raises sqlite3.Error or OSError; then `target` is as it was.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}")
    with _new_part(part) as new:
        with contextlib.closing(
            sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT_S)
        ) as old:
            old.backup(new)
        _finish(new, part, target)


def copy_others_store(source: Path, target: Path) -> None:
    """Copy another farm's file as `copy_store` does, and write nothing into its folder, not even SQLite's lock files.

    Raises sqlite3.Error or OSError, also where the file changed at every try.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}")
    for tried in itertools.count(1):
        before = _read_state(source)
        # Without a log beside it no process has the file open: SQLite need not lock it.
        words = "mode=ro" if before[-1] else "mode=ro&immutable=1"
        with _new_part(part) as new:
            with contextlib.closing(
                sqlite3.connect(f"{source.absolute().as_uri()}?{words}", uri=True, timeout=_BUSY_TIMEOUT_S)
            ) as old:
                old.backup(new)
            if before[-1] or _read_state(source) == before:
                _finish(new, part, target)
                return
        if tried == _TRIES:
            raise OSError(f"{source} was written to whenever it was read")


def _read_state(source: Path) -> tuple[int, int, bool]:
    """What changes where a file is written to: its date, its size, and whether SQLite's log lies beside it."""
    status = source.stat()
    return status.st_mtime_ns, status.st_size, source.with_name(f"{source.name}-wal").exists()


@contextlib.contextmanager
def _new_part(part: Path) -> Iterator[sqlite3.Connection]:
    """An empty database that its owner alone may read; it and what lies beside it are gone after the block."""
    try:
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        with contextlib.closing(sqlite3.connect(part)) as new:
            yield new
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            part.with_name(part.name + suffix).unlink(missing_ok=True)


def _finish(new: sqlite3.Connection, part: Path, target: Path) -> None:
    """Put a finished copy in its place."""
    new.execute("PRAGMA journal_mode=DELETE")  # nothing beside it that could be forgotten
    new.close()
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(target)
