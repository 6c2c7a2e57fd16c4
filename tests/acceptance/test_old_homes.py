"""A home of version 0.2.0: its store is refused, and the records that it exports are imported."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.acceptance.conftest import Home
from tests.places import execute

pytestmark = pytest.mark.core

# One workload's record, as that version exported it; the names of the user and the machine are replaced.
RECORDS = pathlib.Path(__file__).parent / "home_0_2" / "records"


def test_a_store_of_0_2_is_refused(home: Home) -> None:
    """Every command that reads it says what to do, and so do a restore of its backup and a merge; nothing changes."""
    store = pathlib.Path(home.environment["FARM_HOME"]) / "farm.db"
    assert home.call("board", "list").code == 0
    execute(store, "UPDATE alembic_version SET version_num = '0010'")
    before = home.rows("SELECT * FROM alembic_version, identity")
    copy = home.path / "before.db"
    copy.write_bytes(store.read_bytes())
    ways = (("board", "list"), ("store", "check"), ("store", "restore", str(copy)), ("record", "import", str(copy)))
    for words in ways:
        done = home.call(*words)
        assert (done.code, "record export" in done.err, "record import" in done.err) == (3, True, True), done.err
    assert home.rows("SELECT * FROM alembic_version, identity") == before


def test_records_of_0_2_are_imported(home: Home) -> None:
    """What that version exported is imported into a new home."""
    taken = json.loads(home.call("record", "import", str(RECORDS), "--json").out)
    assert (taken["records"], taken["workloads"]) == (1, 1)
    [record] = json.loads(home.call("record", "list", "--simulated", "--json").out)
    exported = json.loads((RECORDS / "farm_records.json").read_text(encoding="utf-8"))["records"][0]
    assert record["candidate"] == exported["candidate"]
