"""Where revisions begin: `making.make_tables` makes a new store at the newest one, and only older ones are altered.

What changes a table in `schema.py` comes with a revision here that alters the tables of stores there are.
"""

revision = "0007"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing: no store is older."""


def downgrade() -> None:
    """Nothing: no store is older."""
