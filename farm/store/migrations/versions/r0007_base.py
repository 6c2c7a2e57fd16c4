"""The first revision: `making.make_tables` creates new stores at the newest one, and migrations alter older ones.

A change of a table in `schema.py` needs a revision here.
"""

revision = "0007"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Do nothing: no store is older."""


def downgrade() -> None:
    """Do nothing: no store is older."""
