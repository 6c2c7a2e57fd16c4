"""Several coordinators on one store: processes that exclude each other, are stopped, and are killed at any moment."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Iterator

import pytest

from device_agent.protocol import Outcome, Status
from farm.errors import LeaseOverError, TransientError, UnavailableError
from farm.settings import StoreLocation
from farm.store import Store
from farm.store.clock import read_clock
from farm.values import Board, Lease, Trial
from tests.contract.conftest import run_python
from tests.fleet_store import kinds
from tests.postgresql import Cluster
from tests.store_cable import cable_to_store
from tests.stored_workloads import make_workload

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE_S = 60.0
GOOD = Outcome(Status.OK, latency_s=(1e-3, 1e-3, 1e-3), board="b0")
# Takes boards as fast as it can, and holds each by a file that only one may make: O_EXCL is who proves the exclusion.
_TAKER = """
import os, pathlib, random, sys, time
from farm.errors import TransientError
from farm.settings import parse_store
from farm.store import Store
folder, name, rounds = pathlib.Path(sys.argv[4]), sys.argv[2], int(sys.argv[3])
random.seed(name)
tokens, deadline = [], time.monotonic() + 50
with Store(parse_store(sys.argv[1])) as store:
    while len(tokens) < rounds and time.monotonic() < deadline:
        board = f"b{random.randrange(3)}"
        try:
            lease = store.leases.acquire(board, name, "contract")
        except TransientError:
            continue
        held = folder / f"held-{board}"
        os.close(os.open(held, os.O_CREAT | os.O_EXCL))
        store.leases.renew(lease)
        held.unlink()
        assert store.leases.release(lease)
        tokens.append(f"{board}:{lease.token}")
