"""Sums over trials and records, which read no trial into Python: for plans, pages and Prometheus."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from device_agent.protocol import FaultSide
from farm.store import expressions, schema
from farm.store.session import StorePart
from farm.types.states import CampaignStanding, CampaignState, TrialSums
from farm.values import SEARCH_TRIAL

# Enough for a steady median; older trials were measured under other settings.
NEWEST_TRIALS = 2000
# The fields of the progress document that do not grow with the campaign's tasks.
_PROGRESS = ("models", "boards", "eta_s", "wall_clock_s", "search_s")
_OVER = [str(state) for state in CampaignState if state.over]


@dataclasses.dataclass(frozen=True)
class TrialCosts:
    """Medians over the newest trials, in seconds; None without data: board held, compiler busy."""

    trials: int = 0
    held_s: float | None = None
    build_s: float | None = None


class BoardTotal(NamedTuple):
    """A campaign's trials of one kind on one board (None: never on one), and how long they held it (s)."""

    board_type: str
    board: str | None
    purpose: str
    status: str
    fault_side: str | None
    trials: int
    held_s: float


class CountedTrial(NamedTuple):
    """A counted trial without its trace; `median_s` in seconds, None for a candidate's own failure."""

    board_type: str
    workload: str
    operating_point: str
    median_s: float | None


class Totals(StorePart):
    """Sums over `trials` and `records`: for plans, pages and Prometheus. None reads the long columns."""

    def fetch_trial_costs(self, board_type: str, *, simulated: bool) -> TrialCosts:
        """What a trial costs on boards of a type, over the newest `NEWEST_TRIALS` of this farm that reached one."""
        trials = schema.trials
        rows = self._db.rows(
            sa.select(trials.c.held_s, trials.c.build_s)
            .where(
                trials.c.board_type == board_type,
                trials.c.simulated == simulated,
                trials.c.held_s.is_not(None),
                expressions.is_own_trial(),
            )
            .order_by(trials.c.id.desc())
            .limit(NEWEST_TRIALS)
        )
        held = [row["held_s"] for row in rows]
        built = [row["build_s"] for row in rows if row["build_s"] is not None]
        return TrialCosts(
            len(rows), statistics.median(held) if held else None, statistics.median(built) if built else None
        )

    def count_known_candidates(
        self, workloads: Sequence[str], board_type: str, *, simulated: bool
    ) -> Mapping[tuple[str, str], int]:
        """The number of candidates with trials, good or bad, by workload and operating point; zeros left out."""
        trials = schema.trials
        key = (trials.c.workload, trials.c.operating_point)
        query = sa.select(*key, sa.func.count(sa.distinct(trials.c.candidate)).label("n")).group_by(*key)
        query = query.where(
            trials.c.board_type == board_type,
            trials.c.simulated == simulated,
            sa.or_(trials.c.fault_side.is_(None), trials.c.fault_side == str(FaultSide.CANDIDATE)),
        )
        rows = self._db.rows_among(query, trials.c.workload, workloads)
        return {(row["workload"], row["operating_point"]): row["n"] for row in rows}

    def fetch_recorded(self, workloads: Sequence[str], board_type: str, *, simulated: bool) -> set[tuple[str, str]]:
        """The workloads with a record, each with its operating point."""
        table = schema.records
        query = sa.select(table.c.workload, table.c.operating_point)
        query = query.where(table.c.board_type == board_type, table.c.simulated == simulated)
        rows = self._db.rows_among(query, table.c.workload, workloads)
        return {(row["workload"], row["operating_point"]) for row in rows}

    # Of one campaign

    def fetch_by_board(self, campaign: int) -> list[BoardTotal]:
        """Trials by board type, board, purpose, status and side at fault."""
        table = schema.trials
        key = (table.c.board_type, table.c.board, table.c.purpose, table.c.status, table.c.fault_side)
        query = (
            sa.select(*key, sa.func.count(), expressions.total(table.c.held_s))
            .where(table.c.campaign == campaign)
            .group_by(*key)
            .order_by(*(column.nulls_first() for column in key))
        )
        return self._db.read(query, BoardTotal)

    def fetch_course(self, campaign: int) -> list[CountedTrial]:
        """Every counted trial, in order."""
        table = schema.trials
        query = (
            sa.select(table.c.board_type, table.c.workload, table.c.operating_point, expressions.sound_median_s)
            .where(table.c.campaign == campaign, table.c.counted.is_not(None))
            .order_by(table.c.id)
        )
        return self._db.read(query, CountedTrial)

    # For Prometheus

    def fetch_standings(self, lately_s: float, most: int) -> list[CampaignStanding]:
        """Campaigns that are not over, or ended less than `lately_s` ago: the `most` newest, oldest first."""
        common, fleet, progress = schema.campaigns, schema.fleet_campaigns, schema.campaign_progress
        parts = [progress.c.progress[name].label(name) for name in _PROGRESS]
        query = (
            sa.select(common.c.id, fleet.c.name, common.c.state, fleet.c.wanted, *parts)
            .join(fleet, fleet.c.campaign == common.c.id)
            .outerjoin(progress, progress.c.campaign == common.c.id)
            .where(common.c.state.not_in(_OVER) | (common.c.finished_at >= self._db.wall_clock() - lately_s))
            .order_by(common.c.id.desc())
            .limit(most)
        )
        rows = self._db.read(query, CampaignStanding)
        of = schema.campaign_workloads.c
        types: dict[int, list[str]] = {}
        wanted = [row.id for row in rows]
        for pair in self._db.rows(sa.select(of.campaign, of.board_type).where(of.campaign.in_(wanted)).distinct()):
            types.setdefault(pair["campaign"], []).append(pair["board_type"])
        return [dataclasses.replace(row, board_types=tuple(sorted(types.get(row.id, ())))) for row in reversed(rows)]

    def sum_trials(self, campaign: int, before: TrialSums | None = None) -> TrialSums:
        """Sums over a campaign's trials.

        `before` is an earlier result: only newer trials are read then. One engine writes a campaign's trials in order,
        so none comes late.
        """
        before = before or TrialSums()
        table = schema.trials
        rows = self._db.rows(
            sa.select(
                table.c.fault_side,
                sa.func.count().filter(table.c.purpose == SEARCH_TRIAL).label("trials"),
                expressions.total(table.c.build_s).label("build_s"),
                expressions.total(table.c.held_s).label("board_s"),
                sa.func.max(table.c.id).label("mark"),
            )
            .where(table.c.campaign == campaign, table.c.id > before.mark)
            .group_by(table.c.fault_side)
        )
        by_side = dict(before.by_side)
        for row in rows:
            side = row["fault_side"] or "ok"
            by_side[side] = by_side.get(side, 0) + row["trials"]
        return TrialSums(
            max([before.mark, *(row["mark"] for row in rows)]),
            by_side,
            before.build_s + sum(float(row["build_s"]) for row in rows),
            before.board_s + sum(float(row["board_s"]) for row in rows),
        )
