"""A store with one board and clocks that stand still until moved, for the tests of boards and leases."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from farm.crew.health import HealthLimits, Kind, Observation, decide_by
from farm.settings import StoreLocation
from farm.store import Store
from farm.store.clock import Instant
from farm.store.session import StoreSession
from farm.values import Lease, Ssh, Transition

SSH = Ssh("nano-01.lab", "farm", identity_file="~/.ssh/farm", host_key="SHA256:AAAA")


class Clocks:
    def __init__(self) -> None:
        self.boot, self.seconds, self.wall = "boot-1", 1000.0, 1.7e9

    def read(self) -> Instant:
        return Instant(self.boot, self.seconds)

    def read_wall(self) -> float:
        return self.wall

    def pass_s(self, seconds: float) -> None:
        self.seconds += seconds
        self.wall += seconds

    def reboot(self) -> None:
        """The coordinator's machine starts again."""
        self.boot, self.seconds = self.boot + "x", 5.0


@contextlib.contextmanager
def open_fleet(place: StoreLocation, clocks: Clocks) -> Iterator[Store]:
    with Store(StoreSession(place, clocks.read, clocks.read_wall)) as store:
        store.boards.register("nano-01", "jetson-nano", SSH, {"rack": "2"})
        observe(store, Kind.BACK)
        observe(store, Kind.PROBE_PASSED)
        yield store


def observe(store: Store, kind: Kind, name: str = "nano-01", limits: HealthLimits | None = None) -> Transition:
    """Observe something of a board, by the farm's own rule."""
    return store.boards.observe(name, kind, "test", decide_by(Observation(kind), limits or HealthLimits()))


def take(store: Store, owner: str = "left", **options: Any) -> Lease:
    return store.leases.acquire("nano-01", owner, "tuning", **options)


def kinds(store: Store, name: str = "nano-01") -> list[str]:
    return [event.kind for event in store.events.fetch_of_boards(name)]
