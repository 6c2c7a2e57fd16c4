"""The engine's boards: for which campaign each works, and which boards campaigns may use.

`boards` takes and keeps them, the scheduler gives them work. A board lent to verification is gone for the scheduler
meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from device_agent.protocol import MeasureSpec
from farm.campaign.engine import boards
from farm.campaign.engine.active import Active
from farm.campaign.engine.board_keeping import LOOK_REST, BoardsAsked
from farm.campaign.scheduler import events
from farm.campaign.scheduler.fleet import FleetState
from farm.campaign.scheduler.state import Lane, Status, to_labels, to_names
from farm.crew.choice import find_reason, find_unusable
from farm.store import Store
from farm.types.campaigns import Order
from farm.types.states import CampaignState

# How often the store is asked which boards there are.
_LOOK_S = 1.0
# Starting services and agents need seconds to connect; before that, a missing board need not be off.
_CONNECTING_S = 20.0
# Boards whose absence is explained; a rack has dozens.
_MOST_NAMED = 3


class Roster:
    """The boards at hand. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        engine_boards: boards.EngineBoards,
        fleet: FleetState,
        need: Callable[[Collection[str]], None] = lambda names: None,
    ) -> None:
        """`need` connects boards by name."""
        self._store, self._boards, self._fleet, self._need = store, engine_boards, fleet, need
        # The boards that campaigns name, each campaign's together.
        self._named: set[tuple[str, ...]] = set()
        self._here: dict[str, boards.Arrived] = {}
        self._lent: dict[str, str] = {}
        self._yielding: set[str] = set()
        self._look_at = 0.0

    def want(self, actives: Iterable[Active]) -> None:
        """Request the boards that running campaigns may use, and return all others.

        Boards that only some campaigns may use form groups of their own.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        asked: list[BoardsAsked] = []
        under_way = [each.order for each in actives if each.campaign.status is not Status.PAUSED]
        host = self._boards.want_host(any(each.is_host for order in under_way for each in order.types))
        rows = self._store.boards.fetch()
        for order in under_way:
            for each in order.types:
                names = {
                    row.name
                    for row in rows
                    if row.board_type == each.board_type
                    and row.simulated == each.simulated
                    and order.may_use(row.name, row.labels)
                    and (row.name == host or not each.is_host)
                }
                purpose = f"trials of {order.name} of {order.owner}"
                asked.append(BoardsAsked(order.name, purpose, each.board_type, frozenset(names), order.priority))
        self._boards.want(asked)
        self._need({name for each in asked for name in each.boards} - {host})
        self._regroup({order.boards for order in under_way if order.boards})
        self._look_at = now + max(_LOOK_S, LOOK_REST * (time.monotonic() - now))

    def arrive(self, report: boards.Arrived) -> None:
        self._here[report.board] = report
        labels = to_labels(report.labels).union(*(to_names(names) for names in self._find_named(report.board)))
        events.arrive(self._fleet, report.board, report.board_type, labels=labels, is_host=report.is_host)

    def _find_named(self, board: str) -> set[tuple[str, ...]]:
        return {names for names in self._named if board in names}

    def _regroup(self, named: set[tuple[str, ...]]) -> None:
        """Report boards to the scheduler anew that are named by other campaigns now."""
        before = {name: self._find_named(name) for name in self._here}
        self._named = named
        settled = [name for name in before if name not in self._lent.keys() | self._yielding]
        for name in settled:
            if self._find_named(name) != before[name]:
                self.arrive(self._here[name])

    def yields(self, board: str) -> None:
        """Report that a board goes to another user: it finishes its work and gets no more."""
        self._yielding.add(board)
        events.yield_board(self._fleet, board)

    def leave(self, report: boards.Left) -> None:
        self._here.pop(report.board, None)
        self._yielding.discard(report.board)
        if report.doubted_after is not None:
            count = self._store.trials.add_doubt(report.board, report.doubted_after, report.reason)
            self._store.events.add("board_lied", report.board, f"{count} trials are doubted: {report.reason}")
        self._lent.pop(report.board, None)
        events.leave(self._fleet, report.board)

    def lend(self, order: Order, board_type: str, count: int) -> list[boards.Arrived]:
        """Lend up to `count` boards of a type to a campaign's verification, idle ones first."""
        taken = self._lent.keys() | self._yielding
        fits = [each.board for each in self._list_usable(order, {board_type}) if each.board not in taken]
        chosen = sorted(fits, key=lambda name: (self._is_measuring(name), name))[:count]
        for name in chosen:
            self._lent[name] = order.name
            events.leave(self._fleet, name)
        return [self._here[name] for name in chosen]

    def _is_measuring(self, name: str) -> bool:
        board = self._fleet.boards.get(name)
        return board is not None and board.running is not None

    def _list_usable(self, order: Order, board_types: Collection[str]) -> list[boards.Arrived]:
        here = self._here.values()
        return [each for each in here if each.board_type in board_types and order.may_use(each.board, each.labels)]

    def suits(self, name: str, order: Order) -> bool:
        """Whether a campaign may use a board that is here."""
        return name in self._here and order.may_use(name, self._here[name].labels)

    def take_back(self, name: str) -> None:
        """Return a lent board."""
        if self._lent.pop(name, None) is not None and name in self._here and name not in self._yielding:
            self.arrive(self._here[name])

    def explain_absence(self, active: Active) -> tuple[CampaignState, str]:
        """Explain why a campaign has no board, beside the scheduler's reason."""
        order = active.order
        kinds = {each.board_type for each in order.types}
        lent = {campaign for name, campaign in self._lent.items() if self._here[name].board_type in kinds}
        if borrowers := lent - {active.name}:
            return CampaignState.WAITING, f"boards verify {', '.join(sorted(borrowers))}"
        now = time.monotonic()
        active.alone_since = active.alone_since or now
        simulated = {(each.board_type, each.simulated) for each in order.types}
        rows = [row for row in self._store.boards.fetch() if order.may_use(row.name, row.labels)]
        rows = [row for row in rows if (row.board_type, row.simulated) in simulated]
        coming = f"{len(rows)} board{'' if len(rows) == 1 else 's'} may be used"
        why = {str(row.name): find_reason(row) for row in rows if not self._boards.has_taken(row.name)}
        if any(row.name not in why or not why[row.name] for row in rows):
            return CampaignState.CONNECTING, coming
        if now - active.alone_since < _CONNECTING_S and any(find_unusable(row).startswith("offline") for row in rows):
            return CampaignState.CONNECTING, coming
        said = "; ".join(f"{name}: {text}" for name, text in list(why.items())[:_MOST_NAMED])
        more = f"; and {len(why) - _MOST_NAMED} more" if len(why) > _MOST_NAMED else ""
        return CampaignState.WAITING, active.campaign.reason + (f" ({said}{more})" if said else "")

    def count(self, order: Order, board_type: str) -> int:
        """Count the boards of a type at hand that a campaign may use, lent ones included."""
        return len(self._list_usable(order, {board_type}))

    def offer_reference_kernel(self, lane: Lane, spec: MeasureSpec, library: bytes) -> None:
        """Offer a good candidate of a type's heaviest workload as its reference kernel; the first one is taken.

        A long-running kernel is least affected by noise.
        """
        board_type, point = lane.board_type, lane.of_type.points[lane.point]
        alone = any(about.is_host for about in self._here.values() if about.board_type == board_type)
        if not alone:
            self._boards.offer_reference_kernel(board_type, point, spec, library)

    def list_boards(self, active: Active) -> list[dict[str, Any]]:
        """List the boards that a campaign may use, with their state."""
        rows = []
        for each in self._list_usable(active.order, {of_type.board_type for of_type in active.order.types}):
            board, doing = self._fleet.boards.get(each.board), "verifying" if each.board in self._lent else "idle"
            doing = "measuring" if self._is_measuring(each.board) else doing
            point = "" if board is None else board.point
            rows.append({"name": each.board, "board_type": each.board_type, "doing": doing, "point": point})
        return sorted(rows, key=lambda row: row["name"])
