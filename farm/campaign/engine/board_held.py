"""One leased board as the crew has it: its lease, its actor, the calls that were sent there, and what is seen of it.

When boards are taken and left, and what the engine is told, is `boards`' business.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from farm.campaign.engine import board_actor, ray_calls
from farm.campaign.engine.host import HostBoard
from farm.connectivity.tracker import Tracker
from farm.crew.blame import Blame
from farm.crew.health import Kind
from farm.crew.leased_board import LeasedBoard
from farm.errors import InternalError
from farm.store import Store
from farm.values import WorkKind

# An agent that takes a dead one's place is at the tracker in some seconds, a board whose session was cut at once.
REQUEST_TIMEOUT_S = 30.0
# A process that loads TVM's runtime, on a machine where many start at once; then the board is waited for.
_CONNECT_TIMEOUT_S = 120.0


@dataclasses.dataclass
class Call:
    """Something that a board was asked for. `key` is whose it is (`kind` says what), `order` what its actor is told
    after the call's number; `limit_s` is for the call itself.

    `began_s` is when nothing was before it any more, on the monotonic clock.
    """

    kind: str
    key: Any
    order: tuple[Any, ...]
    limit_s: float
    number: int = 0
    reference: Any = None
    began_s: float | None = None
    revoked: bool = False


class CrewBoard(LeasedBoard):
    """A leased board. For `Blame` it is the place that a run works at. Not thread-safe."""

    def __init__(
        self, store: Store, row: Mapping[str, Any], tracker: Tracker | None, purpose: str, host: HostBoard | None = None
    ) -> None:
        """Take its lease, start the actor, and have it open a session, which is not waited for.

        `host` is this machine where that is the board, whose tracker is taken then. Raises what `LeasedBoard` raises.
        """
        self.host, self._tracker = host, tracker
        self.board_type, self.labels = str(row["board_type"]), dict(row["labels"] or {})
        # When it was taken (monotonic, s), and the mark of the store's (`Store.fetch_mark`) then.
        self.taken_at, self.taken_mark = time.monotonic(), store.fetch_mark()
        _ = self.tracker_address  # where there is none, nothing is taken
        find_tracker = (lambda: tracker) if host is None else None
        kind = WorkKind.TRIALS if host is None else None  # this machine is in no queue
        super().__init__(store, f"{self.board_type}/{row['name']}", purpose, find_tracker, kind=kind)
        self.description: dict[str, Any] | None = None
        self.arrived = False
        self.calls: collections.deque[Call] = collections.deque()
        self.losses = 0  # in a row
        self.blame = Blame(self)
        self._like = {"board_type": self.board_type, "simulated": bool(row["simulated"])}
        self._number = 0
        self.actor: Any = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.give_back)
            self.start_actor()
            undo.pop_all()

    @property
    def can_change(self) -> bool:
        """See `Site`: what waits for it is done elsewhere, unless it is this machine."""
        return self.host is None

    @property
    def tracker_address(self) -> tuple[str, int]:
        """Where it is asked for."""
        tracker = self.host.tracker if self.host is not None else self._tracker
        if tracker is None:
            raise InternalError(f"a {self.board_type} is to be taken without a tracker")
        return tracker.host, tracker.port

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
                self._hand_over(call)

    def send(self, call: Call) -> None:
        """Have a call carried out after those before it."""
        self._number += 1
        call.number = self._number
        self._hand_over(call)
        self.calls.append(call)

    def _hand_over(self, call: Call) -> None:
        method = self.actor.run_at if call.kind == "run" else self.actor.measure_at
        call.reference, call.began_s = method.remote(call.number, *call.order), None

    def revoke(self, call: Call) -> None:
        """Take a call back, begun or not."""
        call.revoked = True
        board_actor.revoke(self.actor, call.number)

    def observe(self, kind: Kind, detail: str) -> None:
        """See `Site.observe`. This machine is judged by whoever sits at it."""
        if self.host is None:
            super().observe(kind, detail)

    def end_actor(self) -> None:
        """End the session; the board's agent puts its clocks back."""
        ray_calls.kill(self.actor)
