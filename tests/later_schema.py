"""A version of the farm that is to come: one whose stores have a table and a column more."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from farm import backup
from farm.store import database

# Written with what this version has, which `become` changes.
TODAY = database.HEAD
REVISION = f"{int(TODAY) + 1:04}"
TABLE = "later_table"


def alter(connection: sa.Connection) -> None:
    """One column and one table more."""
    connection.execute(sa.text("ALTER TABLE events ADD COLUMN later TEXT NOT NULL DEFAULT 'as before'"))
    connection.execute(sa.text(f"CREATE TABLE {TABLE} (x INTEGER PRIMARY KEY)"))


def become(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "STEPS", {REVISION: alter})
    monkeypatch.setattr(database, "HEAD", REVISION)
    monkeypatch.setattr(backup, "SCHEMA", REVISION)


def install() -> None:
    """For a process of its own."""
    become(pytest.MonkeyPatch())
