"""Queries for pages and the API: the store's latest numbers, newest events, last faults, trials in order of writing.
Each reads only what is shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from farm.store import database, schema, sweeps
from farm.store.campaigns import CampaignQueries, select_fleet, to_campaign
from farm.store.standing import select_boards, to_shown
from farm.values import FleetCampaign, GoldenSample

# How many of the newest board events to search for a board's last fault: weeks of a small fleet, a day of a large one.
_FAULTS_WITHIN = 50_000
# Events of every board in every campaign, which are no news.
_ROUTINE = ("board_taken", "board_left", "warm_start")
_ROUTINE_OF_BOARDS = ("lease_taken", "lease_released", "lease_expired")
# Rows of trials in memory at once.
_CHUNK = 5_000


@dataclasses.dataclass(frozen=True)
class OverviewMark:
    """The numbers of the newest event, board event, trial and golden-kernel run."""

    event: int = 0
    board_event: int = 0
    trial: int = 0
    golden: int = 0


class OverviewQueries(CampaignQueries):
    """Queries on several tables, for pages."""

    def fetch_overview_mark(self) -> OverviewMark:
        """The present mark, in one cheap query."""
        tables = (schema.events, schema.board_events, schema.trials, schema.golden_samples)
        newest = [sa.select(sa.func.coalesce(sa.func.max(each.c.id), 0)).scalar_subquery() for each in tables]
        names = [field.name for field in dataclasses.fields(OverviewMark)]
        [row] = self._rows(sa.select(*(query.label(name) for query, name in zip(newest, names, strict=True))))
        return OverviewMark(**row)

    def fetch_newest_events(self, limit: int, subject: str | None = None, offset: int = 0) -> list[dict[str, Any]]:
        """The newest events of boards and all else, newest first: `at`, `kind`, `subject`, `message`, `by`.

        Leaves out routine events of boards. `subject` is a board's or a campaign's name.
        """
        own, boards = schema.events, schema.board_events
        first = sa.select(own.c.at, own.c.kind, own.c.subject, own.c.message, own.c.by, own.c.id)
        first = first.where(own.c.kind.not_in(_ROUTINE))
        second = sa.select(
            boards.c.at, boards.c.kind, boards.c.board.label("subject"), boards.c.reason.label("message"), boards.c.by,
            boards.c.id,
        ).where(boards.c.kind.not_in(_ROUTINE_OF_BOARDS))  # fmt: skip
        if subject is not None:
            first, second = first.where(own.c.subject == subject), second.where(boards.c.board == subject)
        # Each side through its own index, so that neither is read as a whole.
        wanted = limit + offset
        rows = self._rows(first.order_by(own.c.id.desc()).limit(wanted))
        rows += self._rows(second.order_by(boards.c.id.desc()).limit(wanted))
        rows.sort(key=lambda row: (row["at"], row["id"]), reverse=True)
        return [{key: row[key] for key in row if key != "id"} for row in rows[offset:wanted]]

    def fetch_changed_boards(self, after: int) -> list[str]:
        """The boards with events after a mark's `board_event`."""
        table = schema.board_events
        return [row["board"] for row in self._rows(sa.select(table.c.board).where(table.c.id > after).distinct())]

    def fetch_board_news(self, after: int, kinds: Collection[str]) -> list[dict[str, Any]]:
        """Board events of these kinds after a mark's `board_event`, oldest first."""
        table = schema.board_events
        query = sa.select(table).where(table.c.id > after, table.c.kind.in_(sorted(kinds)))
        return self._rows(query.order_by(table.c.id))

    def fetch_some_boards(self, names: Collection[str]) -> list[dict[str, Any]]:
        """The boards of these names that exist, as in `fetch_boards`."""
        rows = self._rows(select_boards().where(schema.boards.c.name.in_(sorted(names))).order_by(schema.boards.c.name))
        now = self._clock()
        return [to_shown(row, now) for row in rows]

    def fetch_board_page(self, limit: int, offset: int) -> tuple[list[dict[str, Any]], int]:
        """A page of boards by name, as in `fetch_boards`, and their total."""
        rows = self._rows(select_boards().order_by(schema.boards.c.name).limit(limit).offset(offset))
        now = self._clock()
        return [to_shown(row, now) for row in rows], self._count(schema.boards)

    def fetch_last_faults(self, kinds: Collection[str], board: str | None = None) -> dict[str, dict[str, Any]]:
        """Each board's newest event of one of these kinds, if it is among the newest board events."""
        table = schema.board_events
        newest = sa.select(sa.func.coalesce(sa.func.max(table.c.id), 0)).scalar_subquery()
        latest = sa.select(sa.func.max(table.c.id).label("id")).where(
            table.c.kind.in_(sorted(kinds)),
            table.c.id > newest - _FAULTS_WITHIN if board is None else table.c.board == board,
        )
        latest = latest.group_by(table.c.board)
        rows = self._rows(sa.select(table).where(table.c.id.in_(latest)))
        return {row["board"]: row for row in rows}

    def fetch_golden_since(self, after: int, newest: int) -> list[tuple[int, GoldenSample]]:
        """Golden-kernel runs after a number, with their own, oldest first; at most the `newest` of each board."""
        table = schema.golden_samples
        age = sa.func.row_number().over(partition_by=table.c.board, order_by=table.c.id.desc())
        ranked = sa.select(table, age.label("age")).where(table.c.id > after).subquery()
        fields = [field.name for field in dataclasses.fields(GoldenSample) if field.name != "samples_s"]
        query = sa.select(ranked.c.id, *(ranked.c[name] for name in fields))
        query = query.where(ranked.c.age <= newest, schema.is_sound(ranked.c.median_s)).order_by(ranked.c.id)
        return [
            (row["id"], GoldenSample(**{name: row[name] for name in fields}, samples_s=())) for row in self._rows(query)
        ]

    def fetch_campaign_page(self, limit: int, offset: int) -> tuple[list[FleetCampaign], int]:
        """A page of fleet campaigns, newest first, and their total."""
        query = select_fleet().order_by(schema.campaigns.c.id.desc()).limit(limit).offset(offset)
        return [to_campaign(row) for row in self._rows(query)], self._count(schema.fleet_campaigns)

    def fetch_sweep_page(self, limit: int, offset: int) -> tuple[list[dict[str, Any]], int]:
        """A page of sweeps, newest first, as in `fetch_sweeps`, and their total."""
        query = sweeps.select_sweeps().order_by(schema.sweeps.c.id.desc()).limit(limit).offset(offset)
        return self._rows(query), self._count(schema.sweeps)

    def fetch_trials_since(self, campaign: int, after: int) -> Iterator[Sequence[Any]]:
        """A campaign's trials after a number, in order, without the long columns: number, board type, workload,
        operating point, whether it counts, median (s), board, time of writing, time on the board (s).
        """
        table = schema.trials
        query = (
            sa.select(
                table.c.id, table.c.board_type, table.c.workload, table.c.operating_point, table.c.counted,
                table.c.median_s, table.c.board, table.c.recorded_at, table.c.held_s,
            )
            .where(table.c.campaign == campaign, table.c.id > after)
            .order_by(table.c.id)
        )  # fmt: skip
        with database.translated(self._database), self._engine.connect() as connection:
            result = connection.execution_options(stream_results=True, max_row_buffer=_CHUNK).execute(query)
            for chunk in result.partitions(_CHUNK):
                yield from chunk

    def fetch_newest_outcomes(self, after: int, limit: int) -> list[dict[str, Any]]:
        """The newest trials of all campaigns after a number, oldest first: `board`, `recorded_at`, `operating_point`,
        `outcome`. Leaves out trials without a board.
        """
        table = schema.trials
        query = sa.select(table.c.board, table.c.recorded_at, table.c.operating_point, table.c.outcome)
        query = query.where(table.c.id > after).order_by(table.c.id.desc()).limit(limit)
        return [row for row in reversed(self._rows(query)) if row["board"]]

    def fetch_board_users(self, board: str, limit: int) -> list[dict[str, Any]]:
        """The latest holders of a board, newest first: `at`, `by`, `purpose`."""
        table = schema.board_events
        query = sa.select(table.c.at, table.c.by, table.c.reason.label("purpose"))
        query = query.where(table.c.board == board, table.c.kind == "lease_taken")
        return self._rows(query.order_by(table.c.id.desc()).limit(limit))

    def fetch_board_gaps(self, boards: Collection[str], since: float, until: float) -> list[dict[str, Any]]:
        """Events of boards in a time span, oldest first: they explain why boards stood idle."""
        table = schema.board_events
        query = sa.select(table.c.board, table.c.at, table.c.kind, table.c.after, table.c.reason)
        query = query.where(table.c.board.in_(sorted(boards)), table.c.at.between(since, until))
        return self._rows(query.order_by(table.c.id).limit(20_000))

    def _count(self, table: sa.Table) -> int:
        [row] = self._rows(sa.select(sa.func.count().label("rows")).select_from(table))
        return int(row["rows"])
