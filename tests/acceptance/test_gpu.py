"""A model for a board's GPU, as a user makes and checks it; the board is a virtual one."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest

from farm.models.zoo import ZOO
from tests.acceptance.conftest import new_home


@pytest.mark.timeout(1500)  # five minutes of two cores that others use, too
def test_a_model_for_a_virtual_boards_gpu() -> None:
    """Compiled without a GPU, right on the virtual board's, tuned there, its records none of the processor's; what GPU
    code cannot do yet is refused in plain words.
    """
    with new_home() as home:
        made = ("model", "compile", "tiny-cnn", "--board-type", "jetson-nano", "--device", "gpu")
        manifest = home.run(*made, "--simulated", "--out", "art", "--json").json()
        assert (manifest["gpu"]["arch"], manifest["gpu"]["ptx"], manifest["gpu"]["kernels"]) == ("sm_53", "6.5", 8)
        home.run("board", "add", "v1", "--virtual", "jetson-nano")
        verified = home.run("model", "verify", "art", "--board", "v1", "--json").json()
        assert verified["matches"]
        assert verified["simulated"]

        half = home.run(*made, "--weights", "fp16", "--simulated", "--out", "half", "--json").json()
        assert half["weights"]["asked"] == "fp16"
        verified = home.run("model", "verify", "half", "--board", "v1", "--json").json()
        assert verified["matches"]
        assert 1e-5 < verified["rms_rel_error"] < 1e-2

        tuned = home.run("tune", "tiny-cnn", *made[3:], "--trials", "8", "--json").json()
        assert tuned["trials"]["ok"] == 8
        assert tuned["records"]["new"] >= 1
        assert {each["device"] for each in home.run("record", "list", "--simulated", "--json").json()} == {"gpu"}
        assert "jetson-nano GPU (simulated)" in home.run("record", "list", "--simulated").out
        served = home.run(*made, "--simulated", "--out", "tuned", "--json").json()
        final = tuned["final"]
        assert final["taken"] in final["variants"]
        used = tuned["records"]["new"] - len(final["left_out"])
        assert [each["source"] for each in served["workloads"]].count("record") == used
        refused = home.run(*made[:5], "--simulated", "--missing", "refuse", "--out", "no")
        assert "8 of 8 workloads of tiny-cnn have no record" in refused.err

        either = home.run(*made[:5], "--device", "both", "--simulated", "--out", "either", "--json").json()
        times = {name: each["latency_s"] for name, each in either["devices"].items()}
        assert set(times) == {"cpu", "gpu"}
        assert either["devices"]["gpu"]["copies_s"] > 0
        assert (either["gpu"] is not None) == (times["gpu"] < times["cpu"])

        gpu_hz = ("--gpu-freqs", "76.8MHz,921.6MHz", "--mem-freqs", "none", "--exhaustive", "--window", "1s")
        swept = home.run("sweep", "run", "tiny-cnn", "--board", "v1", "--device", "gpu", *gpu_hz, "--json").json()
        found = {row["key"]: row["latency_s"]["value"] for row in swept["series"][0]["rows"]}
        assert found["gpu=76.8MHz"] > 1.05 * found["gpu=921.6MHz"]

        timed = home.run("model", "bench", "art", "half", "--board", "v1", "--against", "rule", "--json").json()
        assert [each["device"] for each in timed["models"]] == ["gpu", "gpu"]
        for variants in (each["variants"] for each in timed["models"]):
            assert {name: each["matches"] for name, each in variants.items()} == {"tvm-farm": True, "rule": True}
            assert variants["rule"]["ratio"] == pytest.approx(1.0, abs=0.1)

        # The package has what the board's own Python and TVM's runtime lack.
        deployed = home.run("model", "deploy", "art", "--board", "v1", "--json").json()
        assert deployed["command"] == "farm model run art --board v1 --input"
        ((name, shape),) = ZOO["tiny-cnn"].input_shapes.items()
        np.savez(home.path / "x.npz", **{name: np.ones(shape, "float32")})
        done = subprocess.run(
            [sys.executable, "-m", deployed["package"], str(home.path / "x.npz"), "--out", str(home.path / "y.npz")],
            env=os.environ | {"PYTHONPATH": deployed["folder"]},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (given,) = np.load(home.path / "y.npz").values()
        session = onnxruntime.InferenceSession(ZOO["tiny-cnn"].build(), providers=["CPUExecutionProvider"])
        assert np.allclose(given, session.run(None, {name: np.ones(shape, "float32")})[0], atol=1e-4)

        home.run(*made, "--out", "real")
        for arguments, said in (
            (("model", "package", "art", "--format", "c"), "compiled for a GPU, and a C package takes CPU code"),
            ((*made[:3], "--out", "no", "--device", "gpu", "--board-type", "raspberry-pi-4"), "has no GPU"),
            ((*made[:3], "--out", "no", "--device", "both", "--board-type", "raspberry-pi-4"), "has no GPU"),
            (("tune", *made[2:5], "--device", "both"), "is for `farm model compile` only"),
            ((*made[:3], "--out", "no", "--device", "npu"), "the device 'npu' is unknown"),
            (("model", "verify", "real", "--board", "v1"), "board v1 is aarch64 (jetson-nano, simulated)"),
        ):
            done = home.run(*arguments)
            assert done.code == 2, done.err
            assert said in done.err
            assert not (home.path / "no").exists()
