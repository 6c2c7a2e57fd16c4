"""The tables, as SQLAlchemy Core sees them. `making.py` makes them, `migrations/` changes those of older stores."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

# PostgreSQL's INTEGER ends at 2^31, and its order of texts is that of a language unless told otherwise.
Integer = sa.Integer().with_variant(sa.BigInteger(), "postgresql")
Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


metadata = sa.MetaData()

# One row: what tells this store from every other, for those who compare fencing tokens.
identity = sa.Table("identity", metadata, sa.Column("id", Text, primary_key=True))

# `state` is derived: offline unless reachable, else leased where `leases` has a row, else idle. `history` is a
# HealthHistory whose times belong to the clock `history_clock`. `power` are the commands that switch it; `core`
# was written by version 0.2, and nothing reads it; null for none.
boards = sa.Table(
    "boards",
    metadata,
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
    sa.Column("power", sa.JSON(none_as_null=True)),
    sa.Column("core", sa.JSON(none_as_null=True)),
)

# Open leases only; how one ended is a board event. AUTOINCREMENT never gives a number twice, so a token only grows. A
# store that was put back to an earlier state gives numbers again; the nonce, drawn for each lease, tells them apart.
# `kind` is a `WorkKind`, "" for what is no work (a probe, say); `since_s` is when it was taken, by the clock `clock`;
# `through` is the coordinator whose way to the board its holder needs, "" for whichever there is.
leases = sa.Table(
    "leases",
    metadata,
    sa.Column("token", Integer, primary_key=True, autoincrement=True),
    sa.Column("board", Text, sa.ForeignKey("boards.name"), nullable=False),
    sa.Column("owner", Text, nullable=False),
    sa.Column("purpose", Text, nullable=False),
    sa.Column("ttl_s", sa.Float, nullable=False),
    sa.Column("acquired_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("clock", Text, nullable=False),
    sa.Column("expires_s", sa.Float, nullable=False),
    sa.Column("nonce", Text, nullable=False, server_default=""),
    sa.Column("kind", Text, nullable=False, server_default=""),
    sa.Column("since_s", sa.Float, nullable=False, server_default="0"),
    sa.Column("through", Text, nullable=False, server_default=""),
    sa.UniqueConstraint("board", name="uq_leases_board"),
    sqlite_autoincrement=True,
)

# Which coordinator keeps the way to a board, asks for it, or has found that it leads nowhere from there (`part`).
# `session` names what a connection is on the board. A row is believed until `expires_s` by the clock `clock`.
board_ways = sa.Table(
    "board_ways",
    metadata,
    sa.Column("board", Text, primary_key=True),
    sa.Column("keeper", Text, primary_key=True),
    sa.Column("part", Text, nullable=False),
    sa.Column("session", Text, nullable=False),
    sa.Column("handed", sa.Boolean, nullable=False),
    sa.Column("reason", Text, nullable=False),
    sa.Column("clock", Text, nullable=False),
    sa.Column("since_s", sa.Float, nullable=False),
    sa.Column("expires_s", sa.Float, nullable=False),
)

# Who wants boards: `wanted` of those named in `boards`. A row is believed until `expires_s` by the clock `clock`, which
# its owner puts off while it waits. `campaign` is whose trials they are for, by its name, else null.
board_requests = sa.Table(
    "board_requests",
    metadata,
    sa.Column("id", Integer, primary_key=True, autoincrement=True),
    sa.Column("owner", Text, nullable=False),
    sa.Column("kind", Text, nullable=False),
    sa.Column("purpose", Text, nullable=False),
    sa.Column("campaign", Text),
    sa.Column("board_type", Text, nullable=False),
    sa.Column("boards", sa.JSON, nullable=False),
    sa.Column("wanted", Integer, nullable=False),
    sa.Column("priority", Integer, nullable=False),
    sa.Column("requested_at", sa.Float, nullable=False),
    sa.Column("clock", Text, nullable=False),
    sa.Column("since_s", sa.Float, nullable=False),
    sa.Column("expires_s", sa.Float, nullable=False),
    sa.Column("through", Text, nullable=False, server_default=""),
    sqlite_autoincrement=True,
)

# How long each owner of leases that are over had a board for work of a kind, in s: what lies back counts less and less,
# so a number holds for its moment `at_s` by the clock `clock`. No foreign key: a board may come back under its name.
board_usage = sa.Table(
    "board_usage",
    metadata,
    sa.Column("board", Text, primary_key=True),
    sa.Column("owner", Text, primary_key=True),
    sa.Column("kind", Text, primary_key=True),
    sa.Column("clock", Text, nullable=False),
    sa.Column("at_s", sa.Float, nullable=False),
    sa.Column("used_s", sa.Float, nullable=False),
)

# No foreign key: what happened to a board outlives its row.
board_events = sa.Table(
    "board_events",
    metadata,
    sa.Column("id", Integer, primary_key=True, autoincrement=True),
    sa.Column("board", Text, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("kind", Text, nullable=False),
    sa.Column("before", Text),
    sa.Column("after", Text),
    sa.Column("reason", Text, nullable=False),
    sa.Column("by", Text, nullable=False),
    sa.Index("ix_board_events_board", "board", "id"),
)

golden_samples = sa.Table(
    "golden_samples",
    metadata,
    sa.Column("id", Integer, primary_key=True, autoincrement=True),
    sa.Column("board", Text, sa.ForeignKey("boards.name"), nullable=False),
    sa.Column("kernel", Text, nullable=False),
    sa.Column("operating_point", Text, nullable=False),
    sa.Column("median_s", sa.Float, nullable=False),
    sa.Column("samples_s", sa.JSON, nullable=False),
    sa.Column("simulated", sa.Boolean, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Index("ix_golden_samples_board", "board", "kernel", "operating_point", "id"),
)

workloads = sa.Table(
    "workloads",
    metadata,
    sa.Column("hash", Text, primary_key=True),
    sa.Column("name", Text, nullable=False),
    sa.Column("flop", sa.Float, nullable=False),
    sa.Column("arguments", sa.JSON, nullable=False),
    sa.Column("target", sa.JSON, nullable=False),
    sa.Column("pipeline", Text, nullable=False),
    sa.Column("module_json", Text, nullable=False),
    sa.Column("added_at", sa.Float, nullable=False),
)

campaigns = sa.Table(
    "campaigns",
    metadata,
    sa.Column("id", Integer, primary_key=True, autoincrement=True),
    sa.Column("command", Text, nullable=False),
    sa.Column("model", Text, nullable=False),
    sa.Column("model_sha256", Text, nullable=False),
    sa.Column("board_type", Text, nullable=False),
    sa.Column("trials_budget", Integer, nullable=False),
    sa.Column("settings", sa.JSON, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("finished_at", sa.Float),
    sa.Column("state", Text, nullable=False),
)

# What a campaign over a fleet has beyond its row in `campaigns`; `order` says what to do, in the engine's words.
# `engine` names the process that carries it out, null where none does.
fleet_campaigns = sa.Table(
    "fleet_campaigns",
    metadata,
    sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
    sa.Column("name", Text, nullable=False),
    sa.Column("owner", Text, nullable=False),
    sa.Column("reason", Text, nullable=False),
    sa.Column("wanted", Text, nullable=False),
    sa.Column("order", sa.JSON, nullable=False),
    sa.Column("budget", sa.JSON, nullable=False),
    sa.Column("engine", sa.JSON(none_as_null=True)),
    sa.UniqueConstraint("name", name="uq_fleet_campaigns_name"),
)

# Processes that carry out campaigns and are not known to be gone: `name` is their identity as text. From
# `expires_s` on, by the clock `clock`, nobody believes any more that they are there.
engines = sa.Table(
    "engines",
    metadata,
    sa.Column("name", Text, primary_key=True),
    sa.Column("clock", Text, nullable=False),
    sa.Column("expires_s", sa.Float, nullable=False),
)

# Written about once a second, and so apart from the order, which is long.
campaign_progress = sa.Table(
    "campaign_progress",
    metadata,
    sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
    sa.Column("progress", sa.JSON, nullable=False),
)

# What a board measured in the trials after one and up to another is not to be believed: by their numbers, since the
# time may be set; `since` and `until` (wall clock, s) are for people. No foreign key, as for its events.
doubts = sa.Table(
    "doubts",
    metadata,
    sa.Column("id", Integer, primary_key=True, autoincrement=True),
    sa.Column("board", Text, nullable=False),
    sa.Column("since", sa.Float, nullable=False),
    sa.Column("until", sa.Float, nullable=False),
    sa.Column("reason", Text, nullable=False),
    sa.Column("after_trial", Integer, nullable=False, server_default="0"),
    sa.Column("until_trial", Integer, nullable=False, server_default="0"),
)

# `position` counts the workloads of a campaign in the order in which they were given.
campaign_workloads = sa.Table(
    "campaign_workloads",
    metadata,
    sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
    sa.Column("board_type", Text, primary_key=True),
    sa.Column("workload", Text, sa.ForeignKey("workloads.hash"), primary_key=True),
    sa.Column("weight", sa.Float, nullable=False),
    sa.Column("position", Integer, nullable=False, server_default="0"),
)

# Append-only, by triggers. `counted` is 1 where the trial is its candidate's result in the campaign, else null: there
# cannot be two. The long columns come last, so that SQLite need not read them to find the others.
trials = sa.Table(
    "trials",
    metadata,
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
    sa.Index(
        "ix_trials_wrong",
        *("workload", "candidate"),
        sqlite_where=sa.text("status = 'wrong_result'"),
    ),
)

# How many trials have each status, kept up by whoever adds one: counting them would read the whole table.
trial_counts = sa.Table(
    "trial_counts",
    metadata,
    sa.Column("status", Text, primary_key=True),
    sa.Column("trials", Integer, nullable=False),
)

# What boards have said was not always checked: a time that no run takes counts for nothing, whoever wrote it down.
# A median outside these is none that a run takes.
SHORTEST_S, LONGEST_S = 1e-12, 1e9


def is_sound(median_s: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Whether a median, in seconds, is a time that a run can take."""
    return median_s.between(SHORTEST_S, LONGEST_S)


