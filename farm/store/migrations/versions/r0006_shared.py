"""Stores that several hosts share: who carries out campaigns, the order of their workloads, where records come from."""

import sqlalchemy as sa
from alembic import op

from farm.store.columns import Integer, Text
from farm.store.migrations.portable import on_postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; workloads keep the order that their rows had, records were made here."""
    op.create_table(
        "engines",
        sa.Column("name", Text, primary_key=True),
        sa.Column("clock", Text, nullable=False),
        sa.Column("expires_s", sa.Float, nullable=False),
    )
    op.add_column("campaign_workloads", sa.Column("position", Integer, nullable=False, server_default="0"))
    if not on_postgresql():
        op.execute("UPDATE campaign_workloads SET position = rowid")
    op.add_column("records", sa.Column("origin", sa.JSON))


def downgrade() -> None:
    """Take them away."""
    op.drop_column("records", "origin")
    op.drop_column("campaign_workloads", "position")
    op.drop_table("engines")
