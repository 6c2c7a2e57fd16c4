"""The engine's campaigns in the queue for boards: what each asks for, which boards are theirs, which are asked back.

The rules are `farm.crew.queue_rules`'; leasing and leaving is `board_keeping`'s business.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from farm.crew.queue_place import QueuePlace, describe, read_queue
from farm.crew.queue_rules import QueuePlan
from farm.errors import TransientError
from farm.store import Store
from farm.values import BoardRequest, WorkKind

# Longer than a command's: an engine may be busy for some seconds, and what it loses by it is its turn.
_TTL_S = 30.0

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BoardsAsked:
    """The boards of a type that a campaign may use. `campaign` None: nobody's in particular."""

    campaign: str | None
    purpose: str
    board_type: str
    boards: frozenset[str]
    priority: int = 0

    def without(self, board: str) -> BoardsAsked:
        """The same without one board."""
        return dataclasses.replace(self, boards=self.boards - {board})


class TrialQueue:
    """What campaigns wait for. Not thread-safe, like the store it is given."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._places: dict[tuple[str | None, str], QueuePlace] = {}
        self._plan = QueuePlan()
        self._known: dict[int, BoardRequest] = {}

    def ask(self, asked: Sequence[BoardsAsked]) -> None:
        """From now on this is wanted, and nothing else."""
        wanted = {(each.campaign, each.board_type): each for each in asked if each.boards}
        for key in self._places.keys() - wanted.keys():
            self._places.pop(key).leave()
        for key, each in wanted.items():
            if key in self._places:
                self._places[key].change(each.boards)
            else:
                self._places[key] = QueuePlace(
                    self._store,
                    WorkKind.TRIALS,
                    each.purpose,
                    each.board_type,
                    each.boards,
                    priority=each.priority,
                    campaign=each.campaign,
                    ttl_s=_TTL_S,
                )

    def look(self, rows: Sequence[Mapping[str, Any]], leaving: Collection[str]) -> None:
        """See how the queue stands; `rows` are the store's of boards. Where it is busy, nothing changes."""
        if not self._places:
            self._plan = QueuePlan()
            return
        try:
            for place in self._places.values():
                place.stay()
            queue, self._plan = read_queue(self._store, rows, leaving)
        except TransientError as error:
            _log.info("the queue cannot be read: %s", error.message)
            return
        self._known = {each.id: each for each in queue.requests}

    def may_take(self, board: str) -> bool:
        """Whether a free board is ours now."""
        return self._plan.grants.get(board) in {place.number for place in self._places.values()} - {None}

    def asked_back(self, held: Collection[str]) -> dict[str, str]:
        """Which of our boards are to go to somebody else, and to whom."""
        found = {name: self._known.get(number) for name, number in self._plan.yields.items() if name in held}
        return {name: describe(request) for name, request in found.items() if request is not None}

    def priorities(self) -> dict[str, int]:
        """The priority of each campaign, as operators have set it."""
        return {campaign: place.priority for (campaign, _), place in self._places.items() if campaign is not None}

    def close(self) -> None:
        """Ask for nothing any more."""
        for place in self._places.values():
            place.leave()
        self._places.clear()
