"""What every store promises of its schema: made and changed all at once or not at all, and nobody's rows lost."""

from __future__ import annotations

import json
import os
import pathlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from device_agent.protocol import Outcome, Status
from farm import safekeeping
from farm.errors import UnavailableError
from farm.settings import StoreLocation
from farm.store import Store, database, parse_transport, schema
from farm.values import DEFAULT_POINT, Direct, Trial
from tests.places import Places, connect, execute
from tests.postgresql import Cluster

ROOT = pathlib.Path(__file__).parents[2]


def run_python(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own that knows this checkout."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_newer_schema_is_refused(place: StoreLocation) -> None:
    """A store written by a newer version is left alone, and the error says to update."""
    execute(place, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(UnavailableError, match="9999") as caught:
        Store(place)
    assert "newer" in caught.value.hint


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


def test_a_migration_is_all_or_nothing(tmp_path: pathlib.Path) -> None:
    """A file on which the migration fails half way holds no table afterwards, and works once the cause is gone."""
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
        assert store.fetch_campaigns() == []


def test_head_is_alembics_head() -> None:
    """The revision that the store expects is the newest migration there is."""
    config = Config()
    config.set_main_option("script_location", str(ROOT / "farm/store/migrations"))
    assert ScriptDirectory.from_config(config).get_heads() == [database.HEAD]


def test_migrations_make_the_schema(place: StoreLocation) -> None:
    """What the migrations build is what the tables in schema.py say, to the last column and index."""
    engine = connect(place)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
    engine.dispose()


# What a release of each older schema wrote, column by column; the schema of then is made by its own frozen migrations.
_ROWS_OF_0001 = {
    "boards": ("nano", "jetson-nano", 1, '{"cores": 4, "name": "nano"}', 100.5, 200.25),
    "workloads": ("w1", "conv2d", 1e6, "[]", "{}", "graph/1", "{}", 1.0),
    "campaigns": (1, "farm tune", "tiny-cnn", "00", "local", 16, "{}", 1.0, None, "running"),
    "campaign_workloads": (1, "w1", 2),
    "trials": (
        *(1, 1, "w1", "c1", "default", 1, "ok", None, 0.5, "nano", 0),
        *('{"status": "ok"}', "[]", None, None, None, 1.0),
    ),
    "records": ("w1", "local", "default", 0, "c1", 0.5, 0.0, 0.0, "[]", 1.0),
    "events": (7, 3.0, "restarted", "agent", "it had died"),
}
_ROWS_OF_0002 = _ROWS_OF_0001 | {
    "boards": (
        *("tx2", "jetson-tx2", 0, '{"rack": "2"}', '{"kind": "ssh", "host": "tx2.lab", "user": "farm"}', "{}"),
        *(1, "link is up", 150.5, "good", "probe passed", 160.25, '{"faults": 1}', "boot-1", 100.5, None),
    ),
    "leases": (41, "tx2", "me", "tuning", 60.0, 200.5, 260.5, "boot-1", 1060.125),
    "board_events": (9, "tx2", 160.25, "probe_passed", "suspect", "good", "golden kernel in 1.5 ms", "farm"),
    "golden_samples": (3, "tx2", "dense-512", "default", 0.0015, "[0.0015, 0.0016]", 0, 160.25),
}
_ROWS_OF_0003 = _ROWS_OF_0002 | {
    "sweeps": (5, "farm sweep run", "tiny-cnn", "00", "jetson-tx2", 0, *("{}",) * 4, 1.0, None, "running", None),
    "sweep_points": (6, 5, "tuned", 1, 1, "k", "tx2", "{}", "{}", 2.0),
}
_ROWS_OF_0004 = _ROWS_OF_0003 | {
    "campaign_workloads": (1, "local", "w1", 2.0),
    "trials": (
        *(1, 1, "local", "w1", "default", "c1", "search", 1, 1, "ok", None, 0.5, "nano", 0),
        *(None, None, None, 1.0, '{"status": "ok"}', "[]"),
    ),
    "records": (*_ROWS_OF_0003["records"], None),
    "fleet_campaigns": (1, "c", "me", "", "run", "{}", "{}", None),
    "campaign_progress": (1, "{}"),
    "doubts": (4, "nano", 0.5, 1.5, "it was slow"),
}
_ROWS_OF_0005 = _ROWS_OF_0004 | {
    "leases": (*_ROWS_OF_0004["leases"], "ab12"),
    "doubts": (*_ROWS_OF_0004["doubts"], 0, 1),
    "trial_counts": ("ok", 1),
}
_ROWS_OF_0006 = _ROWS_OF_0005 | {
    "engines": ("host 1", "boot", 5.0),
    "campaign_workloads": (*_ROWS_OF_0005["campaign_workloads"], 0),
    "records": (*_ROWS_OF_0005["records"], None),
}
_ROWS = {
    "0001": _ROWS_OF_0001,
    "0002": _ROWS_OF_0002,
    "0003": _ROWS_OF_0003,
    "0004": _ROWS_OF_0004,
    "0005": _ROWS_OF_0005,
    "0006": _ROWS_OF_0006,
}
# Tables whose rows have numbers that the database gives.
_COUNTED = {
    "campaigns",
    "trials",
    "events",
    "leases",
    "board_events",
    "golden_samples",
    "sweeps",
    "sweep_points",
    "doubts",
}


def migrate(place: StoreLocation, revision: str, move: Callable[[Config, str], None] = command.upgrade) -> None:
    """Take a database to a revision, up or down, as a release of that time would have."""
    config = Config()
    config.set_main_option("script_location", str(ROOT / "farm/store/migrations"))
    engine = connect(place)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        move(config, revision)
    engine.dispose()


def make_old(place: StoreLocation, revision: str = "0001") -> None:
    """A database of an older revision with one row in every table."""
    if isinstance(place, pathlib.Path):
        place.parent.mkdir(parents=True)
    migrate(place, revision)
    for table, row in _ROWS[revision].items():
        insert(place, table, row)


def insert(place: StoreLocation, table: str, *rows: Sequence[object]) -> None:
    """Rows as a release of then wrote them. What is quoted is of whichever type its column has, on PostgreSQL."""
    on_file = isinstance(place, pathlib.Path)
    for row in rows:
        values = ("NULL" if x is None else str(x) if on_file and not isinstance(x, str) else f"'{x}'" for x in row)
        text = ", ".join(values).replace("%", "%%")
        execute(place, f"INSERT INTO {table} VALUES ({text})")  # noqa: S608
    if not on_file and (key := {"leases": "token"}.get(table, "id")) and table in _COUNTED:
        execute(place, f"SELECT setval(pg_get_serial_sequence('{table}', '{key}'), max({key})) FROM {table}")  # noqa: S608


def open_updated(place: StoreLocation) -> Store:
    """An old store after an update of the farm: on PostgreSQL somebody has to order it."""
    safekeeping.upgrade(place)
    return Store(place)


def fetch_columns(place: StoreLocation, tables: Collection[str]) -> dict[str, list[str]]:
    """The names of the columns of these tables."""
    engine = connect(place)
    try:
        return {table: [column["name"] for column in sa.inspect(engine).get_columns(table)] for table in tables}
    finally:
        engine.dispose()


def fetch_all(
    place: StoreLocation, tables: Collection[str], columns: Mapping[str, Sequence[str]] | None = None
) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of these tables, as the database holds it; checks that no row refers to one that is gone.

    With `columns` those alone: what an older schema knew of a table that has got more since.
    """
    columns = columns or {table: ["*"] for table in tables}
    named = {table: ", ".join(f'"{name}"' if name != "*" else name for name in columns[table]) for table in tables}
    rows = {table: execute(place, f"SELECT {named[table]} FROM {table}") for table in tables}  # noqa: S608
    if isinstance(place, pathlib.Path):
        assert execute(place, "PRAGMA foreign_key_check") == []
    return {table: [tuple(map(_to_text, row)) for row in those] for table, those in rows.items()}


def _to_text(value: object) -> object:
    return json.dumps(value) if isinstance(value, dict | list) else value


def test_a_store_of_the_first_schema_is_migrated_without_loss(places: Places) -> None:
    """Every row of revision 0001 is there afterwards; a board that was in use is good, idle and directly reached."""
    place = places.make(empty=True)
    make_old(place)
    tables = set(_ROWS_OF_0001) - {"boards"}
    columns = fetch_columns(place, tables)
    with open_updated(place) as store:
        [board] = store.fetch_boards()
        assert store.add_trial(Trial(1, "w1", "c2", DEFAULT_POINT, 1, Outcome(Status.OK, latency_s=(1.0,)), "[]"))
        assert store.acquire_lease("nano", "me", "test").token == 1
    assert {table: rows[0] for table, rows in fetch_all(place, tables, columns).items()} == {
        table: _ROWS_OF_0001[table] for table in tables
    }
    with pytest.raises(sa.exc.IntegrityError, match="append-only"):
        execute(place, "DELETE FROM trials")
    assert (board["name"], board["board_type"], board["simulated"]) == ("nano", "jetson-nano", True)
    assert board["description"] == {"cores": 4, "name": "nano"}
    assert (board["added_at"], board["seen_at"]) == (100.5, 200.25)
    assert (board["state"], board["health"], board["labels"], board["lease"]) == ("idle", "good", {}, None)
    assert parse_transport(board["transport"]) == Direct()


@pytest.mark.parametrize("revision", sorted(_ROWS))
def test_several_processes_migrate_the_same_store(places: Places, revision: str) -> None:
    """Commands that start at once after an update all find the board once, under the new schema."""
    place = places.make(empty=True)
    make_old(place, revision)
    script = (
        "import sys; from farm import safekeeping; from farm.settings import parse_store;"
        "from farm.store import Store; place = parse_store(sys.argv[1]); safekeeping.upgrade(place);"
        "print(len(Store(place).fetch_boards()))"
    )
    for migrating in [run_python(script, place) for _ in range(4)]:
        answer, complaints = migrating.communicate(timeout=60)
        assert (migrating.returncode, answer.strip()) == (0, "1"), complaints


@pytest.mark.parametrize("revision", sorted(_ROWS))
def test_an_update_on_a_full_disk_changes_nothing(tmp_path: pathlib.Path, revision: str) -> None:
    """With the disk full the store stays at its revision with every row, and is migrated once there is space."""
    path = tmp_path / "home" / "farm.db"
    make_old(path, revision)
    # A reader keeps what was written in the write-ahead log, so that the log is what grows when the migration writes.
    reader, writer = sqlite3.connect(path), sqlite3.connect(path)
    with writer:
        writer.execute("PRAGMA journal_mode=WAL")
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM events").fetchall()
    with writer:
        writer.execute("INSERT INTO events VALUES (8, 4.0, 'long', 'log', ?)", ("x" * 40_000,))
    before = fetch_all(path, [*_ROWS[revision], "alembic_version"])
    # Room for two pages more: enough to open the store, which a query proves, and not for any migration.
    room = path.with_name(path.name + "-wal").stat().st_size + 2 * 4120
    script = (
        "import pathlib, resource, sqlite3, sys; from farm.store import Store; path = pathlib.Path(sys.argv[1]);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2);"
        "print(sqlite3.connect(path).execute('SELECT count(*) FROM events').fetchone()[0], flush=True); Store(path)"
    )
    failing = run_python(script, path, room)
    answer, complaints = failing.communicate(timeout=60)
    assert (failing.returncode, answer.strip()) == (1, "2")
    assert "UnavailableError" in complaints
    assert "in migrate" in complaints
    reader.close()
    writer.close()
    assert fetch_all(path, [*_ROWS[revision], "alembic_version"]) == before
    with Store(path) as store:
        assert len(store.fetch_boards()) == 1


def test_a_store_of_the_fleets_schema_is_migrated_without_loss(places: Places) -> None:
    """Every row of revision 0002 is there unchanged, leases and who this store is included; sweeps can be kept."""
    place = places.make(empty=True)
    make_old(place, "0002")
    tables = [*_ROWS_OF_0002, "identity"]
    before, columns = fetch_all(place, tables), fetch_columns(place, tables)
    assert {table: rows[0] for table, rows in before.items() if table != "identity"} == _ROWS_OF_0002
    with open_updated(place) as store:
        assert store.fetch_sweeps() == []
        sweep = store.start_sweep(
            command="farm sweep run",
            model="tiny-cnn",
            model_sha256="00",
            board_type="jetson-tx2",
            simulated=False,
            request={},
            goal={},
            grid={},
            settings={},
        )
        point: dict[str, Any] = {
            "variant": "tuned",
            "batch": 1,
            "key": "k",
            "board": "tx2",
            "measurement": {},
            "outcome": {},
        }
        assert store.add_sweep_point(sweep, visit=1, **point)
    assert fetch_all(place, tables, columns) == before
    with pytest.raises(sa.exc.IntegrityError, match="append-only"):
        execute(place, "DELETE FROM trials")


def test_a_store_of_the_sweeps_schema_is_migrated_without_loss(places: Places) -> None:
    """Every row of revision 0003 is there unchanged; trials are of their campaign's type, and one result is counted."""
    place = places.make(empty=True)
    make_old(place, "0003")
    later = ("b", 0, "{}", "[]", None, None, 0.5, 2.0)
    insert(place, "campaigns", (2, "farm tune", "mlp", "", "nano", 8, "{}", 1, 2, "finished"))
    insert(
        place,
        "trials",
        (2, 1, "w1", "c1", "default", 2, "ok", None, 0.25, *later),  # as no engine ever should have
        (3, 1, "w1", "c1", "default", 100, "wrong_result", "candidate", None, *later),
        (4, 2, "w1", "c1", "default", 1, "board_lost", "board", None, *later),
        (5, 2, "w1", "c1", "default", 2, "crashed", "candidate", None, *later),
    )
    tables = [*_ROWS_OF_0003, "identity"]
    before, columns = fetch_all(place, tables), fetch_columns(place, tables)
    with open_updated(place) as store:
        rows = [(row["id"], row["board_type"], row["purpose"], row["counted"]) for row in store.fetch_trials()]
        assert rows == [
            (1, "local", "search", 1),
            (2, "local", "search", None),
            (3, "local", "winner", None),
            (4, "nano", "search", None),
            (5, "nano", "search", 1),
        ]
        [workload] = store.fetch_workloads(1)
        assert (workload["hash"], workload["board_type"], workload["weight"]) == ("w1", "local", 2)
        assert store.fetch_fleet_campaigns() == []
        assert store.fetch_records()[0].evidence is None
        ok = Outcome(Status.OK, latency_s=(1.0,))
        assert not store.add_trial(Trial(2, "w1", "c1", DEFAULT_POINT, 3, ok, "[]"))
        assert store.add_trial(Trial(2, "w1", "c2", DEFAULT_POINT, 1, ok, "[]"))
        assert store.fetch_trials()[-1]["id"] > 5
    rows_after = fetch_all(place, tables, columns)
    assert rows_after.pop("trials")[:-1] == before.pop("trials")
    assert rows_after == before
    for statement in ("DELETE FROM trials", "UPDATE trials SET median_s = 0"):
        with pytest.raises(sa.exc.IntegrityError, match="append-only"):
            execute(place, statement)


def test_a_store_of_the_campaigns_schema_is_migrated_without_loss(places: Places) -> None:
    """Every row of revision 0004 is there; tokens go on, trials are counted, doubts are of the trials of their time."""
    place = places.make(empty=True)
    make_old(place, "0004")
    tables = [*(set(_ROWS_OF_0004) - {"doubts"}), "identity"]
    before, columns = fetch_all(place, tables), fetch_columns(place, tables)
    with open_updated(place) as store:
        assert store.count_statuses() == {"ok": 1}
        assert store.fetch_mark() == 1
        ok = Outcome(Status.OK, latency_s=(1.0,))
        known = store.fetch_known_candidates("w1", "local", DEFAULT_POINT, simulated=False)
        assert [each["doubted"] for each in known] == [1]
    assert fetch_all(place, tables, columns) == before
    assert fetch_all(place, ["doubts"])["doubts"] == [(4, "nano", 0.5, 1.5, "it was slow", 0, 1)]
    with open_updated(place) as store:
        assert store.add_trial(Trial(1, "w1", "c2", DEFAULT_POINT, 1, ok, "[]"))
        assert store.count_statuses() == {"ok": 2}
        assert store.force_release("tx2", "me", "test")
        assert store.acquire_lease("tx2", "me", "test").token == 42


@pytest.mark.parametrize("revision", sorted(_ROWS))
def test_a_copy_is_kept_of_what_a_migration_changes(tmp_path: pathlib.Path, revision: str) -> None:
    """Beside the store lies one of its old schema with every row, for its owner alone; a new one has none."""
    path = tmp_path / "home" / "farm.db"
    make_old(path, revision)
    before = fetch_all(path, [*_ROWS[revision], "alembic_version"])
    Store(path).close()
    Store(path).close()
    [copy] = [each for each in path.parent.iterdir() if each.name.startswith(f"{path.name}.")]
    assert copy.name == f"{path.name}.{revision}"
    assert copy.stat().st_mode & 0o777 == 0o600
    assert fetch_all(copy, [*_ROWS[revision], "alembic_version"]) == before
    other = path.with_name("other.sqlite")
    Store(other).close()
    assert [each.name for each in path.parent.glob("other*")] == ["other.sqlite"]


def test_others_do_not_read_a_store(tmp_path: pathlib.Path) -> None:
    """A new one is its owner's alone, whatever the umask; an old one is closed to other users, not to its group."""
    path = tmp_path / "home" / "farm.db"
    before = os.umask(0)
    try:
        with Store(path) as store:
            store.add_event("kind", "subject", "message")
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


def test_going_back_keeps_the_campaigns_of_one_command(place: StoreLocation) -> None:
    """Undoing drops what older schemas cannot say: of trials that differ by board type or purpose the first stays."""
    with Store(place) as store:
        row = {"hash": "w1", "name": "dense", "flop": 1.0, "arguments": [], "target": {}, "pipeline": "graph/1"}
        order = {"name": "both", "owner": "me", "budget": {}, "models": [{"name": "mlp"}]}
        order["types"] = [{"board_type": "nano"}, {"board_type": "tx2"}]
        workloads = [row | {"module_json": "{}", "weight": 1, "board_type": kind} for kind in ("nano", "tx2")]
        number = store.submit_campaign(order, "farm campaign run", workloads)
        for kind in ("nano", "tx2"):
            outcome = Outcome(Status.OK, latency_s=(1.0,))
            assert store.add_trial(Trial(number, "w1", "c1", DEFAULT_POINT, 1, outcome, "[]", board_type=kind))
    migrate(place, "0003", command.downgrade)
    assert len(fetch_all(place, ["trials"])["trials"]) == 1
    with open_updated(place) as store:
        assert store.fetch_fleet_campaigns() == []
        assert [row["id"] for row in store.fetch_campaigns()] == [number]


@pytest.mark.parametrize("revision", sorted(_ROWS))
def test_migrations_can_be_undone(places: Places, revision: str) -> None:
    """Back at an older revision the rows that it knew are as they were, and going forward again works."""
    place = places.make(empty=True)
    make_old(place, revision)
    before = fetch_all(place, _ROWS[revision])
    open_updated(place).close()
    migrate(place, revision, command.downgrade)
    assert fetch_all(place, _ROWS[revision]) == before
    assert fetch_all(place, ["alembic_version"]) == {"alembic_version": [(revision,)]}
    with open_updated(place) as store:
        assert len(store.fetch_boards()) == 1


def test_a_store_that_hosts_share_is_updated_by_order(cluster: Cluster) -> None:
    """A newer version that only looks leaves it to those who still work with it, and says what to do."""
    url = cluster.make()
    make_old(url, "0005")
    with pytest.raises(UnavailableError, match="0005") as caught:
        Store(url)
    assert "farm db upgrade" in caught.value.hint
    assert fetch_all(url, ["alembic_version"]) == {"alembic_version": [("0005",)]}
    assert safekeeping.upgrade(url) == "0005"
    with Store(url) as store:
        assert len(store.fetch_boards()) == 1


@pytest.mark.parametrize("revision", sorted(_ROWS))
def test_an_update_that_fails_half_way_changes_nothing(places: Places, revision: str) -> None:
    """Something is in the way of the last step: all of them are undone, and done once it has gone."""
    place = places.make(empty=True)
    make_old(place, revision)
    before = fetch_all(place, [*_ROWS[revision], "alembic_version"])
    execute(place, "CREATE TABLE model_decisions (x INTEGER)")
    with pytest.raises(UnavailableError, match="model_decisions"):
        open_updated(place)
    assert fetch_all(place, [*_ROWS[revision], "alembic_version"]) == before
    execute(place, "DROP TABLE model_decisions")
    with open_updated(place) as store:
        assert len(store.fetch_boards()) == 1
