"""An entry in the queue for boards: requested, kept up while its owner waits, removed; the queue's state; and boards
reserved for a person, taken in turn.

`queue_rules` decides who gets which board; `leased_board` takes one. A reservation is a lease of the kind `reserved`
that is not renewed: see docs/adr/0042.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from farm.crew.choice import find_reason, find_unusable, plan_choice
from farm.crew.leased_board import name_owner
from farm.crew.queue_rules import QueueBoard, QueuePlan, plan_queue
from farm.errors import FarmError, TransientError, UnavailableError, UsageError
from farm.processes.machine import name_coordinator, name_user
from farm.store import Store
from farm.store.queue import REQUEST_TTL_S, BoardQueue
from farm.types.documents import BoardInfo
from farm.values import BoardRequest, Health, Lease, WorkKind

# Renewals per lifetime of an entry: two writes may fail.
_SIGNS_PER_TTL = 3
# Boards that are explained; a rack has dozens.
_MOST_SAID = 3
MOST_S = 7 * 86400.0
_MOST_WHY = 200
_LOOK_S = 0.5
# How often to repeat that the board is still waited for.
_REMIND_S = 30.0
# A broken board may be reserved for repair.
_ALLOWED = frozenset(Health) - {Health.RETIRED}


class QueueEntry:
    """One entry of this process. Not thread-safe, as its store."""

    def __init__(
        self,
        store: Store,
        kind: WorkKind,
        purpose: str,
        board_type: str,
        boards: Collection[str],
        *,
        priority: int = 0,
        campaign: str | None = None,
        ttl_s: float = REQUEST_TTL_S,
    ) -> None:
        """Request nothing before `stay`. Trials want as many of the boards as possible, all else wants one."""
        self.number: int | None = None
        self.boards = frozenset(boards)
        self._store, self._kind, self._purpose, self._board_type = store, kind, purpose, board_type
        self.priority, self._campaign, self._ttl_s = priority, campaign, ttl_s
        self.since = time.monotonic()
        self._sign_at = 0.0

    def stay(self) -> None:
        """Write or renew the entry; at most once an interval. Raises TransientError.

        An entry that expired, as after a long stop of our process, is written anew with its waiting time so far.
        """
        now = time.monotonic()
        if self.number is not None and now < self._sign_at:
            return
        found = None if self.number is None else self._store.queue.stay(self.number, self.boards, self._ttl_s)
        if found is not None:
            self.priority = found.priority
        else:
            self.number = self._store.queue.enter(
                name_owner(),
                self._kind,
                self._purpose,
                self._board_type,
                self.boards,
                wanted=len(self.boards) if self._kind is WorkKind.TRIALS else 1,
                priority=self.priority,
                campaign=self._campaign,
                waited_s=now - self.since,
                ttl_s=self._ttl_s,
                through=name_coordinator(),
            )
        self._sign_at = now + self._ttl_s / _SIGNS_PER_TTL

    def change(self, boards: Collection[str]) -> None:
        if frozenset(boards) != self.boards:
            self.boards = frozenset(boards)
            self._sign_at = 0.0

    def end(self) -> None:
        """Forget the entry: taking the board has removed it."""
        self.number = None

    def leave(self) -> None:
        """Remove the entry; without a store it expires. Safe to call twice."""
        if self.number is not None:
            with contextlib.suppress(FarmError):
                self._store.queue.leave(self.number)
            self.number = None

    def explain(self, rows: Sequence[BoardInfo], free: Collection[str]) -> dict[str, str]:
        """Write or renew the entry; explain why it does not get free boards, and which one is next."""
        self.stay()
        queue, plan = read_queue(self._store, rows)
        mine = next((each for each in queue.requests if each.id == self.number), None)
        if mine is None:  # it was renewed too late: at the next look
            return dict.fromkeys(free, "the request for it is being renewed")
        return explain(mine, queue, plan, free)


def read_queue(store: Store, rows: Sequence[BoardInfo], leaving: Iterable[str] = ()) -> tuple[BoardQueue, QueuePlan]:
    """Read the queue and plan it; `rows` are those of `store.boards.fetch`."""
    queue = store.queue.fetch()
    return queue, plan_queue(queue.requests, list_usable(rows, queue), queue.used_s, leaving)


def list_usable(rows: Sequence[BoardInfo], queue: BoardQueue) -> list[QueueBoard]:
    """Return the usable boards in the rules' form."""
    found = []
    for row in rows:
        lease = row.lease
        if lease or not find_unusable(row):
            kind, owner = (WorkKind(lease.kind) if lease.kind else None, lease.owner) if lease else (None, "")
            held_s = queue.held_s.get(row.name, 0.0)
            found.append(QueueBoard(row.name, row.board_type, owner, kind, held_s))
    return found


def explain(request: BoardRequest, queue: BoardQueue, plan: QueuePlan, free: Collection[str]) -> dict[str, str]:
    """Explain why a request does not get free boards, and which one is next; `choice` explains other boards."""
    known = {each.id: each for each in queue.requests}
    reasons = {}
    for name in request.boards:
        number = plan.grants.get(name)
        if plan.yields.get(name) == request.id:
            reasons[name] = "available after the running trial"
        elif name in free and number != request.id:
            first = known.get(number) if number is not None else None
            reasons[name] = f"behind {describe(first)}" if first else plan.why.get(request.id, "not available yet")
    return reasons


def describe(request: BoardRequest) -> str:
    """Describe a request in a few words."""
    return f"request {request.id} ({request.purpose} of {request.owner})"


def to_document(store: Store) -> dict[str, Any]:
    """Describe the queue as plain data: `requests`, each with why it has no board yet; `boards` with their holders.

    A campaign's request stays while it has boards: `has` are those.
    """
    rows = store.boards.fetch()
    queue, plan = read_queue(store, rows)
    known = {row.name: row for row in rows}
    requests = []
    for request in queue.requests:
        leases = {name: row.lease for name in request.boards if (row := known.get(name)) and row.lease}
        own = (request.owner, WorkKind.TRIALS)
        has = [n for n, each in leases.items() if request.kind is own[1] and (each.owner, each.kind) == own]
        document = dataclasses.asdict(request) | {"kind": str(request.kind), "boards": list(request.boards)}
        requests.append(document | {"has": has, "why": _explain_in_words(request, rows, queue, plan, has)})
    boards = []
    for row in rows:
        fields = ("owner", "purpose", "kind", "acquired_at")
        about = {name: getattr(row.lease, name, None) for name in fields} | {"reserved_until": None}
        if row.lease is not None and row.lease.kind == WorkKind.RESERVED:
            about["reserved_until"] = row.lease.expires_at
        goes_to = plan.yields.get(row.name, plan.grants.get(row.name))
        boards.append({"name": row.name, "board_type": row.board_type, **about, "goes_to": goes_to})
    return {"requests": requests, "boards": boards}


def _explain_in_words(
    request: BoardRequest, rows: Sequence[BoardInfo], queue: BoardQueue, plan: QueuePlan, has: Sequence[str]
) -> str:
    wanted = [name for name in request.boards if name not in has]
    choice = plan_choice(rows, wanted)
    reasons = {**choice.reasons, **explain(request, queue, plan, choice.free)}
    said = [f"{name}: {reasons[name]}" for name in wanted if name in reasons][:_MOST_SAID]
    if len(reasons) > len(said):
        said.append(f"and {len(reasons) - len(said)} more")
    if has:
        said.insert(0, f"has {', '.join(has)}")
    if (why := plan.why.get(request.id)) and why not in " ".join(said):
        said.insert(0, why)
    return "; ".join(said) or "takes one now"


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
