"""Hold leases for boards that a foreign client, such as a stock TVM script, took at the tracker.

All users then see that the board is taken, and wait. The tracker knows which boards are free, the agent who has a
session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio

from device_agent.protocol import ClaimReport, LeaseClaim
from farm.errors import FarmError, LeaseOverError
from farm.measure import answers
from farm.store import Store
from farm.types.documents import BoardInfo
from farm.values import Health, Lease

OWNER, PURPOSE = "an unknown client", "a session that has no lease of this farm"
# Our own ending session returns its lease a moment before its agent offers the board again.
SETTLE_S = 3.0
# After an agent that did not answer, or an operator who ended our lease.
_PAUSE_S = 15.0
# On the services' one thread: an agent that answers does so in milliseconds.
_ASK_TIMEOUT_S = 1.0

Ask = Callable[[tuple[str, int], LeaseClaim], ClaimReport]

_log = logging.getLogger(__name__)


def _ask_agent(address: tuple[str, int], claim: LeaseClaim) -> ClaimReport:
    return anyio.run(answers.send_fence, address, claim, _ASK_TIMEOUT_S)


class ForeignClients:
    """Leases held for foreign clients. Not thread-safe."""

    def __init__(self, store: Store, ask: Ask = _ask_agent) -> None:
        """`ask` sends a lease to an agent and returns who has a session with it."""
        self._store, self._ask = store, ask
        self._since: dict[str, float] = {}
        self._again_at: dict[str, float] = {}
        self._leases: dict[str, tuple[Lease, float]] = {}

    def look(
        self, summary: Mapping[str, Any], keys: Mapping[str, str], rows: Sequence[BoardInfo], now_s: float
    ) -> None:
        """Take and return leases. `summary` is the tracker's, `keys` are those of the connected boards by name, `rows`
        those of `store.boards.fetch`. `now_s` is monotonic.
        """
        queues = summary.get("queue_info", {})
        taken = {name for name, key in keys.items() if queues.get(key, {}).get("free") == 0}
        for name in self._leases.keys() - taken:
            self._let_go(name)
        leased = {row.name for row in rows if row.lease is not None}
        alone = taken - leased - self._leases.keys()
        self._since = {name: self._since.get(name, now_s) for name in alone}
        # The agents' addresses by key; of two with one key the last to register.
        addresses = {
            str(info.get("key", "")).removeprefix("server:"): (str(info["addr"][0]), int(info["addr"][1]))
            for info in summary.get("server_info", ())
            if info.get("addr") and all(info["addr"])
        }
        for name, since in self._since.items():
            if now_s - since >= SETTLE_S and now_s >= self._again_at.get(name, 0.0) and keys[name] in addresses:
                self._hold(name, addresses[keys[name]], now_s)
        for name in list(self._leases):
            self._renew(name, now_s)

    def close(self) -> None:
        """Return all leases."""
        for name in list(self._leases):
            self._let_go(name)

    def _hold(self, name: str, address: tuple[str, int], now_s: float) -> None:
        try:
            lease = self._store.leases.acquire(name, OWNER, PURPOSE, allowed=frozenset(Health))
        except FarmError as error:  # another was faster
            _log.info("%s", error)
            return
        self._leases[name] = (lease, now_s)
        try:
            # As from any holder: this ends a session of an earlier lease of ours, which is over.
            holder = self._ask(address, answers.to_claim(lease)).holder
        except FarmError as error:
            _log.info("the holder of %s is unknown: %s", name, error)
            holder = ""
        if holder:
            _log.info("%s is held by %s", name, holder, extra={"board": name})
        else:
            self._again_at[name] = now_s + _PAUSE_S
            self._let_go(name)

    def _renew(self, name: str, now_s: float) -> None:
        lease, at_s = self._leases[name]
        if now_s - at_s < lease.ttl_s / 3:
            return
        try:
            self._leases[name] = (self._store.leases.renew(lease), now_s)
        except LeaseOverError:
            del self._leases[name]
            self._again_at[name] = now_s + _PAUSE_S

    def _let_go(self, name: str) -> None:
        self._store.leases.give_back(self._leases.pop(name)[0])
