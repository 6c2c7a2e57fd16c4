"""Which boards campaigns have taken, and how the scheduler tells apart those that only some may use."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from farm.campaign.engine.active import Active
from farm.campaign.engine.board_keeping import BoardsAsked
from farm.campaign.engine.engine_board import Arrived
from farm.campaign.engine.roster import Roster
from farm.campaign.scheduler import events
from farm.campaign.scheduler.scheduler import step
from farm.campaign.scheduler.state import to_campaign
from farm.store import Store
from farm.types.campaigns import Order
from farm.types.states import CampaignState
from farm.values import Board
from tests.unit import campaign_orders
from tests.unit.fleet_campaigns import Hands


class Crew:
    """Keeps what it is asked for; `name` is this machine's while it is a board."""

    def __init__(self, name: str = "") -> None:
        self.wanted: dict[str, set[str]] = {}
        self.name = name
        self.host_wanted = False
        self.taken: set[str] = set()

    def has_taken(self, name: str) -> bool:
        return name in self.taken

    def want(self, asked: Sequence[BoardsAsked]) -> None:
        self.wanted = {each.board_type: set(each.boards) for each in asked}

    def want_host(self, wanted: bool) -> str:
        self.host_wanted = wanted
        return self.name if wanted else ""


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Iterator[Store]:
    """Two simulated Nanos, and two machines of the type `local`: ours and another coordinator's."""
    with Store(tmp_path / "farm.db") as store:
        for name in ("n1", "n2"):
            store.boards.save(Board(name, "jetson-nano", simulated=True))
        for name in ("here", "elsewhere"):
            store.boards.save(Board(name, "local", simulated=False))
        yield store


def active(name: str, **changes: Any) -> Active:
    order: Order = campaign_orders.make_order(name, **changes)
    made = Active(1, to_campaign(order, order.budget))
    made.campaign.reason = "no board is here"
    return made


def roster(store: Store, crew: Crew, needed: list[set[str]] | None = None) -> Roster:
    made = Roster(store, crew, Hands().state, lambda names: needed.append(set(names)) if needed is not None else None)  # type: ignore[arg-type]
    made._look_at = -1e9
    return made


def test_a_campaign_that_names_a_board_takes_no_other(store: Store) -> None:
    """Only the board that is named is leased, and only it is brought within reach."""
    crew, needed = Crew(), []
    roster(store, crew, needed).want([active("c", boards=("n2",))])
    assert crew.wanted == {"jetson-nano": {"n2"}}
    assert needed == [{"n2"}]


def test_a_board_is_not_measured_on_by_those_that_name_another(store: Store) -> None:
    """With both boards here, the campaign that names one gets that one alone; the other campaign may have both."""
    crew = Crew()
    mine, free = active("mine", boards=("n1",)), active("free")
    made = roster(store, crew)
    fleet = made._fleet
    for each in (mine, free):
        events.add_campaign(fleet, each.campaign)
    for name in ("n1", "n2"):
        made.arrive(Arrived(name, "jetson-nano", {}, {}))
    made.want([mine, free])
    step(fleet, 1.0)
    served = {name: [lane.campaign.name for lane in fleet.boards[name].pool.lanes] for name in ("n1", "n2")}
    assert served == {"n1": ["mine", "free"], "n2": ["free"]}
    assert made.count(mine.order, "jetson-nano") == 1


def test_of_this_machines_type_it_takes_our_own_alone(store: Store) -> None:
    """Another coordinator's machine in the same store is none of our boards, and ours needs no services."""
    crew, needed = Crew("here"), []
    order = campaign_orders.make_order("c")
    local = order.types[0].model_copy(update={"board_type": "local", "simulated": False, "is_host": True})
    made = roster(store, crew, needed)
    made.want([active("c", types=(local,))])
    assert (crew.host_wanted, crew.wanted, needed) == (True, {"local": {"here"}}, [set()])
    made._look_at = -1e9
    made.want([])
    assert not crew.host_wanted


def test_names_of_boards_are_kept_and_waited_for(store: Store) -> None:
    """Through JSON and back it is the same; one that was written before boards could be named has none. There is
    nothing to connect to.
    """
    order = campaign_orders.make_order("c", boards=("n1",))
    order = order.model_copy(update={"types": (order.types[0].model_copy(update={"is_host": True}),)})
    document = order.model_dump(mode="json")
    assert Order(**document) == order
    del document["boards"], document["types"][0]["is_host"], document["measure"]["repeat_alone"]
    del document["models"][0]["shapes"], document["labels"], document["priority"], document["process"]
    assert Order(**document) == campaign_orders.make_order("c")
    store.boards.remove("n1", "n2")
    found = roster(store, Crew()).explain_absence(active("c"))
    assert found == (CampaignState.WAITING, "no board is here")


def test_a_campaign_whose_boards_are_being_connected_to_does_not_wait(store: Store) -> None:
    """One that is free, or leased to be connected to, is about to come; nothing is said of boards that are missing."""
    crew = Crew()
    made = roster(store, crew)
    assert made.explain_absence(active("c")) == (CampaignState.CONNECTING, "2 boards may be used")
    for name in ("n1", "n2"):
        store.leases.acquire(name, "client", "a sweep")
    state, reason = made.explain_absence(active("c"))
    assert state is CampaignState.WAITING
    assert reason.startswith("no board is here (n1: ")
    assert "client" in reason
    crew.taken = {"n2"}
    assert made.explain_absence(active("c")) == (CampaignState.CONNECTING, "2 boards may be used")
