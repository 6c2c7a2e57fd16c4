"""Which boards the engine has, whom they work for, and which ones its campaigns may use.

Taking and keeping boards is `boards`' business, giving them work the scheduler's; one that measures winners again is
lent out, and gone for the scheduler meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from device_agent.protocol import MeasureSpec, OperatingPoint
from farm.campaign import fleet_values as v
from farm.campaign.board_choice import has_labels
from farm.campaign.fleet_state import FleetState
from farm.campaign.running import boards
from farm.campaign.running.active import Active
from farm.campaign.running.resume import to_labels
from farm.store import Store

# How often the store is asked which boards there are.
_LOOK_S = 1.0


class Roster:
    """The boards at hand. Not thread-safe."""

    def __init__(self, store: Store, crew: boards.BoardCrew) -> None:
        self._store, self._crew = store, crew
        self._here: dict[str, boards.Arrived] = {}
        self._lent: dict[str, str] = {}
        self._look_at = 0.0

    def want(self, actives: Iterable[Active], state: FleetState) -> None:
        """Have the crew take the boards that campaigns under way may use, and give back all others."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        rows = self._store.fetch_boards()
        wanted: dict[str, set[str]] = {}
        for active in actives:
            campaign = state.campaigns.get(active.name)
            if campaign is not None and campaign.status is v.Status.PAUSED:
                continue
            for each in active.order.types:
                wanted.setdefault(each.board_type, set()).update(
                    row["name"]
                    for row in rows
                    if row["board_type"] == each.board_type
                    and bool(row["simulated"]) == each.simulated
                    and has_labels(row["labels"], active.order.labels)
                )
        self._crew.want(wanted)

    def arrive(self, report: boards.Arrived) -> list[v.Event]:
        """A board is here."""
        self._here[report.board] = report
        return [v.BoardArrived(report.board, report.board_type, labels=to_labels(report.labels))]

    def leave(self, report: boards.Left) -> list[v.Event]:
        """A board is gone."""
        self._here.pop(report.board, None)
        if report.doubted_after is not None:
            count = self._store.add_doubt(report.board, report.doubted_after, report.reason)
            self._store.add_event("board_lied", report.board, f"{count} trials are doubted: {report.reason}")
        if self._lent.pop(report.board, None) is not None:
            return []
        return [v.BoardLeft(report.board, report.lost)]

    def lend(
        self, campaign: str, board_type: str, labels: Mapping[str, str], count: int, state: FleetState
    ) -> list[str]:
        """Up to `count` boards of a type for measuring a campaign's winners again, those without work first."""
        fits = [
            name
            for name, about in self._here.items()
            if about.board_type == board_type and name not in self._lent and has_labels(about.labels, labels)
        ]

        def is_working(name: str) -> bool:
            board = state.boards.find(name)
            return board is not None and board.running is not None

        chosen = sorted(fits, key=lambda name: (is_working(name), name))[:count]
        for name in chosen:
            self._lent[name] = campaign
        return chosen

    def take_back(self, name: str) -> list[v.Event]:
        """A board that was lent has nothing more to do there."""
        if self._lent.pop(name, None) is None or name not in self._here:
            return []
        return self.arrive(self._here[name])

    def find_borrowers(self, active: Active) -> list[str]:
        """The other campaigns that have boards of a campaign's types for their winners."""
        kinds = {each.board_type for each in active.order.types}
        return sorted(
            {
                campaign
                for name, campaign in self._lent.items()
                if campaign != active.name and self._here[name].board_type in kinds
            }
        )

    def find(self, name: str) -> boards.Arrived | None:
        """What a board said of itself when it came."""
        return self._here.get(name)

    def is_of(self, name: str, board_type: str) -> bool:
        """Whether a board is here and of a type."""
        return name in self._here and self._here[name].board_type == board_type

    def count(self, board_type: str, labels: Mapping[str, str]) -> int:
        """How many boards of a type with these labels are here, lent ones included."""
        return sum(about.board_type == board_type and has_labels(about.labels, labels) for about in self._here.values())

    def offer_anchor(self, board_type: str, point: OperatingPoint, spec: MeasureSpec, library: bytes) -> None:
        """The first good candidate of a type's heaviest workload is what its boards are compared by from then on.

        One that takes long enough is what noise says least of.
        """
        if not self._crew.has_anchor(board_type):
            self._crew.set_anchor(board_type, point, spec, library)

    def list_boards(self, active: Active, state: FleetState) -> list[dict[str, Any]]:
        """The boards that a campaign may use, and what they are doing."""
        kinds = {each.board_type for each in active.order.types}
        rows = []
        for name, about in sorted(self._here.items()):
            if about.board_type not in kinds:
                continue
            board = state.boards.find(name)
            doing = "verifying" if name in self._lent else "idle"
            if board is not None and board.running is not None:
                doing = "measuring"
            rows.append(
                {
                    "name": name,
                    "board_type": about.board_type,
                    "doing": doing,
                    "point": "" if board is None else board.point,
                }
            )
        return rows
