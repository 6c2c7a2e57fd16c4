"""The queue for boards: requests, each owner's use of boards, and the kind of each lease."""

import sqlalchemy as sa
from alembic import op

from farm.store.schema import Integer, Text

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add two tables; existing leases count as no work."""
    op.add_column("leases", sa.Column("kind", Text, nullable=False, server_default=""))
    op.add_column("leases", sa.Column("since_s", sa.Float, nullable=False, server_default="0"))
    op.create_table(
        "board_requests",
        sa.Column("id", Integer, primary_key=True, autoincrement=True),
        sa.Column("owner", Text, nullable=False),
        sa.Column("kind", Text, nullable=False),
        sa.Column("purpose", Text, nullable=False),
        sa.Column("campaign", Text),
        sa.Column("board_type", Text, nullable=False),
        sa.Column("boards", sa.JSON, nullable=False),
        sa.Column("wanted", Integer, nullable=False),
        sa.Column("priority", Integer, nullable=False),
        sa.Column("requested_at", sa.Float, nullable=False),
        sa.Column("clock", Text, nullable=False),
        sa.Column("since_s", sa.Float, nullable=False),
        sa.Column("expires_s", sa.Float, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "board_usage",
        sa.Column("board", Text, primary_key=True),
        sa.Column("owner", Text, primary_key=True),
        sa.Column("kind", Text, primary_key=True),
        sa.Column("clock", Text, nullable=False),
        sa.Column("at_s", sa.Float, nullable=False),
        sa.Column("used_s", sa.Float, nullable=False),
    )


def downgrade() -> None:
    """Remove them."""
    op.drop_table("board_usage")
    op.drop_table("board_requests")
    op.drop_column("leases", "since_s")
    op.drop_column("leases", "kind")
