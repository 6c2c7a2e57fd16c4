"""Who changed what, and the commands that switch a board's power."""

import sqlalchemy as sa
from alembic import op

from farm.store.schema import Text

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add two columns; existing boards have no power commands, and old changes name their author in the text."""
    op.add_column("boards", sa.Column("power", sa.JSON(none_as_null=True)))
    op.add_column("events", sa.Column("by", Text, nullable=False, server_default=""))


def downgrade() -> None:
    """Remove them."""
    op.drop_column("events", "by")
    op.drop_column("boards", "power")
