"""What every store promises of its schema: made and changed all at once or not at all, and nobody's rows lost."""

from __future__ import annotations

import os
import pathlib
import sqlite3
import subprocess
import sys

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from device_agent.protocol import Outcome, Status
from farm.errors import UnavailableError
from farm.store import Store, database, parse_transport, schema
from farm.values import DEFAULT_POINT, Direct, Trial

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where the store's file goes; its folder does not exist yet."""
    return tmp_path / "home" / "farm.sqlite"


def run_python(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own that knows this checkout."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_newer_schema_is_refused(path: pathlib.Path) -> None:
    """A file written by a newer version is left alone, and the error says to update."""
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(UnavailableError, match="9999") as caught:
        Store(path)
    assert "newer" in caught.value.hint


def test_a_corrupt_file_is_refused(path: pathlib.Path) -> None:
    """A file that is no database is left as it is."""
    path.parent.mkdir()
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(UnavailableError, match="not a database"):
        Store(path)
    assert path.read_bytes().startswith(b"not a database")


def test_a_strangers_database_is_refused(path: pathlib.Path) -> None:
    """No tables are added to another program's file."""
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    connection.close()
    with pytest.raises(UnavailableError, match="songs"):
        Store(path)


def test_a_migration_is_all_or_nothing(path: pathlib.Path) -> None:
    """A file on which the migration fails half way holds no table afterwards, and works once the cause is gone."""
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


def test_migrations_make_the_schema(path: pathlib.Path) -> None:
    """What the migrations build is what the tables in schema.py say, to the last column and index."""
    Store(path).close()
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
    engine.dispose()


# What a release of schema 0001 wrote, column by column; the schema of then is made by its own frozen migration.
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


def make_0001(path: pathlib.Path) -> None:
    """A database of revision 0001 with one row in every table."""
    path.parent.mkdir(parents=True)
    config = Config()
    config.set_main_option("script_location", str(ROOT / "farm/store/migrations"))
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
    engine.dispose()
    with sqlite3.connect(path) as connection:
        for table, row in _ROWS_OF_0001.items():
            connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)  # noqa: S608
    connection.close()


def test_a_store_of_the_first_schema_is_migrated_without_loss(path: pathlib.Path) -> None:
    """Every row of revision 0001 is there afterwards; a board that was in use is good, idle and directly reached."""
    make_0001(path)
    with Store(path) as store:
        [board] = store.fetch_boards()
        assert store.add_trial(Trial(1, "w1", "c2", DEFAULT_POINT, 1, Outcome(Status.OK, latency_s=(1.0,)), "[]"))
        assert store.acquire_lease("nano", "me", "test").token == 1
    with sqlite3.connect(path) as connection:
        for table, row in _ROWS_OF_0001.items():
            if table != "boards":
                assert connection.execute(f"SELECT * FROM {table}").fetchall()[:1] == [row]  # noqa: S608
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute("DELETE FROM trials")
    connection.close()
    assert (board["name"], board["board_type"], board["simulated"]) == ("nano", "jetson-nano", True)
    assert board["description"] == {"cores": 4, "name": "nano"}
    assert (board["added_at"], board["seen_at"]) == (100.5, 200.25)
    assert (board["state"], board["health"], board["labels"], board["lease"]) == ("idle", "good", {}, None)
    assert parse_transport(board["transport"]) == Direct()


def test_several_processes_migrate_the_same_store(path: pathlib.Path) -> None:
    """Commands that start at once after an update all find the board once, under the new schema."""
    make_0001(path)
    script = (
        "import pathlib, sys; from farm.store import Store; print(len(Store(pathlib.Path(sys.argv[1])).fetch_boards()))"
    )
    for migrating in [run_python(script, path) for _ in range(4)]:
        answer, complaints = migrating.communicate(timeout=60)
        assert (migrating.returncode, answer.strip()) == (0, "1"), complaints


def test_an_update_that_fails_half_way_changes_nothing(path: pathlib.Path) -> None:
    """With the disk full the store stays at 0001 with every row, and is migrated once there is space."""
    make_0001(path)
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000));"
        "import pathlib, sys; from farm.store import Store; Store(pathlib.Path(sys.argv[1]))"
    )
    failing = run_python(script, path)
    _, complaints = failing.communicate(timeout=60)
    assert "UnavailableError" in complaints
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("0001",)]
        for table, row in _ROWS_OF_0001.items():
            assert connection.execute(f"SELECT * FROM {table}").fetchall() == [row]  # noqa: S608
    connection.close()
    with Store(path) as store:
        assert [board["name"] for board in store.fetch_boards()] == ["nano"]


def test_the_fleets_migration_can_be_undone(path: pathlib.Path) -> None:
    """Back at 0001 the rows that it knew are as they were, and going forward again works."""
    make_0001(path)
    Store(path).close()
    config = Config()
    config.set_main_option("script_location", str(ROOT / "farm/store/migrations"))
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
        for table, row in _ROWS_OF_0001.items():
            assert connection.exec_driver_sql(f"SELECT * FROM {table}").fetchall() == [row]  # noqa: S608
    engine.dispose()
    with Store(path) as store:
        assert len(store.fetch_boards()) == 1
