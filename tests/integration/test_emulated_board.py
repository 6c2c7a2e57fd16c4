"""An aarch64 agent under user-mode emulation, given what the farm itself cross-compiles for a Jetson Nano.

Needs the emulator and its root, as the fixture `emulated_root` says.
"""

from __future__ import annotations

import json
import os
import pathlib
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

from device_agent.protocol import Engine, Limits, MeasureSpec, OperatingPoint, PinStatus, RunSpec, Status, TensorSpec
from farm.artifacts import checking, make
from farm.artifacts.compile import UNTUNED_PIPELINE, compile_model
from farm.artifacts.given_model import open_model
from farm.artifacts.on_board import HeldForModels
from farm.artifacts.package import WHEEL, C, write_package
from farm.artifacts.verify import compare
from farm.connectivity.tracker import Tracker
from farm.inventory.board_types import BoardType, load_board_types
from farm.measure.blocking import BlockingSession
from farm.models.zoo import ZOO
from farm.search import tvm_env
from farm.search.codegen import lowering
from farm.settings import Settings
from farm.store import Store
from tests.integration import candidates
from tests.integration.conftest import EMULATED_BOARD, PATIENCE_S, Agent, wait_until

tvm = tvm_env.load()

# Everything takes some ten times as long as on the machine itself, and two cores may have more to do.
START_TIMEOUT_S = 120.0
LIMITS = Limits(timeout_s=60.0, threads=2)
SHAPE = TensorSpec((candidates.SIZE, candidates.SIZE), "float32")

# The crash and the leak that a candidate may bring along, with TVM's calling convention.
_BAD_SOURCE = r"""
#include <stdlib.h>
int __tvm_ffi_segfault(void *self, void *args, int count, void *result) { *(volatile int *)0 = 1; return 0; }
/* Never touches what it gets, so that the machine's memory stays free. */
int __tvm_ffi_reserves_memory(void *self, void *args, int count, void *result) {
  for (;;) {
    char *block = malloc(1 << 24);
    __asm__ volatile("" : "+r"(block) : : "memory"); /* or the compiler sees that nothing comes of it */
    if (!block) *(volatile char *)0 = 1;
  }
  return 0;
}
"""
# Rounds of five instructions: two FMAs, of full vectors and of half ones, one load, two of the loop.
_COUNTED = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
import counter
spin, reader = ctypes.CDLL(sys.argv[2]).spin, counter.Reader(counter.Path(os.environ[counter.VARIABLE]))
marks = [reader.read()]
for rounds in (1, 1_000_000, 2_000_000):
    spin(ctypes.c_long(rounds))
    marks.append(reader.read())
print(*(getattr(after - before, name) for before, after in zip(marks[1:], marks[2:])
        for name in ("instructions", "vector_fmas", "loads_stores")))
"""
_SPIN = r"""
void spin(long rounds) {
  __asm__ volatile("1: fmla v0.4s, v1.4s, v2.s[3]\n fmla v0.2s, v1.2s, v2.2s\n ldr w9, [sp]\n subs %0, %0, #1\n b.ne 1b"
                   : "+r"(rounds) : : "v0", "w9", "cc");
}
"""


@pytest.fixture(scope="module")
def agent(emulated_root: str, tracker: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("emulated")
    ready, log_path = folder / "ready.json", folder / "log"
    command = [
        str(EMULATED_BOARD / "start"),
        "--root",
        emulated_root,
        "--",
        "--name",
        "emulated",
        "--ready-file",
        str(ready),
    ]
    command += ["--tracker", f"{tracker.host}:{tracker.port}"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=os.environ | {"TMPDIR": str(folder)})
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, "the emulated agent", START_TIMEOUT_S)
        assert process.poll() is None, log_path.read_text()
        facts = json.loads(ready.read_text())
        assert facts["pid"] == process.pid
        yield Agent(process, facts["key"], facts["port"], folder, log_path, folder)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, log_path.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def board(agent: Agent, tracker: Any) -> Iterator[BlockingSession]:
    """A session of the farm's own client with the emulated board."""
    with BlockingSession(Tracker(tracker.host, tracker.port), agent.key) as session:
        yield session


