"""`farm tune` on a model that the project did not make, and `farm doctor`."""

from __future__ import annotations

import pathlib

import onnx
import pytest

from tests.acceptance.conftest import Home


def test_a_foreign_model_is_tuned(home: Home) -> None:
    """Three trials of a model that PyTorch wrote: softmax becomes a record; an operator it lacks is refused."""
    data = pathlib.Path(onnx.__file__).parent / "backend" / "test" / "data" / "pytorch-converted"
    model = str(data / "test_Softmax" / "model.onnx")
    done = home.run("tune", model, "--ops", "softmax", "--trials", "3", "--json")
    assert done.code == 0, done.err
    document = done.json()
    assert document["model"] == "model"
    assert document["trials"]["ok"] + document["trials"]["candidate_faults"] == 3
    [workload] = document["workloads"]
    assert workload["latency_us"] > 0
    assert document["records"]["new"] == 1
    assert document["board"]["type"] == "local"
    home.expect_no_processes()

    wrong = home.run("tune", model, "--ops", "softmax,dream", "--trials", "3", "--json")
    assert wrong.code == 2
    assert wrong.out == ""
    assert "'dream'" in wrong.err
    assert "It has: reshape, softmax." in wrong.err


@pytest.mark.core
def test_a_healthy_farm_passes(home: Home) -> None:
    """Every hop is ok, down to a kernel run on the board."""
    done = home.run("doctor", "--json")
    assert done.code == 0, done.err
    checks = {check["name"]: check for check in done.json()}
    assert list(checks)[-1] == "kernel"
    assert all(check["ok"] for check in checks.values())
    assert "matrix product" in checks["kernel"]["detail"]
    assert "runs virtual boards' own code" in checks["emulator"]["detail"]
    home.expect_no_processes()


@pytest.mark.core
def test_a_broken_hop_is_named(home: Home) -> None:
    """With a file for a home the doctor fails at the store, says what to do, and tries nothing that needs it."""
    pathlib.Path(home.environment["FARM_HOME"]).write_text("")
    done = home.run("doctor")
    assert done.code == 3
    lines = {line.split()[1]: line for line in done.out.splitlines() if line.startswith(("ok", "FAIL"))}
    assert lines["store"].startswith("FAIL")
    assert "FARM_HOME" in done.out
    assert "ray" not in lines


@pytest.mark.core
def test_what_runs_virtual_boards_code_is_told(home: Home) -> None:
    """The emulator by name, where it is used; what is broken behind it keeps the rest from being started."""
    folder = pathlib.Path(home.environment["FARM_HOME"])
    folder.mkdir(mode=0o700)
    (folder / "farm.db").write_text("no database")
    done = home.run("doctor")
    assert done.code == 3
    assert "which runs virtual boards' own code" in done.out
