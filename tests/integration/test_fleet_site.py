"""Taking one leased board for a command: what is waited for, and what is said where that is in vain."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest

from farm.connectivity.tracker import Tracker
from farm.crew.health import HealthLimits, Kind, Observation, decide_by
from farm.crew.leased_site import FleetSite
from farm.errors import BoardUnsafeError, UnavailableError
from farm.store import Store
from farm.values import Board, Virtual
from tests.awaiting import take
from tests.integration.test_engine_boards import Within
from tests.ports import find_free_port

TYPE = "jetson-nano"


def observe(store: Store, name: str, kind: Kind) -> None:
    """What the farm's services would say of a board."""
    store.boards.observe(name, kind, "test", decide_by(Observation(kind), HealthLimits()))


def test_waiting_in_vain_says_for_what(tracker: Any, tmp_path: pathlib.Path) -> None:
    """Without a board within the time given, the error has each board's reason; where nothing can help, at once."""
    with Store(tmp_path / "farm.db") as store:
        for name in ("a", "b"):
            store.boards.register(name, TYPE, Virtual())
            observe(store, name, Kind.BACK)
            observe(store, name, Kind.PROBE_PASSED)
        store.leases.acquire("a", "ann", "sweep")
        observe(store, "b", Kind.LOST)
        notes: list[str] = []
        with pytest.raises(
            UnavailableError, match=r"within 0\.2 s \(a: leased by ann: sweep; b: offline: it cannot be"
        ):
            take(FleetSite(Within(tracker), store, TYPE, None, "tune", 0.2, notes.append))
        assert len(notes) == 1
        observe(store, "b", Kind.UNSAFE)
        began = time.monotonic()
        with pytest.raises(BoardUnsafeError, match="b: unsafe"):
            take(FleetSite(Within(tracker), store, TYPE, "b", "tune", 60.0, notes.append))
        assert time.monotonic() - began < 5


def test_nobody_is_blamed_for_services_that_are_gone(tmp_path: pathlib.Path) -> None:
    """Where the tracker does not answer, boards are neither taken nor found at fault; the error names the services."""
    with Store(tmp_path / "farm.db") as store:
        store.boards.save(Board("a", TYPE, simulated=True))
        gone = Within(Tracker("127.0.0.1", find_free_port()))
        with pytest.raises(UnavailableError, match="a: the farm's services do not answer"):
            take(FleetSite(gone, store, TYPE, None, "tune", 0.2, lambda text: None))
        assert [event.kind for event in store.events.fetch_of_boards()] == []
