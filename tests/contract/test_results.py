"""What every store promises of kept results: each under a number of its own, the newest first."""

from __future__ import annotations

import pytest

from farm.errors import UsageError
from farm.settings import StoreLocation
from farm.store import Store


def test_results_are_kept_and_chosen(place: StoreLocation) -> None:
    """A result is found again by its number, its command, model and board type."""
    about = {"board": "n-1", "simulated": False, "device": "cpu", "by": "ann@host"}
    with Store(place) as store:
        first = store.results.add("bench", {"models": [1]}, model="a", board_type="jetson-nano", **about)
        second = store.results.add("run", {"latency": {}}, model="b", board_type="jetson-tx2", **about)
    with Store(place) as store:
        assert [each.id for each in store.results.fetch()] == [second, first]
        assert [each.id for each in store.results.fetch(limit=1, offset=1)] == [first]
        for chosen in ({"kind": "run"}, {"model": "b"}, {"board_type": "jetson-tx2"}):
            assert [each.id for each in store.results.fetch(**chosen)] == [second]
        found = store.results.require(first)
        assert (found.document, found.by, found.simulated) == ({"models": [1]}, "ann@host", False)
        assert store.results.count() == 2
        for unknown in (0, 3, 2**70):
            with pytest.raises(UsageError, match="no result"):
                store.results.require(unknown)
