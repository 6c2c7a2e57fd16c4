"""The artifacts that a campaign was ordered with: what is still to be made, through pauses and killed commands."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from farm.campaign import artifacts
from farm.campaign.submit import clone
from farm.errors import UsageError
from farm.report.campaign_document import summarise
from farm.store import Store
from farm.types.campaigns import Order
from tests.unit.campaign_orders import make_order, submit


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Iterator[Store]:
    with Store(tmp_path / "farm.db") as store:
        submit(store, make_order("c", compile_to=str(tmp_path / "packages")))
        yield store


def finish(store: Store) -> None:
    store.campaigns.note(1, "finished", "its trials are made")


def is_pending(store: Store) -> bool:
    campaign = store.campaigns.require("c")
    return artifacts.is_pending(campaign, summarise(campaign))


def keep(store: Store, folder: pathlib.Path, matches: bool = True) -> pathlib.Path:
    """Note an artifact as made; returns its package's path."""
    package = folder / "mlp.whl"
    made = {"name": "mlp-jetson-nano", "board_type": "jetson-nano", "folder": str(folder / "mlp-jetson-nano")}
    made |= {"package": str(package) if matches else None, "reason": "", "matches": matches}  # type: ignore[dict-item]
    store.campaigns.save_progress(1, {"artifacts": [made]})
    return package


def test_the_folder_lies_in_the_order(store: Store, tmp_path: pathlib.Path) -> None:
    """It is there on resume; orders of before have none, and a clone's artifacts are not its own."""
    campaign = store.campaigns.require("c")
    assert campaign.order.compile_to == str(tmp_path / "packages") == campaign.order.compile_to
    old = campaign.order.model_dump(mode="json", exclude={"compile_to", "rivals"})
    assert Order(**old).compile_to is None
    clone(store, "c", "d", {}, "ana@desk", "campaign clone c d")
    assert store.campaigns.require("d").order.compile_to is None


def test_artifacts_are_missing_until_the_last_is_packed(store: Store, tmp_path: pathlib.Path) -> None:
    """One under way has none yet; where a package is gone, or computed wrongly, it is to be made again."""
    folder = tmp_path / "packages"
    assert not is_pending(store)
    finish(store)
    assert is_pending(store)
    package = keep(store, folder)
    assert is_pending(store)
    folder.mkdir()
    package.write_bytes(b"wheel")
    assert not is_pending(store)
    keep(store, folder, matches=False)
    assert is_pending(store)


def test_another_folder_can_be_ordered_at_any_time(store: Store, tmp_path: pathlib.Path) -> None:
    """Also once the campaign is over; what lies in the first one does not count there."""
    finish(store)
    folder = tmp_path / "packages"
    folder.mkdir()
    keep(store, folder).write_bytes(b"wheel")
    assert not is_pending(store)
    store.campaigns.change_folder("c", str(tmp_path / "others"), "ben@desk")
    assert is_pending(store)
    assert artifacts.list_made(store.campaigns.require("c")) == []
    assert [each.kind for each in store.events.fetch("c")].count("campaign_compile") == 1
    with pytest.raises(UsageError, match="there is no campaign"):
        store.campaigns.change_folder("x", str(tmp_path), "ben@desk")
