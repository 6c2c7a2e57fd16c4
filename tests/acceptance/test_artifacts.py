"""From records to a package that runs where there is no farm: compile, verify, package, install, run."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image

from farm.artifacts.artifact_folder import open_artifact
from farm.models.onnx_builder import GraphBuilder
from farm.models.source import resolve_model
from tests.acceptance.conftest import Home, new_home
from tests.encoders import make_encoder

# All that a board has: what runs compiled models, and what that needs.
_BOARD = ("apache-tvm", "numpy")
_PYTHON_S = 60.0
# Convolutions, matrix products, pools, joins and residuals; from an image down to 64 numbers; a dot in a file's name.
FIRE = "fire1.1"
TWO = (FIRE, "mlp")
CAMPAIGN = f"""\
name: two
models: [{FIRE}.onnx, mlp]
boards: {{ types: [local] }}
budget: {{ per_workload: 1 }}
search: {{ ops: [conv2d, dense] }}
measure: {{ repeat: 2, min_repeat: 5ms, verify_top: 1 }}
"""
RUN_ALL = """
import importlib, sys, time
import numpy
folder, *names = sys.argv[1:]
for name in names:
    package = name.replace("-", "_").replace(".", "_")
    inputs = dict(numpy.load(f"{folder}/{name}.npz"))
    numpy.savez(f"{folder}/{name}.out.npz", **importlib.import_module(package).Model().run(inputs))
used = time.process_time()
time.sleep(1)  # no frame for a second
print(time.process_time() - used)
"""


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
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-index", wheel]
        subprocess.run(command, check=True, timeout=_PYTHON_S)

    def run(self, *arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
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
    data = make_fire() if model == FIRE else resolve_model(model).onnx_bytes
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return list(session.run(None, arrays))


@dataclasses.dataclass(frozen=True)
class Made:
    """What the tests share: an artifact of a tuned model, an input, and what the reference makes of that."""

    home: Home
    folder: pathlib.Path
    manifest: dict[str, Any]
    arrays: dict[str, Any]
    wanted: Any

    @property
    def x(self) -> str:
        """The input's file."""
        return str(self.folder.with_name("x.npz"))


@pytest.fixture(scope="module")
def made() -> Iterator[Made]:
    with new_home() as home:
        tuned = home.run("tune", "tiny-cnn", "--trials", "8", "--json").json()
        folder = home.path / "artifact"
        manifest = home.run("model", "compile", "tiny-cnn", "--out", str(folder), "--json").json()
        used = [each for each in manifest["workloads"] if each["source"] == "record"]
        assert len(used) == tuned["records"]["new"] - len(tuned["final"]["left_out"])
        assert tuned["records"]["new"] > 0
        assert {each["record"]["fit"] for each in used} <= {"exact"}
        refused = home.run("model", "package", str(folder), "--out", str(home.path))
        assert (refused.code, list(home.path.glob("*.whl"))) == (1, [])
        assert "never verified" in refused.err
        (taken,) = manifest["inputs"]
        arrays = {taken["name"]: np.random.default_rng(5).standard_normal(taken["shape"]).astype("float32")}
        (wanted,) = reference("tiny-cnn", arrays)
        one = Made(home, folder, manifest, arrays, wanted)
        np.savez(one.x, **arrays)
        verified = home.run("model", "verify", str(folder), "--input", one.x, "--json").json()
        assert verified["matches"]
        assert verified["inputs"] == [one.x]
        yield one