@pytest.fixture(scope="module")
def nano() -> BoardType:
    return load_board_types()["jetson-nano"]


def target(board_type: BoardType) -> dict[str, Any]:
    assert board_type.target is not None
    return board_type.target.to_tvm()


@pytest.fixture(scope="module")
def kernel(emulated_root: str, nano: BoardType) -> bytes:
    """A matmul that the farm's builder compiled for the Nano; it stands alone."""
    from tvm import te

    a, b = (te.placeholder(SHAPE.shape, name=name) for name in "AB")
    k = te.reduce_axis((0, candidates.SIZE), name="k")
    c = te.compute(SHAPE.shape, lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([a, b, c]))
    schedule.parallel(schedule.get_loops("C")[0])
    schedule.vectorize(schedule.split(schedule.get_loops("C")[1], [None, 4])[1])
    return lowering.build_candidate(tvm.ir.save_json(schedule.mod), target(nano))


@pytest.fixture(scope="module")
def bad(emulated_root: str, nano: BoardType, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("bad") / "bad.so"
    return candidates.compile_c(_BAD_SOURCE, path, "-target", str(nano.link_triple))


def spec(entry: str = "main") -> MeasureSpec:
    return MeasureSpec((SHAPE,) * 3, entry=entry, repeat=2, min_repeat_s=0.0, limits=LIMITS)


def test_it_says_what_it_is(board: BlockingSession) -> None:
    """The board is an aarch64 one, of the type it was started as, and runs programs of the Relax VM."""
    assert board.description.architecture == "aarch64"
    assert board.description.board_type == "jetson-nano"
    assert Engine.RELAX_VM in board.description.engines


def test_a_kernel_of_the_farms_builder_is_measured(board: BlockingSession, kernel: bytes) -> None:
    """What the builder cross-compiled runs there, is timed, and computes NumPy's product."""
    outcome = board.measure(spec(), kernel)
    assert outcome.status is Status.OK, outcome.message
    assert len(outcome.latency_s) == 2
    assert min(outcome.latency_s) > 0
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(SHAPE.shape).astype("float32") for _ in range(2))
    run = RunSpec(Engine.KERNEL, runs=1, limits=LIMITS)
    outcome, outputs = board.run_model(run, kernel, {"a": a, "b": b, "c": np.zeros_like(a)})
    assert outcome.status is Status.OK, outcome.message
    assert np.abs(list(outputs.values())[-1] - a @ b).max() < 1e-4


def test_a_whole_model_gives_the_references_output(board: BlockingSession, nano: BoardType) -> None:
    """A model compiled and linked for the Nano gives ONNX Runtime's output, within its type's tolerance."""
    entry = ZOO["tiny-cnn"]
    data = entry.build()
    ((name, shape),) = entry.input_shapes.items()
    compiled = compile_model(
        onnx.load_model_from_string(data), {name: shape}, target(nano), UNTUNED_PIPELINE, [], nano.link_triple
    )
    feed = {name: np.random.default_rng(1).standard_normal(shape).astype("float32")}
    reference = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, feed)
    outcome, outputs = board.run_model(RunSpec(Engine.RELAX_VM, runs=2, limits=LIMITS), compiled.library, feed)
    assert outcome.status is Status.OK, outcome.message
    comparison = compare(list(outputs.values()), reference)
    assert comparison.matches, comparison.reason