def total(column: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    """The sum of what is not null, 0 where all is."""
    return sa.func.coalesce(sa.func.sum(column), 0.0)


sound_median_s = sa.case((is_sound(trials.c.median_s), trials.c.median_s)).label("median_s")


# `origin` says which farm and campaign an imported record comes from, null where it was made here.
records = sa.Table(
    "records",
    metadata,
    sa.Column("workload", Text, sa.ForeignKey("workloads.hash"), primary_key=True),
    sa.Column("board_type", Text, primary_key=True),
    sa.Column("operating_point", Text, primary_key=True),
    sa.Column("simulated", sa.Boolean, primary_key=True),
    sa.Column("candidate", Text, nullable=False),
    sa.Column("median_s", sa.Float, nullable=False),
    sa.Column("max_abs_error", sa.Float, nullable=False),
    sa.Column("max_rel_error", sa.Float, nullable=False),
    sa.Column("trace_json", Text, nullable=False),
    sa.Column("verified_at", sa.Float, nullable=False),
    sa.Column("evidence", sa.JSON(none_as_null=True)),
    sa.Column("origin", sa.JSON(none_as_null=True)),
)

# Which records a model is compiled from, by its own times: `workloads` names all of them together, `refused` has the
# candidates of records that are left out. The latest counts; `campaign` made it.
model_decisions = sa.Table(
    "model_decisions",
    metadata,
    sa.Column("model_sha256", Text, primary_key=True),
    sa.Column("workloads", Text, primary_key=True),
    sa.Column("board_type", Text, primary_key=True),
    sa.Column("operating_point", Text, primary_key=True),
    sa.Column("simulated", sa.Boolean, primary_key=True),
    sa.Column("refused", sa.JSON, nullable=False),
    sa.Column("evidence", sa.JSON, nullable=False),
    sa.Column("campaign", Integer),
    sa.Column("decided_at", sa.Float, nullable=False),
)

sweeps = sa.Table(
    "sweeps",
    metadata,
    sa.Column("id", Integer, primary_key=True, autoincrement=True),
    sa.Column("command", Text, nullable=False),
    sa.Column("model", Text, nullable=False),
    sa.Column("model_sha256", Text, nullable=False),
    sa.Column("board_type", Text, nullable=False),
    sa.Column("simulated", sa.Boolean, nullable=False),
    sa.Column("request", sa.JSON, nullable=False),
    sa.Column("goal", sa.JSON, nullable=False),
    sa.Column("grid", sa.JSON, nullable=False),
    sa.Column("settings", sa.JSON, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("finished_at", sa.Float),
    sa.Column("state", Text, nullable=False),
    sa.Column("summary", sa.JSON),
)

# Append-only, by triggers. `visit` counts the visits of one variant and batch; `key` is the grid point's name.
sweep_points = sa.Table(
    "sweep_points",
    metadata,
    sa.Column("id", Integer, primary_key=True, autoincrement=True),
    sa.Column("sweep", Integer, sa.ForeignKey("sweeps.id"), nullable=False),
    sa.Column("variant", Text, nullable=False),
    sa.Column("batch", Integer, nullable=False),
    sa.Column("visit", Integer, nullable=False),
    sa.Column("key", Text, nullable=False),
    sa.Column("board", Text, nullable=False),
    sa.Column("measurement", sa.JSON, nullable=False),
    sa.Column("outcome", sa.JSON, nullable=False),
    sa.Column("recorded_at", sa.Float, nullable=False),
    sa.UniqueConstraint("sweep", "variant", "batch", "visit", name="uq_sweep_points_identity"),
)

# `by` is whose order it was, "" for what the farm does by itself.
events = sa.Table(
    "events",
    metadata,
    sa.Column("id", Integer, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("kind", Text, nullable=False),
    sa.Column("subject", Text, nullable=False),
    sa.Column("message", Text, nullable=False),
    sa.Column("by", Text, nullable=False, server_default=""),
    sa.Index("ix_events_subject", "subject", "id"),
)
