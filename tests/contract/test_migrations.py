"""What every store promises of its schema: made and changed all at once or not at all, without losing rows."""

from __future__ import annotations

import json
import os
import pathlib
import sqlite3
from typing import Any

import pytest
import sqlalchemy as sa

from device_agent.protocol import Outcome, Status
from farm import backup
from farm.errors import UnavailableError
from farm.settings import StoreLocation
from farm.store import Store, database, schema
from farm.store.schema import APPEND_ONLY
from farm.values import DEFAULT_POINT, Board, Trial
from tests import later_schema
from tests.contract.conftest import run_python
from tests.places import Places, execute
from tests.stored_workloads import make_workload
from tests.unit.campaign_orders import make_order, make_type


def test_stores_of_other_times_are_refused(place: StoreLocation) -> None:
    """A store of a newer version is left alone, and so is one of 0.2; each error says what to do."""
    for revision, way in (("9999", "update this one"), ("0012", "record export"), ("0008", "record import")):
        execute(place, f"UPDATE alembic_version SET version_num = '{revision}'")  # noqa: S608
        for opening in (Store, backup.upgrade):
            with pytest.raises(UnavailableError, match=revision) as caught:
                opening(place)  # type: ignore[operator]
            assert way in caught.value.hint
        assert execute(place, "SELECT * FROM alembic_version") == [(revision,)]


def test_a_corrupt_file_is_refused(tmp_path: pathlib.Path) -> None:
    """A file that is no database is left as it is."""
    path = tmp_path / "home" / "farm.db"
    path.parent.mkdir()
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(UnavailableError, match="not a database"):
        Store(path)
    assert path.read_bytes().startswith(b"not a database")


def test_a_strangers_database_is_refused(places: Places) -> None:
    """No tables are added to what is another program's."""
    place = places.make(empty=True)
    if isinstance(place, pathlib.Path):
        place.parent.mkdir()
    execute(place, "CREATE TABLE songs (title TEXT)")
    with pytest.raises(UnavailableError, match="songs"):
        Store(place)


def test_a_store_is_made_all_or_nothing(tmp_path: pathlib.Path) -> None:
    """A file that the disk has no room for holds no table afterwards, and works once the cause is gone."""
    path = tmp_path / "home" / "farm.db"
    limit = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000));"
        "import pathlib, sys; from farm.store import Store; Store(pathlib.Path(sys.argv[1]))"
    )
    failing = run_python(limit, path)
    _, complaints = failing.communicate(timeout=60)
    assert failing.returncode != 0
    assert "UnavailableError" in complaints
    with Store(path) as store:
        assert store.campaigns.fetch_searches() == []


def test_trials_cannot_be_changed(place: StoreLocation) -> None:
    """A new store refuses to change or delete rows of append-only tables."""
    with Store(place) as store:
        add_rows(store)
    for table in APPEND_ONLY:
        for change in (f"DELETE FROM {table}", f"UPDATE {table} SET recorded_at = 0"):  # noqa: S608
            with pytest.raises(sa.exc.IntegrityError, match="append-only"):
                execute(place, change)


def add_rows(store: Store) -> None:
    store.boards.save(Board("tx2", "jetson-tx2", simulated=False))
    store.events.add("kind", "subject", "message")
    workloads = [make_workload("w1", board_type="jetson-tx2")]
    order = make_order("both", types=(make_type("jetson-tx2"),))
    number = store.campaigns.submit(order, "farm campaign run", workloads)
    assert store.trials.add(
        Trial(number, "w1", "c1", DEFAULT_POINT, 1, Outcome(Status.OK, latency_s=(1.0,)), "[]", board_type="jetson-tx2")
    )
    about: dict[str, Any] = {"command": "farm sweep run", "model": "mlp", "model_sha256": "", "simulated": False}
    documents: dict[str, Any] = {name: {} for name in ("request", "goal", "grid", "settings")}
    sweep = store.sweeps.start(**about, board_type="jetson-tx2", **documents)
    measured: dict[str, Any] = {"measurement": {}, "outcome": {}}
    assert store.sweeps.add_point(sweep, variant="tuned", batch=1, key="k", board="tx2", visit=1, **measured)


# Tables in which `add_rows` leaves something.
FILLED = ("boards", "events", "campaigns", "fleet_campaigns", "trials", "trial_counts", "sweeps", "sweep_points")


def fetch_all(place: StoreLocation, *tables: str) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of these tables in the columns of today, and the schema's revision; checks references."""
    rows = {"alembic_version": execute(place, "SELECT * FROM alembic_version")}
    for table in tables or FILLED:
        names = ", ".join(f'"{column.name}"' for column in schema.metadata.tables[table].columns)
        rows[table] = [tuple(map(_to_text, row)) for row in execute(place, f"SELECT {names} FROM {table}")]  # noqa: S608
        assert rows[table]
    if isinstance(place, pathlib.Path):
        assert execute(place, "PRAGMA foreign_key_check") == []
    return rows


def _to_text(value: object) -> object:
    return json.dumps(value) if isinstance(value, dict | list) else value


@pytest.fixture
def old(place: StoreLocation) -> StoreLocation:
    with Store(place) as store:
        add_rows(store)
    return place


