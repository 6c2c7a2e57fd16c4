"""The fleet: boards with labels, transport, state and health; leases, board events, golden samples, identity."""

import uuid

import sqlalchemy as sa
from alembic import op

from farm.store.columns import Integer, Text
from farm.store.migrations.portable import put_aside

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_IN_USE = "in use before health was kept"
# Its colon must not be taken for that of a bound value.
_DIRECT = '{"kind"\\: "direct", "port"\\: null}'


def upgrade() -> None:
    """Give boards their new columns, keeping their rows, and make the other tables. Nothing else is touched."""
    # A new table and not ALTER TABLE: SQLite cannot let a column become nullable, and defaults would stay behind.
    put_aside("boards", "boards_0001")
    op.create_table(
        "boards",
        sa.Column("name", Text, primary_key=True),
        sa.Column("board_type", Text, nullable=False),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("transport", sa.JSON, nullable=False),
        sa.Column("description", sa.JSON, nullable=False),
        sa.Column("reachable", sa.Boolean, nullable=False),
        sa.Column("state_reason", Text, nullable=False),
        sa.Column("state_since", sa.Float, nullable=False),
        sa.Column("health", Text, nullable=False),
        sa.Column("health_reason", Text, nullable=False),
        sa.Column("health_since", sa.Float, nullable=False),
        sa.Column("history", sa.JSON, nullable=False),
        sa.Column("history_clock", Text, nullable=False),
        sa.Column("added_at", sa.Float, nullable=False),
        sa.Column("seen_at", sa.Float),
    )
    # Until now every board was this machine, and worked.
    op.execute(
        "INSERT INTO boards (name, board_type, simulated, labels, transport, description, reachable, state_reason,"  # noqa: S608
        " state_since, health, health_reason, health_since, history, history_clock, added_at, seen_at)"
        f" SELECT name, board_type, simulated, '{{}}', '{_DIRECT}', description, true, '{_IN_USE}', seen_at, 'good',"
        f" '{_IN_USE}', seen_at, '{{}}', '', added_at, seen_at FROM boards_0001"
    )
    op.drop_table("boards_0001")
    op.create_table(
        "leases",
        sa.Column("token", Integer, primary_key=True, autoincrement=True),
        sa.Column("board", Text, sa.ForeignKey("boards.name"), nullable=False),
        sa.Column("owner", Text, nullable=False),
        sa.Column("purpose", Text, nullable=False),
        sa.Column("ttl_s", sa.Float, nullable=False),
        sa.Column("acquired_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("clock", Text, nullable=False),
        sa.Column("expires_s", sa.Float, nullable=False),
        sa.UniqueConstraint("board", name="uq_leases_board"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "board_events",
        sa.Column("id", Integer, primary_key=True, autoincrement=True),
        sa.Column("board", Text, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("kind", Text, nullable=False),
        sa.Column("before", Text),
        sa.Column("after", Text),
        sa.Column("reason", Text, nullable=False),
        sa.Column("by", Text, nullable=False),
    )
    op.create_index("ix_board_events_board", "board_events", ["board", "id"])
    op.create_table(
        "golden_samples",
        sa.Column("id", Integer, primary_key=True, autoincrement=True),
        sa.Column("board", Text, sa.ForeignKey("boards.name"), nullable=False),
        sa.Column("kernel", Text, nullable=False),
        sa.Column("operating_point", Text, nullable=False),
        sa.Column("median_s", sa.Float, nullable=False),
        sa.Column("samples_s", sa.JSON, nullable=False),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
    )
    op.create_index("ix_golden_samples_board", "golden_samples", ["board", "kernel", "operating_point", "id"])
    identity = op.create_table("identity", sa.Column("id", Text, primary_key=True))
    op.bulk_insert(identity, [{"id": uuid.uuid4().hex}])


def downgrade() -> None:
    """Put the first schema's boards back; a board that was never seen counts as seen when it was added."""
    for table in ("identity", "golden_samples", "board_events", "leases"):
        op.drop_table(table)
    put_aside("boards", "boards_0002")
    op.create_table(
        "boards",
        sa.Column("name", Text, primary_key=True),
        sa.Column("board_type", Text, nullable=False),
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
