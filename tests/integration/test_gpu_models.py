"""Whole models compiled for a GPU, run by the agent of a virtual Nano, whose GPU this machine's processor plays."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
import subprocess
import zipfile
from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest

from device_agent.platforms import gpu
from device_agent.protocol import GPU, EnergySpec, Engine, Limits, OperatingPoint, PinStatus, RunSpec, Status
from farm.artifacts.compile import Compiled, compile_model
from farm.artifacts.manifest import GpuCode, Tensor
from farm.artifacts.package import WHEEL, write_package
from farm.artifacts.verify import compare
from farm.errors import CodeRefusedError
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.measure.answers import AgentAddress
from farm.measure.blocking import BlockingSession
from farm.models.zoo import ZOO
from farm.search import gpus, tvm_env
from farm.search.codegen import lowering
from farm.virtual import gpu_time
from tests.integration.conftest import Agent, wait_until
from tests.unit import artifacts

tvm_env.load()

SPEC = RunSpec(Engine.RELAX_VM, device=GPU, limits=Limits(timeout_s=60.0, threads=1))
VIRTUAL_NANO = ("--virtual", "jetson-nano", "--port", "9600", "--port-end", "9699", "--gpu-folder")
# Of one run of tiny-cnn; a worker of its own meets the driver's failure after as many as the first run makes.
LAUNCHES = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What a virtual board's agent needs for its GPU."""
    home = tmp_path_factory.mktemp("home")
    code.prepare(home)
    return code.find_folder(home)


def connect(agent: Agent) -> BlockingSession:
    """A session with a virtual Nano's agent."""
    return BlockingSession(AgentAddress("127.0.0.1", agent.port), f"jetson-nano/{agent.key.partition('/')[2]}")


@pytest.fixture
def board(folder: pathlib.Path, start_agent: Callable[..., Agent]) -> Iterator[BlockingSession]:
    options = ("--virtual", "jetson-nano", "--port", "9600", "--port-end", "9699", "--gpu-folder", str(folder))
    with connect(start_agent(*options)) as session:
        yield session


def compile_tiny(plan: code.GpuPlan) -> Compiled:
    """The zoo's tiny-cnn for a virtual Nano's GPU, with such limits."""
    entry = ZOO["tiny-cnn"]
    config = gpus.to_config("jetson-nano", plan, tvm_env.host_target(2), simulated=True)
    model = onnx.load_model_from_string(entry.build())
    return compile_model(model, entry.input_shapes, config, gpus.PIPELINE, [], None)


@pytest.fixture(scope="module")
def library() -> bytes:
    """tiny-cnn for a virtual Nano's GPU."""
    compiled = compile_tiny(code.plan_gpu(load_board_types()["jetson-nano"]))
    assert len(compiled.usages) == len(compiled.served) == compiled.by_rule == 8
    return compiled.library


def feed() -> dict[str, np.ndarray]:
    ((name, shape),) = ZOO["tiny-cnn"].input_shapes.items()
    return {name: np.random.default_rng(1).standard_normal(shape).astype("float32")}


def test_a_model_on_the_gpu_gives_the_references_output(board: BlockingSession, library: bytes) -> None:
    """Schedules by prediction through CUDA source, the plug-in and the driver give what ONNX Runtime gives."""
    assert board.description.engine_versions["cuda"] == "10.2 sm_53"
    inputs = feed()
    outcome, outputs = board.run_model(SPEC, library, inputs)
    assert outcome.status is Status.OK, outcome.message
    assert outcome.simulated
    assert outcome.before.gpu_load == 0.0  # it was idle
    assert outcome.before.gpu_freq_hz
    session = onnxruntime.InferenceSession(ZOO["tiny-cnn"].build(), providers=["CPUExecutionProvider"])
    comparison = compare(list(outputs.values()), session.run(None, inputs))
    assert comparison.matches, comparison.reason


