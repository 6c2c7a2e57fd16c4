"""Routes to boards of several coordinators: the keeper of each, and the route of a lease and a request."""

import sqlalchemy as sa
from alembic import op

from farm.store.schema import Text

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add one table; existing leases and requests need no coordinator in particular."""
    op.add_column("leases", sa.Column("through", Text, nullable=False, server_default=""))
    op.add_column("board_requests", sa.Column("through", Text, nullable=False, server_default=""))
    op.create_table(
        "board_ways",
        sa.Column("board", Text, primary_key=True),
        sa.Column("keeper", Text, primary_key=True),
        sa.Column("part", Text, nullable=False),
        sa.Column("session", Text, nullable=False),
        sa.Column("handed", sa.Boolean, nullable=False),
        sa.Column("reason", Text, nullable=False),
        sa.Column("clock", Text, nullable=False),
        sa.Column("since_s", sa.Float, nullable=False),
        sa.Column("expires_s", sa.Float, nullable=False),
    )


def downgrade() -> None:
    """Remove them."""
    op.drop_table("board_ways")
    op.drop_column("board_requests", "through")
    op.drop_column("leases", "through")
