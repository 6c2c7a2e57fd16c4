"""Leases over whole lives: any sequence of calls, waits and restarts, held against the plainest model of a lease."""

from __future__ import annotations

import pathlib
import tempfile

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from farm.crew.health import Kind
from farm.errors import PermanentError, TransientError
from farm.settings import StoreLocation
from farm.store import PROBE
from farm.values import Lease
from tests.fleet_store import Clocks, kinds, observe, open_fleet
from tests.postgresql import Cluster

BOARD = "nano-01"


class LeaseLives(RuleBasedStateMachine):
    """One board, many holders. The model: who holds it, and at which second that ends."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clocks = Clocks()
        self.context = open_fleet(self.make_place(), self.clocks)
        self.holder: Lease | None = None
        self.ends_s = 0.0
        self.last_token = 0
        self.reachable = True

    def make_place(self) -> StoreLocation:
        return pathlib.Path(self.folder.name) / "farm.sqlite"

    @initialize()
    def open(self) -> None:
        self.store = self.context.__enter__()

    def teardown(self) -> None:
        self.context.__exit__(None, None, None)
        self.folder.cleanup()

    @property
    def held(self) -> bool:
        return self.holder is not None and self.clocks.seconds < self.ends_s

    @rule(target=leases, ttl_s=st.floats(1, 100))
    @precondition(lambda self: not self.held and self.reachable)
    def acquire(self, ttl_s: float) -> Lease:
        lease = self.store.leases.acquire(BOARD, "a holder", "test", ttl_s=ttl_s, allowed=PROBE)
        assert lease.token > self.last_token
        self.holder, self.ends_s, self.last_token = lease, self.clocks.seconds + ttl_s, lease.token
        return lease

    @rule()
    @precondition(lambda self: self.held or not self.reachable)
    def acquire_in_vain(self) -> None:
        try:
            self.store.leases.acquire(BOARD, "another", "test", allowed=PROBE)
        except TransientError:
            return
        raise AssertionError("two hold one board, or one holds an offline one")

    @rule(lease=leases)
    def renew(self, lease: Lease) -> None:
        mine = self.held and self.holder is not None and lease.token == self.holder.token
        try:
            assert self.store.leases.renew(lease).token == lease.token
        except PermanentError:
            assert not mine
            return
        assert mine
        self.ends_s = self.clocks.seconds + lease.ttl_s

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        mine = self.held and self.holder is not None and lease.token == self.holder.token
        assert self.store.leases.release(lease) == mine
        if mine:
            self.holder = None

    @rule()
    def force(self) -> None:
        self.store.leases.force_release(BOARD, "operator", "test")
        self.holder = None

    @rule()
    def sweep(self) -> None:
        self.store.leases.expire()

    @rule(seconds=st.floats(0, 60), jump_s=st.sampled_from([0.0, 1e6, -1e6]))
    def wait(self, seconds: float, jump_s: float) -> None:
        self.clocks.pass_s(seconds)
        self.clocks.wall += jump_s

    @rule()
    def restart(self) -> None:
        self.clocks.reboot()
        self.holder = None

    @rule()
    def cut_or_mend(self) -> None:
        self.reachable = not self.reachable
        observe(self.store, Kind.BACK if self.reachable else Kind.LOST)

    @invariant()
    def the_list_says_what_is(self) -> None:
        if not hasattr(self, "store"):
            return
        shown = self.store.boards.require(BOARD)
        if not self.reachable:
            assert shown.state == "offline"
        else:
            assert shown.state == ("leased" if self.held else "idle")
        assert (shown.lease is not None) == self.held
        if self.held:
            assert shown.lease.token == self.holder.token
        happened = [kind for kind in kinds(self.store) if kind.startswith("lease_")]
        assert happened[::2] == ["lease_taken"] * ((len(happened) + 1) // 2)
        assert "lease_taken" not in happened[1::2]


LeaseLives.TestCase.settings = hypothesis.settings(max_examples=40, stateful_step_count=40)
TestLeaseLives = LeaseLives.TestCase


def test_leases_live_so_on_postgresql(cluster: Cluster) -> None:
    """The same lives, fewer of them: each has a database of its own."""

    class OnPostgresql(LeaseLives):
        def make_place(self) -> StoreLocation:
            return cluster.make(empty=False)

    few = hypothesis.settings(max_examples=8, stateful_step_count=30)
    run_state_machine_as_test(OnPostgresql, settings=few)
