"""One leased board as the crew has it: its lease, its actor, the calls that were sent there, and what is seen of it.

When boards are taken and left, and what the engine is told, is `boards`' business.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from farm.boards.blame import Blame
from farm.boards.health import Kind, Observation, decide_by
from farm.boards.lease_keeper import LeaseKeeper
from farm.boards.site import find_trouble
from farm.campaign.engine import board_actor, ray_calls
from farm.campaign.engine.host import Host
from farm.errors import InternalError, UsageError
from farm.reach.tracker import Tracker
from farm.store import Store
from farm.values import Lease

# An agent that takes a dead one's place is at the tracker in some seconds, a board whose session was cut at once.
REQUEST_TIMEOUT_S = 30.0
# A process that loads TVM's runtime, on a machine where many start at once; then the board is waited for.
_CONNECT_TIMEOUT_S = 120.0


@dataclasses.dataclass
class Call:
    """Something that a board was asked for. `key` is whose it is (`kind` says what); `limit_s` is for the call itself.

    `began_s` is when nothing was before it any more, on the monotonic clock.
    """

    kind: str
    key: Any
    send: Callable[[Any, int], Any]
    limit_s: float
    number: int = 0
    reference: Any = None
    began_s: float | None = None
    revoked: bool = False


class CrewBoard:
    """A leased board. For `Blame` it is the place that a run works at. Not thread-safe."""

    def __init__(
        self,
        row: Mapping[str, Any],
        lease: Lease,
        tracker: Tracker | None,
        store: Store,
        purpose: str,
        host: Host | None = None,
    ) -> None:
        """Keep the lease, start the actor, and have it open a session; waits for neither.

        `host` is this machine where that is the board, whose tracker is taken then.
        """
        self.host = host
        self.name, self.board_type = str(row["name"]), str(row["board_type"])
        self.labels = dict(row["labels"] or {})
        # When it was taken (monotonic, s), and the mark of the store's (`Store.fetch_mark`) then.
        self.taken_at, self.taken_mark = time.monotonic(), store.fetch_mark()
        self.description: dict[str, Any] | None = None
        self.arrived = False
        self.calls: collections.deque[Call] = collections.deque()
        # In a row: calls that found no session, points that were not reached, clocks that did not hold.
        self.farm_errors = self.pins_failed = self.drifted = self.losses = 0
        # Why it has to be left, once that is known.
        self.over = ""
        self.blame = Blame(self)
        self._like = {"board_type": self.board_type, "simulated": bool(row["simulated"])}
        self._tracker, self._store, self._purpose = tracker, store, purpose
        self._number = 0
        self._keeper = LeaseKeeper(functools.partial(Store, store.location), lease)
        self.actor: Any = None
        self.start_actor()

    @property
    def key(self) -> str:
        """The board's name at the tracker."""
        return f"{self.board_type}/{self.name}"

    @property
    def can_change(self) -> bool:
        """See `Site`: what waits for it is done elsewhere, unless it is this machine."""
        return self.host is None

    @property
    def tracker_address(self) -> tuple[str, int]:
        """Where it is asked for."""
        tracker = self.host.tracker if self.host is not None else self._tracker
        if tracker is None:
            raise InternalError(f"{self.key} has no tracker")
        return tracker.host, tracker.port

    @property
    def lease(self) -> Lease:
        """The lease, as last renewed."""
        return self._keeper.lease

    @property
    def lost_lease(self) -> str:
        """Why the lease is over; "" where it is not, as far as its keeper knows."""
        return self._keeper.reason if self._keeper.lost.is_set() else ""

    @property
    def references(self) -> list[Any]:
        """What is still to come from the actor: the session, or the call that is carried out."""
        if self.connecting is not None:
            return [self.connecting]
        return [self.calls[0].reference] if self.calls else []

    @property
    def work(self) -> list[Call]:
        """The calls that the engine waits for."""
        return [call for call in self.calls if call.kind != "anchor" and not call.revoked]

    def start_actor(self) -> None:
        """Put an actor in the place of the one before, if any, and send it what is still to do."""
        if self.actor is not None:
            ray_calls.kill(self.actor)
        self.actor = board_actor.start_campaign_board(
            *self.tracker_address, self.key, self.lease, self._like, REQUEST_TIMEOUT_S
        )
        self.connecting: Any = self.actor.connect.remote(REQUEST_TIMEOUT_S)
        self.connect_by = time.monotonic() + _CONNECT_TIMEOUT_S
        for call in list(self.calls):
            if call.revoked:
                self.calls.remove(call)
            else:
                call.reference, call.began_s = call.send(self.actor, call.number), None

    def send(self, call: Call) -> None:
        """Have a call carried out after those before it."""
        self._number += 1
        call.number = self._number
        call.reference = call.send(self.actor, call.number)
        self.calls.append(call)

    def revoke(self, call: Call) -> None:
        """Take a call back, begun or not."""
        call.revoked = True
        board_actor.revoke(self.actor, call.number)

    def confirm(self) -> bool:
        """See `Site.confirm`."""
        trouble = self._keeper.find_end(self._store)
        if not trouble and self.host is None:
            trouble = find_trouble(self._tracker)
        self.over = self.over or trouble
        return not trouble

    def observe(self, kind: Kind, detail: str) -> None:
        """See `Site.observe`. This machine is judged by whoever sits at it."""
        if self.host is not None:
            return
        with contextlib.suppress(UsageError):  # it was removed, which the next look finds out
            self._store.observe_board(self.name, kind, self._purpose, decide_by(Observation(kind, detail)))

    def end_actor(self) -> None:
        """End the session; the board's agent puts its clocks back."""
        ray_calls.kill(self.actor)

    def give_back(self) -> None:
        """Give the lease back. Waits for the store; from any thread."""
        self._keeper.close()
