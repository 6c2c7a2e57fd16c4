"""The queue for boards in every store: all see a request, and it is gone once its owner waits no more."""

from __future__ import annotations

import pytest

from farm.errors import UsageError
from farm.store import Store
from farm.store.queue import HALF_LIFE_S, count_use
from farm.values import WorkKind
from tests.fleet_store import Clocks, take
from tests.unit.campaign_orders import make_order, submit

TYPE, NAMES = "jetson-nano", ("nano-01", "nano-02")


def ask(store: Store, owner: str = "ann", campaign: str | None = None) -> int:
    """Wait for a board, for ten seconds unless there are more signs; a campaign's request is for its trials."""
    kind = WorkKind.SWEEP if campaign is None else WorkKind.TRIALS
    return store.queue.enter(owner, kind, f"{kind} x", TYPE, NAMES, campaign=campaign, ttl_s=10.0)


def test_who_waits_is_there_until_its_signs_end(store: Store, clocks: Clocks) -> None:
    """A request says who, what for, which boards and since when; signs keep it, and without them it is gone."""
    number = ask(store)
    clocks.pass_s(8)
    assert store.queue.stay(number, NAMES[:1], 10.0).id == number
    clocks.pass_s(8)
    [request] = store.queue.fetch().requests
    assert (request.id, request.owner, request.kind, request.board_type) == (number, "ann", WorkKind.SWEEP, TYPE)
    assert (request.boards, request.wanted, request.priority, request.waited_s) == (NAMES[:1], 1, 0, 16.0)
    assert request.requested_at == pytest.approx(clocks.wall - 16)
    clocks.pass_s(2)
    assert store.queue.fetch().requests == ()
    other = ask(store, "bob")
    assert store.queue.stay(number, NAMES) is None, "the next caller clears what has expired"
    clocks.reboot()
    assert store.queue.fetch().requests == ()
    store.queue.leave(other, number)


def test_a_lease_takes_its_request_out(store: Store) -> None:
    """Both at once, so that a kill leaves neither half; another's request stays, and one that is left is gone."""
    number, other = ask(store), ask(store, "bob")
    take(store, "ann", kind=WorkKind.SWEEP, request=number)
    assert [each.id for each in store.queue.fetch().requests] == [other]
    store.queue.leave(other)
    assert store.queue.fetch().requests == ()


def test_the_longest_waiting_comes_first(store: Store, clocks: Clocks) -> None:
    """Also who had waited before its place was lost."""
    first = ask(store)
    clocks.pass_s(5)
    ask(store, "bob")
    late = store.queue.enter("eve", WorkKind.RUN, "run x", TYPE, NAMES, waited_s=60.0)
    assert [each.id for each in store.queue.fetch().requests][:2] == [late, first]


def test_a_priority_is_all_of_its_campaigns(store: Store) -> None:
    """Set for one request, it holds for all requests of the campaign, and for no other; events record it."""
    mine, also, other = ask(store, campaign="c"), ask(store, campaign="c"), ask(store, campaign="d")
    assert store.queue.set_priority(mine, 3).priority == 3
    assert {each.id: each.priority for each in store.queue.fetch().requests} == {mine: 3, also: 3, other: 0}
    [event] = [each for each in store.events.fetch() if each.kind == "queue_priority"]
    assert "from 0 to 3" in event.message
    with pytest.raises(UsageError, match="nothing with the number 99 waits"):
        store.queue.set_priority(99, 1)
    with pytest.raises(UsageError, match="lies between"):
        store.queue.set_priority(mine, 11)


def test_a_campaigns_priority_outlasts_its_engine(store: Store) -> None:
    """It is in the order, by which another engine goes on."""
    submit(store, make_order("vision"))
    store.queue.set_priority(ask(store, campaign="vision"), -2)
    assert store.campaigns.require("vision").order.priority == -2


def test_time_at_boards_is_counted_and_fades(store: Store, clocks: Clocks) -> None:
    """Leases for work count from their beginning, over or not, no longer than they lasted; probes count for nothing."""
    lease = take(store, "ann", kind=WorkKind.SWEEP, ttl_s=100.0)
    clocks.pass_s(60)
    key = ("nano-01", "ann", WorkKind.SWEEP)
    assert store.queue.fetch().held_s == {"nano-01": 60.0}
    assert store.queue.fetch().used_s == {key: pytest.approx(count_use(60.0))}
    store.leases.release(lease)
    assert store.queue.fetch().used_s == {key: pytest.approx(count_use(60.0))}
    clocks.pass_s(HALF_LIFE_S)
    assert store.queue.fetch().used_s == {key: pytest.approx(count_use(60.0) / 2)}
    take(store, "ann", kind=WorkKind.SWEEP, ttl_s=10.0)
    clocks.pass_s(1000)
    store.leases.expire()
    assert store.queue.fetch().used_s[key] < count_use(60.0) / 2 + 10.0
    take(store, "prober")
    clocks.pass_s(5)
    assert store.queue.fetch().held_s == {}
    assert store.queue.fetch().used_s.keys() == {key}
