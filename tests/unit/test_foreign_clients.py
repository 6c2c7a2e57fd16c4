"""A client that took a board at the tracker without a lease is shown to all users; no other counts as one."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from device_agent.protocol import ClaimReport, ClaimStatus, LeaseClaim
from farm.errors import TransientError
from farm.services.foreign_clients import OWNER, SETTLE_S, ForeignClients
from farm.store import Store
from tests.fleet_store import Clocks, open_fleet, take

KEY = "jetson-nano/nano-01"


class Agent:
    """Who has a session with the board, as its agent says; None: it does not answer."""

    def __init__(self) -> None:
        self.holder: str | None = "a client that is not the farm (127.0.0.1:5)"
        self.asked: list[LeaseClaim] = []

    def __call__(self, address: tuple[str, int], claim: LeaseClaim) -> ClaimReport:
        assert address == ("127.0.0.1", 9090)
        self.asked.append(claim)
        if self.holder is None:
            raise TransientError("silence")
        return ClaimReport(ClaimStatus.OK, holder=self.holder)


def summary(free: int) -> dict[str, Any]:
    """What the tracker says where so many sessions of the board are to be had."""
    return {
        "queue_info": {KEY: {"free": free, "pending": 0}},
        "server_info": [{"addr": ["127.0.0.1", 9090], "key": f"server:{KEY}"}],
    }


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Iterator[Store]:
    with open_fleet(tmp_path / "farm.sqlite", Clocks()) as store:
        yield store


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def clients(store: Store, agent: Agent) -> ForeignClients:
    return ForeignClients(store, agent)


def look(clients: ForeignClients, store: Store, free: int, now_s: float) -> str | None:
    """One look; returns who holds the board then."""
    clients.look(summary(free), {"nano-01": KEY}, store.boards.fetch(), now_s)
    lease = store.boards.require("nano-01").lease
    return None if lease is None else str(lease.owner)


def test_a_stock_client_shows_while_it_is_there(store: Store, clients: ForeignClients) -> None:
    """Waiters see for whom; as soon as the board is offered again it is free."""
    assert look(clients, store, 0, 0.0) is None
    assert look(clients, store, 0, SETTLE_S) == OWNER
    board = store.boards.require("nano-01")
    assert (board.state, OWNER in board.state_reason) == ("leased", True)
    with pytest.raises(TransientError, match=f"is leased by {OWNER}"):
        take(store)
    for now_s in (30.0, 60.0, 90.0):
        assert look(clients, store, 0, now_s) == OWNER
    assert look(clients, store, 1, 91.0) is None
    take(store)


def test_a_holder_of_the_farms_is_no_foreign_client(store: Store, clients: ForeignClients, agent: Agent) -> None:
    """Nor is one that has just given its lease back, while its agent is about to offer the board again."""
    lease = take(store)
    assert look(clients, store, 0, 0.0) == "left"
    assert look(clients, store, 0, 99.0) == "left"
    store.leases.release(lease)
    assert look(clients, store, 0, 100.0) is None
    assert look(clients, store, 1, 100.5) is None
    assert look(clients, store, 0, 100.0 + 2 * SETTLE_S) is None
    assert agent.asked == []


@pytest.mark.parametrize("holder", ["", None])
def test_where_the_agent_knows_of_nobody_the_board_is_free(
    store: Store, clients: ForeignClients, agent: Agent, holder: str | None
) -> None:
    """A session of a lease that is over ends by the question, a silent agent tells nothing: both are asked later."""
    agent.holder = holder
    look(clients, store, 0, 0.0)
    assert look(clients, store, 0, SETTLE_S) is None
    assert look(clients, store, 0, SETTLE_S + 1) is None
    assert len(agent.asked) == 1
    assert look(clients, store, 0, 2 * SETTLE_S + 15) is None
    assert len(agent.asked) == 2


def test_an_operator_and_the_end_of_the_services_free_the_board(store: Store, clients: ForeignClients) -> None:
    """A lease that was ended by force is not taken again at once; those that are left are given back."""
    look(clients, store, 0, 0.0)
    look(clients, store, 0, SETTLE_S)
    assert store.leases.force_release("nano-01", "op", "mine now")
    assert look(clients, store, 0, 30.0) is None
    assert look(clients, store, 0, 31.0) is None
    assert look(clients, store, 0, 60.0) == OWNER
    clients.close()
    assert store.boards.require("nano-01").lease is None
