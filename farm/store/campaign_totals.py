"""What the trials of one campaign come to, for its report: sums by board, and the course of its latencies."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from farm.store import schema
from farm.store.base import Base


class CampaignTotals(Base):
    """Queries over `trials` that add up one campaign. None reads the long columns."""

    def fetch_board_totals(self, campaign: int) -> list[dict[str, Any]]:
        """Trials by `board_type`, `board` (None: none had it), `purpose`, `status` and `fault_side`.

        Each with `trials`, how many, and `held_s`, how long they held the board.
        """
        table = schema.trials
        key = (table.c.board_type, table.c.board, table.c.purpose, table.c.status, table.c.fault_side)
        return self._rows(
            sa.select(*key, sa.func.count().label("trials"), schema.total(table.c.held_s).label("held_s"))
            .where(table.c.campaign == campaign)
            .group_by(*key)
            .order_by(*(column.nulls_first() for column in key))
        )

    def fetch_course(self, campaign: int) -> list[dict[str, Any]]:
        """`board_type`, `workload`, `operating_point` and `median_s` (s) of every trial that counts, in order."""
        table = schema.trials
        return self._rows(
            sa.select(table.c.board_type, table.c.workload, table.c.operating_point, schema.sound_median_s)
            .where(table.c.campaign == campaign, table.c.counted.is_not(None))
            .order_by(table.c.id)
        )
