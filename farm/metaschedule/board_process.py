"""One leased board, held for a script: taken, measured on, given up when unfit, given back. Started by `boards`.

A process of its own: a session's calls block in TVM's client, and the script has TVM's compiler loaded.
"""

from __future__ import annotations

import dataclasses
import time

from device_agent.protocol import MeasureSpec
from farm.connectivity.tracker import Tracker
from farm.crew.blame import Blame
from farm.crew.held_board import HeldBoard
from farm.crew.leased_site import FleetSite
from farm.errors import BoardLostError, FarmError
from farm.processes.worker_processes import Parent
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
        self._held: HeldBoard | None = None
        self._told: tuple[object, ...] = ()
        self._noted = ""

    def cut(self) -> None:
        """End the call under way, from another thread."""
        if (held := self._held) is not None:
            held.cut()

    def serve(self, order: BoardOrder) -> None:
        """Take a board and measure what comes until the script is gone. Raises StoppedError, FarmError."""
        with (
            Store(order.store) as store,
            FleetSite(
                _Reach(order.tracker), store, order.board_type, order.name, order.purpose, _WAIT_S, self._note
            ) as site,
        ):
            held = self._held = HeldBoard(site)
            try:
                self._serve(site, held, Blame(site))
            finally:
                self._parent.leave()
                held.close()

    def _serve(self, site: FleetSite, held: HeldBoard, blame: Blame) -> None:
        while True:
            site.ensure_alive()
            self._say_where_we_are(site, held, blame)
            message = self._parent.receive(_LOOK_S)
            if message is None:
                continue
            _, spec, library = message
            began = time.monotonic()
            try:
                if not site.has_board:
                    raise BoardLostError(f"{site.name} was left")
                held.open(REQUEST_TIMEOUT_S)
                outcome = blame.judge(held.measure(MeasureSpec.from_json(spec), library))
            except FarmError as error:
                outcome = blame.judge_error(error)
            self._parent.send("measured", outcome.to_json(), time.monotonic() - began)

    def _say_where_we_are(self, site: FleetSite, held: HeldBoard, blame: Blame) -> None:
        """Open a session with a board that is new; tell the script which board there is, or that there is none."""
        now: tuple[object, ...] = ()
        if site.has_board:
            now = (site.key, site.lease.token if site.lease else None)
            try:
                held.open(REQUEST_TIMEOUT_S)
                self._noted = ""
            except FarmError as error:
                now = ()
                blame.judge_error(error)
                if error.message != self._noted:
                    self._noted = error.message
                    self._note(error.message)
        if now == self._told:
            return
        self._told = now
        if now and held.description is not None:
            self._parent.send("board", site.name, held.description.to_dict())
        else:
            self._parent.send("no_board", site.name)

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
