"""Which boards' ways are this coordinator's, as the store has it, and when they change hands.

What the keeper does about it, such as connecting and hanging up, is in `keeper`; the rules are the store's (`ways`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping

from farm.store import Store
from farm.store.ways import OVERDUE_S, BoardWay

# Within this a board that another coordinator handed to us is in reach: a connection, and an agent that looks for its
# tracker every 2 s. Until then it is what it was for everybody.
SETTLE_S = 20.0
# For so long a board is asked for that somebody here named.
_WANTED_S = 60.0

_log = logging.getLogger(__name__)


class WayLeases:
    """The ways that are ours. Used by the keeper's main thread alone."""

    def __init__(self, store: Store, me: str) -> None:
        """`me`: this coordinator's name, which no other has."""
        self._store, self._me = store, me
        self._ways: dict[str, BoardWay] = {}
        self._settling: dict[str, float] = {}
        self._late_since: dict[str, float] = {}
        self._wanted: dict[str, float] = {}

    def look(self, sessions: Mapping[str, str]) -> None:
        """Renew, take and ask for ways; `sessions` has the boards, each with what our connection is on it, if any.

        Raises what the store does; then all stays as it was, and what is connected stays so.
        """
        now = time.monotonic()
        self._wanted = {name: until for name, until in self._wanted.items() if until > now}
        overdue = {name for name, since in self._late_since.items() if now - since >= OVERDUE_S}
        before, self._ways = self._ways, self._store.keep_ways(self._me, sessions, self._wanted.keys(), overdue)
        self._late_since = {
            name: self._late_since.get(name, now) for name, way in self._ways.items() if way.lapsed and way.keeper
        }
        for name, way in self._ways.items():
            if way.keeper == self._me and (name not in before or before[name].keeper != self._me):
                self._wanted.pop(name, None)
                if way.handed:
                    self._settling[name] = now + SETTLE_S
                if way.before not in ("", self._me):
                    _log.info("%s is gone: the way to %s is ours", way.before, name, extra={"board": name})
        self._settling = {name: until for name, until in self._settling.items() if self.is_mine(name)}

    def want(self, names: Collection[str]) -> None:
        """Somebody here asks for these boards by their names."""
        self._wanted |= dict.fromkeys(names, time.monotonic() + _WANTED_S)

    def find(self, name: str) -> BoardWay:
        """Whose a board's way is, as it was last seen."""
        return self._ways.get(name, BoardWay(""))

    def is_mine(self, name: str) -> bool:
        """Whether we reach a board for everybody."""
        return self.find(name).keeper == self._me

    def note_up(self, name: str) -> None:
        """A board is in reach."""
        self._settling.pop(name, None)

    def is_settling(self, name: str) -> bool:
        """Whether a board that was handed to us has still time to come in reach."""
        return self._settling.get(name, 0.0) > time.monotonic()

    def list_asked(self) -> dict[str, str]:
        """The boards of ours that others are to have now, and who."""
        return {name: way.asked_by for name, way in self._ways.items() if way.asked_by and self.is_mine(name)}

    def hand(self, boards: Mapping[str, tuple[str, str]]) -> None:
        """Give ways, whose connections are closed, to who asks for them: `boards` has who, and what ours was there."""
        for name in self._store.hand_ways(self._me, boards) if boards else ():
            self._ways[name] = BoardWay(boards[name][0])
            _log.info("the way to %s goes to %s", name, boards[name][0], extra={"board": name})

    def give_up(self, name: str, reason: str) -> bool:
        """Leave to others a board that was handed to us and stays out of reach; False where it is for us to keep."""
        if name not in self._settling:
            return False
        del self._settling[name]
        self._store.bar_way(self._me, name, reason)
        self._ways[name] = BoardWay("")
        return True

    def close(self) -> None:
        """Let go of all."""
        self._store.leave_ways(self._me)
