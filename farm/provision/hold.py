"""Keep a board to ourselves while its agent is stopped and started: a lease in the store, where there can be one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from farm.crew.lease_keeper import LeaseKeeper
from farm.errors import TransientError
from farm.processes.machine import name_coordinator
from farm.store import Store
from farm.values import Health, State

PURPOSE = "provision"
# A probe that has the board just now ends within this; work does not, and is not waited for.
WAIT_S = 15.0
_LOOK_S = 0.25


class StoreHold:
    """Takes leases for the length of a block. Thread-safe."""

    def __init__(self, open_store: Callable[[], Store], owner: str) -> None:
        """`owner` says who, so that a person can find them."""
        self._open_store = open_store
        self._owner = owner

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Hold a board. One that is out of reach for the farm is nobody's to use: it is worked on without a lease.

        An operator's word about its health does not matter here: this is an operator too. Raises TransientError where
        somebody uses the board, UsageError where there is none of that name.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            with self._open_store() as store:
                board = store.require_board(name)
                try:
                    lease = store.acquire_lease(
                        *(name, self._owner, PURPOSE), allowed=frozenset(Health), through=name_coordinator()
                    )
                    break
                except TransientError:
                    if board["lease"] is None and board["state"] == State.OFFLINE:
                        yield
                        return
                    if time.monotonic() > deadline:
                        raise
            time.sleep(_LOOK_S)
        with LeaseKeeper(self._open_store, lease):
            yield
