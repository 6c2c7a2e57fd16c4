"""What every store promises of leases: one holder at a time, whoever asks, dies, or sets the time."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farm.errors import BoardUnsafeError, PermanentError, TransientError, UnavailableError, UsageError
from farm.fleet.health import Kind, Limits
from farm.store import PROBE, Store
from farm.store.clock import read_clock
from farm.values import Board, Health, Lease
from tests.fleet_store import SSH, Clocks, kinds, observe, open_fleet, take

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE_S = 60.0


@pytest.fixture
def clocks() -> Clocks:
    """Clocks that stand still until moved."""
    return Clocks()


@pytest.fixture
def store(tmp_path: pathlib.Path, clocks: Clocks) -> Iterator[Store]:
    """A store with one good board, nano-01, that can be reached."""
    with open_fleet(tmp_path / "farm.sqlite", clocks) as store:
        yield store


# One holder


def test_a_board_has_one_holder(store: Store) -> None:
    """While one holds it another is told who does, and gets it once it is given back."""
    lease = take(store)
    with pytest.raises(TransientError, match="leased by left for tuning"):
        take(store, "right")
    assert store.release_lease(lease)
    assert take(store, "right").owner == "right"


def test_tokens_only_grow(store: Store, clocks: Clocks) -> None:
    """Given back, expired, ended by force, or the board removed and added again: the next token is greater."""
    tokens = [take(store)]
    store.release_lease(tokens[-1])
    tokens.append(take(store, ttl_s=10))
    clocks.pass_s(10)
    tokens.append(take(store))
    store.force_release("nano-01", "operator", "stuck")
    store.remove_board("nano-01")
    store.register_board("nano-01", "jetson-nano", SSH)
    observe(store, Kind.BACK)
    tokens.append(take(store, allowed=PROBE))
    assert [lease.token for lease in tokens] == sorted({lease.token for lease in tokens})
    assert len({lease.store for lease in tokens}) == 1


def test_stores_are_told_apart(store: Store, tmp_path: pathlib.Path) -> None:
    """Tokens of two stores mean nothing to each other, so a lease says whose it is."""
    with Store(tmp_path / "other.sqlite") as other:
        other.save_board(Board("b", "local", simulated=False))
        assert other.acquire_lease("b", "left", "tuning").store != take(store).store


def test_a_lease_is_renewed(store: Store, clocks: Clocks) -> None:
    """For as long as it is, it lasts; the token stays."""
    lease = take(store, ttl_s=30)
    for _ in range(10):
        clocks.pass_s(29)
        renewed = store.renew_lease(lease)
        assert (renewed.token, renewed.expires_at) == (lease.token, clocks.wall + 30)
    with pytest.raises(TransientError):
        take(store, "right")


def test_a_lease_that_is_not_renewed_expires(store: Store, clocks: Clocks) -> None:
    """Another takes the board at once; the old holder can neither renew nor give back what is not its own."""
    old = take(store, ttl_s=30)
    clocks.pass_s(30)
    new = take(store, "right")
    with pytest.raises(PermanentError, match="is over"):
        store.renew_lease(old)
    assert not store.release_lease(old)
    assert store.renew_lease(new).token == new.token
    assert kinds(store)[-3:] == ["lease_taken", "lease_expired", "lease_taken"]


def test_an_expired_lease_is_over_even_if_nobody_took_the_board(store: Store, clocks: Clocks) -> None:
    """Everybody agrees: the list says idle, renewing is refused."""
    lease = take(store, ttl_s=30)
    clocks.pass_s(31)
    [shown] = store.fetch_boards()
    assert (shown["state"], shown["lease"]) == ("idle", None)
    assert "left expired" in shown["state_reason"]
    with pytest.raises(PermanentError):
        store.renew_lease(lease)


def test_expired_leases_are_swept(store: Store, clocks: Clocks) -> None:
    """The sweep frees those that are over and no other, once."""
    store.save_board(Board("b", "local", simulated=False))
    take(store, ttl_s=30)
    store.acquire_lease("b", "left", "tuning", ttl_s=300)
    assert store.expire_leases() == []
    clocks.pass_s(60)
    assert store.expire_leases() == ["nano-01"]
    assert store.expire_leases() == []
    assert store.require_board("b")["lease"]["owner"] == "left"


# Time


@pytest.mark.parametrize("jump_s", [365 * 86400.0, -365 * 86400.0], ids=["a year ahead", "a year back"])
def test_the_time_may_be_set(store: Store, clocks: Clocks, jump_s: float) -> None:
    """A wall clock that jumps ends no lease and keeps none alive."""
    lease = take(store, ttl_s=30)
    clocks.wall += jump_s
    assert store.expire_leases() == []
    store.renew_lease(lease)
    clocks.pass_s(29)
    assert store.require_board("nano-01")["state"] == "leased"
    clocks.pass_s(1)
    assert store.expire_leases() == ["nano-01"]


def test_leases_end_with_the_machine(store: Store, clocks: Clocks) -> None:
    """After a reboot of the coordinator no holder is left, so the board is free at once."""
    lease = take(store, ttl_s=1e6)
    clocks.reboot()
    assert store.require_board("nano-01")["state"] == "idle"
    with pytest.raises(PermanentError):
        store.renew_lease(lease)
    assert take(store, "right").token > lease.token


def test_a_cool_down_starts_over_with_the_machine(store: Store, clocks: Clocks) -> None:
    """Times of another start cannot be placed, so a quarantined board waits the whole of it again."""
    limits = Limits(faults=1, cooldown_s=100, passes=1)
    observe(store, Kind.FAULT, limits=limits)
    clocks.pass_s(99)
    clocks.reboot()
    assert observe(store, Kind.PROBE_PASSED, limits=limits).standing.health is Health.QUARANTINED
    clocks.pass_s(99)
    assert observe(store, Kind.PROBE_PASSED, limits=limits).standing.health is Health.QUARANTINED
    clocks.pass_s(1)
    assert observe(store, Kind.PROBE_PASSED, limits=limits).standing.health is Health.GOOD


def test_the_real_clock_goes_forward() -> None:
    """Every reading is of the same clock and no earlier than the one before."""
    first, second = read_clock(), read_clock()
    assert first.clock == second.clock != ""
    assert 0 < first.seconds <= second.seconds


# What a lease asks of a board


@pytest.mark.parametrize(
    ("health", "steps", "error", "hint"),
    [
        ("suspect", [Kind.THROTTLED], TransientError, ""),
        ("quarantined", [Kind.QUARANTINE], TransientError, ""),
        ("maintenance", [Kind.DRAIN], UnavailableError, "undrain"),
        ("unsafe", [Kind.UNSAFE], BoardUnsafeError, "clear"),
        ("retired", [Kind.RETIRE], UnavailableError, "clear"),
    ],
)
def test_work_wants_a_good_board(
    store: Store, health: str, steps: list[Kind], error: type[Exception], hint: str
) -> None:
    """Each other health is refused with its reason, and what an operator can do."""
    for kind in steps:
        observe(store, kind)
    with pytest.raises(error, match=health) as caught:
        take(store)
    assert hint in str(caught.value)


def test_a_probe_may_have_a_board_that_work_may_not(store: Store) -> None:
    """Otherwise no board would ever be good again; an unsafe one is nobody's."""
    observe(store, Kind.THROTTLED)
    store.release_lease(take(store, allowed=PROBE))
    observe(store, Kind.UNSAFE)
    with pytest.raises(BoardUnsafeError):
        take(store, allowed=PROBE)


