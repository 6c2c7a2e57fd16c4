"""From records to a package that runs where there is no farm: compile, verify, package, install, run."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tarfile
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from farm.models.source import resolve_model
from tests.acceptance.conftest import Home

# All that a board has: what runs compiled models, and what that needs.
_BOARD = ("apache-tvm", "numpy")
_PYTHON_S = 60.0


def link_distribution(name: str, site: pathlib.Path) -> None:
    """Make an installed distribution, and what it needs, importable from `site` and known to pip there."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
        target = site / top
        if not target.exists():
            target.symlink_to(str(distribution.locate_file(top)))
    for requirement in distribution.requires or ():
        needed = re.match(r"[A-Za-z0-9_.-]+", requirement)
        if needed and "extra ==" not in requirement and not (site / needed[0]).exists():
            link_distribution(needed[0], site)


class Venv:
    """An environment with TVM's runtime and NumPy, and nothing else."""

    def __init__(self, folder: pathlib.Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=_PYTHON_S)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        for name in _BOARD:
            link_distribution(name, self.site)

    def install(self, wheel: pathlib.Path) -> None:
        """As a user would; what the wheel needs must be there already."""
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-index", wheel]
        subprocess.run(command, check=True, timeout=_PYTHON_S)

    def run(self, *arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
        """Python there."""
        return subprocess.run(
            [self.python, *arguments],
            capture_output=True,
            text=True,
            timeout=_PYTHON_S,
            check=False,
            cwd=self.site.parent,
        )


def reference(model: str, arrays: dict[str, Any]) -> list[Any]:
    """ONNX Runtime's outputs."""
    session = onnxruntime.InferenceSession(resolve_model(model).onnx_bytes, providers=["CPUExecutionProvider"])
    return list(session.run(None, arrays))


@pytest.mark.timeout(600)
def test_from_records_to_a_package_that_runs_alone(home: Home, tmp_path: pathlib.Path) -> None:
    """Tune, compile, verify, package, install and run: the package gives ONNX Runtime's outputs without the farm."""
    tuned = home.run("tune", "tiny-cnn", "--trials", "8", "--json").json()
    folder = tmp_path / "artifact"
    compiled = home.run("model", "compile", "tiny-cnn", "--out", str(folder), "--json").json()
    used = [each for each in compiled["workloads"] if each["source"] == "record"]
    assert len(used) == tuned["records"]["new"] > 0
    assert {each["record"]["fit"] for each in used} == {"exact"}
    assert compiled["predicted_latency_s"] > 0

    refused = home.run("model", "package", str(folder), "--out", str(tmp_path))
    assert (refused.code, list(tmp_path.glob("*.whl"))) == (1, [])
    assert "never verified" in refused.err

    ((name, shape),) = [(each["name"], each["shape"]) for each in compiled["inputs"]]
    arrays = {name: np.random.default_rng(5).standard_normal(shape).astype("float32")}
    np.savez(tmp_path / "x.npz", **arrays)
    verified = home.run("model", "verify", str(folder), "--input", str(tmp_path / "x.npz"), "--json").json()
    assert verified["matches"]
    assert len(verified["inputs"]) == 3

    ran = home.run("model", "run", str(folder), "--input", str(tmp_path / "x.npz"), "--repeat", "5", "--json").json()
    assert (ran["latency"]["count"], len(ran["found"]), ran["energy_j"]) == (5, 5, None)
    deployed = home.run("model", "deploy", str(folder), "--json").json()
    assert (pathlib.Path(deployed["folder"]) / "tiny_cnn" / "model.so").is_file()

    packed = home.run("model", "package", str(folder), "--out", str(tmp_path), "--json").json()
    venv = Venv(tmp_path / "venv")
    venv.install(pathlib.Path(packed["package"]))
    script = f"import numpy, tiny_cnn; x = dict(numpy.load({str(tmp_path / 'x.npz')!r})); " + (
        f"numpy.savez({str(tmp_path / 'y.npz')!r}, **tiny_cnn.Model().run(x))"
    )
    done = venv.run("-c", script)
    assert done.returncode == 0, done.stderr
    for given, wanted in zip(np.load(tmp_path / "y.npz").values(), reference("tiny-cnn", arrays), strict=True):
        assert np.abs(given - wanted).max() < 1e-4 * np.abs(wanted).max()

    Image.new("RGB", (48, 40), (200, 30, 30)).save(tmp_path / "red.png")
    without = venv.run("-m", "tiny_cnn", tmp_path / "red.png")
    assert (without.returncode, "pip install pillow" in without.stderr) == (2, True)
    link_distribution("pillow", venv.site)
    done = venv.run("-m", "tiny_cnn", tmp_path / "red.png", "--repeat", "3")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^ *[\d.]+ %  ", done.stdout, re.MULTILINE)) == 5
    assert "ms per inference, median of 3" in done.stdout
    wrong = venv.run("-m", "tiny_cnn", tmp_path / "y.npz")
    assert wrong.returncode == 2
    assert f"takes the inputs {name}" in wrong.stderr

    c = home.run("model", "package", str(folder), "--format", "c", "--out", str(tmp_path), "--json").json()
    with tarfile.open(c["package"]) as archive:
        archive.extractall(tmp_path / "c", filter="data")
    (root,) = (tmp_path / "c").iterdir()
    (tmp_path / "in").write_bytes(arrays[name].tobytes())
    program = [root / "bin" / "main", root / "lib" / "model.so", tmp_path / "in", tmp_path / "out"]
    subprocess.run(program, check=True, timeout=_PYTHON_S)
    assert np.abs(np.fromfile(tmp_path / "out", "float32") - given.ravel()).max() <= 1e-5 * np.abs(given).max()
    home.expect_no_processes()


def test_an_artifact_is_timed_beside_onnx_runtime(home: Home) -> None:
    """One table for one board: both are timed in turns, both compute the same, and there is a chart."""
    artifact = home.path / "artifact"
    assert home.run("model", "compile", "tiny-cnn", "--out", str(artifact)).code == 0
    words = ("model", "bench", str(artifact), "--against", "onnxruntime,untuned", "--out", "bench", "--json")
    done = home.run(*words, FARM_MODEL_RUNS="6")
    assert done.code == 0, done.err
    (model,) = done.json()["models"]
    assert set(model["variants"]) == {"tvm-farm", "onnxruntime", "untuned"}
    for each in model["variants"].values():
        assert each["matches"], each
        assert each["latency_s"]["count"] == 6
    assert (home.path / "bench" / "latency-tiny-cnn.png").stat().st_size > 10_000
    assert home.run("model", "bench", "tiny-cnn", "--against", "torch").code == 2
    home.expect_no_processes()
