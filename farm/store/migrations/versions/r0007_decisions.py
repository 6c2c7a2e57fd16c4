"""What models are compiled from, once they were timed themselves."""

import sqlalchemy as sa
from alembic import op

from farm.store.columns import Integer, Text

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table; nothing was decided so far."""
    op.create_table(
        "model_decisions",
        sa.Column("model_sha256", Text, primary_key=True),
        sa.Column("workloads", Text, primary_key=True),
        sa.Column("board_type", Text, primary_key=True),
        sa.Column("operating_point", Text, primary_key=True),
        sa.Column("simulated", sa.Boolean, primary_key=True),
        sa.Column("refused", sa.JSON, nullable=False),
        sa.Column("evidence", sa.JSON, nullable=False),
        sa.Column("campaign", Integer),
        sa.Column("decided_at", sa.Float, nullable=False),
    )


def downgrade() -> None:
    """Take it away."""
    op.drop_table("model_decisions")