def test_an_offline_board_is_not_leased(store: Store) -> None:
    """And one that is lost under a lease is offline, keeps the lease, and is leased again when it is back."""
    take(store)
    observe(store, Kind.LOST)
    assert (store.require_board("nano-01")["state"], store.require_board("nano-01")["lease"]["owner"]) == (
        "offline",
        "left",
    )
    observe(store, Kind.BACK)
    assert store.require_board("nano-01")["state"] == "leased"
    observe(store, Kind.LOST)
    store.force_release("nano-01", "operator", "gone")
    with pytest.raises(TransientError, match="offline"):
        take(store, allowed=PROBE)


def test_a_drained_board_finishes_its_lease(store: Store) -> None:
    """Maintenance takes no board from its holder, and lets nobody take it after."""
    lease = take(store)
    observe(store, Kind.DRAIN)
    shown = store.require_board("nano-01")
    assert (shown["state"], shown["health"]) == ("leased", "maintenance")
    store.renew_lease(lease)
    store.release_lease(lease)
    with pytest.raises(UnavailableError):
        take(store)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"board": "nano-99"}, "no board 'nano-99'"),
        ({"owner": " "}, "owner"),
        ({"purpose": ""}, "purpose"),
        ({"ttl_s": 0}, "positive"),
        ({"ttl_s": float("nan")}, "positive"),
        ({"ttl_s": float("inf")}, "positive"),
    ],
)
def test_arguments_that_are_no_lease(store: Store, arguments: dict[str, Any], message: str) -> None:
    """They are the caller's mistake, and said to be."""
    good: dict[str, Any] = {"board": "nano-01", "owner": "left", "purpose": "tuning", "ttl_s": 1.0}
    values = good | arguments
    with pytest.raises(UsageError, match=message):
        store.acquire_lease(values["board"], values["owner"], values["purpose"], ttl_s=values["ttl_s"])


