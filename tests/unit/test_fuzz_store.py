"""A store that anything was done to: commands work or say what is wrong, and none takes it for a bug of its own."""

from __future__ import annotations

import contextlib
import pathlib
import random
import shutil
import sqlite3
from collections.abc import Callable, Sequence

import pytest

from device_agent.protocol import Outcome, Status
from farm import backup
from farm.errors import PermanentError
from farm.report import results
from farm.store import Store, schema
from farm.values import Trial
from tests import fuzzing
from tests.fleet_store import Clocks, open_fleet, take
from tests.fuzzing import WORDS, run_command
from tests.stored_workloads import make_record
from tests.unit.campaign_orders import make_order, submit
from tests.unit.test_sweep_goal import add_sweep

COUNT = 8
COMMANDS = (
    ("board", "list"),
    ("board", "show", "nano-01", "--json"),
    ("campaign", "list"),
    ("campaign", "show", "c"),
    ("record", "list", "--json"),
    ("sweep", "list"),
    ("sweep", "show", "1"),
    ("store", "check"),
)
VALUES: tuple[object, ...] = (*WORDS[:10], "{}", "[]", '{"kind": []}', "[" * 2000, b"\xff\xfe", -1, 2**62, 9e999, None)


@pytest.fixture
def good(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "good.db"
    with open_fleet(path, Clocks()) as store:
        take(store)
        submit(store, make_order("c"))
        outcome = Outcome(Status.OK, latency_s=(0.5,), board="nano-01", simulated=True)
        store.trials.add(Trial(1, "w1", "c1", "default", 1, outcome, "[]", board_type="jetson-nano"))
        store.campaigns.save_progress(1, {"counted": 1, "tasks": [], "history": []})
        store.records.save(make_record(0.5, simulated=True))
        store.events.add("kind", "c", "message")
        about = {"model": "mlp", "board": "nano-01", "board_type": "jetson-nano", "device": "cpu", "by": "ann"}
        store.results.add("bench", {"models": [{"variants": {}}]}, simulated=True, **about)
        store.trials.add_doubt("nano-01", 0, "it was slow")
        add_sweep(store)
    return path


def spoil(path: pathlib.Path, random_: random.Random) -> str:
    """Change one value to anything, or some bytes; returns what was done."""
    if random_.random() < 0.3:
        data = bytearray(path.read_bytes())
        place = random_.randrange(len(data))
        data[place : place + 16] = random_.randbytes(16)
        path.write_bytes(data)
        return f"16 bytes at {place}"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for (trigger,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {trigger}")
        table = random_.choice(schema.metadata.sorted_tables)
        column, value = random_.choice(list(table.c)), random_.choice(VALUES)
        with contextlib.suppress(sqlite3.Error, UnicodeEncodeError):
            connection.execute(f'UPDATE {table.name} SET "{column.name}" = ?', (value,))  # noqa: S608
        connection.commit()
    return f"{table.name}.{column.name} = {str(value)[:40]!r}"


def test_a_spoilt_store_is_said_to_be_spoilt(
    good: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded damage of values and bytes, each looked at by commands that read every table."""
    home = tmp_path / "home"
    monkeypatch.setenv("FARM_HOME", str(home))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    complaints = []
    for seed, random_ in enumerate(fuzzing.each(COUNT)):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        shutil.copy(good, home / "farm.db")
        done = spoil(home / "farm.db", random_)
        for command in random_.sample(COMMANDS, 3):
            if text := run_command(*command):
                complaints.append(f"{seed}: {done}: {text}")
    assert not complaints, "\n".join(complaints)
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (f"boards SET labels = '{{\"a\": {'9' * 6000}}}'", lambda store: store.boards.fetch()),
        ("boards SET labels = '{\"a\": 1e999}'", lambda store: store.boards.fetch()),
        ("boards SET history = '{\"a\": 1}'", lambda store: store.boards.fetch()),
        (
            "boards SET health_reason = CAST(x'fffe' AS TEXT)",
            lambda store: [each for each in store.boards.fetch() if each.health_reason != "\ufffd\ufffd"],
        ),
        ("""fleet_campaigns SET "order" = '{}'""", lambda store: store.campaigns.fetch()),
        ("records SET origin = '{\"store\": 1}'", lambda store: store.records.fetch(simulated=None)),
        ("sweeps SET grid = '{}'", None),
        (
            "trials SET outcome = '{\"a\": 1}'",
            lambda store: store.imports.fetch_bundle(store.records.fetch(simulated=None)).trials,
        ),
        ("results SET document = '{}'", lambda store: results.list_figures(store.results.require(1))),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_row_that_no_command_reads_stops_its_own_line(
    good: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    lines: Callable[[Store], Sequence[object]] | None,
) -> None:
    """A list leaves it out, `farm store check` names it, and a restore refuses the store."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # other tests measure on this machine
    home = tmp_path / "home"
    home.mkdir()
    with contextlib.closing(sqlite3.connect(good)) as connection, connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute(f"UPDATE {change} WHERE rowid = 1")
        for _, sql in triggers:
            connection.execute(sql)
    shutil.copy(good, home / "farm.db")
    if lines is not None:
        with Store(home / "farm.db") as store:
            assert not lines(store)
    [problem] = [each for each in backup.check(home) if "chmod" not in each]
    assert "cannot be" in problem
    (home / "farm.db").unlink()
    with pytest.raises(PermanentError, match="no whole store"):
        backup.put_back(home, good)


def test_a_sound_store_is_not_accused(
    good: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands that the damage is shown to work on a store that has none."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    good.rename(tmp_path / "farm.db")
    assert [run_command(*command) for command in COMMANDS] == [""] * len(COMMANDS)
    with Store(tmp_path / "farm.db") as store:
        assert store.trials.count_statuses() == {"ok": 1}