@pytest.fixture
def later(old: StoreLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    """That version is there."""
    later_schema.become(monkeypatch)


def test_several_processes_make_the_same_store(places: Places) -> None:
    """Commands that start at once on nothing all find one store."""
    place = places.make(empty=True)
    script = (
        "import sys; from farm.settings import parse_store; from farm.store import Store;"
        "print(len(Store(parse_store(sys.argv[1])).boards.fetch()))"
    )
    for making in [run_python(script, place) for _ in range(4)]:
        answer, complaints = making.communicate(timeout=60)
        assert (making.returncode, answer.strip()) == (0, "0"), complaints
    assert len(execute(place, "SELECT id FROM identity")) == 1


def test_a_migration_keeps_every_row(old: StoreLocation, later: None) -> None:
    """Rows are as they were, and the store works; on PostgreSQL an operator has to order it."""
    before = fetch_all(old)
    if isinstance(old, str):
        with pytest.raises(UnavailableError, match=database.HEAD) as caught:
            Store(old)
        assert "farm db upgrade" in caught.value.hint
        assert fetch_all(old) == before
        assert backup.upgrade(old) == later_schema.TODAY
    with Store(old) as store:
        assert [row.name for row in store.boards.fetch()] == ["tx2"]
    assert fetch_all(old) == before | {"alembic_version": [(later_schema.REVISION,)]}
    assert execute(old, "SELECT later FROM events")[0] == ("as before",)


def test_several_processes_migrate_the_same_store(old: StoreLocation, later: None) -> None:
    """Commands that start at once after an update all find the board once, under the new schema."""
    script = (
        "import sys; from farm import backup; from farm.settings import parse_store; from farm.store import Store;"
        "from tests import later_schema; later_schema.install(); place = parse_store(sys.argv[1]);"
        "backup.upgrade(place); print(len(Store(place).boards.fetch()))"
    )
    for migrating in [run_python(script, old) for _ in range(4)]:
        answer, complaints = migrating.communicate(timeout=60)
        assert (migrating.returncode, answer.strip()) == (0, "1"), complaints


def test_an_update_that_fails_half_way_changes_nothing(old: StoreLocation, later: None) -> None:
    """Something is in the way of the last step: all of them are undone, and done once it has gone."""
    before = fetch_all(old)
    execute(old, f"CREATE TABLE {later_schema.TABLE} (x INTEGER)")
    with pytest.raises(UnavailableError, match=later_schema.TABLE):
        backup.upgrade(old)
    assert fetch_all(old) == before
    execute(old, f"DROP TABLE {later_schema.TABLE}")
    backup.upgrade(old)
    with Store(old) as store:
        assert len(store.boards.fetch()) == 1


def test_an_update_on_a_full_disk_changes_nothing(tmp_path: pathlib.Path) -> None:
    """With the disk full the store stays at its revision with every row, and is migrated once there is space."""
    path = tmp_path / "home" / "farm.db"
    with Store(path) as store:
        add_rows(store)
    # A reader keeps what was written in the write-ahead log, so that the log is what grows when the migration writes.
    reader, writer = sqlite3.connect(path), sqlite3.connect(path)
    with writer:
        writer.execute("PRAGMA journal_mode=WAL")
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM events").fetchall()
    with writer:
        writer.execute("INSERT INTO events VALUES (8, 4.0, 'long', 'log', ?, '')", ("x" * 40_000,))
    before = fetch_all(path)
    # Room for two pages more: enough to open the store, which a query proves, and not for any migration.
    room = path.with_name(path.name + "-wal").stat().st_size + 2 * 4120
    script = (
        "import pathlib, resource, sqlite3, sys; from farm.store import Store; from tests import later_schema;"
        "later_schema.install(); path = pathlib.Path(sys.argv[1]);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2);"
        "print(sqlite3.connect(path).execute('SELECT count(*) FROM events').fetchone()[0], flush=True); Store(path)"
    )
    failing = run_python(script, path, room)
    answer, complaints = failing.communicate(timeout=60)
    assert (failing.returncode, answer.strip()) == (1, str(len(before["events"])))
    assert "UnavailableError" in complaints
    assert "in migrate" in complaints
    reader.close()
    writer.close()
    assert fetch_all(path) == before
    with Store(path) as store:
        assert len(store.boards.fetch()) == 1


def test_a_copy_is_kept_of_what_a_migration_changes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the store lies one of its old schema with every row, for its owner alone; a new one has none."""
    path = tmp_path / "home" / "farm.db"
    with Store(path) as store:
        add_rows(store)
    before = fetch_all(path)
    later_schema.become(monkeypatch)
    Store(path).close()
    Store(path).close()
    [copy] = [each for each in path.parent.iterdir() if each.name.startswith(f"{path.name}.")]
    assert copy.name == f"{path.name}.{later_schema.TODAY}"
    assert copy.stat().st_mode & 0o777 == 0o600
    assert fetch_all(copy) == before
    other = path.with_name("other.sqlite")
    Store(other).close()
    assert [each.name for each in path.parent.glob("other*")] == ["other.sqlite"]


def test_others_do_not_read_a_store(tmp_path: pathlib.Path) -> None:
    """A new one is its owner's alone, under any umask; an old one is closed to other users, not to its group."""
    path = tmp_path / "home" / "farm.db"
    before = os.umask(0)
    try:
        with Store(path) as store:
            store.events.add("kind", "subject", "message")
            assert {each.name: each.stat().st_mode & 0o777 for each in path.parent.iterdir()} == {
                path.name: 0o600,
                f"{path.name}-wal": 0o600,
                f"{path.name}-shm": 0o600,
            }
        path.chmod(0o664)
        Store(path).close()
        assert path.stat().st_mode & 0o777 == 0o660
    finally:
        os.umask(before)
