"""The first schema: boards, workloads, campaigns, trials (append-only), records, events."""

import sqlalchemy as sa
from alembic import op

from farm.store.columns import Integer, Text
from farm.store.migrations.portable import make_append_only

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables, and triggers that refuse to change or delete a trial."""
    op.create_table(
        "boards",
        sa.Column("name", Text, primary_key=True),
        sa.Column("board_type", Text, nullable=False),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("description", sa.JSON, nullable=False),
        sa.Column("added_at", sa.Float, nullable=False),
        sa.Column("seen_at", sa.Float, nullable=False),
    )
    op.create_table(
        "workloads",
        sa.Column("hash", Text, primary_key=True),
        sa.Column("name", Text, nullable=False),
        sa.Column("flop", sa.Float, nullable=False),
        sa.Column("arguments", sa.JSON, nullable=False),
        sa.Column("target", sa.JSON, nullable=False),
        sa.Column("pipeline", Text, nullable=False),
        sa.Column("module_json", Text, nullable=False),
        sa.Column("added_at", sa.Float, nullable=False),
    )
    op.create_table(
        "campaigns",
        sa.Column("id", Integer, primary_key=True, autoincrement=True),
        sa.Column("command", Text, nullable=False),
        sa.Column("model", Text, nullable=False),
        sa.Column("model_sha256", Text, nullable=False),
        sa.Column("board_type", Text, nullable=False),
        sa.Column("trials_budget", Integer, nullable=False),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("finished_at", sa.Float),
        sa.Column("state", Text, nullable=False),
    )
    op.create_table(
        "campaign_workloads",
        sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
        sa.Column("workload", Text, sa.ForeignKey("workloads.hash"), primary_key=True),
        sa.Column("weight", Integer, nullable=False),
    )
    op.create_table(
        "trials",
        sa.Column("id", Integer, primary_key=True, autoincrement=True),
        sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), nullable=False),
        sa.Column("workload", Text, sa.ForeignKey("workloads.hash"), nullable=False),
        sa.Column("candidate", Text, nullable=False),
        sa.Column("operating_point", Text, nullable=False),
        sa.Column("attempt", Integer, nullable=False),
        sa.Column("status", Text, nullable=False),
        sa.Column("fault_side", Text),
        sa.Column("median_s", sa.Float),
        sa.Column("board", Text),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("outcome", sa.JSON, nullable=False),
        sa.Column("trace_json", Text, nullable=False),
        sa.Column("library_sha256", Text),
        sa.Column("build_s", sa.Float),
        sa.Column("held_s", sa.Float),
        sa.Column("recorded_at", sa.Float, nullable=False),
        sa.UniqueConstraint(
            "campaign", "workload", "candidate", "operating_point", "attempt", name="uq_trials_identity"
        ),
    )
    op.create_index("ix_trials_workload", "trials", ["workload", "operating_point", "median_s"])
    op.create_table(
        "records",
        sa.Column("workload", Text, sa.ForeignKey("workloads.hash"), primary_key=True),
        sa.Column("board_type", Text, primary_key=True),
        sa.Column("operating_point", Text, primary_key=True),
        sa.Column("simulated", sa.Boolean, primary_key=True),
        sa.Column("candidate", Text, nullable=False),
        sa.Column("median_s", sa.Float, nullable=False),
        sa.Column("max_abs_error", sa.Float, nullable=False),
        sa.Column("max_rel_error", sa.Float, nullable=False),
        sa.Column("trace_json", Text, nullable=False),
        sa.Column("verified_at", sa.Float, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("id", Integer, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("kind", Text, nullable=False),
        sa.Column("subject", Text, nullable=False),
        sa.Column("message", Text, nullable=False),
    )
    make_append_only("trials", "trials")


def downgrade() -> None:
    """Drop everything; the first revision has nothing before it."""
    for table in ("events", "records", "trials", "campaign_workloads", "campaigns", "workloads", "boards"):
        op.drop_table(table)
