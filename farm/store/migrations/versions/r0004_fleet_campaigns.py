"""Campaigns over a fleet: their orders and progress, board types and purposes of trials, the evidence for records."""

import sqlalchemy as sa
from alembic import op

from farm.store.columns import Integer, Text
from farm.store.migrations.portable import go_on_counting, make_append_only, on_postgresql, put_aside

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# Until now a winner whose output was wrong was told from attempts at timing it by this number.
_WRONG_WINNER = 100
_NOT_OF_THE_CANDIDATE = "fault_side IS NOT NULL AND fault_side != 'candidate'"
_TRIAL = (
    "workload, candidate, operating_point, attempt, status, fault_side, median_s, board, simulated, outcome,"
    " trace_json, library_sha256, build_s, held_s, recorded_at"
)


def upgrade() -> None:
    """Make the new tables; give trials and the workloads of campaigns their board type, keeping every row."""
    op.create_table(
        "fleet_campaigns",
        sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
        sa.Column("name", Text, nullable=False),
        sa.Column("owner", Text, nullable=False),
        sa.Column("reason", Text, nullable=False),
        sa.Column("wanted", Text, nullable=False),
        sa.Column("order", sa.JSON, nullable=False),
        sa.Column("budget", sa.JSON, nullable=False),
        sa.Column("engine", sa.JSON),
        sa.UniqueConstraint("name", name="uq_fleet_campaigns_name"),
    )
    op.create_table(
        "campaign_progress",
        sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
        sa.Column("progress", sa.JSON, nullable=False),
    )
    op.create_table(
        "doubts",
        sa.Column("id", Integer, primary_key=True, autoincrement=True),
        sa.Column("board", Text, nullable=False),
        sa.Column("since", sa.Float, nullable=False),
        sa.Column("until", sa.Float, nullable=False),
        sa.Column("reason", Text, nullable=False),
    )
    op.add_column("records", sa.Column("evidence", sa.JSON))
    op.create_index("ix_events_subject", "events", ["subject", "id"])
    _upgrade_campaign_workloads()
    _upgrade_trials()


def _upgrade_campaign_workloads() -> None:
    put_aside("campaign_workloads", "campaign_workloads_0003")
    op.create_table(
        "campaign_workloads",
        sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
        sa.Column("board_type", Text, primary_key=True),
        sa.Column("workload", Text, sa.ForeignKey("workloads.hash"), primary_key=True),
        sa.Column("weight", sa.Float, nullable=False),
    )
    op.execute(
        "INSERT INTO campaign_workloads (campaign, board_type, workload, weight)"  # noqa: S608
        " SELECT old.campaign, campaigns.board_type, old.workload, old.weight"
        " FROM campaign_workloads_0003 AS old JOIN campaigns ON campaigns.id = old.campaign"
        f" ORDER BY old.{_row()}"
    )
    op.drop_table("campaign_workloads_0003")


