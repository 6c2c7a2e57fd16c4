"""The store is copied while it is written, put back whole or not at all, and damage is seen."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sqlite3
import subprocess
import sys
import threading

import pytest

from farm import backup
from farm.artifacts.artifact_folder import open_artifact
from farm.campaign.engine.state import ENGINE
from farm.connectivity.services import SERVICES
from farm.errors import FarmError, PermanentError, TransientError, UnavailableError, UsageError
from farm.processes.machine import machine_lock
from farm.store import Store, soundness
from farm.values import Board
from tests.unit import artifacts, test_campaign_artifacts
from tests.unit.campaign_orders import make_order, submit

pytestmark = pytest.mark.core

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def home(tmp_path: pathlib.Path) -> pathlib.Path:
    """A FARM_HOME whose store has one board and one event."""
    home = tmp_path / "home"
    with Store(home / "farm.db") as store:
        store.boards.save(Board("b", "local", simulated=False))
        store.events.add("kind", "subject", "first")
    return home


def messages(path: pathlib.Path) -> list[str]:
    """What a store's events say."""
    with Store(path) as store:
        return [row.message for row in store.events.fetch()]


def names(folder: pathlib.Path) -> set[str]:
    return {each.name for each in folder.iterdir() if "farm.db" in each.name or "copy" in each.name}


