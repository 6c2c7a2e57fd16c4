"""The result of a certificate about a board's core."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add one column, empty for existing boards."""
    op.add_column("boards", sa.Column("core", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    """Remove it."""
    op.drop_column("boards", "core")
