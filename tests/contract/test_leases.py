"""What every store promises of leases: one holder at a time, despite concurrency, deaths, and changes of the time."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import sqlalchemy as sa

from farm.crew.health import HealthLimits, Kind
from farm.errors import BoardUnsafeError, PermanentError, TransientError, UnavailableError, UsageError
from farm.store import PROBE, Store
from farm.store.clock import read_clock
from farm.store.leases import MAX_RAISE
from farm.store.session import StoreSession
from farm.values import Board, Health
from tests.fleet_store import SSH, Clocks, kinds, observe, take
from tests.places import Places

# One holder


def test_a_board_has_one_holder(store: Store) -> None:
    """While one holds it another learns who does, and gets it after its release."""
    lease = take(store)
    with pytest.raises(TransientError, match="leased by left for tuning"):
        take(store, "right")
    assert store.leases.release(lease)
    assert take(store, "right").owner == "right"


def test_tokens_only_grow(store: Store, clocks: Clocks) -> None:
    """Given back, expired, ended by force, or the board removed and added again: the next token is greater."""
    tokens = [take(store)]
    store.leases.release(tokens[-1])
    tokens.append(take(store, ttl_s=10))
    clocks.pass_s(10)
    tokens.append(take(store))
    store.leases.force_release("nano-01", "operator", "stuck")
    store.boards.remove("nano-01")
    store.boards.register("nano-01", "jetson-nano", SSH)
    observe(store, Kind.BACK)
    tokens.append(take(store, allowed=PROBE))
    assert [lease.token for lease in tokens] == sorted({lease.token for lease in tokens})
    assert len({lease.store for lease in tokens}) == 1


def test_a_lease_is_on_the_disk_before_a_board_hears_of_it(store: Store) -> None:
    """Taking one waits for the disk, or a power cut would have its token given twice; other writes do not."""
    levels: list[object] = []
    ask = "PRAGMA synchronous" if isinstance(store.location, pathlib.Path) else "SHOW synchronous_commit"
    sa.event.listen(store.session.engine, "commit", lambda each: levels.append(each.exec_driver_sql(ask).scalar()))
    lease = take(store)
    store.leases.renew(lease)
    assert levels in ([2, 1], ["on", "off"])  # FULL, NORMAL: sqlite.org/pragma.html#pragma_synchronous


def test_a_store_that_was_put_back_gives_no_token_away(store: Store, places: Places, clocks: Clocks) -> None:
    """The same number twice is two leases, and of neither's holder the other's is taken; a refusal raises the next."""
    before = places.copy(store.location)
    left = take(store, "left")
    with Store(StoreSession(before, clocks.read, lambda: clocks.wall)) as restored:
        right = take(restored, "right")
        assert (right.store, right.token) == (left.store, left.token)
        assert right.nonce != left.nonce
        with pytest.raises(PermanentError, match="is over"):
            restored.leases.renew(left)
        assert not restored.leases.release(left)
        assert restored.leases.release(right)
        restored.leases.raise_token(left.token + 41)
        assert take(restored, "right").token == left.token + 42


def test_a_refusal_raises_tokens_within_bounds(store: Store) -> None:
    """A board that lies about the greatest it has seen cannot use them up, nor take any back."""
    store.leases.raise_token(2**53)
    first = take(store)
    assert first.token == MAX_RAISE + 1
    store.leases.release(first)
    store.leases.raise_token(3)
    assert take(store).token == MAX_RAISE + 2


def test_stores_are_told_apart(store: Store, places: Places) -> None:
    """Tokens of two stores mean nothing to each other, so a lease says whose it is."""
    with Store(places.make()) as other:
        other.boards.save(Board("b", "local", simulated=False))
        assert other.leases.acquire("b", "left", "tuning").store != take(store).store


def test_a_lease_that_is_not_renewed_expires(store: Store, clocks: Clocks) -> None:
    """Another takes the board at once; the old holder can neither renew nor give back what is not its own."""
    old = take(store, ttl_s=30)
    clocks.pass_s(30)
    new = take(store, "right")
    with pytest.raises(PermanentError, match="is over"):
        store.leases.renew(old)
    assert not store.leases.release(old)
    assert store.leases.renew(new).token == new.token
    assert kinds(store)[-3:] == ["lease_taken", "lease_expired", "lease_taken"]


def test_expired_leases_are_swept(store: Store, clocks: Clocks) -> None:
    """The sweep frees those that are over and no other, once."""
    store.boards.save(Board("b", "local", simulated=False))
    take(store, ttl_s=30)
    store.leases.acquire("b", "left", "tuning", ttl_s=300)
    assert store.leases.expire() == []
    clocks.pass_s(60)
    assert store.leases.expire() == ["nano-01"]
    assert store.leases.expire() == []
    assert store.boards.require("b").lease.owner == "left"


# Time


def test_a_cool_down_starts_over_with_the_machine(store: Store, clocks: Clocks) -> None:
    """Times of another start cannot be placed, so a quarantined board waits the whole of it again."""
    limits = HealthLimits(faults=1, cooldown_s=100, passes=1)
    observe(store, Kind.FAULT, limits=limits)
    clocks.pass_s(99)
    clocks.reboot()
    assert observe(store, Kind.PROBE_PASSED, limits=limits).standing.health is Health.QUARANTINED
    clocks.pass_s(99)
    assert observe(store, Kind.PROBE_PASSED, limits=limits).standing.health is Health.QUARANTINED
    clocks.pass_s(1)
    assert observe(store, Kind.PROBE_PASSED, limits=limits).standing.health is Health.GOOD


def test_the_real_clock_goes_forward() -> None:
    """Every reading is of the same clock and no earlier than the one before."""
    first, second = read_clock(), read_clock()
    assert first.clock == second.clock != ""
    assert 0 < first.seconds <= second.seconds


# What a lease asks of a board


@pytest.mark.parametrize(
    ("health", "steps", "error", "hint"),
    [
        ("suspect", [Kind.THROTTLED], TransientError, ""),
        ("quarantined", [Kind.QUARANTINE], TransientError, ""),
        ("maintenance", [Kind.DRAIN], UnavailableError, "release"),
        ("unsafe", [Kind.UNSAFE], BoardUnsafeError, "release"),
        ("retired", [Kind.RETIRE], UnavailableError, "release"),
    ],
)
def test_work_wants_a_good_board(
    store: Store, health: str, steps: list[Kind], error: type[Exception], hint: str
) -> None:
    """Each other health is refused with its reason, and what an operator can do."""
    for kind in steps:
        observe(store, kind)
    with pytest.raises(error, match=health) as caught:
        take(store)
    assert hint in str(caught.value)


def test_a_probe_may_have_a_board_that_work_may_not(store: Store) -> None:
    """Otherwise no board would ever be good again; an unsafe one cannot be leased."""
    observe(store, Kind.THROTTLED)
    store.leases.release(take(store, allowed=PROBE))
    observe(store, Kind.UNSAFE)
    with pytest.raises(BoardUnsafeError):
        take(store, allowed=PROBE)


def test_a_drained_board_finishes_its_lease(store: Store) -> None:
    """Maintenance takes no board from its holder, and prevents later leases."""
    lease = take(store)
    observe(store, Kind.DRAIN)
    shown = store.boards.require("nano-01")
    assert (shown.state, shown.health) == ("leased", "maintenance")
    store.leases.renew(lease)
    store.leases.release(lease)
    with pytest.raises(UnavailableError):
        take(store)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"board": "nano-99"}, "no board 'nano-99'"),
        ({"owner": " "}, "owner"),
        ({"purpose": ""}, "purpose"),
        ({"ttl_s": 0}, "positive"),
        ({"ttl_s": float("nan")}, "positive"),
        ({"ttl_s": float("inf")}, "positive"),
    ],
)
def test_arguments_that_are_no_lease(store: Store, arguments: dict[str, Any], message: str) -> None:
    """They are the caller's mistake, and said to be."""
    good: dict[str, Any] = {"board": "nano-01", "owner": "left", "purpose": "tuning", "ttl_s": 1.0}
    values = good | arguments
    with pytest.raises(UsageError, match=message):
        store.leases.acquire(values["board"], values["owner"], values["purpose"], ttl_s=values["ttl_s"])


def test_force_is_audited(store: Store) -> None:
    """Who ended whose lease, and why, is kept; the holder learns it when it renews."""
    lease = take(store)
    with pytest.raises(UsageError, match="a reason"):
        store.leases.force_release("nano-01", "operator", "")
    assert store.leases.force_release("nano-01", "operator", "holder is on holiday")
    assert not store.leases.force_release("nano-01", "operator", "again")
    event = store.events.fetch_of_boards("nano-01")[-1]
    assert (event.kind, event.before, event.after, event.by) == ("lease_forced", "leased", "idle", "operator")
    assert f"the lease {lease.token} of left (tuning): holder is on holiday" in event.reason
    with pytest.raises(PermanentError, match="is over"):
        store.leases.renew(lease)
