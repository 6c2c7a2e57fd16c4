"""What a certificate found of a board's core."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """One column more; no core of the boards there are was asked."""
    op.add_column("boards", sa.Column("core", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    """Take it out again."""
    op.drop_column("boards", "core")
