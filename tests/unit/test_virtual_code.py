"""Virtual boards' code: its target in records, and what to do without the emulator."""

from __future__ import annotations

import json
import pathlib

import pytest
from typer.testing import CliRunner

from farm import emulation
from farm.cli import record
from farm.crew.local import require_virtual
from farm.errors import UnavailableError
from farm.inventory.board_types import require_board_type
from farm.store import Store
from farm.values import DEFAULT_POINT, Record
from tests.stored_workloads import make_workload

TARGETS = {"a" * 16: "x86_64-linux-gnu", "b" * 16: "aarch64-linux-gnu"}


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A home whose store has simulated records of a Nano: one of a simulating machine's code, one of its own."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    with Store(tmp_path / "farm.db") as store:
        number = store.campaigns.start("farm tune", "m", "", "jetson-nano", 8, {})
        for key, mtriple in TARGETS.items():
            target = {"kind": "llvm", "mtriple": mtriple, "mcpu": "x", "num-cores": 4}
            store.workloads.save(number, [make_workload(key, name=f"dense {key[0]}", target=target)])
            place = (key, f"dense {key[0]}", "jetson-nano", DEFAULT_POINT, "graph/2", "c", 1e-3, 1e6, 0.0, 0.0)
            store.records.save(Record(*place, simulated=True, trace_json="[]"))
    return tmp_path


def test_records_of_the_old_cost_model_are_marked(home: pathlib.Path) -> None:
    """In the list, in its document, and in words where one is shown."""
    run = CliRunner().invoke
    listed = {each["workload"]: each for each in json.loads(run(record.app, ["list", "--simulated", "--json"]).stdout)}
    assert {key: each["virtual_code"] for key, each in listed.items()} == {"a" * 16: "native", "b" * 16: "emulated"}
    native, own = (run(record.app, ["show", key]).stdout for key in TARGETS)
    assert "(simulated, native)" in native
    assert "says nothing of the board" in " ".join(native.split())
    assert "(simulated)" in own
    assert "native" not in own


def test_where_a_workload_is_held_settles_which_is_meant(home: pathlib.Path) -> None:
    """Three have the name; only one has a record of the type that is asked for."""
    with Store(home / "farm.db") as store:
        number = store.campaigns.start("farm tune", "m", "", "jetson-tx2", 8, {})
        store.workloads.save(number, [make_workload("c" * 16, name="dense c")])
        place = ("c" * 16, "dense c", "jetson-tx2", DEFAULT_POINT, "graph/2", "c", 1e-3, 1e6, 0.0, 0.0)
        store.records.save(Record(*place, simulated=True, trace_json="[]"))
    for words in (["show", "dense"], ["show", "dense", "--top", "5", "--simulated"]):
        assert "3 workloads are meant by 'dense'" in CliRunner().invoke(record.app, words).output
        found = CliRunner().invoke(record.app, [*words, "--board-type", "jetson-tx2", "--json"])
        assert "c" * 16 in json.loads(found.stdout).values()


def test_without_the_emulator_it_says_what_to_do(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where virtual boards are made, before any wait."""
    monkeypatch.setattr(emulation, "_MODULES", ("unicorn_of_nobody",))
    nano = require_board_type("jetson-nano")
    with Store(home / "farm.db") as store:
        with pytest.raises(UnavailableError, match="unicorn_of_nobody is not installed") as caught:
            require_virtual(store, nano, "me")
        assert "emulator" in caught.value.hint
        assert store.boards.fetch() == []
