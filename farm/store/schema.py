"""The tables, as SQLAlchemy Core sees them. The migrations are what makes and changes them in a database."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

metadata = sa.MetaData()

# One row: what tells this store from every other, for those who compare fencing tokens.
identity = sa.Table("identity", metadata, sa.Column("id", sa.Text, primary_key=True))

# `state` is derived: offline unless reachable, else leased where `leases` has a row, else idle. `history` is a
# HealthHistory whose times belong to the clock `history_clock`.
boards = sa.Table(
    "boards",
    metadata,
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

# Open leases only; how one ended is a board event. AUTOINCREMENT never gives a number twice, so a token only grows. A
# store that was put back to an earlier state gives numbers again; the nonce, drawn for each lease, tells them apart.
leases = sa.Table(
    "leases",
    metadata,
    sa.Column("token", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("board", sa.Text, sa.ForeignKey("boards.name"), nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("ttl_s", sa.Float, nullable=False),
    sa.Column("acquired_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("clock", sa.Text, nullable=False),
    sa.Column("expires_s", sa.Float, nullable=False),
    sa.Column("nonce", sa.Text, nullable=False, server_default=""),
    sa.UniqueConstraint("board", name="uq_leases_board"),
    sqlite_autoincrement=True,
)

# No foreign key: what happened to a board outlives its row.
board_events = sa.Table(
    "board_events",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("board", sa.Text, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("before", sa.Text),
    sa.Column("after", sa.Text),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("by", sa.Text, nullable=False),
    sa.Index("ix_board_events_board", "board", "id"),
)

golden_samples = sa.Table(
    "golden_samples",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("board", sa.Text, sa.ForeignKey("boards.name"), nullable=False),
    sa.Column("kernel", sa.Text, nullable=False),
    sa.Column("operating_point", sa.Text, nullable=False),
    sa.Column("median_s", sa.Float, nullable=False),
    sa.Column("samples_s", sa.JSON, nullable=False),
    sa.Column("simulated", sa.Boolean, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Index("ix_golden_samples_board", "board", "kernel", "operating_point", "id"),
)

workloads = sa.Table(
    "workloads",
    metadata,
    sa.Column("hash", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("flop", sa.Float, nullable=False),
    sa.Column("arguments", sa.JSON, nullable=False),
    sa.Column("target", sa.JSON, nullable=False),
    sa.Column("pipeline", sa.Text, nullable=False),
    sa.Column("module_json", sa.Text, nullable=False),
    sa.Column("added_at", sa.Float, nullable=False),
)

campaigns = sa.Table(
    "campaigns",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("command", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("model_sha256", sa.Text, nullable=False),
    sa.Column("board_type", sa.Text, nullable=False),
    sa.Column("trials_budget", sa.Integer, nullable=False),
    sa.Column("settings", sa.JSON, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("finished_at", sa.Float),
    sa.Column("state", sa.Text, nullable=False),
)

# What a campaign over a fleet has beyond its row in `campaigns`; `order` says what to do, in the engine's words.
# `engine` names the process that carries it out, null where none does.
fleet_campaigns = sa.Table(
    "fleet_campaigns",
    metadata,
    sa.Column("campaign", sa.Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("wanted", sa.Text, nullable=False),
    sa.Column("order", sa.JSON, nullable=False),
    sa.Column("budget", sa.JSON, nullable=False),
    sa.Column("engine", sa.JSON(none_as_null=True)),
    sa.UniqueConstraint("name", name="uq_fleet_campaigns_name"),
)

# Written about once a second, and so apart from the order, which is long.
campaign_progress = sa.Table(
    "campaign_progress",
    metadata,
    sa.Column("campaign", sa.Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
    sa.Column("progress", sa.JSON, nullable=False),
)

# What a board measured in the trials after one and up to another is not to be believed: by their numbers, since the
# time may be set; `since` and `until` (wall clock, s) are for people. No foreign key, as for its events.
doubts = sa.Table(
    "doubts",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("board", sa.Text, nullable=False),
    sa.Column("since", sa.Float, nullable=False),
    sa.Column("until", sa.Float, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("after_trial", sa.Integer, nullable=False, server_default="0"),
    sa.Column("until_trial", sa.Integer, nullable=False, server_default="0"),
)

campaign_workloads = sa.Table(
    "campaign_workloads",
    metadata,
    sa.Column("campaign", sa.Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
    sa.Column("board_type", sa.Text, primary_key=True),
    sa.Column("workload", sa.Text, sa.ForeignKey("workloads.hash"), primary_key=True),
    sa.Column("weight", sa.Float, nullable=False),
)

# Append-only, by triggers. `counted` is 1 where the trial is its candidate's result in the campaign, else null: there
# cannot be two. The long columns come last, so that SQLite need not read them to find the others.
trials = sa.Table(
    "trials",
    metadata,
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
    sa.Index(
        "uq_trials_counted",
        "campaign",
        "board_type",
        "workload",
        "operating_point",
        "candidate",
        unique=True,
        sqlite_where=sa.text("counted IS NOT NULL"),
    ),
    # What a campaign's trials come to, without reading one of them.
    sa.Index(
        "ix_trials_campaign",
        *("campaign", "purpose", "fault_side", "status", "board_type", "board", "held_s"),
    ),
    sa.Index("ix_trials_workload", "workload", "board_type", "operating_point", "simulated", "median_s", "candidate"),
    sa.Index("ix_trials_wrong", "workload", "candidate", sqlite_where=sa.text("status = 'wrong_result'")),
)

# How many trials have each status, kept up by whoever adds one: counting them would read the whole table.
trial_counts = sa.Table(
    "trial_counts",
    metadata,
    sa.Column("status", sa.Text, primary_key=True),
    sa.Column("trials", sa.Integer, nullable=False),
)

# What boards have said was not always checked: a time that no run takes counts for nothing, whoever wrote it down.
_LONGEST_S = 1e9


def is_sound(median_s: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Whether a median, in seconds, is a time that a run can take."""
    return median_s.between(1e-12, _LONGEST_S)


