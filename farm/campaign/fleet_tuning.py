"""Tuning on a leased board of the fleet, reached through the farm's services. What tuning is, is in `tuning`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection

from farm.campaign.board_choice import plan_pool, plan_target
from farm.campaign.fleet_site import FleetSite, Reach
from farm.campaign.tuning import Listener, Tuning
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.services.client import using_services
from farm.settings import Settings
from farm.store import Store
from farm.values import Board

DEFAULT_WAIT_S = 60.0

OpenServices = Callable[
    [Settings, Collection[str] | None, Callable[[str], None]], contextlib.AbstractContextManager[Reach]
]


class FleetTuning(Tuning):
    """A board of a type, or the one called `name`, leased for the length of a `with` block.

    `wait_s` bounds every wait for a board: at first, and again whenever the one in use was lost.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        board_type: BoardType,
        listener: Listener,
        name: str | None = None,
        wait_s: float = DEFAULT_WAIT_S,
        purpose: str = "tune",
        open_services: OpenServices = using_services,
    ) -> None:
        """`open_services` brings boards within reach for a block.

        Raises UsageError where there is no such board, or where its type is whatever machine asks.
        """
        if board_type.target is None:
            raise UsageError(
                f"boards of type {board_type.name!r} are whatever machine asks: there is no target to compile for",
                "Leave --board out to tune for this machine; a board elsewhere needs a type with a target of its own.",
            )
        # The host is not the board: nothing has to be kept quiet while it measures.
        super().__init__(dataclasses.replace(settings, isolation="none"), store, board_type, listener)
        self._open_services = open_services
        self._pool = plan_pool(store.fetch_boards(), board_type.name, name)
        self._name, self._wait_s, self._purpose = name, wait_s, purpose

    def board(self) -> Board:
        """The board in use, as it describes itself now. What the store keeps of it is the services' business."""
        description = self.parts.connect()
        return Board(self.site.name, self._board_type.name, bool(description["simulated"]), description)

    def _start(self) -> None:
        note = self._listener.note
        services = self._stack.enter_context(self._open_services(self._settings, self._pool, note))
        self.site = self._stack.enter_context(
            FleetSite(services, self._store, self._board_type.name, self._name, self._purpose, self._wait_s, note)
        )
        cores = len(os.sched_getaffinity(0))
        self._start_parts(self.site, lambda about: plan_target(self._board_type, about, cores), cores, self._wait_s)
