"""Who changed what, and the commands that switch a board's power."""

import sqlalchemy as sa
from alembic import op

from farm.store.schema import Text

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Two columns more; boards there are have no such commands, and who made a change of before is in its text."""
    op.add_column("boards", sa.Column("power", sa.JSON(none_as_null=True)))
    op.add_column("events", sa.Column("by", Text, nullable=False, server_default=""))


def downgrade() -> None:
    """Take them out again."""
    op.drop_column("events", "by")
    op.drop_column("boards", "power")
