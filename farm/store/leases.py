"""Leases: take, renew, release, expire, and end them by force; each call is one transaction.

Coordinators may call concurrently: a transaction holds the store's write lock from its start, and the table admits one
lease per board.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from farm.errors import BoardUnsafeError, FarmError, LeaseOverError, TransientError, UnavailableError, UsageError
from farm.store import schema
from farm.store.boards import Boards
from farm.store.clock import Instant, read_process_space
from farm.store.queue import RequestQueue
from farm.store.routes import find_bar
from farm.store.session import VALUES_AT_ONCE, Statement, StorePart, StoreSession
from farm.store.standing import require_row, select_boards, to_standing
from farm.values import Health, Lease, Standing, State, WorkKind

# A holder renews every third of it, and may miss one renewal on a busy machine; still short enough to wait for.
LEASE_TTL_S = 60.0
# The health that a lease requires for work, and for a probe.
WORK = frozenset({Health.GOOD})
PROBE = frozenset({Health.GOOD, Health.SUSPECT, Health.QUARANTINED})
# A month of leases on a large fleet: a store restored further back catches up over several refusals.
MAX_RAISE = 1_000_000
_NONCE_BYTES = 8
_TIMES = Statement(sa.select(schema.leases.c.clock, schema.leases.c.expires_s))

_log = logging.getLogger(__name__)


class Leases(StorePart):
    """Queries on `leases`."""

    def __init__(self, db: StoreSession, boards: Boards, queue: RequestQueue) -> None:
        super().__init__(db)
        self._boards, self._queue = boards, queue

    def acquire(
        self,
        board: str,
        owner: str,
        purpose: str,
        *,
        ttl_s: float = LEASE_TTL_S,
        allowed: Collection[Health] = WORK,
        kind: WorkKind | None = None,
        request: int | None = None,
        through: str = "",
        within_reach: bool = True,
    ) -> Lease:
        """Lease an idle board whose health is `allowed`; ends an expired lease on it.

        `owner` lets a person find the holder; `kind` is the work that its time counts as, None for no work. `request`
        is the place in the queue that this fulfils and removes. `through` is the coordinator whose route to the board
        the holder needs: the route moves there (`routes`). Without `within_reach` the board may be offline, for holders
        that do not talk to it.

        Raises TransientError if the board is leased, offline, or its health may recover by itself; BoardUnsafeError if
        it is unsafe; UnavailableError if an operator took it out of service; UsageError for an unknown board or invalid
        arguments.
        """
        _check_ttl(ttl_s)
        if not owner.strip() or not purpose.strip():
            raise UsageError("a lease needs an owner and a purpose")
        # Durable before the board stores the token too: a power cut must not make the store issue it twice.
        with self._db.writing(durably=True) as connection:
            now, wall = self._db.clock(), self._db.wall_clock()
            row = _require_free(connection, board, now, allowed, through, within_reach)
            if row["lease_token"] is not None:
                self._end(connection, row, "lease_expired", f"the lease of {row['lease_owner']} expired", owner)
            expires_at = wall + ttl_s
            # Where it was taken, for `release_orphan`; then random digits.
            nonce = read_process_space() + secrets.token_hex(_NONCE_BYTES)
            token = self._db.insert(
                connection,
                schema.leases,
                board=board,
                owner=owner,
                purpose=purpose,
                ttl_s=ttl_s,
                acquired_at=wall,
                expires_at=expires_at,
                **now.claim(ttl_s),
                nonce=nonce,
                kind="" if kind is None else str(kind),
                since_s=now.seconds,
                through=through,
            )
            if request is not None:
                connection.execute(schema.board_requests.delete().where(schema.board_requests.c.id == request))
            change = str(State.IDLE), str(State.LEASED), f"{purpose} (lease {token})"
            self._boards.add_event(connection, board, "lease_taken", *change, owner)
            store = str(connection.execute(sa.select(schema.identity.c.id)).scalar_one())
        return Lease(board, owner, purpose, store, token, ttl_s, wall, expires_at, nonce)

    def renew(self, lease: Lease) -> Lease:
        """Extend a lease to its `ttl_s` from now; the token stays.

        Raises LeaseOverError if it is over, even if the board is still free: all clients agree on the holder. The
        holder must then release the board.
        """
        if not (renewed := self.renew_all([lease])):
            raise make_over(lease)
        return renewed[lease]

    def renew_all(self, leases: Sequence[Lease], watched: Collection[Lease] = ()) -> dict[Lease, Lease]:
        """As `renew`, in one transaction; map each lease that is not over to its renewal.

        Of those `watched`, which others renew, it only says which are not over.
        """
        table, lasts_s = schema.leases, sa.bindparam("lasts_s", type_=sa.Float)
        known = set[tuple[int, str, str]]()
        with self._db.writing() as connection:
            now, wall = self._db.clock(), self._db.wall_clock()
            for first in range(0, len(leases), VALUES_AT_ONCE):
                chosen = table.c.token.in_([each.token for each in leases[first : first + VALUES_AT_ONCE]])
                query = sa.select(table.c.token, table.c.nonce, table.c.board).where(chosen, ~now.find_lapsed(table))
                known |= {(row.token, row.nonce, row.board) for row in connection.execute(query)}
            held = [each for each in leases if (each.token, each.nonce, each.board) in known]
            if ours := [{"held": each.token, "lasts_s": each.ttl_s} for each in held if each not in watched]:
                times = {"ttl_s": lasts_s, "expires_at": lasts_s + wall, "expires_s": lasts_s + now.seconds}
                connection.execute(table.update().where(table.c.token == sa.bindparam("held")).values(times), ours)
        return {each: dataclasses.replace(each, expires_at=wall + each.ttl_s) for each in held}

    def prolong(self, lease: Lease, ttl_s: float) -> Lease:
        """Make an unrenewed lease last for `ttl_s` from now, longer or shorter than before.

        Raises LeaseOverError if it is over, UsageError for an invalid time.
        """
        _check_ttl(ttl_s)
        return self.renew(dataclasses.replace(lease, ttl_s=ttl_s))

    def find_reservation(self, board: str, owner: str) -> Lease | None:
        """The lease by which a person has reserved the board; None without one."""
        kind = str(WorkKind.RESERVED)
        query = select_boards().where(
            schema.boards.c.name == board, schema.leases.c.kind == kind, schema.leases.c.owner == owner
        )
        [store] = self._db.rows(sa.select(schema.identity.c.id))
        for row in self._db.rows(query):
            if self._db.clock().is_valid(row, "lease_"):
                times = row["lease_ttl_s"], row["lease_acquired_at"], row["lease_expires_at"]
                about = board, owner, row["lease_purpose"], str(store["id"]), int(row["lease_token"])
                return Lease(*about, *times, row["lease_nonce"])
        return None

    def release(self, lease: Lease) -> bool:
        """Release a board. Returns False if the lease was over already; a later lease is left alone."""
        with self._db.writing() as connection:
            leases = schema.leases.c
            same = (leases.token == lease.token, leases.nonce == lease.nonce, leases.board == lease.board)
            row = next(iter(self._db.rows(select_boards().where(*same), connection)), None)
            if row is None:
                return False
            lapsed = not self._db.clock().is_valid(row, "lease_")
            kind, what = ("lease_expired", "expired") if lapsed else ("lease_released", "was given back")
            self._end(connection, row, kind, f"the lease of {lease.owner} {what}", lease.owner)
            return not lapsed

    def give_back(self, lease: Lease) -> None:
        """As `release`; without a store it expires."""
        try:
            self.release(lease)
        except FarmError as error:
            text = "the lease %d of %s is not given back: %s"
            _log.warning(text, lease.token, lease.board, error, extra={"board": lease.board})

    def expire(self, by: str = "farm") -> list[str]:
        """End every expired lease; return the freed boards."""
        now = self._db.clock()
        if all(now.is_valid(row) for row in self._db.rows(_TIMES)):
            return []  # as nearly always: others may write
        with self._db.writing() as connection:
            query = select_boards().where(self._db.clock().find_lapsed(schema.leases))
            lapsed = self._db.rows(query, connection)
            for row in lapsed:
                self._end(connection, row, "lease_expired", f"the lease of {row['lease_owner']} expired", by)
        return [row["name"] for row in lapsed]

    def force_release(self, board: str, by: str, reason: str) -> bool:
        """End a board's lease as an operator's act, recording who did it and why.

        The holder notices at its next renewal. Returns False without a lease. Raises UsageError for an unknown board,
        or a missing name or reason.
        """
        if not by.strip() or not reason.strip():
            raise UsageError("ending a lease by force needs a name and a reason")
        with self._db.writing() as connection:
            row = require_row(connection, board)
            if row["lease_token"] is None:
                return False
            held = f"the lease {row['lease_token']} of {row['lease_owner']} ({row['lease_purpose']})"
            self._end(connection, row, "lease_forced", f"ended {held}: {reason}", by)
        return True

    def release_orphan(self, board: str, token: int, by: str, reason: str) -> bool:
        """End a lease whose process, of this machine and this container, is gone.

        Returns False, with nothing changed, if the board has another lease by now, or the process was elsewhere: host
        names and pids may coincide.
        """
        with self._db.writing() as connection:
            row = require_row(connection, board)
            if row["lease_token"] != token or not row["lease_nonce"].startswith(read_process_space()):
                return False
            self._end(connection, row, "lease_forced", f"ended the lease {token} of {row['lease_owner']}: {reason}", by)
        return True

    def raise_token(self, greatest: int) -> None:
        """Issue tokens greater than `greatest` from now on: a board knows that one, so the store was restored since.

        The board is not trusted: one refusal raises tokens by at most `MAX_RAISE`, so that none can exhaust them.
        """
        if greatest <= 0:
            return
        with self._db.writing(durably=True) as connection:
            last = self._db.database.fetch_last_token(connection)
            if greatest > last:
                self._db.database.set_last_token(connection, min(greatest, last + MAX_RAISE))

    def _end(self, connection: sa.Connection, row: Mapping[str, Any], kind: str, reason: str, by: str) -> None:
        name = row["name"]
        self._queue.note_use(connection, row)
        connection.execute(schema.leases.delete().where(schema.leases.c.token == row["lease_token"]))
        reachable = bool(row["reachable"])
        if reachable:  # an offline board stays offline with its own reason
            self._boards.change(connection, name, {"state_reason": reason, "state_since": self._db.wall_clock()})
        health = Health(row["health"])
        before, after = Standing(reachable, True, health).state, Standing(reachable, False, health).state
        self._boards.add_event(connection, name, kind, str(before), str(after), reason, by)


def make_over(lease: Lease) -> LeaseOverError:
    """The error of a lease that is over."""
    return LeaseOverError(
        f"the lease {lease.token} of board {lease.board!r} is over",
        "It was not renewed in time, or ended by force. Take the board anew.",
    )


def _check_ttl(ttl_s: float) -> None:
    if not (math.isfinite(ttl_s) and ttl_s > 0):
        raise UsageError(f"a lease lasts a positive number of seconds, not {ttl_s:g}")


def _require_free(
    connection: sa.Connection, board: str, now: Instant, allowed: Collection[Health], through: str, within_reach: bool
) -> dict[str, Any]:
    """Return the row of a board that can be leased now; raise why it cannot."""
    row = require_row(connection, board)
    standing = to_standing(row, now)
    if standing.leased:
        raise TransientError(f"board {board!r} is leased by {row['lease_owner']} for {row['lease_purpose']}")
    if standing.health not in allowed:
        text = f"board {board!r} is {standing.health}: {row['health_reason']}"
        if standing.health is Health.UNSAFE:
            raise BoardUnsafeError(text, f"Look at it, restore its clocks, then: farm board release {board}")
        if standing.health is Health.MAINTENANCE:
            raise UnavailableError(text, f"To put it back in service: farm board release {board}")
        if standing.health is Health.RETIRED:
            raise UnavailableError(text, f"To take it back: farm board release {board}")
        raise TransientError(text)
    if within_reach and not standing.reachable:
        raise TransientError(f"board {board!r} is offline: {row['state_reason']}")
    if through and (bar := find_bar(connection, board, through, now)) is not None:
        raise TransientError(f"board {board!r} cannot be reached through {through}: {bar}")
    return row
