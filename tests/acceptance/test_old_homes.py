"""A home of version 0.2.0, made by that version, opened with today's commands."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sqlite3
from typing import Any

import pytest

from farm.campaign.spec import read_campaign
from farm.store import database
from tests.acceptance.conftest import Home

pytestmark = pytest.mark.core

# Two virtual boards, a campaign, a sweep and exported records, cut down to one workload; the names of the user and the
# machine are replaced. `campaign.yaml` was that version's example.
OLD = pathlib.Path(__file__).parent / "home_0_2"
WORKLOAD = "ee37ed46b42296c3"


@pytest.fixture
def old(home: Home) -> Home:
    store = pathlib.Path(home.environment["FARM_HOME"]) / "farm.db"
    store.parent.mkdir(mode=0o700)
    with contextlib.closing(sqlite3.connect(store)) as connection:
        connection.executescript((OLD / "farm.sql").read_text(encoding="utf-8"))
    return home


def ask(home: Home, *arguments: str) -> Any:
    done = home.call(*arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def count_rows(home: Home) -> dict[str, int]:
    names = [name for (name,) in home.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name: home.rows(f'SELECT count(*) FROM "{name}"')[0][0] for name in names}  # noqa: S608


def test_a_store_of_0_2_opens_with_every_row(old: Home) -> None:
    """The first command migrates it and loses no row; a copy of the old one stays beside it."""
    before = count_rows(old)
    assert old.rows("SELECT version_num FROM alembic_version") == [("0008",)]
    assert {each["name"] for each in ask(old, "board", "list")} == {"nano", "tx2"}
    assert old.rows("SELECT version_num FROM alembic_version") == [(database.HEAD,)]
    assert before == {name: rows for name, rows in count_rows(old).items() if name in before}
    assert min(before[name] for name in ("trials", "records", "sweep_points", "events", "golden_samples")) > 0
    assert (pathlib.Path(old.environment["FARM_HOME"]) / "farm.db.0008").exists()
    assert old.call("db", "check").code == 0


def test_what_0_2_kept_is_listed_and_shown(old: Home) -> None:
    """Boards, the campaign, the sweep and records are the documents that today's commands print."""
    board = ask(old, "board", "show", "nano")
    assert (board["board_type"], board["simulated"], board["health"]) == ("jetson-nano", True, "good")
    [listed] = ask(old, "campaign", "list")
    shown = ask(old, "campaign", "show", "two-types")
    for campaign in (listed, shown):
        assert (campaign["name"], campaign["state"], campaign["owner"]) == ("two-types", "finished", "ann@desk")
        assert (campaign["budget"]["trials"], len(campaign["types"])) == (12, 2)
        assert campaign["progress"] is not None
    [sweep] = ask(old, "sweep", "list")
    assert (sweep["model"], sweep["state"], sweep["visits"]) == ("mlp", "finished", 1)
    assert ask(old, "sweep", "show", "1")["grid"]["points"]
    records = ask(old, "record", "list", "--simulated")
    assert {(each["workload"], each["board_type"]) for each in records} == {
        (WORKLOAD, "jetson-nano"),
        (WORKLOAD, "jetson-tx2"),
    }
    assert len(ask(old, "record", "show", WORKLOAD)["records"]) == 2
    for report in (("campaign", "report", "two-types"), ("sweep", "report", "1")):
        done = old.run(*report, "--out", "-".join(report))
        assert done.code == 0, done.err


def test_files_of_0_2_are_read(home: Home) -> None:
    """Exported records are imported into a new home; a campaign file means what it meant."""
    taken = ask(home, "record", "import", str(OLD / "records"))
    assert (taken["records"], taken["workloads"]) == (1, 1)
    [record] = ask(home, "record", "list", "--simulated")
    exported = json.loads((OLD / "records" / "farm_records.json").read_text(encoding="utf-8"))["records"][0]
    assert record["candidate"] == exported["candidate"]
    spec = read_campaign(OLD / "campaign.yaml").spec
    assert (spec.name, spec.budget.trials, spec.budget.wall_clock) == ("vision-q4", 4000, 6 * 3600.0)