def test_a_model_whose_weights_are_float16(board: BlockingSession) -> None:
    """Inputs, weights and outputs are float16: the model computes in it without being asked to."""
    entry = ZOO["tiny-cnn"]
    model = onnx.load_model_from_string(entry.build())
    for each in model.graph.initializer:
        if each.data_type == onnx.TensorProto.FLOAT:
            each.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(each).astype("float16"), each.name))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    inputs = {name: array.astype("float16") for name, array in feed().items()}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = session.run(None, inputs)
    plan = code.plan_gpu(load_board_types()["jetson-nano"])
    config = gpus.to_config("jetson-nano", plan, tvm_env.host_target(2), simulated=True)
    compiled = compile_model(model, entry.input_shapes, config, gpus.PIPELINE, [], None)
    assert compiled.workloads == compiled.by_rule == 8
    outcome, outputs = board.run_model(SPEC, compiled.library, inputs)
    assert outcome.status is Status.OK, outcome.message
    assert [array.dtype for array in outputs.values()] == ["float16"]
    comparison = compare(list(outputs.values()), wanted)
    assert comparison.matches, comparison.reason


@pytest.mark.parametrize("suffix", ["", "-fp16"])
@pytest.mark.parametrize("name", ["jetson-tx2", "jetson-agx-xavier", "jetson-orin-nano-8gb"])
def test_a_model_compiles_for_every_generation(name: str, suffix: str) -> None:
    """PTX that `ptxas` takes for the type's GPU, in both precisions; a family schedules all functions."""
    board_type = load_board_types()[name]
    assert board_type.target is not None
    config = gpus.to_config(name, code.plan_gpu(board_type), board_type.target.to_tvm(), simulated=False)
    entry = ZOO["tiny-cnn"]
    model = onnx.load_model_from_string(entry.build())
    compiled = compile_model(model, entry.input_shapes, config, gpus.PIPELINE + suffix, [], board_type.link_triple)
    assert compiled.workloads == compiled.by_rule == len(compiled.usages) >= 8


def test_gpu_clocks_change_time_and_power(
    folder: pathlib.Path, start_agent: Callable[..., Agent], library: bytes
) -> None:
    """A twelfth of the GPU's clock takes longer and draws less; in another session the same again, to the digit."""
    options = ("--virtual", "jetson-nano", "--port", "9600", "--port-end", "9699", "--gpu-folder", str(folder))
    agent = start_agent(*options)
    spec = dataclasses.replace(SPEC, runs=3, energy=EnergySpec(min_updates=2, limit_s=3.0, idle_s=0.0))
    seen = []
    for _ in range(2):
        with connect(agent) as board:
            for gpu_hz in (921_600_000, 76_800_000):
                report = board.pin(OperatingPoint(cpu_freq_hz={"a57": 1_479_000_000}, gpu_freq_hz=gpu_hz))
                assert report.status is PinStatus.OK, report.message
                outcome, _ = board.run_model(spec, library, feed())
                assert outcome.status is Status.OK, outcome.message
                watts = {rail.rail: rail.power_w for rail in outcome.energy.busy.rails}["POM_5V_GPU"]
                seen.append((statistics.median(outcome.latency_s), watts))
    (fast_s, fast_w), (slow_s, slow_w) = seen[:2]
    # At the high clock the processor, which starts kernels, takes longer than these do.
    assert 1.05 < slow_s / fast_s < 12.0
    assert slow_w < fast_w
    assert seen[2:] == seen[:2]


