"""The tables, in SQLAlchemy Core, and how a new store gets them."""

from __future__ import annotations

import sqlalchemy as sa

# PostgreSQL's INTEGER ends at 2^31, and its text order is a language's by default.
Integer = sa.Integer().with_variant(sa.BigInteger(), "postgresql")
Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

metadata = sa.MetaData()

# One row: the store's unique identity, which qualifies fencing tokens.
identity = sa.Table("identity", metadata, sa.Column("id", Text, primary_key=True))

# `state` is derived: offline unless reachable, else leased if `leases` has a row, else idle. `history` is a
# HealthHistory with times of the clock `history_clock`. `power` holds the power commands, null for none.
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
)

# Open leases only; a board event records how one ended. AUTOINCREMENT never repeats a number, so a token only grows. A
# restored store repeats numbers; the nonce, drawn for each lease, distinguishes them. `kind` is a `WorkKind`, "" for no
# work (a probe); `since_s` is its start on the clock `clock`; `through` is the coordinator whose route the holder
# needs, "" for any.
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

# Which coordinator keeps the route to a board, asks for it, or could not reach the board (`part`). `session` identifies
# a connection on the board. A row is valid until `expires_s` on the clock `clock`.
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

# Requests for boards: `wanted` of those in `boards`. A row is valid until `expires_s` on the clock `clock`, which its
# owner extends while it waits. `campaign` names the campaign whose trials need them, else null.
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

# How long each owner of ended leases had a board for a kind of work, in s, decayed to the time `at_s` on the clock
# `clock`. No foreign key: a board may return under its name.
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

# No foreign key: a board's events outlive its row.
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

# A fleet campaign's columns beyond its row in `campaigns`; `order` is the engine's description of the work. `engine`
# identifies the process that carries it out, null without one.
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

# Live engines: `name` is an engine's identity as text. A row is valid until `expires_s` on the clock `clock`.
engines = sa.Table(
    "engines",
    metadata,
    sa.Column("name", Text, primary_key=True),
    sa.Column("clock", Text, nullable=False),
    sa.Column("expires_s", sa.Float, nullable=False),
)

# Written about once a second, so apart from the long order.
campaign_progress = sa.Table(
    "campaign_progress",
    metadata,
    sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
    sa.Column("progress", sa.JSON, nullable=False),
)

# A board's trials between two numbers are not to be trusted. Numbers, since the time may be set; `since` and `until`
# (wall clock, s) are for people. No foreign key, as for its events.
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

# `position` orders the workloads of a campaign as given.
campaign_workloads = sa.Table(
    "campaign_workloads",
    metadata,
    sa.Column("campaign", Integer, sa.ForeignKey("campaigns.id"), primary_key=True),
    sa.Column("board_type", Text, primary_key=True),
    sa.Column("workload", Text, sa.ForeignKey("workloads.hash"), primary_key=True),
    sa.Column("weight", sa.Float, nullable=False),
    sa.Column("position", Integer, nullable=False, server_default="0"),
)

# Append-only, by triggers. `counted` is 1 if the trial is its candidate's result in the campaign, else null: at most
# one per candidate. The long columns come last, so that SQLite can skip them.
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
    # For sums over a campaign's trials without reading them.
    sa.Index("ix_trials_campaign", *("campaign", "purpose", "fault_side", "status", "board_type", "board", "held_s")),
    sa.Index("ix_trials_workload", "workload", "board_type", "operating_point", "simulated", "median_s", "candidate"),
    sa.Index("ix_trials_wrong", *("workload", "candidate"), sqlite_where=sa.text("status = 'wrong_result'")),
)

# Trials by status, maintained on insert: counting would read the whole table.
trial_counts = sa.Table(
    "trial_counts", metadata, sa.Column("status", Text, primary_key=True), sa.Column("trials", Integer, nullable=False)
)

# `origin` names the farm and campaign of an imported record, null for one made here.
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

# The records from which a model is compiled, by its own times: `workloads` identifies all of them together, `refused`
# lists candidates of rejected records. The latest row counts; `campaign` made it.
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

# Append-only, by triggers. `visit` numbers the visits of a variant and batch; `key` names the grid point.
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

# What `farm model bench`, `run` and `evaluate` (`kind`) measured of one model: `document` is the command's, for that
# model alone.
results = sa.Table(
    "results",
    metadata,
    sa.Column("id", Integer, primary_key=True, autoincrement=True),
    sa.Column("kind", Text, nullable=False),
    sa.Column("model", Text, nullable=False),
    sa.Column("board", Text, nullable=False),
    sa.Column("board_type", Text, nullable=False),
    sa.Column("simulated", sa.Boolean, nullable=False),
    sa.Column("device", Text, nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Column("by", Text, nullable=False),
    sa.Column("recorded_at", sa.Float, nullable=False),
    sqlite_autoincrement=True,
)

# `by` is who ordered it, "" for the farm itself.
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
