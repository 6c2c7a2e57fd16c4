"""One rule for names of boards and campaigns, wherever one comes in: what is none never becomes a path or a key."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest

from farm.campaign.submit import clone
from farm.errors import UsageError
from farm.inventory.fleet_document import check_labels
from farm.store import Store
from farm.values import Virtual
from tests.unit import campaign_orders

NONE_OF_THEM = ["", ".", "../../x", "a/b", "-rf", "a b", "a\n", "\x1b[31mred", "a\x00b", "ä", "a:b", "a" * 64]


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Iterator[Store]:
    with Store(tmp_path / "farm.db") as store:
        campaign_orders.submit(store, campaign_orders.make_order("c"))
        yield store


@pytest.mark.parametrize("name", NONE_OF_THEM)
def test_what_is_no_name_is_refused_everywhere(store: Store, name: str) -> None:
    """Boards, campaigns and clones are held to the same rule, and nothing is kept of what was refused."""
    attempts: list[Callable[[], object]] = [
        lambda: store.boards.register(name, "jetson-nano", Virtual()),
        lambda: clone(store, "c", name, {}, "op", "campaign clone"),
        lambda: campaign_orders.submit(store, campaign_orders.make_order(name)),
    ]
    for attempt in attempts:
        with pytest.raises(UsageError, match=r"cannot be a .*'s name"):
            attempt()
    assert [each.name for each in store.campaigns.fetch()] == ["c"]
    assert store.boards.fetch() == []


@pytest.mark.parametrize("name", ["a", "9", "nano-01", "Rack_2.b", "a" * 63])
def test_what_is_a_name_is_one_everywhere(store: Store, name: str) -> None:
    """What one place takes, every other takes too."""
    store.boards.register(name, "jetson-nano", Virtual())
    assert clone(store, "c", name, {}, "op", "campaign clone") == name


@pytest.mark.parametrize("labels", [{"Rack 1": "a"}, {"rack": "\x1b[31m"}, {"-": "a"}, {"rack": "x" * 256}])
def test_labels_given_on_the_command_line_are_those_of_a_file(labels: dict[str, str]) -> None:
    """`farm board add --label` takes what a fleet file takes."""
    with pytest.raises(UsageError, match="cannot be in a label"):
        check_labels(labels)
    assert check_labels({"rack/row": "A 2"}) == {"rack/row": "A 2"}
