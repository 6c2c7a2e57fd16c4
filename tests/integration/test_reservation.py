"""A reserved board: who gets it, who does not, what all users see, and how it ends."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from farm.crew import queue_entry
from farm.crew.health import Kind
from farm.crew.leased_site import FleetSite
from farm.crew.queue_entry import QueueEntry
from farm.errors import UnavailableError, UsageError
from farm.store import Store
from farm.values import Virtual, WorkKind
from tests.acceptance.conftest import Home, new_home
from tests.awaiting import take
from tests.integration.test_fleet_site import TYPE, Within, observe


@pytest.fixture
def home() -> Iterator[Home]:
    with new_home() as home:
        with open_store(home) as store:
            for name in ("a", "b"):
                store.boards.register(name, TYPE, Virtual())
                observe(store, name, Kind.BACK)
                observe(store, name, Kind.PROBE_PASSED)
        yield home


def open_store(home: Home) -> Store:
    folder = pathlib.Path(home.environment["FARM_HOME"])
    folder.mkdir(exist_ok=True)
    return Store(folder / "farm.db")


def be(monkeypatch: pytest.MonkeyPatch, person: str) -> None:
    """Act as a user for this process's commands."""
    monkeypatch.setenv("LOGNAME", person)


def test_a_reserved_board_is_its_holders(home: Home, tracker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of others passes it by; the holder's runs there under the reservation, which it does not end."""
    done = home.call("board", "hold", "a", "--for", "2h", "--why", "debugging", LOGNAME="ann")
    assert done.code == 0, done.err
    with open_store(home) as store:
        token = store.boards.require("a").lease.token
        be(monkeypatch, "bob")
        with take(FleetSite(Within(tracker), store, TYPE, None, "bench x", 5.0, lambda text: None)) as site:
            assert site.name == "b"
        with pytest.raises(UnavailableError, match=r"a: leased by ann@.*reserved: debugging"):
            take(FleetSite(Within(tracker), store, TYPE, "a", "bench x", 0.2, lambda text: None))
        be(monkeypatch, "ann")
        with take(FleetSite(Within(tracker), store, TYPE, None, "bench x", 5.0, lambda text: None)) as site:
            assert site.name == "a", "what is reserved for us comes first"
            assert site.lease.token == token
            assert site.confirm()
            assert store.leases.force_release("a", "operator", "needed")
            assert not site.confirm()
        assert store.boards.require("a").lease is None


def test_everybody_sees_a_reservation_and_who_may_end_it(home: Home) -> None:
    """`list` and `queue` say who, why and until when; another person needs --force, the holder does not."""
    reserve = ("board", "hold", "a", "--for", "30m", "--json")
    first = home.call(*reserve, "--why", "a look", LOGNAME="ann").json()
    longer = home.call("board", "hold", "a", "--for", "3h", "--json", LOGNAME="ann").json()
    assert (first["new"], longer["new"]) == (True, False)
    assert longer["until"] - first["until"] > 9000 - 60
    [row, _] = home.call("board", "list", "--json").json()
    assert row["lease"]["purpose"] == "reserved: a look"
    assert row["lease"]["expires_at"] == pytest.approx(longer["until"])
    assert " until " in home.call("board", "list", COLUMNS="400").out
    [held] = [board for board in home.call("queue", "--json").json()["boards"] if board["owner"]]
    assert (held["kind"], held["reserved_until"]) == ("reserved", pytest.approx(longer["until"]))
    assert "Reserved until" in home.call("queue", COLUMNS="400").out
    assert home.call("board", "release", "a", LOGNAME="bob").code == 2
    assert home.call("board", "release", "a", LOGNAME="ann").code == 0
    done = home.call("board", "release", "a", "--force", "--why", "night", LOGNAME="bob")
    assert "has no holder" in done.out
    events = home.call("board", "show", "a", "--json").json()["events"]
    assert [event["by"].partition("@")[0] for event in events[-2:]] == ["ann", "ann"]


def test_a_reservation_ends_by_itself_and_waits_its_turn(home: Home) -> None:
    """After its time the board is free for any client; a campaign that holds it is asked to give it up."""
    with open_store(home) as store, open_store(home) as other:
        lease, _ = queue_entry.reserve(store, "a", 0.3, "", 1.0, lambda text: None, "ann@lab")
        assert (lease.purpose, lease.owner) == ("reserved", "ann@lab")
        kept, new = queue_entry.reserve(other, "a", 3600.0, "next", 30.0, lambda text: None, "bob@lab")
        assert new
        assert kept.token > lease.token
        assert store.leases.find_reservation("a", "ann@lab") is None
        campaign = QueueEntry(store, WorkKind.TRIALS, "campaign", TYPE, ["b"], campaign="long")
        campaign.stay()
        held = store.leases.acquire("b", "engine pid 1", "campaign", kind=WorkKind.TRIALS, request=campaign.number)
        campaign.end()
        campaign.stay()
        notes: list[str] = []

        def give_up(text: str) -> None:
            notes.append(text)
            store.leases.release(held)

        taken, _ = queue_entry.reserve(other, "b", 60.0, "", 30.0, give_up, "ann@lab")
        assert taken.board == "b"
        assert "leased by engine pid 1: campaign" in notes[0]


def test_what_is_out_of_order_may_be_reserved(home: Home) -> None:
    """An offline or quarantined board is there to be looked into; a retired one, and a reason of two lines, are not."""
    with open_store(home) as store:
        observe(store, "a", Kind.QUARANTINE)
        observe(store, "a", Kind.LOST)
        assert queue_entry.reserve(store, "a", 60.0, "why?", 1.0, lambda text: None, "ann@lab")[1]
        with pytest.raises(UsageError, match="one line"):
            queue_entry.reserve(store, "b", 60.0, "a\nb", 1.0, lambda text: None, "ann@lab")
        with pytest.raises(UsageError, match="up to 7 days"):
            queue_entry.reserve(store, "b", 8 * 86400.0, "", 1.0, lambda text: None, "ann@lab")
        observe(store, "b", Kind.RETIRE)
        with pytest.raises(UnavailableError, match="retired"):
            queue_entry.reserve(store, "b", 60.0, "", 1.0, lambda text: None, "ann@lab")
