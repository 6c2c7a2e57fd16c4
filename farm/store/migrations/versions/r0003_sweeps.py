"""Sweeps, and the visits to their points (append-only). What was there is not touched."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables, and triggers that refuse to change or delete a visit."""
    op.create_table(
        "sweeps",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("command", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("model_sha256", sa.Text, nullable=False),
        sa.Column("board_type", sa.Text, nullable=False),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("goal", sa.JSON, nullable=False),
        sa.Column("grid", sa.JSON, nullable=False),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("finished_at", sa.Float),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("summary", sa.JSON),
    )
    op.create_table(
        "sweep_points",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("sweep", sa.Integer, sa.ForeignKey("sweeps.id"), nullable=False),
        sa.Column("variant", sa.Text, nullable=False),
        sa.Column("batch", sa.Integer, nullable=False),
        sa.Column("visit", sa.Integer, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("board", sa.Text, nullable=False),
        sa.Column("measurement", sa.JSON, nullable=False),
        sa.Column("outcome", sa.JSON, nullable=False),
        sa.Column("recorded_at", sa.Float, nullable=False),
        sa.UniqueConstraint("sweep", "variant", "batch", "visit", name="uq_sweep_points_identity"),
    )
    for action in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER sweep_points_no_{action.lower()} BEFORE {action} ON sweep_points "
            "BEGIN SELECT RAISE(ABORT, 'sweep points are append-only'); END"
        )


def downgrade() -> None:
    """Drop both tables with all sweeps; the schema before knows none."""
    for table in ("sweep_points", "sweeps"):
        op.drop_table(table)
