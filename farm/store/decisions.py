"""What models are compiled from: the latest decision for each, from its own times in turns."""

from __future__ import annotations

import sqlalchemy as sa

from farm.store import schema
from farm.store.base import Base
from farm.values import ModelDecision

_KEY = ("model_sha256", "workloads", "board_type", "operating_point", "simulated")


class DecisionQueries(Base):
    """Queries on `model_decisions`."""

    def save_decision(self, decision: ModelDecision) -> None:
        """Keep it in the place of an earlier one for the same model at the same place."""
        table = schema.model_decisions
        row = {
            **{name: getattr(decision, name) for name in _KEY},
            "refused": dict(decision.refused),
            "evidence": dict(decision.evidence),
            "campaign": decision.campaign,
        }
        with self._writing() as connection:
            connection.execute(table.delete().where(*(table.c[name] == row[name] for name in _KEY)))
            connection.execute(table.insert().values(**row, decided_at=self._wall_clock()))

    def fetch_decisions(
        self,
        *,
        model_sha256: str | None = None,
        board_type: str | None = None,
        simulated: bool | None = None,
        campaign: int | None = None,
    ) -> list[ModelDecision]:
        """Those of a model, a board type, boards that are, or are not, simulated, and a campaign, each where given."""
        table = schema.model_decisions
        wanted = {"model_sha256": model_sha256, "board_type": board_type, "simulated": simulated, "campaign": campaign}
        query = sa.select(table).where(*(table.c[name] == value for name, value in wanted.items() if value is not None))
        return [ModelDecision(**row) for row in self._rows(query.order_by(table.c.decided_at))]
