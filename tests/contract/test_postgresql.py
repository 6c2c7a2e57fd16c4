"""What a store on PostgreSQL promises beyond the common contract: servers come and go, values keep their meaning."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import sqlalchemy as sa

from farm.errors import TransientError, UnavailableError
from farm.store import Store, soundness
from farm.values import Board
from tests.places import execute
from tests.postgresql import Cluster, find_programs

ROOT = pathlib.Path(__file__).parents[2]
NOWHERE = "postgresql://farm@127.0.0.1:1/farm"


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.make(empty=False)


def run_farm(url: str, home: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from farm.cli.main import main; main()", *arguments]
    environment = os.environ | {"FARM_STORE": url, "FARM_HOME": str(home), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def cut_off(store: Store, url: str, statement: str) -> None:
    """End a store's connection in the middle of a write."""
    with store.session.writing() as connection:
        execute(url, statement)
        connection.exec_driver_sql("SELECT 1")


def test_a_server_that_is_not_there(tmp_path: pathlib.Path) -> None:
    """Commands end with exit code 3 and say which server, and what to look at."""
    done = run_farm(NOWHERE, tmp_path, "record", "list")
    assert done.returncode == 3
    assert "127.0.0.1" in done.stderr
    assert "FARM_STORE" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_database_that_is_not_there(cluster: Cluster) -> None:
    """The error says how one is made."""
    with pytest.raises(UnavailableError, match="nothing_here") as caught:
        Store(cluster.locate("nothing_here"))
    assert "createdb" in caught.value.hint


def test_a_server_that_goes_and_comes_back(url: str) -> None:
    """A call in between fails as one that may work later; the next one does, without opening the store again."""
    with Store(url) as store:
        store.boards.save(Board("b", "local", simulated=False))
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        with pytest.raises(TransientError):
            cut_off(store, url, f"{others} AND pid <> pg_backend_pid()")
        assert [board.name for board in store.boards.fetch()] == ["b"]
        assert store.leases.acquire("b", "me", "test").token == 1


def test_a_connection_that_ends_in_a_query_is_a_fault_that_may_pass(url: str) -> None:
    """Also where the second try ends as well."""
    with Store(url) as store, pytest.raises(TransientError, match="failed just now"):
        store.session.rows(sa.select(sa.func.pg_terminate_backend(sa.func.pg_backend_pid())))


def test_times_are_the_servers(url: str) -> None:
    """Leases are judged, and events dated, by one clock, with any clocks of the hosts."""
    [(before,)] = execute(url, "SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")
    with Store(url) as store:
        store.boards.save(Board("b", "local", simulated=False))
        lease = store.leases.acquire("b", "me", "test", ttl_s=60)
        store.events.add("kind", "subject", "message")
    [(after,)] = execute(url, "SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")
    [(clock, expires_s)] = execute(url, "SELECT clock, expires_s FROM leases")
    [(at,)] = execute(url, "SELECT at FROM events")
    assert clock == "postgresql"
    assert before + 60 <= expires_s <= after + 60
    assert before <= lease.acquired_at <= at <= after


def test_what_postgresql_cannot_hold(url: str) -> None:
    """A NUL in a text becomes the sign for what cannot be shown; a number that JSON has no word for becomes null."""
    with Store(url) as store:
        store.events.add("kind", "subject", "a\0b")
        assert store.events.fetch()[0].message == "a\ufffdb"
        store.boards.save(Board("b", "local", False, {"nan": float("nan"), "fine": 1.5}))
        assert store.boards.require("b").description == {"nan": None, "fine": 1.5}


def test_texts_are_ordered_by_their_bytes(url: str) -> None:
    """As in a file: the server's own language, where capitals follow small letters, plays no part."""
    with Store(url) as store:
        for name in ("b", "a", "B", "A", "_"):
            store.boards.save(Board(name, "local", simulated=False))
        assert [board.name for board in store.boards.fetch()] == ["A", "B", "_", "a", "b"]


def test_damage_is_seen(url: str) -> None:
    """A trigger that is gone, a table, and a value that no farm writes."""
    assert soundness.find_server_problems(url) == []
    with Store(url) as store:
        store.boards.save(Board("b", "local", simulated=False))
    execute(url, "UPDATE boards SET health = 'splendid', state_since = 'NaN', labels = '[]'")
    assert soundness.find_server_problems(url) == [
        "boards.labels cannot be right in 1 rows",
        "boards.state_since cannot be right in 1 rows",
        "boards.health cannot be right in 1 rows",
    ]
    execute(url, "DROP TRIGGER trials_no_update ON trials", "DROP TABLE doubts")
    assert soundness.find_server_problems(url) == [
        "the table doubts is missing",
        "the trigger trials_no_update is missing or switched off",
    ]


def test_commands_for_files_name_the_servers_own(url: str, tmp_path: pathlib.Path) -> None:
    """A backup is refused with the tool that makes one; checking works."""
    done = run_farm(url, tmp_path, "store", "backup", str(tmp_path / "copy"))
    assert done.returncode == 2
    assert "pg_dump" in done.stderr
    checked: dict[str, Any] = json.loads(run_farm(url, tmp_path, "store", "check", "--json").stdout)
    assert checked == {"store": url, "problems": [], "removed_workloads": [], "removed_trials": 0}


def test_a_dump_that_was_put_back_is_a_whole_store(url: str, tmp_path: pathlib.Path) -> None:
    """As the howto says it: the store is as it was then, what came later is gone, and the check finds nothing wrong. A
    token that was given since is given again, until a board reports it.
    """
    folder, dump = find_programs(), tmp_path / "farm.dump"
    assert folder is not None
    with Store(url) as store:
        store.boards.save(Board("b", "local", simulated=False))
        store.leases.release(store.leases.acquire("b", "me", "test"))
    subprocess.run([folder / "pg_dump", "--format=custom", f"--file={dump}", url], check=True, timeout=60)
    with Store(url) as store:
        store.events.add("kind", "b", "later")
        later = store.leases.acquire("b", "me", "test")
    restore = [folder / "pg_restore", "--clean", "--if-exists", f"--dbname={url}", dump]
    subprocess.run(restore, check=True, timeout=60)
    checked = json.loads(run_farm(url, tmp_path, "store", "check", "--json").stdout)
    assert checked["problems"] == []
    with Store(url) as store:
        assert store.events.fetch("b") == []
        again = store.leases.acquire("b", "me", "test")
        assert again.token == later.token
        store.leases.raise_token(again.token)
        store.leases.release(again)
        assert store.leases.acquire("b", "me", "test").token > later.token
