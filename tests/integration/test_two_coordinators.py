"""Two coordinators, each with a home of its own, on one PostgreSQL store: whose campaigns and boards are; kill -9."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest

from farm.campaign.engine import control
from farm.campaign.engine.state import beating
from farm.crew import leased_board
from farm.errors import LeaseOverError
from farm.processes.machine import process_identity
from farm.services.daemon import TakeOver
from farm.store import Store
from farm.store.routes import name_engine
from farm.types.states import CampaignState
from farm.values import Board
from tests.board_rows import make_lease
from tests.integration.board_hosts import require_namespaces
from tests.integration.test_engine_process import wait_until
from tests.postgresql import Cluster
from tests.unit.campaign_orders import make_order, submit

ROOT = pathlib.Path(__file__).parents[2]
_HOLDER = """
import os, sys
from farm.crew import leased_board
from farm.processes.machine import process_identity
from farm.settings import parse_store
from farm.store import Store
store = Store(parse_store(sys.argv[1]))
store.leases.acquire("b", leased_board.name_owner(), "campaigns")
me = process_identity()
store.engines.note(me)
store.campaigns.take(1, me)
store.campaigns.note(1, "running", "", me)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.make(empty=False)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """An operator's way to it."""
    with Store(url) as store:
        yield store


@contextlib.contextmanager
def coordinator(url: str, home: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """An engine's process of another home; see `engine_stand_in`."""
    home.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.engine_stand_in"],
        env=os.environ | {"FARM_HOME": str(home), "FARM_STORE": url},
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def find_owners(store: Store) -> dict[str, int | None]:
    return {each.name: (each.engine or {}).get("pid") for each in store.campaigns.fetch()}


def stop_between_transactions(process: subprocess.Popen[bytes], url: str) -> None:
    """Stop a process while the server holds no transaction of its: one that stays idle in it is thrown out."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s AND state <> 'idle'"
    with psycopg.connect(url, autocommit=True) as connection:

        def is_stopped_idle() -> bool:
            process.send_signal(signal.SIGSTOP)
            busy = 0
            for _ in range(2):
                connection.execute("SELECT pg_sleep(0.2)")  # what it has sent is begun by then
                busy += connection.execute(query, (f"%:{process.pid}",)).fetchall()[0][0]
            if busy:
                process.send_signal(signal.SIGCONT)
            return not busy

        wait_until(is_stopped_idle, "it to be between two transactions")


def test_one_of_two_coordinators_is_killed(store: Store, url: str, tmp_path: pathlib.Path) -> None:
    """Every campaign has one engine. What a killed one left is interrupted, resumed, and taken by the other, whose own
    campaign goes on all the while.
    """
    submit(store, make_order("a"))
    with coordinator(url, tmp_path / "left") as left, contextlib.ExitStack() as stack:
        wait_until(lambda: find_owners(store)["a"] == left.pid, "the first to take a campaign")
        stop_between_transactions(left, url)
        submit(store, make_order("b"))
        right = stack.enter_context(coordinator(url, tmp_path / "right"))
        wait_until(lambda: find_owners(store)["b"] == right.pid, "the second to take the other")
        left.send_signal(signal.SIGCONT)
        submit(store, make_order("c"))
        wait_until(lambda: find_owners(store)["c"], "one of them to take a third")
        assert control.close_abandoned(store) == []
        assert {name: pid for name, pid in find_owners(store).items() if name != "c"} == {"a": left.pid, "b": right.pid}
        left.send_signal(signal.SIGKILL)
        left.wait(10)
        mine = [name for name, pid in find_owners(store).items() if pid == left.pid]
        assert control.close_abandoned(store) == mine
        assert find_owners(store)["b"] == right.pid
        for name in mine:
            assert store.campaigns.require(name).state is CampaignState.INTERRUPTED
            control.resume(store, name, "op")
        wait_until(lambda: set(find_owners(store).values()) == {right.pid}, "the other to take all")


def test_an_engine_of_another_host_is_there_while_it_gives_signs(
    store: Store, url: str, tmp_path: pathlib.Path
) -> None:
    """Its process is invisible from here: its campaign is left alone until its heartbeats end, and then is free. Who
    may takes it over.
    """
    submit(store, make_order("c"))
    there = process_identity() | {"host": "elsewhere"}
    store.engines.note(there)
    assert store.campaigns.take(1, there)
    assert not store.campaigns.take(1, process_identity())
    store.campaigns.note(1, CampaignState.RUNNING, "", there)
    with beating(url, process_identity(), ttl_s=60):
        assert store.engines.fetch_living() == {name_engine(there), name_engine(process_identity())}
        assert control.close_abandoned(store, process_identity()) == []
        store.engines.note(there, ttl_s=0)
        assert control.close_abandoned(store, process_identity()) == ["c"]
    assert store.engines.fetch_living() == frozenset()
    for allowed in (False, True):
        take_over = TakeOver(store, tmp_path, on=allowed)
        take_over.watch()
        assert (take_over._process is not None) is allowed
        take_over.close()


def test_a_container_of_our_own_host_name_is_another_machine(store: Store, url: str, tmp_path: pathlib.Path) -> None:
    """Its processes cannot be seen from here: its engine is there while it gives signs, and its lease holds."""
    require_namespaces()
    submit(store, make_order("c"))
    store.boards.save(Board("b", "local", simulated=False))
    holder = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", _HOLDER, url],
        env=os.environ | {"FARM_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout
        assert int(holder.stdout.readline()) < 10, "it has a number of its own"
        engine = store.campaigns.require("c").engine
        assert engine["host"] == process_identity()["host"]
        assert control.close_abandoned(store) == []
        # The number of no process of ours.
        rows = {row.name: row for row in store.boards.fetch()}
        lease = make_lease(f"ann@{engine['host']} pid {2**22 + 1}", "campaigns", token=rows["b"].lease.token)
        foreign = {"b": rows["b"].model_copy(update={"lease": lease})}
        assert leased_board.free_orphans(store, foreign, ["b"], "campaigns") == []
        store.engines.note(engine, ttl_s=0)
        assert control.close_abandoned(store) == ["c"]
    finally:
        holder.kill()
        holder.communicate(timeout=20)


def test_another_hosts_leases_are_not_taken_for_orphans(store: Store) -> None:
    """The number of a process says nothing on another machine: such a lease holds until it expires."""
    purpose, absent = "campaigns", 2**22 + 1
    for name, host in (("far", "elsewhere"), ("near", os.uname().nodename)):
        store.boards.save(Board(name, "local", simulated=False))
        lease = store.leases.acquire(name, f"ann@{host} pid {absent}", purpose)
        rows = {each.name: each for each in store.boards.fetch()}
        freed = leased_board.free_orphans(store, rows, [name], purpose)
        assert freed == ([] if name == "far" else ["near"])
        if name == "far":
            assert store.leases.renew(lease).token == lease.token
        else:
            with pytest.raises(LeaseOverError):
                store.leases.renew(lease)