@pytest.mark.parametrize(
    ("failure", "status", "name"),
    [
        ("memory=4096", Status.OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"),
        ("fail=cuModuleLoadDataEx:222", Status.LOAD_FAILED, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
        ("fail=cuLaunchKernel:700", Status.CRASHED, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("fail=cuInit:100", Status.FARM_ERROR, "CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_a_failure_costs_one_run(
    folder: pathlib.Path,
    start_agent: Callable[..., Agent],
    library: bytes,
    monkeypatch: pytest.MonkeyPatch,
    failure: str,
    status: Status,
    name: str,
) -> None:
    """Each is an outcome that says what happened; the next worker starts with a context of its own."""
    monkeypatch.setenv(gpu_time.VARIABLE, failure)
    options = ("--virtual", "jetson-nano", "--port", "9600", "--port-end", "9699", "--gpu-folder", str(folder))
    with connect(start_agent(*options)) as session:
        for _ in range(2):
            outcome, _ = session.run_model(SPEC, library, feed())
            assert outcome.status is status, outcome.message
            assert name in outcome.message
            assert ("another worker" in outcome.message) == (status is Status.CRASHED)
        if status is Status.FARM_ERROR:
            assert any(name in note for note in session.description.notes)


def count_workers(log: pathlib.Path) -> int:
    """How many processes have asked a driver that writes down its calls for a context."""
    return log.read_text().count("cuDevicePrimaryCtxRetain")


def find_worker(agent: Agent) -> psutil.Process:
    """The one process that an agent's session has kept."""
    (worker,) = [
        each
        for each in psutil.Process(agent.process.pid).children(recursive=True)
        if any("libcuda_virtual" in (mapped.path or "") for mapped in each.memory_maps())
    ]
    return worker


def test_a_worker_is_kept_while_all_goes_well(
    folder: pathlib.Path,
    start_agent: Callable[..., Agent],
    library: bytes,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    """The driver is asked for one context by all runs of a session, despite the threads and address space it takes for
    itself; limits are each run's own, and a worker that was killed while it waited is blameless. Its session takes
    it along.
    """
    log = tmp_path / "calls"
    monkeypatch.setenv(gpu_time.VARIABLE, f"log={log}")
    agent = start_agent(*VIRTUAL_NANO, str(folder))
    with connect(agent) as session:
        described = count_workers(log)
        first, outputs = session.run_model(SPEC, library, feed())
        assert first.status is Status.OK, first.message
        again, same = session.run_model(
            dataclasses.replace(SPEC, limits=Limits(timeout_s=50.0, threads=2)), library, feed()
        )
        assert again.status is Status.OK, again.message
        assert count_workers(log) == described + 1
        assert all(np.array_equal(outputs[name], same[name]) for name in outputs)

        tight = dataclasses.replace(SPEC, limits=Limits(timeout_s=60.0, memory_bytes=1 << 16, threads=1))
        refused, _ = session.run_model(tight, library, feed())
        assert refused.status in (Status.OUT_OF_MEMORY, Status.LOAD_FAILED), refused.message
        assert count_workers(log) == described + 1
        after, _ = session.run_model(SPEC, library, feed())
        assert after.status is Status.OK, after.message
        assert count_workers(log) == described + 2

        worker = find_worker(agent)
        assert worker.memory_info().vms > 24 << 30  # reserved for the context and for the first kernel
        worker.kill()
        wait_until(lambda: worker.status() == psutil.STATUS_ZOMBIE, "the worker's death")
        replaced, _ = session.run_model(SPEC, library, feed())
        assert replaced.status is Status.OK, replaced.message
        assert count_workers(log) == described + 3
        worker = find_worker(agent)
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the session's worker")


@pytest.mark.parametrize(
    ("failure", "status", "name"),
    [
        ("cuLaunchKernel:700", Status.CRASHED, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("cuLaunchKernel:702", Status.RUN_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT"),
        ("cuLaunchKernel:2", Status.OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuLaunchKernel:-1", Status.RUN_TIMEOUT, "not finished after"),
    ],
)
def test_a_kept_worker_is_given_up_after_a_failure(
    folder: pathlib.Path,
    start_agent: Callable[..., Agent],
    library: bytes,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    failure: str,
    status: Status,
    name: str,
) -> None:
    """The run in which it happens says so, and the next has another worker."""
    log = tmp_path / "calls"
    monkeypatch.setenv(gpu_time.VARIABLE, f"log={log};fail={failure}:{LAUNCHES}")
    with connect(start_agent(*VIRTUAL_NANO, str(folder))) as session:
        described = count_workers(log)
        seen = []
        for timeout_s in (60.0, 3.0, 60.0):
            spec = dataclasses.replace(SPEC, limits=Limits(timeout_s=timeout_s, threads=1))
            outcome, _ = session.run_model(spec, library, feed())
            seen.append((outcome.status, outcome.message))
        assert [each for each, _ in seen] == [Status.OK, status, Status.OK], seen
        assert name in seen[1][1]
        assert count_workers(log) == described + 2


def test_a_driver_that_never_answers_is_no_candidates_fault(
    folder: pathlib.Path, start_agent: Callable[..., Agent], library: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it was loaded."""
    monkeypatch.setenv(gpu_time.VARIABLE, "fail=cuDevicePrimaryCtxRetain:-1")
    with connect(start_agent(*VIRTUAL_NANO, str(folder))) as session:
        spec = dataclasses.replace(SPEC, limits=Limits(timeout_s=1.0, threads=1))
        outcome, _ = session.run_model(spec, library, feed())
        assert outcome.status is Status.FARM_ERROR
        assert "the GPU's driver does not answer" in outcome.message


def test_a_board_whose_agent_has_no_plug_in_says_so(start_agent: Callable[..., Agent], library: bytes) -> None:
    """The work is refused, and no code is blamed."""
    with connect(start_agent("--virtual", "jetson-nano", "--port", "9600", "--port-end", "9699")) as session:
        assert "cuda" not in session.description.engine_versions
        outcome, _ = session.run_model(SPEC, library, feed())
        assert outcome.status is Status.FARM_ERROR
        assert "serves no GPU" in outcome.message


def test_code_that_takes_too_much_is_refused_before_it_travels() -> None:
    """A kernel beyond a limit of the GPU is named where the model is compiled."""
    plan = code.plan_gpu(load_board_types()["jetson-nano"])
    small = code.GpuPlan(plan.arch, plan.newest_ptx, code.PtxLimits(1024, 49152, 1024), plan.memory_bytes)
    with pytest.raises(CodeRefusedError, match=r"the kernel \w+ needs \d+ registers per block; the GPU has 1024"):
        compile_tiny(small)


def test_a_wheel_runs_where_nothing_but_tvms_runtime_is(
    emulated_root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A model for the GPU of a Nano, packed, unpacked and run in the stock aarch64 runtime under emulation; the driver
    is the stand-in, which takes machine code in the place of PTX.
    """
    nano = load_board_types()["jetson-nano"]
    assert nano.target is not None
    assert nano.link_triple is not None
    plan = code.plan_gpu(nano)

    made = lowering.make_code
    monkeypatch.setattr(lowering, "make_code", lambda source, plan, _: made(source, plan, True))
    entry = ZOO["tiny-cnn"]
    config = gpus.to_config("jetson-nano", plan, nano.target.to_tvm(), simulated=False)
    model = onnx.load_model_from_string(entry.build())
    library = compile_model(model, entry.input_shapes, config, gpus.PIPELINE, [], nano.link_triple).library
    ((name, shape),) = entry.input_shapes.items()
    used = GpuCode(arch="sm_53", ptx="6.5", kernels=8, registers=1, shared_bytes=0, threads=1, spilled_bytes=0)
    inputs = (Tensor(name=name, shape=shape, dtype="float32"),)
    artifact = artifacts.write(
        tmp_path / "art", library, gpu=used, inputs=inputs, verified=artifacts.verified(library), pipeline=gpus.PIPELINE
    )
    wheel = write_package(artifact, WHEEL, tmp_path)
    assert wheel.name.endswith("-py3-none-manylinux_2_27_aarch64.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "tiny_cnn/libtvm_farm_cuda.so" in names
    assert "tiny_cnn/libcuda_virtual.so" not in names
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    np.savez(tmp_path / "x.npz", **feed())
    command = [f"{emulated_root}/usr/bin/board-python", "-m", "tiny_cnn", str(tmp_path / "x.npz")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "QEMU_CPU": "cortex-a57"}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--out", str(tmp_path / "y.npz")],
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    done = run()
    assert done.returncode == 1
    assert "no CUDA driver" in done.stderr
    done = run(**{gpu.DRIVER_VARIABLE: str(code.build_driver(tmp_path, nano.link_triple))})
    assert done.returncode == 0, done.stderr
    session = onnxruntime.InferenceSession(entry.build(), providers=["CPUExecutionProvider"])
    comparison = compare(list(np.load(tmp_path / "y.npz").values()), session.run(None, feed()))
    assert comparison.matches, comparison.reason
