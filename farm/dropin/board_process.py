"""One leased board, held for a script: taken, measured on, given up when unfit, given back. Started by `boards`.

A process of its own: a session's calls block in TVM's client, and the script has TVM's compiler loaded.
"""

from __future__ import annotations

import dataclasses
import time

from device_agent.protocol import MeasureSpec, Outcome
from farm.boards.blame import Blame, to_outcome
from farm.boards.leased_site import FleetSite
from farm.errors import (
    BoardNonsenseError,
    BoardUnsafeError,
    FarmError,
    LeaseOverError,
)
from farm.measure.session import BoardSession
from farm.processes.partners import Parent
from farm.reach.tracker import Tracker
from farm.settings import StoreLocation
from farm.store import Store

# A board that somebody else has without a lease, or whose agent starts anew.
REQUEST_TIMEOUT_S = 30.0
# How often a board without work is looked at.
_LOOK_S = 0.5
# A script is told what is waited for, and gives up by itself; this only has to be longer.
_WAIT_S = 30 * 86400.0


@dataclasses.dataclass(frozen=True)
class BoardOrder:
    """Which board is wanted, and where things are. `name` None: any of the type."""

    store: StoreLocation
    tracker: tuple[str, int]
    board_type: str
    name: str | None
    purpose: str


class _Reach:
    """The tracker that the script's services keep."""

    def __init__(self, tracker: tuple[str, int]) -> None:
        self.tracker = Tracker(*tracker)


class ScriptBoard:
    """Serves a script with one board at a time. Not thread-safe, but for `cut`."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._session: BoardSession | None = None
        self._held: tuple[object, ...] = ()
        self._told: tuple[object, ...] = ()
        self._noted = ""

    def cut(self) -> None:
        """End the call under way, from another thread."""
        if (session := self._session) is not None:
            session.cut()

    def serve(self, order: BoardOrder) -> None:
        """Take a board and measure what comes until the script is gone. Raises StoppedError, FarmError."""
        with (
            Store(order.store) as store,
            FleetSite(
                _Reach(order.tracker), store, order.board_type, order.name, order.purpose, _WAIT_S, self._note
            ) as site,
        ):
            self._site, self._blame = site, Blame(site)
            try:
                self._serve()
            finally:
                self._parent.leave()
                self.close()

    def close(self) -> None:
        """Let go of the session; the board's agent ends what runs there."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _serve(self) -> None:
        while True:
            self._site.ensure_alive()
            self._say_where_we_are()
            message = self._parent.receive(_LOOK_S)
            if message is None:
                continue
            _, spec, library = message
            began = time.monotonic()
            outcome = self._measure(MeasureSpec.from_json(spec), library)
            self._parent.send("measured", outcome.to_json(), time.monotonic() - began)

    def _say_where_we_are(self) -> None:
        """Open a session with a board that is new; tell the script which board there is, or that there is none."""
        now: tuple[object, ...] = ()
        if self._site.has_board:
            try:
                self._open()
                now = self._held
                self._noted = ""
            except FarmError as error:
                self._fault(error)
                if error.message != self._noted:
                    self._noted = error.message
                    self._note(error.message)
        if now == self._told:
            return
        self._told = now
        if now and self._session is not None:
            self._parent.send("board", self._site.name, self._session.description.to_dict())
        else:
            self._parent.send("no_board", self._site.name)

    def _measure(self, spec: MeasureSpec, library: bytes) -> Outcome:
        try:
            outcome = self._open().measure(spec, library)
        except FarmError as error:
            return self._fault(error)
        return self._blame.judge(outcome, still_there=True)

    def _open(self) -> BoardSession:
        held = (self._site.key, self._site.lease.token if self._site.lease else None)
        if self._session is None or held != self._held:
            self.close()
            self._session = BoardSession(self._site.tracker, self._site.key, REQUEST_TIMEOUT_S, self._site.lease)
            self._held = held
        return self._session

    def _fault(self, error: FarmError) -> Outcome:
        """What an error says of the board, told to the farm, and the outcome that it makes."""
        self.close()
        if isinstance(error, BoardUnsafeError | BoardNonsenseError):
            return self._blame.judge_error(error)
        if isinstance(error, LeaseOverError):
            self._site.note_refusal(error)
        return self._blame.judge(to_outcome(error, self._site.name), still_there=True)

    def _note(self, text: str) -> None:
        self._parent.send("note", text)


def main(parent: Parent) -> None:
    """Serve until the script is gone, or say why that cannot be: `("gone", message, hint)`."""
    board = ScriptBoard(parent)
    parent.on_stop = board.cut
    order = parent.receive(REQUEST_TIMEOUT_S)
    if order is None:
        return
    try:
        board.serve(order[1])
    except FarmError as error:
        parent.send("gone", error.message, error.hint)
