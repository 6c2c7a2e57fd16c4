"""Campaigns over a fleet: their orders and progress, board types and purposes of trials, the evidence for records."""

import sqlalchemy as sa
from alembic import op

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
        sa.Column("campaign", sa.Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("wanted", sa.Text, nullable=False),
        sa.Column("order", sa.JSON, nullable=False),
        sa.Column("budget", sa.JSON, nullable=False),
        sa.Column("engine", sa.JSON),
        sa.UniqueConstraint("name", name="uq_fleet_campaigns_name"),
    )
    op.create_table(
        "campaign_progress",
        sa.Column("campaign", sa.Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
        sa.Column("progress", sa.JSON, nullable=False),
    )
    op.create_table(
        "doubts",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("board", sa.Text, nullable=False),
        sa.Column("since", sa.Float, nullable=False),
        sa.Column("until", sa.Float, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
    )
    op.add_column("records", sa.Column("evidence", sa.JSON))
    op.create_index("ix_events_subject", "events", ["subject", "id"])
    _upgrade_campaign_workloads()
    _upgrade_trials()


def _upgrade_campaign_workloads() -> None:
    op.rename_table("campaign_workloads", "campaign_workloads_0003")
    op.create_table(
        "campaign_workloads",
        sa.Column("campaign", sa.Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
        sa.Column("board_type", sa.Text, primary_key=True),
        sa.Column("workload", sa.Text, sa.ForeignKey("workloads.hash"), primary_key=True),
        sa.Column("weight", sa.Float, nullable=False),
    )
    op.execute(
        "INSERT INTO campaign_workloads (campaign, board_type, workload, weight)"
        " SELECT old.campaign, campaigns.board_type, old.workload, old.weight"
        " FROM campaign_workloads_0003 AS old JOIN campaigns ON campaigns.id = old.campaign ORDER BY old.rowid"
    )
    op.drop_table("campaign_workloads_0003")


def _upgrade_trials() -> None:
    # A new table and not ALTER TABLE: SQLite cannot change what is unique. Dropping the old one drops its triggers.
    op.rename_table("trials", "trials_0003")
    op.create_table(
        "trials",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("campaign", sa.Integer, sa.ForeignKey("campaigns.id"), nullable=False),
        sa.Column("board_type", sa.Text, nullable=False),
        sa.Column("workload", sa.Text, sa.ForeignKey("workloads.hash"), nullable=False),
        sa.Column("operating_point", sa.Text, nullable=False),
        sa.Column("candidate", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("counted", sa.Integer),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("fault_side", sa.Text),
        sa.Column("median_s", sa.Float),
        sa.Column("board", sa.Text),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("library_sha256", sa.Text),
        sa.Column("build_s", sa.Float),
        sa.Column("held_s", sa.Float),
        sa.Column("recorded_at", sa.Float, nullable=False),
        sa.Column("outcome", sa.JSON, nullable=False),
        sa.Column("trace_json", sa.Text, nullable=False),
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
    op.drop_table("trials_0003")
    op.create_index(
        "uq_trials_counted",
        "trials",
        ["campaign", "board_type", "workload", "operating_point", "candidate"],
        unique=True,
        sqlite_where=sa.text("counted IS NOT NULL"),
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
    )
    _make_append_only()


def downgrade() -> None:
    """Drop what campaigns over a fleet added, and of trials that only that tells apart all but the first."""
    op.rename_table("trials", "trials_0004")
    op.create_table(
        "trials",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("campaign", sa.Integer, sa.ForeignKey("campaigns.id"), nullable=False),
        sa.Column("workload", sa.Text, sa.ForeignKey("workloads.hash"), nullable=False),
        sa.Column("candidate", sa.Text, nullable=False),
        sa.Column("operating_point", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("fault_side", sa.Text),
        sa.Column("median_s", sa.Float),
        sa.Column("board", sa.Text),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("outcome", sa.JSON, nullable=False),
        sa.Column("trace_json", sa.Text, nullable=False),
        sa.Column("library_sha256", sa.Text),
        sa.Column("build_s", sa.Float),
        sa.Column("held_s", sa.Float),
        sa.Column("recorded_at", sa.Float, nullable=False),
        sa.UniqueConstraint(
            "campaign", "workload", "candidate", "operating_point", "attempt", name="uq_trials_identity"
        ),
    )
    op.execute(
        f"INSERT OR IGNORE INTO trials (id, campaign, {_TRIAL})"  # noqa: S608
        f" SELECT id, campaign, {_TRIAL} FROM trials_0004 ORDER BY id"
    )
    op.drop_table("trials_0004")
    op.create_index("ix_trials_workload", "trials", ["workload", "operating_point", "median_s"])
    _make_append_only()
    op.rename_table("campaign_workloads", "campaign_workloads_0004")
    op.create_table(
        "campaign_workloads",
        sa.Column("campaign", sa.Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
        sa.Column("workload", sa.Text, sa.ForeignKey("workloads.hash"), primary_key=True),
        sa.Column("weight", sa.Integer, nullable=False),
    )
    op.execute(
        "INSERT OR IGNORE INTO campaign_workloads (campaign, workload, weight)"
        " SELECT campaign, workload, weight FROM campaign_workloads_0004 ORDER BY rowid"
    )
    op.drop_table("campaign_workloads_0004")
    op.drop_index("ix_events_subject", "events")
    op.drop_column("records", "evidence")
    for table in ("doubts", "campaign_progress", "fleet_campaigns"):
        op.drop_table(table)


def _make_append_only() -> None:
    for action in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER trials_no_{action.lower()} BEFORE {action} ON trials "
            "BEGIN SELECT RAISE(ABORT, 'trials are append-only'); END"
        )
