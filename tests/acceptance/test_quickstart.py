"""`farm quickstart` and the commands beside it: two runs of a tiny model in one home, looked at from all sides."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from farm.models import zoo
from tests.acceptance.conftest import PATIENCE_S, Done, Home, new_home, wait_until

TRIALS = 8
# Hides ONNX Runtime from every interpreter that starts with this folder on its path, as if it were not installed.
_HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *rest: None if name == "onnxruntime" else find(name, *rest))
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """One home for the runs of this module."""
    with new_home() as home:
        yield home


def quickstart(home: Home, out: str, *options: str, **environment: str) -> Done:
    """A quickstart of the tiny model to its end."""
    arguments = ["--model", "tiny-cnn", "--trials", str(TRIALS), "--out", str(home.path / out), *options]
    done = home.run("quickstart", *arguments, timeout_s=2 * PATIENCE_S, **environment)
    assert done.code == 0, done.err
    home.expect_no_processes()
    return done


@pytest.fixture(scope="module")
def first(home: Home) -> dict[str, Any]:
    """The document of a first run."""
    done = quickstart(home, "first", "--json")
    assert "Token authentication" not in done.err
    assert "Traceback" not in done.err
    return dict(done.json())


@pytest.fixture(scope="module")
def beside(home: Home, first: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Done]:
    """A second run, without ONNX Runtime and with the tracker's port in use; and another command's end
    that was given while it ran.
    """
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "sitecustomize.py").write_text(_HIDE)
    options = ["--model", "tiny-cnn", "--trials", str(TRIALS), "--out", str(home.path / "second"), "--no-sweep"]
    with socket.create_server(("127.0.0.1", int(home.environment["FARM_TRACKER_PORT"]))):
        running = home.start("quickstart", *options, PYTHONPATH=str(hidden))
        running.wait_for("workloads")
        rival = home.run("tune", "tiny-cnn", "--trials", "1", "--fresh", "--json", timeout_s=2 * PATIENCE_S)
        done = running.wait()
    assert done.code == 0, done.err
    return done, rival


@pytest.fixture(scope="module")
def second(beside: tuple[Done, Done]) -> Done:
    """The second run."""
    return beside[0]


def test_the_last_step_sweeps_a_virtual_board(home: Home, first: dict[str, Any], second: Done) -> None:
    """Untuned and compiled code over the clocks of a simulated Nano: points, a front and a pick; the board is gone."""
    sweep = first["sweep"]
    assert (sweep["board"]["names"], sweep["board"]["watts"]) == (["quickstart-nano"], "watts assumed")
    assert [series["variant"] for series in sweep["series"]] == ["untuned", "compiled"]
    for series in sweep["series"]:
        assert len(series["rows"]) == 4
        assert all(row["power_w"]["value"] > 0 for row in series["rows"] if row["measured"])
        assert series["front"]
    page = pathlib.Path(sweep["report"]["page"]).read_text()
    assert "simulated" in page
    report = (home.path / "first" / "report.md").read_text()
    assert "## Clocks" in report
    assert "quickstart-nano" not in {row["name"] for row in home.run("board", "list", "--json").json()}
    assert "Clocks" not in (home.path / "second" / "report.md").read_text()


@pytest.mark.core
def test_the_document_holds_what_was_promised(home: Home, first: dict[str, Any]) -> None:
    """One JSON document says what was tuned, where, with what result."""
    assert first["model"] == "tiny-cnn"
    assert first["board"] == {"name": first["board"]["name"], "type": "local", "simulated": False}
    trials = first["trials"]
    assert trials["ok"] + trials["candidate_faults"] == TRIALS
    assert {"board_faults", "farm_faults"} <= trials.keys()
    assert 0 < first["seconds_to_first_trial"] < first["seconds_total"]
    for name in ("untuned", "predicted", "tuned", "onnxruntime"):
        figures = first["latency_ms"][name]
        assert 0 < figures["min"] <= figures["median"] <= figures["max"]
        assert figures["mean"] > 0
        assert figures["std"] >= 0
        assert figures["ci"][0] <= figures["median"] <= figures["ci"][1]
        assert figures["runs"] >= (15 if name == "untuned" else 50)
    latency = {name: figures["median"] for name, figures in first["latency_ms"].items() if figures}
    assert first["shipped"] in {*latency, "mixed 1", "mixed 2", "mixed 3", "mixed joined"}
    if first["shipped"] == "predicted":
        assert (latency["tuned"], first["gain"]) == (latency["predicted"], None)
    else:
        assert first["gain"]["low"] > 1.0
    assert first["gained"].lower() in (home.path / "first" / "report.md").read_text().lower()
    assert first["speedup_vs_untuned"] == pytest.approx(latency["untuned"] / latency["tuned"])
    assert first["ratio_to_onnxruntime"] == pytest.approx(latency["tuned"] / latency["onnxruntime"])


@pytest.mark.core
def test_the_output_matches(first: dict[str, Any]) -> None:
    """The tuned model computes what ONNX Runtime computes."""
    assert first["outputs_match"] is True
    assert 0 <= first["max_rel_error"] < 1e-4
    assert first["max_abs_error"] >= 0


@pytest.mark.core
def test_the_report_is_written(first: dict[str, Any]) -> None:
    """Report, plots and library lie where the document says; report.json is the document."""
    paths = {name: pathlib.Path(path) for name, path in first["report"].items()}
    assert all(path.stat().st_size > 0 for path in paths.values())
    assert paths["plot"].read_bytes().startswith(b"\x89PNG")
    assert "tiny-cnn" in paths["markdown"].read_text()
    assert "tiny-cnn" in paths["page"].read_text()
    assert first["environment"]["cores"] > 0
    assert "relax_vm" in first["environment"]["engines"]
    written = json.loads(paths["json"].read_text())
    assert written["latency_ms"] == first["latency_ms"]


@pytest.mark.core
def test_the_library_works_in_plain_tvm(first: dict[str, Any]) -> None:
    """model.so, loaded by TVM alone, gives ONNX Runtime's output."""
    import onnxruntime

    from farm.search import tvm_env

    tvm = tvm_env.load()
    data = np.random.default_rng(7).standard_normal((1, 3, 16, 16)).astype("float32")
    model = zoo.ZOO["tiny-cnn"].build()
    session = onnxruntime.InferenceSession(onnx.load_from_string(model).SerializeToString())
    [wanted] = session.run(None, {session.get_inputs()[0].name: data})
    executable = tvm.runtime.load_module(first["report"]["artifact"])
    machine = tvm.relax.VirtualMachine(executable, tvm.cpu())
    output = machine["main"](tvm.runtime.tensor(data))
    output = output if hasattr(output, "numpy") else output[0]
    np.testing.assert_allclose(output.numpy(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.core
def test_the_store_keeps_everything(home: Home, first: dict[str, Any]) -> None:
    """Campaign, trials, records and the board are in the store."""
    [(state, command, budget)] = home.rows("SELECT state, command, trials_budget FROM campaigns WHERE id = 1")
    assert (state, command, budget) == ("finished", "quickstart", TRIALS)
    [(counted,)] = home.rows("SELECT count(*) FROM trials WHERE campaign = 1 AND status = 'ok' AND purpose = 'search'")
    assert counted == first["trials"]["ok"]
    [(distinct,)] = home.rows("SELECT count(DISTINCT workload || candidate) FROM trials WHERE campaign = 1")
    assert distinct == TRIALS
    assert len(home.rows("SELECT * FROM records")) >= first["records"]["new"] > 0
    assert [row[0] for row in home.rows("SELECT name FROM boards")] == [first["board"]["name"]]


def test_a_second_run_starts_from_what_it_finds(home: Home, second: Done) -> None:
    """It says how many candidates it knows, and measures none of them again."""
    assert f"starting from {TRIALS} candidates" in second.err
    again = "SELECT count(*) FROM trials a JOIN trials b USING (workload, candidate) WHERE a.campaign < b.campaign"
    assert home.rows(f"{again} AND b.campaign = 2 AND b.purpose = 'search'") == [(0,)]


def test_a_taken_port_is_passed_over(home: Home, second: Done) -> None:
    """With the tracker's port in use another is taken, and the log says so."""
    log = (pathlib.Path(home.environment["FARM_HOME"]) / "logs" / "farm.log").read_text()
    assert f"port {home.environment['FARM_TRACKER_PORT']} is in use; the tracker took " in log


def test_without_json_a_table_is_printed(second: Done) -> None:
    """The table compares what was timed, each program once; notes about progress stay on stderr."""
    shown = ("TVM, untuned", "tvm-farm, no trial")
    for text in (*shown, "report: ", "good trials", "matches the reference"):
        assert text in second.out
    assert "trials 8/8" not in second.out
    assert "trials 8/8" in second.err


def test_without_onnx_runtime_its_part_is_left_out_and_said(home: Home, second: Done) -> None:
    """The comparison is null, a note says why, and the output is checked against untuned TVM."""
    assert second.code == 0
    document = json.loads((home.path / "second" / "report.json").read_text())
    assert document["latency_ms"]["onnxruntime"] is None
    assert document["ratio_to_onnxruntime"] is None
    assert any("ONNX Runtime is not installed" in note for note in document["notes"])
    assert document["outputs_match"] is True
    assert "ONNX Runtime is not installed" in pathlib.Path(document["report"]["markdown"]).read_text()


def test_a_second_command_has_the_first_do_it(home: Home, beside: tuple[Done, Done]) -> None:
    """While one command tunes, its engine carries out another's campaign too. With --fresh the search starts from
    nothing; what earlier runs recorded is shown as well.
    """
    _, rival = beside
    assert rival.code == 0, rival.err
    assert "starting from" not in rival.err
    assert rival.json()["trials"]["ok"] == 1
    assert sum(each["latency_us"] is not None for each in rival.json()["workloads"]) > 1  # by earlier runs
    wait_until(lambda: not home.processes(), "the engine that went on with it to be gone", 20.0)


def test_another_home_is_turned_away(home: Home, first: dict[str, Any]) -> None:
    """While one command measures on this machine, one of another home waits as asked, then says who it is, exit 3."""
    lock = home.temporary / f"tvm-farm-{os.getuid()}.lock"
    with tempfile.TemporaryDirectory() as folder, lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(str(os.getpid()))
        file.flush()
        rival = home.run("tune", "mlp", "--trials", "1", "--wait", "1s", "--json", FARM_HOME=folder)
    assert (rival.code, rival.out) == (3, "")
    assert f"another farm command is measuring on this machine: pid {os.getpid()}" in rival.err


@pytest.mark.core
def test_records_are_listed(home: Home, first: dict[str, Any]) -> None:
    """`farm record list` shows each record, and with --json one document with its figures."""
    records = home.run("record", "list", "--json").json()
    assert len(records) >= first["records"]["new"]
    assert all(r["latency_us"] > 0 and r["max_rel_error"] < 1e-3 and r["board_type"] == "local" for r in records)
    table = home.run("record", "list", "--board-type", "local").out
    assert all(r["workload"] in table for r in records)


@pytest.mark.core
def test_a_functions_latency_is_one_number(home: Home, first: dict[str, Any], second: Done) -> None:
    """The report's latency of a function is its record's, the campaign's document says the same."""
    document = json.loads((home.path / "second" / "report.json").read_text())
    records = {r["name"]: r["latency_us"] for r in home.run("record", "list", "--json").json()}
    told = {each["name"]: each["latency_us"] for each in document["workloads"]}
    assert told == pytest.approx({name: records[name] for name in told})


@pytest.mark.core
def test_the_board_is_listed(home: Home, first: dict[str, Any]) -> None:
    """`farm board list` shows this machine, and with --json what it says of itself."""
    [board] = home.run("board", "list", "--json").json()
    assert board["name"] == first["board"]["name"]
    assert board["description"]["cpu_model"]
    assert first["board"]["name"] in home.run("board", "list").out
