"""A version of the farm that is to come: one whose stores have a table and a column more."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from farm import backup
from farm.store import database

# Written with what this version has, which `become` changes.
TODAY = database.HEAD
REVISION = f"{int(TODAY) + 1:04}"
TABLE = "later_table"
_SCRIPT = f'''"""What a later version changes."""

import sqlalchemy as sa
from alembic import op

revision = "{REVISION}"
down_revision = "{TODAY}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """One column and one table more."""
    op.add_column("events", sa.Column("later", sa.Text, nullable=False, server_default="as before"))
    op.create_table("{TABLE}", sa.Column("x", sa.Integer, primary_key=True))
'''


def write(folder: pathlib.Path) -> pathlib.Path:
    shutil.copytree(database._MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / f"r{REVISION}_later.py").write_text(_SCRIPT)
    return folder


def become(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
    monkeypatch.setattr(database, "_MIGRATIONS", folder)
    monkeypatch.setattr(database, "HEAD", REVISION)
    monkeypatch.setattr(backup, "SCHEMA", REVISION)