def test_a_backup_is_a_moment_of_a_store_that_is_written(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """While another process writes pairs, each copy holds whole pairs; it is one file, for its owner's eyes."""
    ending = threading.Event()

    def write() -> None:
        with Store(home / "farm.db") as store:
            while not ending.is_set():
                with store.session.writing() as connection:
                    for half in ("left", "right"):
                        connection.exec_driver_sql(
                            "INSERT INTO events (at, kind, subject, message) VALUES (0, 'pair', ?, 'x')", (half,)
                        )

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            (tmp_path / "copy").unlink(missing_ok=True)
            backup.back_up(home, tmp_path / "copy")
            with contextlib.closing(sqlite3.connect(tmp_path / "copy")) as copy:
                counts = copy.execute("SELECT sum(subject = 'left'), sum(subject = 'right') FROM events").fetchone()
            assert counts[0] == counts[1]
    finally:
        ending.set()
        writer.join()
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == {"copy"}


def test_a_backup_overwrites_nothing(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Neither another file nor the store."""
    other = tmp_path / "other"
    other.write_text("precious")
    for target in (other, home / "farm.db", tmp_path, tmp_path / "gone" / "copy"):
        with pytest.raises(UsageError):
            backup.back_up(home, target)
    with pytest.raises(UsageError, match="the store itself"):
        backup.back_up(home, home / "farm.db")
    assert other.read_text() == "precious"
    with pytest.raises(UsageError, match="no store"):
        backup.back_up(tmp_path / "absent", tmp_path / "copy")


def test_what_was_backed_up_comes_back(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The store is as it was, the one before it lies beside it, and no lease's token is given a second time."""
    backup.back_up(home, tmp_path / "copy")
    with Store(home / "farm.db") as store:
        store.events.add("kind", "subject", "later")
        for _ in range(3):
            last = store.leases.acquire("b", "me", "test")
            store.leases.release(last)
    backup.put_back(home, tmp_path / "copy")
    assert messages(home / "farm.db") == ["first"]
    assert messages(home / "farm.db.replaced") == ["first", "later"]
    assert names(home) == {"farm.db", "farm.db.replaced"}
    with Store(home / "farm.db") as store:
        assert store.leases.acquire("b", "me", "test").token > last.token


def test_files_may_be_newer_than_the_store_that_comes_back(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """An artifact that a campaign made after the backup is whole by itself; its campaign does not know of it, and what
    is made again takes its place.
    """
    packages = tmp_path / "packages"
    with Store(home / "farm.db") as store:
        assert submit(store, make_order("c", compile_to=str(packages))) == 1
        test_campaign_artifacts.finish(store)
        backup.back_up(home, tmp_path / "copy")
        newer = artifacts.write(packages / "mlp-jetson-nano")
        test_campaign_artifacts.keep(store, packages).write_bytes(b"wheel")
        assert not test_campaign_artifacts.is_pending(store)
    backup.put_back(home, tmp_path / "copy")
    found = open_artifact(packages / "mlp-jetson-nano")
    found.require_whole()
    assert found.manifest == newer.manifest
    with Store(home / "farm.db") as store:
        assert test_campaign_artifacts.is_pending(store)
        again = artifacts.write(packages / "mlp-jetson-nano", b"\x7fELF made again")
        test_campaign_artifacts.keep(store, packages).write_bytes(b"wheel")
        assert not test_campaign_artifacts.is_pending(store)
    assert open_artifact(packages / "mlp-jetson-nano").manifest == again.manifest
    assert {each.name for each in packages.iterdir()} == {"mlp-jetson-nano", "mlp.whl"}


def test_a_restore_into_a_new_home(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """On a new machine there is nothing to put aside."""
    backup.back_up(home, tmp_path / "copy")
    (tmp_path / "new").mkdir()
    backup.put_back(tmp_path / "new", tmp_path / "copy")
    assert messages(tmp_path / "new" / "farm.db") == ["first"]
    assert names(tmp_path / "new") == {"farm.db"}


@pytest.mark.parametrize("lock", [SERVICES.hold, ENGINE.hold, lambda home: machine_lock()])
def test_nothing_is_put_back_under_what_runs(home: pathlib.Path, tmp_path: pathlib.Path, lock: object) -> None:
    """Services, the engine, a command that measures: each has to end first."""
    backup.back_up(home, tmp_path / "copy")
    script = (
        "import pathlib, sys; from tests.integration.test_backup import *\n"
        "try: backup.put_back(*map(pathlib.Path, sys.argv[1:]))\nexcept UnavailableError: print('refused')"
    )
    with lock(home):  # type: ignore[operator]
        done = subprocess.run(
            [sys.executable, "-c", script, str(home), str(tmp_path / "copy")],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout == "refused\n", done.stderr
    assert not (home / "farm.db.replaced").exists()


def test_nothing_is_put_back_under_an_open_store(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A command that reads the store would go on with the old one."""
    backup.back_up(home, tmp_path / "copy")
    with Store(home / "farm.db") as store:
        store.events.add("kind", "subject", "later")
        with store.session.engine.connect() as connection:
            connection.exec_driver_sql("SELECT * FROM events").fetchall()
            with pytest.raises(TransientError, match="another command"):
                backup.put_back(home, tmp_path / "copy")
    assert messages(home / "farm.db") == ["first", "later"]


def spoil(path: pathlib.Path, how: str) -> None:
    if how == "text":
        path.write_text("not a database at all" * 100)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "torn":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "scribbled":
        data = bytearray(path.read_bytes())
        for place in range(4096, len(data), 4096):
            data[place : place + 64] = os.urandom(64)
        path.write_bytes(data)
    else:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(how)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("text", UsageError),
        ("empty", UsageError),
        ("torn", FarmError),
        ("scribbled", FarmError),
        ("DROP TABLE alembic_version", UsageError),
        ("UPDATE alembic_version SET version_num = '9999'", UnavailableError),
        ("DROP TABLE trials", PermanentError),
        ("DROP TRIGGER trials_no_update", PermanentError),
        ("CREATE UNIQUE INDEX ix_own ON trials (campaign, board_type)", FarmError),
        ("UPDATE boards SET labels = '{'", PermanentError),
        ("UPDATE boards SET added_at = 'yesterday'", PermanentError),
        ("UPDATE boards SET added_at = 9e999", PermanentError),
        ("UPDATE boards SET state_since = 1e300", PermanentError),
        ("UPDATE events SET id = 4611686018427387904", PermanentError),
        (
            "UPDATE boards SET labels = '{\"a\": ' || replace(hex(zeroblob(495)), '0', '[') || "
            "replace(hex(zeroblob(495)), '0', ']') || '}'",
            PermanentError,
        ),
        ("INSERT INTO identity VALUES ('another')", PermanentError),
        ("INSERT INTO sqlite_sequence VALUES ('leases', 9223372036854775807)", PermanentError),
        (
            "CREATE VIEW extra AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT * FROM n",
            PermanentError,
        ),
        ("ALTER TABLE events ADD COLUMN more AS (length(zeroblob(1000000))) VIRTUAL", PermanentError),
        ("CREATE TRIGGER more AFTER INSERT ON events BEGIN DELETE FROM boards; END", PermanentError),
        ("CREATE INDEX more ON events (length(zeroblob(1000000)))", PermanentError),
        ("DROP INDEX ix_trials_wrong", PermanentError),
        ("CREATE TABLE more (x CHECK (x > 0))", PermanentError),
        ("INSERT INTO leases VALUES (9, 'absent', 'me', 'test', 1, 1, 1, 'c', 1, '', '', 1, '')", PermanentError),
    ],
)
def test_what_is_no_whole_backup_is_refused(
    home: pathlib.Path, tmp_path: pathlib.Path, how: str, error: type[FarmError]
) -> None:
    """The reason is said, and the store stays."""
    copy = tmp_path / "copy"
    backup.back_up(home, copy)
    spoil(copy, how)
    with pytest.raises(error):
        backup.put_back(home, copy)
    assert messages(home / "farm.db") == ["first"]
    assert names(home) == {"farm.db"}


def test_a_full_disk_leaves_the_store(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Whichever write has no room: what was there is there, and nothing else."""
    copy = tmp_path / "copy"
    backup.back_up(home, copy)
    size = copy.stat().st_size
    script = (
        "import pathlib, sys, resource\nfrom farm import backup\n"
        "from farm.errors import UnavailableError\n"
        "home, copy, room = map(pathlib.Path, sys.argv[1:])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(str(room)),) * 2)\n"
        "for work in (backup.put_back, lambda home, copy: backup.back_up(home, copy.with_name('new'))):\n"
        "  try: work(home, copy)\n  except UnavailableError: print('refused')"
    )
    for room in (0, size // 2, size - 1):
        done = subprocess.run(
            [sys.executable, "-B", "-c", script, str(home), str(copy), str(room)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == "refused\nrefused\n", done.stderr
        assert names(home) <= {"farm.db", "farm.db-wal", "farm.db-shm"}
        assert copy.stat().st_size == size
    assert messages(home / "farm.db") == ["first"]


def test_a_damaged_store_can_be_replaced(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """It is what backups are for; the check sees it, it cannot be backed up, and what is left of it is kept."""
    backup.back_up(home, tmp_path / "copy")
    assert backup.check(home) == []
    spoil(home / "farm.db", "scribbled")
    damaged = (home / "farm.db").read_bytes()
    with contextlib.suppress(UnavailableError):
        assert backup.check(home)
    with pytest.raises(FarmError):
        backup.back_up(home, tmp_path / "another")
    backup.put_back(home, tmp_path / "copy")
    assert messages(home / "farm.db") == ["first"]
    assert (home / "farm.db.replaced").read_bytes() == damaged
    assert backup.check(home) == []


def test_the_check_names_rows_that_no_farm_wrote(home: pathlib.Path) -> None:
    """Table, column and the first row are named; a store that others may read is a finding."""
    spoil(home / "farm.db", "UPDATE events SET at = 'noon'")
    assert backup.check(home) == ["events.at cannot be right in 1 rows, the first of them 1"]


def test_what_a_store_computes_without_end_has_a_deadline(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a malicious file ends, for any expression that SQLite evaluates."""
    monkeypatch.setattr(soundness, "_LEAST_S", 0.1)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT count(*) FROM n"
    with (
        pytest.raises(sqlite3.OperationalError, match="not read within"),
        soundness._reading(home / "farm.db") as connection,
    ):
        connection.execute(endless)


def test_a_counter_that_is_used_up_does_not_outlive_its_store(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A good backup put back over a store whose leases' counter is at its end gives leases again."""
    backup.back_up(home, tmp_path / "copy")
    spoil(home / "farm.db", "INSERT INTO sqlite_sequence VALUES ('leases', 9223372036854775807)")
    assert backup.check(home) == ["its counter of leases is used up"]
    backup.put_back(home, tmp_path / "copy")
    with Store(home / "farm.db") as store:
        assert store.leases.acquire("b", "me", "test").token == 1
