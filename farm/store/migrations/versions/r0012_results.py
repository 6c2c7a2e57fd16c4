"""Results of `farm model bench`, `run` and `evaluate`."""

import sqlalchemy as sa
from alembic import op

from farm.store.schema import Integer, Text

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add one table."""
    op.create_table(
        "results",
        sa.Column("id", Integer, primary_key=True, autoincrement=True),
        sa.Column("kind", Text, nullable=False),
        sa.Column("model", Text, nullable=False),
        sa.Column("board", Text, nullable=False),
        sa.Column("board_type", Text, nullable=False),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("device", Text, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("by", Text, nullable=False),
        sa.Column("recorded_at", sa.Float, nullable=False),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_table("results")
