"""The commands that switch a board's power."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """One column more; boards there are have no such commands."""
    op.add_column("boards", sa.Column("power", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    """Take it out again."""
    op.drop_column("boards", "power")
