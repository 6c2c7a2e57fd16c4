"""Sweeps, and the visits to their points (append-only). What was there is not touched."""

import sqlalchemy as sa
from alembic import op

from farm.store.columns import Integer, Text
from farm.store.migrations.portable import make_append_only

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables, and triggers that refuse to change or delete a visit."""
    op.create_table(
        "sweeps",
        sa.Column("id", Integer, primary_key=True, autoincrement=True),
        sa.Column("command", Text, nullable=False),
        sa.Column("model", Text, nullable=False),
        sa.Column("model_sha256", Text, nullable=False),
        sa.Column("board_type", Text, nullable=False),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("goal", sa.JSON, nullable=False),
        sa.Column("grid", sa.JSON, nullable=False),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("finished_at", sa.Float),
        sa.Column("state", Text, nullable=False),
        sa.Column("summary", sa.JSON),
    )
    op.create_table(
        "sweep_points",
        sa.Column("id", Integer, primary_key=True, autoincrement=True),
        sa.Column("sweep", Integer, sa.ForeignKey("sweeps.id"), nullable=False),
        sa.Column("variant", Text, nullable=False),
        sa.Column("batch", Integer, nullable=False),
        sa.Column("visit", Integer, nullable=False),
        sa.Column("key", Text, nullable=False),
        sa.Column("board", Text, nullable=False),
        sa.Column("measurement", sa.JSON, nullable=False),
        sa.Column("outcome", sa.JSON, nullable=False),
        sa.Column("recorded_at", sa.Float, nullable=False),
        sa.UniqueConstraint("sweep", "variant", "batch", "visit", name="uq_sweep_points_identity"),
    )
    make_append_only("sweep_points", "sweep points")


def downgrade() -> None:
    """Drop both tables with all sweeps; the schema before knows none."""
    for table in ("sweep_points", "sweeps"):
        op.drop_table(table)