def _upgrade_trials() -> None:
    # A new table and not ALTER TABLE: SQLite cannot change what is unique. Dropping the old one drops its triggers.
    put_aside("trials", "trials_0003")
    op.create_table(
        "trials",
        sa.Column("id", Integer, primary_key=True, autoincrement=True),
        sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), nullable=False),
        sa.Column("board_type", Text, nullable=False),
        sa.Column("workload", Text, sa.ForeignKey("workloads.hash"), nullable=False),
        sa.Column("operating_point", Text, nullable=False),
        sa.Column("candidate", Text, nullable=False),
        sa.Column("purpose", Text, nullable=False),
        sa.Column("attempt", Integer, nullable=False),
        sa.Column("counted", Integer),
        sa.Column("status", Text, nullable=False),
        sa.Column("fault_side", Text),
        sa.Column("median_s", sa.Float),
        sa.Column("board", Text),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("library_sha256", Text),
        sa.Column("build_s", sa.Float),
        sa.Column("held_s", sa.Float),
        sa.Column("recorded_at", sa.Float, nullable=False),
        sa.Column("outcome", sa.JSON, nullable=False),
        sa.Column("trace_json", Text, nullable=False),
        sa.UniqueConstraint(
            "campaign",
            "board_type",
            "workload",
            "operating_point",
            "candidate",
            "purpose",
            "attempt",
            name="uq_trials_identity",
        ),
    )
    # Should an old campaign hold two results of one candidate, both stay and the first is the one that counts.
    op.execute(
        f"INSERT INTO trials (id, campaign, board_type, purpose, counted, {_TRIAL})"  # noqa: S608
        " SELECT old.id, old.campaign, campaigns.board_type,"
        f" CASE WHEN old.status = 'wrong_result' AND old.attempt >= {_WRONG_WINNER} THEN 'winner' ELSE 'search' END,"
        " CASE WHEN old.id IN (SELECT min(id) FROM trials_0003"
        f" WHERE NOT ({_NOT_OF_THE_CANDIDATE}) AND status != 'wrong_result'"
        " GROUP BY campaign, workload, operating_point, candidate) THEN 1 END,"
        f" {', '.join(f'old.{name.strip()}' for name in _TRIAL.split(','))}"
        " FROM trials_0003 AS old JOIN campaigns ON campaigns.id = old.campaign ORDER BY old.id"
    )
    go_on_counting("trials")
    op.drop_table("trials_0003")
    op.create_index(
        "uq_trials_counted",
        "trials",
        ["campaign", "board_type", "workload", "operating_point", "candidate"],
        unique=True,
        sqlite_where=sa.text("counted IS NOT NULL"),
        postgresql_where=sa.text("counted IS NOT NULL"),
    )
    op.create_index(
        "ix_trials_workload",
        "trials",
        ["workload", "board_type", "operating_point", "simulated", "median_s", "candidate"],
    )
    op.create_index(
        "ix_trials_wrong",
        "trials",
        ["workload", "candidate"],
        sqlite_where=sa.text("status = 'wrong_result'"),
        postgresql_where=sa.text("status = 'wrong_result'"),
    )
    make_append_only("trials", "trials")


def downgrade() -> None:
    """Drop what campaigns over a fleet added, and of trials that only that tells apart all but the first."""
    put_aside("trials", "trials_0004")
    op.create_table(
        "trials",
        sa.Column("id", Integer, primary_key=True, autoincrement=True),
        sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), nullable=False),
        sa.Column("workload", Text, sa.ForeignKey("workloads.hash"), nullable=False),
        sa.Column("candidate", Text, nullable=False),
        sa.Column("operating_point", Text, nullable=False),
        sa.Column("attempt", Integer, nullable=False),
        sa.Column("status", Text, nullable=False),
        sa.Column("fault_side", Text),
        sa.Column("median_s", sa.Float),
        sa.Column("board", Text),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("outcome", sa.JSON, nullable=False),
        sa.Column("trace_json", Text, nullable=False),
        sa.Column("library_sha256", Text),
        sa.Column("build_s", sa.Float),
        sa.Column("held_s", sa.Float),
        sa.Column("recorded_at", sa.Float, nullable=False),
        sa.UniqueConstraint(
            "campaign", "workload", "candidate", "operating_point", "attempt", name="uq_trials_identity"
        ),
    )
    op.execute(
        f"INSERT INTO trials (id, campaign, {_TRIAL})"  # noqa: S608
        f" SELECT id, campaign, {_TRIAL} FROM trials_0004 WHERE true ORDER BY id ON CONFLICT DO NOTHING"
    )
    go_on_counting("trials")
    op.drop_table("trials_0004")
    op.create_index("ix_trials_workload", "trials", ["workload", "operating_point", "median_s"])
    make_append_only("trials", "trials")
    put_aside("campaign_workloads", "campaign_workloads_0004")
    op.create_table(
        "campaign_workloads",
        sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
        sa.Column("workload", Text, sa.ForeignKey("workloads.hash"), primary_key=True),
        sa.Column("weight", Integer, nullable=False),
    )
    op.execute(
        "INSERT INTO campaign_workloads (campaign, workload, weight)"  # noqa: S608
        f" SELECT campaign, workload, weight FROM campaign_workloads_0004 WHERE true ORDER BY {_row()}"
        " ON CONFLICT DO NOTHING"
    )
    op.drop_table("campaign_workloads_0004")
    op.drop_index("ix_events_subject", "events")
    op.drop_column("records", "evidence")
    for table in ("doubts", "campaign_progress", "fleet_campaigns"):
        op.drop_table(table)


def _row() -> str:
    """The order of rows in a table, as its database calls it."""
    return "ctid" if on_postgresql() else "rowid"