def require_close(given: Any, wanted: Any) -> None:
    assert np.abs(given - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_a_run_of_a_wrong_artifact_fails(made: Made, tmp_path: pathlib.Path) -> None:
    """Outputs of an artifact that was found wrong are shown with the reason and exit code 1."""
    folder = tmp_path / "wrong"
    shutil.copytree(made.folder, folder)
    artifact = open_artifact(folder)
    assert artifact.manifest.verified
    wrong = artifact.manifest.verified.model_copy(update={"matches": False, "reason": "output 0 differs"})
    artifact.update(verified=wrong)
    ran = made.home.run("model", "run", str(folder), "--input", made.x, "--repeat", "2", "--json")
    assert (ran.code, "output 0 differs" in ran.err) == (1, True)
    assert ran.json()["outputs"]


@pytest.mark.timeout(600)
def test_a_wheel_runs_where_there_is_no_farm(made: Made, tmp_path: pathlib.Path) -> None:
    """Installed beside TVM and NumPy alone it gives ONNX Runtime's outputs, takes images, and says what is wrong."""
    packed = made.home.run("model", "package", str(made.folder), "--out", str(tmp_path), "--json").json()
    venv = Venv(tmp_path / "venv")
    venv.install(pathlib.Path(packed["package"]))
    y = tmp_path / "y.npz"
    script = (
        f"import numpy, tiny_cnn; x = dict(numpy.load({made.x!r})); numpy.savez({str(y)!r}, **tiny_cnn.Model().run(x))"
    )
    done = venv.run("-c", script)
    assert done.returncode == 0, done.stderr
    (given,) = np.load(y).values()
    require_close(given, made.wanted)

    Image.new("RGB", (48, 40), (200, 30, 30)).save(tmp_path / "red.png")
    without = venv.run("-m", "tiny_cnn", tmp_path / "red.png")
    assert (without.returncode, "pip install pillow" in without.stderr) == (2, True)
    link_distribution("pillow", venv.site)
    done = venv.run("-m", "tiny_cnn", tmp_path / "red.png", "--repeat", "3")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^ *[\d.]+ %  ", done.stdout, re.MULTILINE)) == 5
    assert "ms per inference, median of 3" in done.stdout
    wrong = venv.run("-m", "tiny_cnn", y)
    assert wrong.returncode == 2
    assert f"takes the inputs {next(iter(made.arrays))}" in wrong.stderr


def make_fire() -> bytes:
    """Two of SqueezeNet's modules behind a convolution of a small image."""
    builder = GraphBuilder(3)
    x = builder.relu(builder.conv(builder.input("data", (1, 3, 64, 64)), 16, 3, stride=2))
    for squeeze, expand in ((8, 16), (16, 32)):
        x = builder.max_pool(x, 3, stride=2)
        narrow = builder.relu(builder.conv(x, squeeze, 1))
        x = builder.concat(*(builder.relu(builder.conv(narrow, expand, size, pad=size // 2)) for size in (1, 3)))
    scores = builder.global_average(builder.conv(x, 10, 1))
    return builder.finish(FIRE, {"scores": (scores, (1, 10))})


@pytest.mark.timeout(900)
def test_models_of_a_campaign_run_as_packages(tmp_path: pathlib.Path) -> None:
    """One command tunes, compiles, verifies and packs two models; their wheels compute them, and are then idle."""
    with new_home() as home:
        (home.path / "two.yaml").write_text(CAMPAIGN)
        (home.path / f"{FIRE}.onnx").write_bytes(make_fire())
        done = home.run("campaign", "run", "two.yaml", "--compile", "packages", "--json", timeout_s=800.0)
        assert done.code == 0, done.err
        venv = Venv(tmp_path / "venv")
        arrays = {}
        for each in done.json()["artifacts"]:
            manifest = json.loads((home.path / each["folder"] / "manifest.json").read_text())
            # From records, or by prediction where the model was faster so.
            assert {one["source"] for one in manifest["workloads"]} <= {"record", "rule"}
            (taken,) = manifest["inputs"]
            name = manifest["model"]["name"]
            arrays[name] = {taken["name"]: np.random.default_rng(5).standard_normal(taken["shape"]).astype("float32")}
            np.savez(tmp_path / f"{name}.npz", **arrays[name])
            venv.install(home.path / each["package"])
    assert sorted(arrays) == sorted(TWO)
    (tmp_path / "run.py").write_text(RUN_ALL)
    ran = venv.run(tmp_path / "run.py", tmp_path, *TWO)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 0.05  # seconds of a processor
    for name, inputs in arrays.items():
        for given, wanted in zip(np.load(tmp_path / f"{name}.out.npz").values(), reference(name, inputs), strict=True):
            require_close(given, wanted)


@pytest.mark.core
def test_a_program_in_c_runs_without_python(made: Made, tmp_path: pathlib.Path) -> None:
    """The C package's program, built by the farm's linker, gives the same numbers."""
    packed = made.home.run(
        "model", "package", str(made.folder), "--format", "c", "--out", str(tmp_path), "--json"
    ).json()
    with tarfile.open(packed["package"]) as archive:
        archive.extractall(tmp_path / "c", filter="data")
    (root,) = (tmp_path / "c").iterdir()
    assert (root / "licences" / "apache-tvm" / "NOTICE").is_file()
    (tmp_path / "in").write_bytes(next(iter(made.arrays.values())).tobytes())
    program = [root / "bin" / "main", root / "lib" / "model.so", tmp_path / "in", tmp_path / "out"]
    subprocess.run(program, check=True, timeout=_PYTHON_S)
    require_close(np.fromfile(tmp_path / "out", "float32"), made.wanted.ravel())


@pytest.mark.core
def test_it_runs_on_a_board_beside_onnx_runtime(made: Made) -> None:
    """`run` says what it found and how long it took; `deploy` leaves a package; `bench` times both in turns."""
    home, folder = made.home, str(made.folder)
    ran = home.run("model", "run", folder, "--input", made.x, "--repeat", "5", "--out", "y.npz", "--json").json()
    assert (ran["latency"]["count"], len(ran["found"]), ran["energy_j"]) == (5, 5, None)
    assert ran["latency"]["median"] <= ran["latency"]["p90"] <= ran["latency"]["p99"] <= ran["latency"]["max"]
    assert ran["first_s"] > 0
    assert ran["peak_memory_bytes"] > 30 << 20
    assert ran["layers"] == []
    (given,) = np.load(home.path / "y.npz").values()
    require_close(given, made.wanted)
    deployed = home.run("model", "deploy", folder, "--json").json()
    assert (pathlib.Path(deployed["folder"]) / "tiny_cnn" / "model.so").is_file()
    words = ("model", "bench", folder, "--against", "onnxruntime,untuned", "--out", "bench", "--per-layer", "--json")
    done = home.run(*words, FARM_MODEL_RUNS="6")
    assert done.code == 0, done.err
    (model,) = done.json()["models"]
    assert set(model["variants"]) == {"tvm-farm", "onnxruntime", "untuned"}
    for each in model["variants"].values():
        assert each["matches"], each
        assert each["latency_s"]["count"] == 6
        assert each["first_s"] > 0
        assert each["bytes"] > 1000
    layers = {
        name: {each["name"]: each["calls"] for each in model["variants"][name]["layers"]} for name in model["variants"]
    }
    # Constants are laid out as the model is compiled: that function is a workload, and no part of an inference.
    assert sum(layers["tvm-farm"].values()) >= len(made.manifest["workloads"]) - 1, layers
    assert layers["onnxruntime"] == {}
    assert layers["untuned"].keys() != layers["tvm-farm"].keys()
    assert (home.path / "bench" / "latency-tiny-cnn.png").stat().st_size > 10_000
    home.expect_no_processes()


def test_weights_in_16_bits_are_tuned_verified_and_timed(made: Made) -> None:
    """Their records are their own; the error against float32 is shown, and `bench` has float32 in the same run."""
    home, folder = made.home, str(made.folder.with_name("halved"))
    tuned = home.run("tune", "mlp", "--weights", "bf16-all", "--trials", "6", "--json").json()
    assert tuned["compile"] == "farm model compile mlp --board-type local --weights bf16-all --out mlp-local"
    manifest = home.run("model", "compile", "mlp", "--weights", "bf16-all", "--out", folder, "--json").json()
    assert manifest["weights"] == {"asked": "bf16-all", "workloads": 3, "bytes": 2 * (64 * 256 + 256 * 128 + 128 * 16)}
    used = [each for each in manifest["workloads"] if each["source"] == "record"]
    assert len(used) == tuned["records"]["new"] - len(tuned["final"]["left_out"])
    assert {each["algorithm"] for each in manifest["workloads"]} == {"bf16 weights"}
    verified = home.run("model", "verify", folder, "--json").json()
    assert verified["matches"]
    assert 1e-4 < verified["rms_rel_error"] < verified["max_rel_error"] < 2e-2
    done = home.run("model", "bench", folder, "--against", "rule", "--json", FARM_MODEL_RUNS="6").json()
    assert set(done["models"][0]["variants"]) == {"tvm-farm", "rule"}


def test_a_quantised_model_keeps_its_weights(made: Made, tmp_path: pathlib.Path) -> None:
    """There is nothing to gain in 16 bits of what is in 8."""
    path = tmp_path / "small.onnx"
    assert made.home.run("model", "quantize", "mlp", "--calibration", "random", "--out", str(path)).code == 0
    done = made.home.run("model", "compile", str(path), "--weights", "bf16", "--out", str(tmp_path / "out"))
    assert done.code == 2
    assert "its weights are in 8 bits" in done.err


@pytest.mark.timeout(600)
def test_one_artifact_takes_a_range_of_lengths(made: Made, tmp_path: pathlib.Path) -> None:
    """Compiled for two sizes it gives ONNX Runtime's outputs for other lengths, on a board and as a package."""
    home, model, folder = made.home, str(tmp_path / "encoder.onnx"), str(tmp_path / "artifact")
    onnx.save(make_encoder(), model)
    words = ("--batch", "1", "--shape", "tokens=1..32@8,32", "--out", folder)
    manifest = home.run("model", "compile", model, *words, "--json").json()
    assert [each["size"] for each in manifest["lengths"]["sizes"]] == [8, 32]
    verified = home.run("model", "verify", folder, "--json").json()
    assert verified["matches"]
    assert {"8 tokens, seed 0", "4 tokens, seed 0", "20 tokens, seed 0"} <= set(verified["inputs"])
    command = home.run("model", "deploy", folder, "--json").json()["command"]
    x, y, z = (str(tmp_path / name) for name in ("x.npz", "y.npz", "z.npz"))
    for length in (3, 8, 17):
        arrays = {"ids": np.arange(length).reshape(1, length), "mask": np.ones((1, length), "int64")}
        np.savez(x, **arrays)
        ran = home.run("model", "run", folder, "--input", x, "--repeat", "2", "--out", y, "--json").json()
        subprocess.run([*shlex.split(command), x, "--out", z], check=True, timeout=_PYTHON_S, capture_output=True)
        wanted = reference(model, arrays)
        assert list(ran["outputs"].values()) == [list(each.shape) for each in wanted]
        for path in (y, z):
            for given, each in zip(np.load(path).values(), wanted, strict=True):
                require_close(given, each)
    campaign = CAMPAIGN.replace(f"[{FIRE}.onnx, mlp]", "[{path: encoder.onnx, batch: 1, lengths: 'tokens=1..32@8,32'}]")
    (tmp_path / "c.yaml").write_text(campaign.replace("conv2d, ", ""))
    planned = home.run("campaign", "run", "--dry-run", str(tmp_path / "c.yaml"), "--json").json()
    assert [each["name"] for each in planned["models"]] == ["encoder tokens=8", "encoder tokens=32"]
    assert {"matmul 8x16>16", "matmul 32x16>16"} <= {each["name"] for each in planned["types"][0]["workloads"]}
    np.savez(x, ids=np.zeros((1, 33), "int64"), mask=np.ones((1, 33), "int64"))
    refused = home.run("model", "run", folder, "--input", x)
    assert (refused.code, "ids has 33 tokens; the model takes from 1 to 32" in refused.err) == (2, True)


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench", "tiny-cnn", "--against", "torch"), "there is no 'torch'"),
        (("run", "ARTIFACT", "--input", "none.jpg"), "there is no file none.jpg"),
        (("run", "ARTIFACT", "--input", "X", "--operating-point", "MAXN"), "'MAXN' is not NAME=VALUE"),
        (("verify", "."), "is no artifact"),
        (("package", "ARTIFACT", "--format", "exe"), "there is no format 'exe'"),
        (("compile", "tiny-cnn", "--out", "ARTIFACT", "--missing", "maybe"), "--missing 'maybe' is unknown"),
        (("compile", "tiny-cnn", "--out", "ARTIFACT", "--operating-point", "mode=MAXN"), "mode=MAXN"),
        (("compile", "tiny-cnn", "--out", "."), "holds something that is no artifact"),
    ],
)
def test_what_is_refused(made: Made, words: tuple[str, ...], message: str) -> None:
    """Wrong words end with exit code 2 and the reason; the artifact that is there stays as it is."""
    before = (made.folder / "manifest.json").read_bytes()
    named = {"ARTIFACT": str(made.folder), "X": made.x}
    done = made.home.call("model", *(named.get(word, word) for word in words))
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert (made.folder / "manifest.json").read_bytes() == before