def test_force_is_audited(store: Store) -> None:
    """Who ended whose lease, and why, is kept; the holder learns it when it renews."""
    lease = take(store)
    with pytest.raises(UsageError, match="a reason"):
        store.force_release("nano-01", "operator", "")
    assert store.force_release("nano-01", "operator", "holder is on holiday")
    assert not store.force_release("nano-01", "operator", "again")
    event = store.fetch_board_events("nano-01")[-1]
    assert (event["kind"], event["before"], event["after"], event["by"]) == (
        "lease_forced",
        "leased",
        "idle",
        "operator",
    )
    assert f"the lease {lease.token} of left (tuning): holder is on holiday" in event["reason"]
    with pytest.raises(PermanentError, match="is over"):
        store.renew_lease(lease)


# Two coordinators


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own that knows this checkout."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where the store of several processes is."""
    return tmp_path / "farm.sqlite"


@pytest.fixture
def real(path: pathlib.Path) -> Iterator[Store]:
    """A store on the real clocks with three good boards, b0 to b2."""
    with Store(path) as store:
        for number in range(3):
            store.save_board(Board(f"b{number}", "local", simulated=False))
        yield store


# Takes boards as fast as it can, and holds each by a file that only one may make: O_EXCL is who proves the exclusion.
_TAKER = """
import os, pathlib, random, sys, time
from farm.errors import TransientError
from farm.store import Store
path, name, rounds = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
random.seed(name)
tokens, deadline = [], time.monotonic() + 50
with Store(path) as store:
    while len(tokens) < rounds and time.monotonic() < deadline:
        board = f"b{random.randrange(3)}"
        try:
            lease = store.acquire_lease(board, name, "contract")
        except TransientError:
            continue
        held = path.with_name(f"held-{board}")
        os.close(os.open(held, os.O_CREAT | os.O_EXCL))
        store.renew_lease(lease)
        held.unlink()
        assert store.release_lease(lease)
        tokens.append(f"{board}:{lease.token}")
print(*tokens)
"""


