"""Boards reserved for a person: taken in turn, prolonged, and used by the person's own commands.

A reservation is a lease of the kind `reserved` that is not renewed: see docs/adr/0042. Others wait for the board in the
queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from farm.crew.choice import find_reason
from farm.crew.queue_entry import QueueEntry
from farm.errors import TransientError, UnavailableError, UsageError
from farm.processes.machine import name_user
from farm.store import Store
from farm.values import Health, Lease, WorkKind

MOST_S = 7 * 86400.0
_MOST_WHY = 200
_LOOK_S = 0.5
# How often to repeat that the board is still waited for.
_REMIND_S = 30.0
# A broken board may be reserved for repair.
_ALLOWED = frozenset(Health) - {Health.RETIRED}


def reserve(
    store: Store, name: str, for_s: float, why: str, wait_s: float, note: Callable[[str], None], person: str = ""
) -> tuple[Lease, bool]:
    """Reserve a board for a person (default: this user) in turn; return the lease, and whether it is new.

    An existing one of the person is prolonged to `for_s` from now. A campaign returns the board after the running
    trial. Raises UsageError, UnavailableError where it is not free within `wait_s`.
    """
    person = person or name_user()
    if not 0 < for_s <= MOST_S:
        raise UsageError(f"a board is reserved for up to {MOST_S / 86400:g} days, not {for_s / 86400:g}")
    if len(why) > _MOST_WHY or not why.isprintable():
        raise UsageError(f"the reason is one line of up to {_MOST_WHY} characters that can be printed")
    row = store.boards.require(name)
    if (kept := store.leases.find_reservation(name, person)) is not None:
        return store.leases.prolong(kept, for_s), False
    purpose = f"reserved: {why}" if why else "reserved"
    place = QueueEntry(store, WorkKind.RESERVED, purpose, row.board_type, [name])
    deadline, said, remind_at = time.monotonic() + wait_s, "", 0.0
    try:
        while True:
            reason = _find_obstacle(store, name, place)
            if not reason:
                try:
                    taken = store.leases.acquire(
                        name,
                        person,
                        purpose,
                        ttl_s=for_s,
                        allowed=_ALLOWED,
                        kind=WorkKind.RESERVED,
                        request=place.number,
                        within_reach=False,
                    )
                    place.end()
                    return taken, True
                except TransientError as error:  # another was faster
                    reason = error.message
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"{name} was not free within {wait_s:g} s: {reason}",
                    "`farm queue` shows who has it and who waits; --wait 10m waits longer.",
                )
            if reason != said or time.monotonic() >= remind_at:
                note(f"waiting for {name}, for {deadline - time.monotonic():.0f} s more at most: {reason}")
                said, remind_at = reason, time.monotonic() + _REMIND_S
            time.sleep(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
    finally:
        place.leave()


def _find_obstacle(store: Store, name: str, place: QueueEntry) -> str:
    """Explain why the board cannot be taken now; "" where it can. A board that others cannot use has no queue."""
    rows = store.boards.fetch()
    [row] = [each for each in rows if each.name == name]
    reason = find_reason(row)
    if reason and row.lease is None:
        return ""
    queued = place.explain(rows, [name]).get(name, "")
    return reason or queued
