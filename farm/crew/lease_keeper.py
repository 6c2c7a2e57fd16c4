"""Keep a lease: renew it on a thread, report its loss once, return it.

The holder decides what to do after a loss; the board's agent refuses it from then on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from farm.closing import Closing
from farm.errors import FarmError, LeaseOverError, TransientError
from farm.store import Store
from farm.store.leases import LEASE_TTL_S
from farm.values import Lease

# Renewed every third of its time: two renewals may fail before it lapses.
_RENEWALS_PER_TTL = 3


# How soon a busy or full store is asked again, at most as often as the lease has time for.
_RETRY_S = 1.0


_RETRIES_PER_TTL = 10


# A renewal waits for another command's transaction (`BUSY_TIMEOUT_S` of the store) at most.
_CLOSE_TIMEOUT_S = 35.0


_log = logging.getLogger(__name__)


class LeaseKeeper(Closing):
    """Holds one lease until `close`. Use as a context manager.

    `lost` is set, and `on_lost` called once with the reason on the keeper's own thread, when the lease ends early: by
    force, not renewed in time, or without a reachable store until it lapsed. The thread has its own store and starts no
    processes.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        lease: Lease,
        on_lost: Callable[[str], None] = lambda reason: None,
        *,
        ours: bool = True,
    ) -> None:
        """`ours`: it is renewed and returned; a person's reservation is only watched."""
        self._open_store, self._ours = open_store, ours
        self._every_s = (lease.ttl_s if ours else min(lease.ttl_s, LEASE_TTL_S)) / _RENEWALS_PER_TTL
        self._lease = lease
        self._on_lost = on_lost
        self._renewed_at = time.monotonic()
        self._wanted = threading.Event()
        self.lost = threading.Event()
        self.reason = ""
        self._thread = threading.Thread(target=self._keep, name=f"farm-lease-{lease.board}", daemon=True)
        self._thread.start()

    @property
    def lease(self) -> Lease:
        """The lease, as last renewed."""
        return self._lease

    def close(self) -> None:
        """Return the lease, if it is still ours. Safe to call twice."""
        self._wanted.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def find_end(self, store: Store) -> str:
        """Ask `store` why the lease is over; "" where it is not. Not for the keeper's own thread."""
        if self.lost.is_set():
            return self.reason
        try:
            self._renew(store)
        except LeaseOverError as error:
            return error.message
        except TransientError:  # the store is busy; the keeper will know
            pass
        return ""

    def _renew(self, store: Store) -> None:
        if self._ours:
            self._lease = store.leases.renew(self._lease)
        else:
            store.leases.require(self._lease)

    def _keep(self) -> None:
        with contextlib.ExitStack() as stack:
            store: Store | None = None
            pause_s = self._every_s
            while not self._wanted.wait(pause_s):
                pause_s = self._every_s
                began = time.monotonic()
                try:
                    store = store or stack.enter_context(self._open_store())
                    self._renew(store)
                    self._renewed_at = began
                except FarmError as error:
                    if self._is_over(error):
                        self._lose(error.message)
                        return
                    self._warn("lease %d of %s: %s; trying again", self._lease.token, self._lease.board, error)
                    pause_s = min(_RETRY_S, self._lease.ttl_s / _RETRIES_PER_TTL)
            if not self._ours:
                return
            try:
                store = store or stack.enter_context(self._open_store())
                store.leases.release(self._lease)
            except FarmError as error:  # then it expires
                self._warn("lease %d of %s is not given back: %s", self._lease.token, self._lease.board, error)

    def _is_over(self, error: FarmError) -> bool:
        """Whether the store said so, or the lease has lapsed while the store could not be asked.

        Both clocks run alike but on a machine that sleeps; then the store knows.
        """
        return isinstance(error, LeaseOverError) or time.monotonic() - self._renewed_at >= self._lease.ttl_s

    def _lose(self, reason: str) -> None:
        self.reason = reason
        self.lost.set()
        self._warn("board %s is no longer ours: %s", self._lease.board, reason)
        self._on_lost(reason)

    def _warn(self, text: str, *values: object) -> None:
        _log.warning(text, *values, extra={"board": self._lease.board})
