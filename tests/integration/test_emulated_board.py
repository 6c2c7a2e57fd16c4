"""An aarch64 agent under user-mode emulation, given what the farm itself cross-compiles for a Jetson Nano.

Without the emulator or the root the tests are skipped, saying what is missing; FARM_REQUIRE_EMULATED_BOARD=1, as CI
sets it, makes that a failure.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from device_agent.protocol import (
    Engine,
    Limits,
    MeasureSpec,
    OperatingPoint,
    PinStatus,
    RunSpec,
    Status,
    TensorSpec,
)
from farm.artifacts.compile import UNTUNED_PIPELINE, compile_model
from farm.artifacts.verify import compare
from farm.fleet.tracker import Tracker
from farm.inventory.board_types import BoardType, load_board_types
from farm.measure.session import BoardSession
from farm.models.zoo import ZOO
from farm.search import builder, tvm_env
from tests.integration import candidates
from tests.integration.conftest import PATIENCE_S, Agent, wait_until

tvm = tvm_env.load()

FOLDER = pathlib.Path(__file__).parents[2] / "deploy/emulated-board"
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


@pytest.fixture(scope="module")
def root() -> str:
    """The emulated board's root, if it is here."""
    checked = subprocess.run([FOLDER / "build", "--check"], capture_output=True, text=True, timeout=60, check=False)
    if checked.returncode != 0:
        reason = checked.stderr.strip().removeprefix("error: ") or "deploy/emulated-board/build --check failed"
        if os.environ.get("FARM_REQUIRE_EMULATED_BOARD") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return checked.stdout.strip()


@pytest.fixture(scope="module")
def agent(root: str, tracker: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An emulated agent, registered with the tracker."""
    folder = tmp_path_factory.mktemp("emulated")
    ready, log_path = folder / "ready.json", folder / "log"
    command = [str(FOLDER / "start"), "--root", root, "--", "--name", "emulated", "--ready-file", str(ready)]
    command += ["--tracker", f"{tracker.host}:{tracker.port}"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=os.environ | {"TMPDIR": str(folder)})
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, "the emulated agent", START_TIMEOUT_S)
        assert process.poll() is None, log_path.read_text()
        facts = json.loads(ready.read_text())
        assert facts["pid"] == process.pid
        yield Agent(process, facts["key"], facts["port"], folder, log_path)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, log_path.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def board(agent: Agent, tracker: Any) -> Iterator[BoardSession]:
    """A session of the farm's own client with the emulated board."""
    with BoardSession(Tracker(tracker.host, tracker.port), agent.key) as session:
        yield session


@pytest.fixture(scope="module")
def nano() -> BoardType:
    """The board type that is emulated."""
    return load_board_types()["jetson-nano"]


def target(board_type: BoardType) -> dict[str, Any]:
    """What TVM compiles for."""
    assert board_type.target is not None
    return board_type.target.to_tvm()


@pytest.fixture(scope="module")
def kernel(root: str, nano: BoardType) -> bytes:
    """A matmul that the farm's builder compiled for the Nano; it stands alone."""
    from tvm import te

    a, b = (te.placeholder(SHAPE.shape, name=name) for name in "AB")
    k = te.reduce_axis((0, candidates.SIZE), name="k")
    c = te.compute(SHAPE.shape, lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([a, b, c]))
    schedule.parallel(schedule.get_loops("C")[0])
    schedule.vectorize(schedule.split(schedule.get_loops("C")[1], [None, 4])[1])
    return builder.build_candidate(tvm.ir.save_json(schedule.mod), target(nano))


@pytest.fixture(scope="module")
def bad(root: str, nano: BoardType, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library for the Nano whose functions misbehave."""
    path = tmp_path_factory.mktemp("bad") / "bad.so"
    return candidates.compile_c(_BAD_SOURCE, path, "-target", str(nano.link_triple))


def spec(entry: str = "main") -> MeasureSpec:
    """How to measure a candidate that takes three matrices."""
    return MeasureSpec((SHAPE,) * 3, entry=entry, repeat=2, min_repeat_s=0.0, limits=LIMITS)


def test_it_says_what_it_is(board: BoardSession) -> None:
    """The board is an aarch64 one, of the type it was started as, and runs programs of the Relax VM."""
    assert board.description.architecture == "aarch64"
    assert board.description.board_type == "jetson-nano"
    assert Engine.RELAX_VM in board.description.engines


def test_a_kernel_of_the_farms_builder_is_measured(board: BoardSession, kernel: bytes) -> None:
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


def test_a_whole_model_gives_the_references_output(board: BoardSession, nano: BoardType) -> None:
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


def test_a_library_for_another_architecture_is_refused(board: BoardSession, matmul: bytes) -> None:
    """What was built for x86-64 does not load there, and that is the candidate's fault."""
    machine = int.from_bytes(matmul[18:20], "little")
    if machine == 183:
        pytest.skip("this machine is an aarch64 one itself")
    assert board.measure(spec(), matmul).status is Status.LOAD_FAILED


def test_what_misbehaves_is_an_outcome_and_the_board_goes_on(board: BoardSession, bad: bytes, kernel: bytes) -> None:
    """A crash is told from a leak under emulation as well, and each costs only itself."""
    outcome = board.measure(spec("segfault"), bad)
    assert (outcome.status, outcome.signal) == (Status.CRASHED, "SIGSEGV")
    assert board.measure(spec("reserves_memory"), bad).status is Status.OUT_OF_MEMORY
    assert board.measure(spec(), kernel).status is Status.OK


def test_it_has_the_clocks_of_a_nano(board: BoardSession, kernel: bytes) -> None:
    """Its clocks are held by a clock helper that is emulated as well; what is measured at them says so."""
    assert board.description.simulated
    assert board.description.detected_type == "jetson-nano"
    held = board.pin(OperatingPoint(cpu_freq_hz={"a57": 921_600_000}))
    assert held.status is PinStatus.OK, held.message
    outcome = board.measure(spec(), kernel)
    assert outcome.status is Status.OK, outcome.message
    assert outcome.simulated
    assert outcome.point is not None
    assert outcome.point.cpu_freq_hz == {"a57": 921_600_000}
    assert board.unpin().status is PinStatus.OK
