"""What every store promises of its schema: made and changed all at once or not at all, without losing rows."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
import sqlalchemy as sa

from device_agent.protocol import Outcome, Status
from farm.errors import UnavailableError
from farm.settings import StoreLocation
from farm.store import Store
from farm.store.database import APPEND_ONLY
from farm.values import DEFAULT_POINT, Board, Trial
from tests.contract.conftest import run_python
from tests.places import Places, execute
from tests.stored_workloads import make_workload
from tests.unit.campaign_orders import make_order, make_type


def test_stores_of_other_times_are_refused(place: StoreLocation) -> None:
    """A store of a newer version is left alone, and so is one of 0.2; each error says what to do."""
    for revision, way in (("9999", "update this one"), ("0012", "record export"), ("0008", "record import")):
        execute(place, f"UPDATE alembic_version SET version_num = '{revision}'")  # noqa: S608
        with pytest.raises(UnavailableError, match=revision) as caught:
            Store(place)
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
