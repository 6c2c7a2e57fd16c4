"""A nonce for each lease, doubts by the numbers of trials, and what counts trials without reading them."""

import sqlalchemy as sa
from alembic import op

from farm.store.columns import Integer, Text

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; a lease that is open gets an empty nonce, a doubt the trials that were recorded in its time."""
    # Not a new table in the place of the old: its counter, on which fencing rests, would begin anew.
    op.add_column("leases", sa.Column("nonce", Text, nullable=False, server_default=""))
    op.create_table(
        "trial_counts",
        sa.Column("status", Text, primary_key=True),
        sa.Column("trials", Integer, nullable=False),
    )
    op.execute("INSERT INTO trial_counts (status, trials) SELECT status, count(*) FROM trials GROUP BY status")
    op.create_index(
        "ix_trials_campaign",
        "trials",
        ["campaign", "purpose", "fault_side", "status", "board_type", "board", "held_s"],
    )
    for name in ("after_trial", "until_trial"):
        op.add_column("doubts", sa.Column(name, Integer, nullable=False, server_default="0"))
    op.execute(
        "UPDATE doubts SET"
        " after_trial = coalesce((SELECT max(id) FROM trials WHERE recorded_at < since), 0),"
        " until_trial = coalesce((SELECT max(id) FROM trials WHERE recorded_at <= until), 0)"
    )


def downgrade() -> None:
    """Take them away."""
    for name in ("after_trial", "until_trial"):
        op.drop_column("doubts", name)
    op.drop_index("ix_trials_campaign", "trials")
    op.drop_table("trial_counts")
    op.drop_column("leases", "nonce")