sound_median_s = sa.case((is_sound(trials.c.median_s), trials.c.median_s)).label("median_s")


records = sa.Table(
    "records",
    metadata,
    sa.Column("workload", sa.Text, sa.ForeignKey("workloads.hash"), primary_key=True),
    sa.Column("board_type", sa.Text, primary_key=True),
    sa.Column("operating_point", sa.Text, primary_key=True),
    sa.Column("simulated", sa.Boolean, primary_key=True),
    sa.Column("candidate", sa.Text, nullable=False),
    sa.Column("median_s", sa.Float, nullable=False),
    sa.Column("max_abs_error", sa.Float, nullable=False),
    sa.Column("max_rel_error", sa.Float, nullable=False),
    sa.Column("trace_json", sa.Text, nullable=False),
    sa.Column("verified_at", sa.Float, nullable=False),
    sa.Column("evidence", sa.JSON(none_as_null=True)),
)

sweeps = sa.Table(
    "sweeps",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("command", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("model_sha256", sa.Text, nullable=False),
    sa.Column("board_type", sa.Text, nullable=False),
    sa.Column("simulated", sa.Boolean, nullable=False),
    sa.Column("request", sa.JSON, nullable=False),
    sa.Column("goal", sa.JSON, nullable=False),
    sa.Column("grid", sa.JSON, nullable=False),
    sa.Column("settings", sa.JSON, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("finished_at", sa.Float),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("summary", sa.JSON),
)

# Append-only, by triggers. `visit` counts the visits of one variant and batch; `key` is the grid point's name.
sweep_points = sa.Table(
    "sweep_points",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("sweep", sa.Integer, sa.ForeignKey("sweeps.id"), nullable=False),
    sa.Column("variant", sa.Text, nullable=False),
    sa.Column("batch", sa.Integer, nullable=False),
    sa.Column("visit", sa.Integer, nullable=False),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("board", sa.Text, nullable=False),
    sa.Column("measurement", sa.JSON, nullable=False),
    sa.Column("outcome", sa.JSON, nullable=False),
    sa.Column("recorded_at", sa.Float, nullable=False),
    sa.UniqueConstraint("sweep", "variant", "batch", "visit", name="uq_sweep_points_identity"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Index("ix_events_subject", "subject", "id"),
)
