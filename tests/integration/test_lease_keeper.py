"""A lease kept by its keeper: renewed with all others on one thread, lost once and loudly, given back."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from farm.crew import leased_board
from farm.crew.leased_board import LeasedBoard, LeaseKeeper
from farm.errors import TransientError
from farm.store import Store, database
from farm.values import Board, Lease
from tests.integration.conftest import wait_until

TTL_S = 0.6


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Iterator[Store]:
    with Store(tmp_path / "farm.db") as store:
        store.boards.save(Board("nano", "local", simulated=False))
        yield store


def test_it_lasts_as_long_as_it_is_kept(store: Store) -> None:
    """Three times its time later the lease holds, until it is released; one thread keeps all and ends with the last."""
    store.boards.save(Board("tx2", "local", simulated=False))
    other, lease = (store.leases.acquire(name, "left", "tuning", ttl_s=TTL_S) for name in ("tx2", "nano"))
    with LeaseKeeper(store.location, other), LeaseKeeper(store.location, lease) as keeper:
        assert [each.name for each in threading.enumerate()].count("farm-leases") == 1
        wait_until(lambda: keeper.lease.expires_at > lease.expires_at + 3 * TTL_S, "renewals")
        with pytest.raises(TransientError, match="leased by left"):
            store.leases.acquire("nano", "right", "tuning")
        assert not keeper.lost.is_set()
    store.leases.acquire("nano", "right", "tuning")
    wait_until(lambda: "farm-leases" not in [each.name for each in threading.enumerate()], "the thread's end")


def test_the_end_by_force_is_noticed_once(store: Store) -> None:
    """Its holder learns it at the next renewal, with the reason; closing then disturbs no successor."""
    lease = store.leases.acquire("nano", "left", "tuning", ttl_s=TTL_S)
    with LeaseKeeper(store.location, lease) as keeper:
        store.leases.force_release("nano", "operator", "needed")
        successor = store.leases.acquire("nano", "right", "tuning")
        assert keeper.lost.wait(10)
        assert f"lease {lease.token} of board 'nano' is over" in keeper.reason
    assert store.leases.release(successor)


def test_a_busy_store_is_asked_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal that another command's transaction keeps away is made once that has ended; nothing is lost."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    lease = store.leases.acquire("nano", "left", "tuning", ttl_s=10 * TTL_S)
    refused = threading.Event()

    def open_watched() -> Store:
        watched = Store(store.location)
        renew = watched.leases.renew_all

        def renew_or_note(*given: Any) -> dict[Lease, Lease]:
            try:
                return renew(*given)
            except TransientError:
                refused.set()
                raise

        monkeypatch.setattr(watched.leases, "renew_all", renew_or_note)
        return watched

    monkeypatch.setattr(leased_board, "Store", lambda _: open_watched())
    with LeaseKeeper(store.location, lease) as keeper:
        with store.session.engine.connect().execution_options(farm_writes=True) as connection, connection.begin():
            assert refused.wait(20)
        wait_until(lambda: keeper.lease.expires_at > lease.expires_at, "the renewal")
        assert not keeper.lost.is_set()


def test_a_store_that_stays_broken_is_a_lost_lease(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lease must have lapsed while renewal was impossible, the holder lets go by itself."""
    lease = store.leases.acquire("nano", "left", "tuning", ttl_s=TTL_S)

    def open_full() -> Store:
        full = Store(store.location)
        engine = full.session.engine
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("PRAGMA query_only=ON"))
        return full

    began = time.monotonic()
    monkeypatch.setattr(leased_board, "Store", lambda _: open_full())
    with LeaseKeeper(store.location, lease) as keeper:
        assert keeper.lost.wait(10)
        assert time.monotonic() - began + 0.05 >= TTL_S
        assert "cannot be used" in keeper.reason


def test_closing_twice_gives_back_once(store: Store) -> None:
    """A keeper may be closed again."""
    lease = store.leases.acquire("nano", "left", "tuning", ttl_s=TTL_S)
    keeper = LeaseKeeper(store.location, lease)
    keeper.close()
    keeper.close()
    assert [event.kind for event in store.events.fetch_of_boards("nano")][-2:] == ["lease_taken", "lease_released"]


def test_a_board_whose_taking_cannot_be_told_is_given_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may get busy between the lease and its event: the lease would be unknown and never released."""

    def refuse(*_: str) -> None:
        raise TransientError("busy")

    monkeypatch.setattr(store.events, "add", refuse)
    with pytest.raises(TransientError, match="busy"):
        LeasedBoard(store, "jetson-nano/nano", "sweep", None)
    wait_until(lambda: store.boards.require("nano").lease is None, "the lease to be given back")