def test_two_coordinators_never_hold_one_board(real: Store, path: pathlib.Path) -> None:
    """Processes that take and give back the same boards exclude each other every time, and every token is new."""
    rounds = 60
    takers = [start(_TAKER, path, name, rounds) for name in ("left", "right", "third")]
    tokens: list[str] = []
    for taker in takers:
        answer, complaints = taker.communicate(timeout=PATIENCE_S)
        assert taker.returncode == 0, complaints
        tokens.extend(answer.split())
    assert len(tokens) == len(set(tokens)) == 3 * rounds
    assert all(board["lease"] is None for board in real.fetch_boards())
    for number in range(3):
        taken = [event for event in real.fetch_board_events(f"b{number}") if event["kind"].startswith("lease_")]
        assert [event["kind"] for event in taken] == ["lease_taken", "lease_released"] * (len(taken) // 2)


_HOLDER = """
import pathlib, sys
from farm.store import Store
from farm.store.clock import read_clock
store = Store(pathlib.Path(sys.argv[1]))
acquired_s = read_clock().seconds
lease = store.acquire_lease("b0", "holder", "contract", ttl_s=float(sys.argv[2]))
print(lease.token, acquired_s, flush=True)
for line in sys.stdin:
    try:
        store.renew_lease(lease)
        print("renewed", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


def poll(attempt: Callable[[], Lease], timeout_s: float) -> Lease:
    """Try to get a lease until it works; fail after `timeout_s`."""
    deadline = read_clock().seconds + timeout_s
    while True:
        try:
            return attempt()
        except TransientError:
            assert read_clock().seconds < deadline, "the lease did not expire"
            threading.Event().wait(0.02)


def test_a_killed_coordinators_lease_expires(real: Store, path: pathlib.Path) -> None:
    """Nobody gave the board back, and it is free when the lease has run out, not before."""
    holder = start(_HOLDER, path, 1.0)
    assert holder.stdout
    token, acquired_s = holder.stdout.readline().split()
    holder.kill()
    holder.communicate(timeout=PATIENCE_S)
    lease = poll(lambda: real.acquire_lease("b0", "heir", "contract"), 10)
    assert lease.token > int(token)
    assert read_clock().seconds - float(acquired_s) >= 1.0


def test_a_stopped_coordinator_comes_back_to_nothing(real: Store, path: pathlib.Path) -> None:
    """A holder that was presumed dead and wakes up cannot renew what another has meanwhile."""
    holder = start(_HOLDER, path, 0.5)
    assert holder.stdin
    assert holder.stdout
    try:
        token = int(holder.stdout.readline().split()[0])
        holder.send_signal(signal.SIGSTOP)
        lease = poll(lambda: real.acquire_lease("b0", "heir", "contract"), 10)
        holder.send_signal(signal.SIGCONT)
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline().strip() == "PermanentError"
        assert real.renew_lease(lease).token > token
    finally:
        holder.kill()
        holder.communicate(timeout=PATIENCE_S)


_OBSERVER = """
import pathlib, sys
from farm.fleet.health import Kind, Limits, Observation, decide_by
from farm.store import Store
decide = decide_by(Observation(Kind.FAULT), Limits(faults=1000, window_s=1e6))
with Store(pathlib.Path(sys.argv[1])) as store:
    for _ in range(50):
        store.observe_board("b0", "fault", sys.argv[2], decide)
"""


def test_no_observation_of_two_is_lost(real: Store, path: pathlib.Path) -> None:
    """Two health loops on one board: every fault is counted."""
    for observer in [start(_OBSERVER, path, name) for name in ("left", "right")]:
        _, complaints = observer.communicate(timeout=PATIENCE_S)
        assert observer.returncode == 0, complaints
    assert "100 of 1000" in real.fetch_board_events("b0")[-1]["reason"]


_KILLED = """
import pathlib, sys
from farm.store import Store
store = Store(pathlib.Path(sys.argv[1]))
while True:
    lease = store.acquire_lease("b0", "victim", "contract", ttl_s=0.2)
    print(lease.token, flush=True)
    store.release_lease(lease)
"""


def test_a_kill_in_the_middle_leaves_the_store_whole(real: Store, path: pathlib.Path) -> None:
    """Killed at any moment, a coordinator leaves a lease that is told by an event, or none; the next one works."""
    for steps in (1, 2, 3, 5, 8):
        victim = start(_KILLED, path)
        assert victim.stdout
        tokens = [int(victim.stdout.readline()) for _ in range(steps)]
        victim.kill()
        victim.communicate(timeout=PATIENCE_S)
        heir = poll(lambda: real.acquire_lease("b0", "heir", "contract"), 10)
        assert heir.token > max(tokens)
        assert real.release_lease(heir)
        happened = kinds(real, "b0")
        assert happened[::2] == ["lease_taken"] * (len(happened) // 2)
        assert set(happened[1::2]) <= {"lease_released", "lease_expired"}
