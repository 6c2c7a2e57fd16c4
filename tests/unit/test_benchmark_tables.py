"""Tables in docs/ are made from benchmarks/results/, and a benchmark saves what they are made from."""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
from types import ModuleType

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tables")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_machine")


def test_tables_are_current(tables: ModuleType) -> None:
    """Each page is what the kept results make; `make generated` writes it again."""
    for path in tables.PAGES:
        page = path.read_text(encoding="utf-8")
        assert "<!-- table: " in page, path
        assert tables.fill(page) == page, path


def test_results_say_where_they_come_from(tables: ModuleType) -> None:
    """Each kept result has the schema that `--save` writes, and its file's name is its benchmark's."""
    paths = sorted(tables.RESULTS.rglob("*.json"))
    assert paths
    for path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        assert set(result) == {"benchmark", "machine", "date", "commit", "command", "figures"}, path
        assert {"cpu", "cores"} <= set(result["machine"]), path
        assert path.stem == result["benchmark"], path
        assert (tables.ROOT / result["command"].split()[1]).exists(), path


def test_save_writes_a_result(machine: ModuleType, tmp_path: pathlib.Path) -> None:
    """`--save FOLDER` keeps figures, machine and command; the option itself is no part of the command."""
    machine.save("one", ["benchmarks/one.py", "--trials", "3", "--save", str(tmp_path)], {"ms": 1.5}, "0123abcd")
    result = json.loads((tmp_path / "one.json").read_text())
    assert result["figures"] == {"ms": 1.5}
    assert result["command"] == "python benchmarks/one.py --trials 3"
    assert result["commit"] == "0123abcd"
    assert result["machine"]["cores"] >= 1


def test_quick_figures_are_not_saved(machine: ModuleType, tmp_path: pathlib.Path) -> None:
    """Figures of `--quick` mean nothing, so nothing is kept of them."""
    with pytest.raises(SystemExit):
        machine.save("one", ["one.py", "--quick", "--save", str(tmp_path)], {}, "")
    assert not list(tmp_path.iterdir())
