"""The fleet: boards with labels, transport, state and health; leases, board events, golden samples, identity."""

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_IN_USE = "in use before health was kept"


def upgrade() -> None:
    """Give boards their new columns, keeping their rows, and make the other tables. Nothing else is touched."""
    # A new table and not ALTER TABLE: SQLite cannot let a column become nullable, and defaults would stay behind.
    op.rename_table("boards", "boards_0001")
    op.create_table(
        "boards",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("board_type", sa.Text, nullable=False),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("transport", sa.JSON, nullable=False),
        sa.Column("description", sa.JSON, nullable=False),
        sa.Column("reachable", sa.Boolean, nullable=False),
        sa.Column("state_reason", sa.Text, nullable=False),
        sa.Column("state_since", sa.Float, nullable=False),
        sa.Column("health", sa.Text, nullable=False),
        sa.Column("health_reason", sa.Text, nullable=False),
        sa.Column("health_since", sa.Float, nullable=False),
        sa.Column("history", sa.JSON, nullable=False),
        sa.Column("history_clock", sa.Text, nullable=False),
        sa.Column("added_at", sa.Float, nullable=False),
        sa.Column("seen_at", sa.Float),
    )
    # Until now every board was this machine, and worked.
    op.execute(
        sa.text(
            "INSERT INTO boards (name, board_type, simulated, labels, transport, description, reachable, state_reason,"
            " state_since, health, health_reason, health_since, history, history_clock, added_at, seen_at)"
            " SELECT name, board_type, simulated, '{}', :transport, description, 1, :reason, seen_at, 'good', :reason,"
            " seen_at, '{}', '', added_at, seen_at FROM boards_0001"
        ).bindparams(transport='{"kind": "direct", "port": null}', reason=_IN_USE)
    )
    op.drop_table("boards_0001")
    op.create_table(
        "leases",
        sa.Column("token", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("board", sa.Text, sa.ForeignKey("boards.name"), nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("ttl_s", sa.Float, nullable=False),
        sa.Column("acquired_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("clock", sa.Text, nullable=False),
        sa.Column("expires_s", sa.Float, nullable=False),
        sa.UniqueConstraint("board", name="uq_leases_board"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "board_events",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("board", sa.Text, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("before", sa.Text),
        sa.Column("after", sa.Text),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("by", sa.Text, nullable=False),
    )
    op.create_index("ix_board_events_board", "board_events", ["board", "id"])
    op.create_table(
        "golden_samples",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("board", sa.Text, sa.ForeignKey("boards.name"), nullable=False),
        sa.Column("kernel", sa.Text, nullable=False),
        sa.Column("operating_point", sa.Text, nullable=False),
        sa.Column("median_s", sa.Float, nullable=False),
        sa.Column("samples_s", sa.JSON, nullable=False),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
    )
    op.create_index("ix_golden_samples_board", "golden_samples", ["board", "kernel", "operating_point", "id"])
    identity = op.create_table("identity", sa.Column("id", sa.Text, primary_key=True))
    op.bulk_insert(identity, [{"id": uuid.uuid4().hex}])


def downgrade() -> None:
    """Put the first schema's boards back; a board that was never seen counts as seen when it was added."""
    for table in ("identity", "golden_samples", "board_events", "leases"):
        op.drop_table(table)
    op.rename_table("boards", "boards_0002")
    op.create_table(
        "boards",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("board_type", sa.Text, nullable=False),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("description", sa.JSON, nullable=False),
        sa.Column("added_at", sa.Float, nullable=False),
        sa.Column("seen_at", sa.Float, nullable=False),
    )
    op.execute(
        "INSERT INTO boards SELECT name, board_type, simulated, description, added_at, coalesce(seen_at, added_at)"
        " FROM boards_0002"
    )
    op.drop_table("boards_0002")