def test_an_artifact_is_verified_and_its_packages_run(
    board: BlockingSession, nano: BoardType, emulated_root: str, tmp_path: pathlib.Path
) -> None:
    """What is compiled for a Nano is right there, and so are its wheel and its C program, without the farm."""
    settings = Settings(home=str(tmp_path / "home"))
    opened = open_model("tiny-cnn")
    with Store(tmp_path / "farm.db") as store:
        artifact = make.make_artifact(make.CompileOrder(opened, nano), tmp_path / "artifact", settings, store)
    assert (artifact.manifest.architecture, artifact.manifest.simulated) == ("aarch64", False)
    held = HeldForModels(board.description, settings, board.run_model, board.pin)
    cases = checking.make_cases(opened, artifact.manifest, ())
    verified = checking.verify_artifact(artifact, held, opened.source, cases)
    assert verified.matches, verified.reason
    assert verified.simulated
    (_, inputs), *_ = cases
    ((wanted,),) = checking.run_reference(opened.source, cases[:1])
    np.savez(tmp_path / "x.npz", **inputs)

    wheel = write_package(artifact, WHEEL, tmp_path)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--only-binary=:all:"]
    command += ["--platform", "manylinux_2_27_aarch64", "--target", str(tmp_path / "site"), str(wheel)]
    subprocess.run(command, check=True, timeout=START_TIMEOUT_S)
    command = [f"{emulated_root}/usr/bin/board-python", "-m", "tiny_cnn", str(tmp_path / "x.npz")]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "y.npz")],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (given,) = np.load(tmp_path / "y.npz").values()
    assert compare([given], [wanted]).matches

    with tarfile.open(write_package(artifact, C, tmp_path, runtime=pathlib.Path(emulated_root))) as archive:
        archive.extractall(tmp_path / "c", filter="data")
    (root,) = (tmp_path / "c").iterdir()
    (tmp_path / "in").write_bytes(next(iter(inputs.values())).tobytes())
    command = ["qemu-aarch64-static", "-L", emulated_root, "bin/main", "lib/model.so"]
    command += [str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    raw = np.frombuffer((tmp_path / "out").read_bytes(), wanted.dtype).reshape(wanted.shape)
    assert compare([raw], [wanted]).matches
    assert "ms per inference" in done.stdout


def test_a_library_for_another_architecture_is_refused(board: BlockingSession, matmul: bytes) -> None:
    """What was built for x86-64 does not load there, and that is the candidate's fault."""
    machine = int.from_bytes(matmul[18:20], "little")
    if machine == 183:
        pytest.skip("this machine is an aarch64 one itself")
    assert board.measure(spec(), matmul).status is Status.LOAD_FAILED


def test_what_misbehaves_is_an_outcome_and_the_board_goes_on(board: BlockingSession, bad: bytes, kernel: bytes) -> None:
    """A crash differs from a leak under emulation as well, and each costs only itself."""
    outcome = board.measure(spec("segfault"), bad)
    assert (outcome.status, outcome.signal) == (Status.CRASHED, "SIGSEGV")
    assert board.measure(spec("reserves_memory"), bad).status is Status.OUT_OF_MEMORY
    assert board.measure(spec(), kernel).status is Status.OK


def test_it_has_the_clocks_of_a_nano(board: BlockingSession, kernel: bytes) -> None:
    """Its clocks are held by a clock helper that is emulated as well; what is measured at them says so."""
    assert board.description.simulated
    assert board.description.detected_type == "jetson-nano"
    held = board.pin(OperatingPoint(cpu_freq_hz={"a57": 921_600_000}))
    assert held.status is PinStatus.OK, held.message
    outcome = board.measure(spec(), kernel)
    assert outcome.status is Status.OK, outcome.message
    assert outcome.simulated
    assert outcome.point.cpu_freq_hz == {"a57": 921_600_000}
    assert board.unpin().status is PinStatus.OK


def test_executed_instructions_are_counted(emulated_root: str, nano: BoardType, tmp_path: pathlib.Path) -> None:
    """A million rounds of five instructions more are five million instructions more, a million of each kind."""
    if shutil.which("qemu-aarch64") is None and os.environ.get("FARM_REQUIRE_EMULATED_BOARD") != "1":
        pytest.skip("qemu-aarch64 is not installed")
    library = tmp_path / "spin.so"
    candidates.compile_c(_SPIN, library, "-target", str(nano.link_triple))
    command = [EMULATED_BOARD / "count", "--root", emulated_root, "--", "-c", _COUNTED, EMULATED_BOARD, library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    once, twice = np.reshape([int(word) for word in done.stdout.split()], (2, 3))
    assert twice - once == pytest.approx([5e6, 1e6, 1e6], rel=1e-3)
    assert twice[1] == 2_000_000
    assert json.loads(done.stderr.splitlines()[-1])["vector_fmas"] >= 3_000_000
