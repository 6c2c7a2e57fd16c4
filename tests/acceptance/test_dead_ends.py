"""A command that finds nothing names the boards and records that exist."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from farm.cli.model_artifacts import _choose_type
from farm.errors import UsageError
from farm.store import Store
from farm.values import DEFAULT_POINT, Record, Ssh, Virtual
from tests.acceptance.conftest import Home, new_home
from tests.stored_workloads import make_workload

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def simulated() -> Iterator[Home]:
    with new_home() as home, Store(pathlib.Path(home.environment["FARM_HOME"]) / "farm.db") as store:
        for name in ("v1", "v2"):
            store.boards.register(name, "jetson-nano", Virtual())
        number = store.campaigns.start("farm tune", "m", "", "jetson-nano", 8, {})
        store.workloads.save(number, [make_workload("abc", name="conv2d 8")])
        place = ("abc", "conv2d 8", "jetson-nano", DEFAULT_POINT, "graph/2", "c", 1e-3, 2.0, 1.0, 1e-7)
        store.records.save(Record(*place, simulated=True, trace_json="[]", evidence={}))
        yield home


@pytest.mark.parametrize("words", [("export", "out"), ("list",), ("prune", "--workload", "conv2d")])
def test_records_of_virtual_boards_are_pointed_to(simulated: Home, words: tuple[str, ...]) -> None:
    """Where only simulated records are, nothing is found without --simulated, and that is said."""
    done = simulated.call("record", *words)
    assert done.code == (2 if words[0] == "export" else 0)
    assert "there are 1 records of virtual boards: add --simulated" in done.err
    assert "add --simulated" not in simulated.call("record", *words, "--workload", "softmax").err


def test_what_a_board_is_decides_what_is_compiled_for_it(
    simulated: Home, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    """With --board the type follows, and whether it is for virtual boards; without it, where all are, that is said."""
    with Store(pathlib.Path(simulated.environment["FARM_HOME"]) / "farm.db") as store:
        kind, is_virtual = _choose_type(store, "", "v1", False)
        assert (kind.name, is_virtual) == ("jetson-nano", True)
        assert _choose_type(store, "", "local", False)[1] is False
        assert capsys.readouterr().err == ""
        assert _choose_type(store, "jetson-nano", "", False)[1] is False
        assert "those of this farm are virtual: --simulated compiles for them" in capsys.readouterr().err.replace(
            "\n", " "
        )
        for words, match in (
            (("jetson-tx2", "v1", False), "no jetson-tx2 but a jetson-nano"),
            (("", "local", True), "a real one"),
        ):
            with pytest.raises(UsageError, match=match):
                _choose_type(store, *words)
    with Store(tmp_path / "farm.db") as store:
        store.boards.register("n1", "jetson-nano", Ssh("n1", "farm"))
        store.boards.register("v1", "jetson-nano", Virtual())
        assert _choose_type(store, "", "n1", False)[1] is False
        _choose_type(store, "jetson-nano", "", False)
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [
        ("model", "compile", "tiny-cnn", "--out", "file/model"),
        ("model", "bench", "tiny-cnn", "--out", "file/report"),
        ("model", "run", "art", "--input", "x.npz", "--out", "file/y.npz"),
        ("board", "bundle", "--arch", "aarch64", "--out", "file/nano.tar"),
        ("campaign", "run", "gone.yaml", "--compile", "file/models"),
        ("sweep", "run", "tiny-cnn", "--board", "v1", "--out", "file/report"),
        ("sweep", "run", "--resume", "1", "--out", "file/report"),
        ("quickstart", "--model", "tiny-cnn", "--out", "file/report"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_folder_that_cannot_be_is_refused_before_the_work(simulated: Home, words: tuple[str, ...]) -> None:
    """Nothing is compiled, tuned or measured whose result would have no place."""
    (simulated.path / "file").write_text("")
    done = simulated.call(*words)
    assert (done.code, done.out) == (2, "")
    assert "nothing can be written to file" in done.err
