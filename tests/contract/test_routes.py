"""Ways to boards, on both databases: one coordinator's at a time, followed when it is gone, handed to who works."""

from __future__ import annotations

import pytest

from farm.crew.health import Kind
from farm.errors import TransientError
from farm.store import Store
from farm.store.routes import BAR_S, OVERDUE_S, PATIENCE_S, WAY_TTL_S
from farm.values import WorkKind
from tests.fleet_store import Clocks, observe

BOARD = "nano-01"
A, B = "a:/home", "b:/home"


def look(store: Store, who: str, *, session: str = "", wanted: bool = False, overdue: bool = False) -> str:
    """Have a coordinator look after the board's way; whose it is then."""
    names = [BOARD]
    found = store.routes.keep(who, {BOARD: session}, names if wanted else (), names if overdue else ())
    return found[BOARD].keeper


def test_the_first_keeps_it_while_it_shows_itself(store: Store, clocks: Clocks) -> None:
    """Another one neither takes it nor asks for it; who renews it keeps it for as long as it likes."""
    assert look(store, A) == A
    for _ in range(5):
        clocks.pass_s(WAY_TTL_S - 1)
        assert look(store, A) == A
        assert look(store, B) == A
        assert store.routes.keep(A, {BOARD: ""})[BOARD].asked_by == ""


def test_one_that_is_gone_is_followed_and_its_session_known(store: Store, clocks: Clocks) -> None:
    """Not at once, since all may be late together; the follower learns what to end on the board, and no look writes
    where nothing changes.
    """
    look(store, A)
    assert look(store, A, session="77 1234") == A
    clocks.pass_s(WAY_TTL_S + OVERDUE_S)
    way = store.routes.keep(B, {BOARD: ""})[BOARD]
    assert (way.keeper, way.lapsed) == (A, True)
    way = store.routes.keep(B, {BOARD: ""}, (), [BOARD])[BOARD]
    assert (way.keeper, way.before, way.session, way.handed) == (B, A, "77 1234", False)
    assert look(store, A, overdue=True) == B
    assert store.routes.fetch() == {BOARD: B}


def test_who_comes_back_in_time_keeps_it(store: Store, clocks: Clocks) -> None:
    """After an outage of the store the ways of all have lapsed, and each takes its own first."""
    look(store, A)
    clocks.pass_s(10 * WAY_TTL_S)
    assert look(store, B) == A
    assert look(store, A) == A
    assert look(store, B, overdue=True) == A


def test_it_goes_to_who_has_the_lease(store: Store, clocks: Clocks) -> None:
    """Asked for as soon as the lease is had, handed over, and left where it is once the lease is given back."""
    look(store, A)
    lease = store.leases.acquire(BOARD, "ann@b pid 1", "sweep", kind=WorkKind.SWEEP, through=B)
    assert look(store, B) == A
    assert store.routes.keep(A, {BOARD: ""})[BOARD].asked_by == B
    assert store.routes.hand_over(A, {BOARD: (B, "77 1234")}) == [BOARD]
    assert store.routes.hand_over(A, {BOARD: (B, "77 1234")}) == []
    way = store.routes.keep(B, {BOARD: ""})[BOARD]
    assert (way.keeper, way.handed, way.session) == (B, True, "77 1234")
    assert not store.routes.keep(B, {BOARD: ""})[BOARD].handed
    store.leases.release(lease)
    assert look(store, A) == B
    assert look(store, A, wanted=True) == B
    assert store.routes.keep(B, {BOARD: ""})[BOARD].asked_by == A
    store.leases.acquire(BOARD, "ann@b pid 1", "sweep", kind=WorkKind.SWEEP, through=B)
    assert store.routes.keep(B, {BOARD: ""})[BOARD].asked_by == ""  # not from under a lease


def test_who_asked_and_is_gone_asks_no_more(store: Store, clocks: Clocks) -> None:
    """An ask is believed for some seconds."""
    look(store, A)
    look(store, B, wanted=True)
    clocks.pass_s(WAY_TTL_S - 1)
    assert store.routes.keep(A, {BOARD: ""})[BOARD].asked_by == ""


def test_a_way_that_leads_nowhere_is_left_to_others(store: Store, clocks: Clocks) -> None:
    """A board that is lost for long is asked for by another; where it cannot be reached from there either, that one has
    no lease of it and no turn for a while, and the first has it back.
    """
    look(store, A)
    observe(store, Kind.LOST)
    assert look(store, B) == A
    assert store.routes.keep(A, {BOARD: ""})[BOARD].asked_by == ""
    clocks.pass_s(PATIENCE_S)
    look(store, A)
    look(store, B)
    assert store.routes.keep(A, {BOARD: ""})[BOARD].asked_by == B
    store.routes.hand_over(A, {BOARD: (B, "")})
    store.routes.bar(B, BOARD, "no key there")
    assert look(store, B) == ""
    assert look(store, A) == A
    observe(store, Kind.BACK)
    observe(store, Kind.PROBE_PASSED)
    with pytest.raises(TransientError, match="cannot be reached through b:/home: no key there"):
        store.leases.acquire(BOARD, "ann@b pid 1", "sweep", through=B)
    store.queue.enter("ann@b pid 1", WorkKind.SWEEP, "sweep", "jetson-nano", [BOARD], through=B, ttl_s=1e6)
    assert [each.boards for each in store.queue.fetch().requests] == [()]
    clocks.pass_s(BAR_S)
    assert [each.boards for each in store.queue.fetch().requests] == [(BOARD,)]
    store.leases.acquire(BOARD, "ann@b pid 1", "sweep", through=B)


def test_who_ends_leaves_its_ways(store: Store) -> None:
    """The next to look has them; and a board that was removed leaves none."""
    look(store, A)
    store.routes.release(A)
    assert look(store, B) == B
    store.boards.remove(BOARD)
    assert store.routes.fetch() == {}