print(*tokens)
"""
_HOLDER = """
import sys, time
from farm.settings import parse_store
from farm.store import Store
store = Store(parse_store(sys.argv[1]))
acquired_s = time.clock_gettime(time.CLOCK_BOOTTIME)
lease = store.leases.acquire("b0", "holder", "contract", ttl_s=float(sys.argv[2]))
print(lease.token, acquired_s, flush=True)
for line in sys.stdin:
    try:
        store.leases.renew(lease)
        print("renewed", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""
_OBSERVER = """
import sys
from farm.crew.health import Kind, HealthLimits, Observation, decide_by
from farm.settings import parse_store
from farm.store import Store
decide = decide_by(Observation(Kind.FAULT), HealthLimits(faults=1000, window_s=1e6))
with Store(parse_store(sys.argv[1])) as store:
    for _ in range(50):
        store.boards.observe("b0", "fault", sys.argv[2], decide)
"""
_KILLED = """
import sys
from farm.settings import parse_store
from farm.store import Store
store = Store(parse_store(sys.argv[1]))
while True:
    lease = store.leases.acquire("b0", "victim", "contract", ttl_s=0.2)
    print(lease.token, flush=True)
    store.leases.release(lease)
"""


@pytest.fixture
def real(place: StoreLocation) -> Iterator[Store]:
    with Store(place) as store:
        for number in range(3):
            store.boards.save(Board(f"b{number}", "local", simulated=False))
        yield store


def test_two_coordinators_never_hold_one_board(real: Store, place: StoreLocation, tmp_path: pathlib.Path) -> None:
    """Processes that take and give back the same boards exclude each other every time, and every token is new."""
    rounds = 60
    takers = [run_python(_TAKER, place, name, rounds, tmp_path) for name in ("left", "right", "third")]
    tokens: list[str] = []
    for taker in takers:
        answer, complaints = taker.communicate(timeout=PATIENCE_S)
        assert taker.returncode == 0, complaints
        tokens.extend(answer.split())
    assert len(tokens) == len(set(tokens)) == 3 * rounds
    assert all(board.lease is None for board in real.boards.fetch())
    for number in range(3):
        taken = [event for event in real.events.fetch_of_boards(f"b{number}") if event.kind.startswith("lease_")]
        assert [event.kind for event in taken] == ["lease_taken", "lease_released"] * (len(taken) // 2)


def poll(attempt: Callable[[], Lease], timeout_s: float) -> Lease:
    deadline = read_clock().seconds + timeout_s
    while True:
        try:
            return attempt()
        except TransientError:
            assert read_clock().seconds < deadline, "the lease did not expire"
            threading.Event().wait(0.02)


def test_a_killed_coordinators_lease_expires(real: Store, place: StoreLocation) -> None:
    """A board that was not released is free when the lease has expired, not before."""
    holder = run_python(_HOLDER, place, 1.0)
    assert holder.stdout
    token, acquired_s = holder.stdout.readline().split()
    holder.kill()
    holder.communicate(timeout=PATIENCE_S)
    lease = poll(lambda: real.leases.acquire("b0", "heir", "contract"), 10)
    assert lease.token > int(token)
    assert read_clock().seconds - float(acquired_s) >= 1.0


def test_no_observation_of_two_is_lost(real: Store, place: StoreLocation) -> None:
    """Two health loops on one board: every fault is counted."""
    for observer in [run_python(_OBSERVER, place, name) for name in ("left", "right")]:
        _, complaints = observer.communicate(timeout=PATIENCE_S)
        assert observer.returncode == 0, complaints
    assert "100 of 1000" in real.events.fetch_of_boards("b0")[-1].reason


def test_a_kill_in_the_middle_leaves_the_store_whole(real: Store, place: StoreLocation) -> None:
    """Killed at any moment, a coordinator leaves a lease with its event, or none; the next one works."""
    for steps in (1, 2, 3, 5, 8):
        victim = run_python(_KILLED, place)
        assert victim.stdout
        tokens = [int(victim.stdout.readline()) for _ in range(steps)]
        victim.kill()
        victim.communicate(timeout=PATIENCE_S)
        heir = poll(lambda: real.leases.acquire("b0", "heir", "contract"), 10)
        assert heir.token > max(tokens)
        assert real.leases.release(heir)
        happened = kinds(real, "b0")
        assert happened[::2] == ["lease_taken"] * (len(happened) // 2)
        assert set(happened[1::2]) <= {"lease_released", "lease_expired"}


def test_a_coordinator_that_is_cut_off_comes_back(cluster: Cluster) -> None:
    """While the network between it and the store is cut it gets an error within the URL's time, and its board
    goes to another after its lease's time. Then it learns that its lease is over; of what both measured one counts, and
    what it could not write is written once.
    """
    url = cluster.make(empty=False)
    words = "?tcp_user_timeout=1500&connect_timeout=2"
    with cable_to_store(url) as (cable, far), Store(far + words) as left, Store(url) as right:
        right.boards.save(Board("b0", "local", simulated=False))
        number = right.campaigns.start("farm tune m", "m", "", "local", 9, {})
        right.workloads.save(number, [make_workload()])
        both, own = (Trial(number, "w", candidate, "default", 1, GOOD, "[]") for candidate in ("both", "own"))
        lease = left.leases.acquire("b0", "left", "contract", ttl_s=1.0)
        cable.pull_the_plug()
        with pytest.raises((TransientError, UnavailableError), match=r"failed just now|cannot be used"):
            left.trials.add(own)
        heir = poll(lambda: right.leases.acquire("b0", "right", "contract"), 10)
        assert heir.token > lease.token
        assert right.trials.add(both)
        cable.plug_in()
        with pytest.raises(LeaseOverError, match="is over"):
            left.leases.renew(lease)
        assert not left.leases.release(lease)
        assert (left.trials.add(both), left.trials.add(own), left.trials.add(own)) == (False, True, False)
        assert [row["candidate"] for row in right.trials.fetch(number, columns=("candidate",))] == ["both", "own"]
        assert right.leases.release(heir)
