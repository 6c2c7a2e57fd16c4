"""A board's aarch64 code in the emulator: same results as native, exact counts, no harm to other processes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from device_agent import protocol
from device_agent.board_types import load_board_types
from device_agent.protocol import Engine, Limits, MeasureSpec, OperatingPoint, PinStatus, RunSpec, Status, TensorSpec
from farm import emulation, settings
from farm.artifacts.compile import Compiled, compile_model
from farm.errors import UnavailableError
from farm.measure.answers import AgentAddress
from farm.measure.blocking import BlockingSession
from farm.virtual.agent import VirtualRig
from farm.virtual.emulated.client import Emulation, Placed, ProgramError
from farm.virtual.emulated.pipeline import load_core
from farm.virtual.emulated.runs import Emulator, Execution, collect
from tests import together
from tests.integration import candidates
from tests.integration.conftest import Agent, wait_until

CORE = load_core("cortex-a57") or {}
TRIPLE = "aarch64-linux-gnu.2.27"
CAP = 50_000_000
_BAD = r"""
#define FUNCTION(name) int __tvm_ffi_##name(void *self, void *arguments, int count, void *result)
FUNCTION(writes_nowhere) { *(volatile int *)16 = 1; return 0; }
FUNCTION(is_undefined) { __asm__ volatile(".word 0"); return 0; }
FUNCTION(loops) { for (;;) __asm__ volatile(""); }
FUNCTION(fails) { return -1; }
FUNCTION(recurses) {
  volatile char frame[1 << 16];
  frame[0] = 1;
  return __tvm_ffi_recurses(self, (void *)frame, count, result) + frame[0];
}
FUNCTION(jumps) { return ((int (*)(void))0x123456789)(); }
"""
_MATMUL = r"""
typedef struct { void *data; int device[2]; int ndim; int dtype; long *shape, *strides; unsigned long offset; } Tensor;
typedef struct { int index, pad; Tensor *value; } Any;
int __tvm_ffi_matmul(void *self, Any *args, int count, void *result) {
  float *a = args[0].value->data, *b = args[1].value->data, *restrict c = args[2].value->data;
  for (int i = 0; i < 64; i++) {
    for (int j = 0; j < 64; j++) c[64 * i + j] = 0;
    for (int k = 0; k < 64; k++)
      for (int j = 0; j < 64; j++) c[64 * i + j] += a[64 * i + k] * b[64 * k + j];
  }
  return 0;
}
"""


@pytest.fixture(scope="module")
def natives(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The emulator's own parts, as the farm builds them."""
    home = tmp_path_factory.mktemp("home")
    together.share_what_is_built(home)
    folder = emulation.prepare(dataclasses.replace(settings.load(), home=str(home)))
    assert folder is not None
    return folder


@pytest.fixture(scope="module")
def emulator(natives: pathlib.Path) -> Iterator[Emulator]:
    """The emulator's process, as an agent starts it."""
    with VirtualRig() as rig:
        types = load_board_types()
        found = rig.start_emulator(natives, types["jetson-nano"].clusters)
        assert found is not None
        strange = dataclasses.replace(types["jetson-nano"].clusters[0], core="zen")
        assert rig.start_emulator(natives, [strange]) is None  # its pipes are not known
        yield found


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[bytes, bytes, list[tuple[tuple[int, ...], str]]]]:
    """By workload of a small model of all kinds: its schedule's aarch64 code, this machine's plain code, arguments."""
    import tvm.s_tir.meta_schedule as ms

    from farm.inventory.board_types import require_board_type
    from farm.models.inputs import read_inputs, resolve_inputs
    from farm.models.source import resolve_model
    from farm.search import tvm_env
    from farm.search.codegen import lowering
    from farm.search.traces import find_default
    from farm.search.tvm_env import host_target, make_target
    from farm.search.workloads import prepare_model

    tvm = tvm_env.load()
    nano = require_board_type("jetson-nano")
    target = nano.target.to_tvm()
    model = resolve_model("tiny-cnn").load()
    shapes = {each.name: each.static_shape for each in resolve_inputs(read_inputs(model), {})}
    found = {}
    for workload in prepare_model(model, shapes, target, nano.pipeline).workloads:
        entry = ms.database.MemoryDatabase().commit_workload(tvm.ir.load_json(workload.module_json))
        default = find_default(workload, entry, make_target(target))
        schedule = default.candidate.sch.mod if default and default.candidate else entry.mod
        arguments = [(tuple(map(int, each[0])), str(each[1])) for each in map(_describe, workload.arguments)]
        plain = entry.mod.with_attr("target", None) if hasattr(entry.mod, "with_attr") else entry.mod
        found[workload.name] = (
            lowering.build_candidate(tvm.ir.save_json(schedule), target, standalone=True),
            lowering.build_candidate(tvm.ir.save_json(plain), host_target(1), standalone=True),
            arguments,
        )
    return found


def _describe(argument: Any) -> tuple[Any, Any]:
    return (argument.shape, argument.dtype) if hasattr(argument, "shape") else (argument[0], argument[1])


def fill(emulation_: Emulation, arguments: list[tuple[tuple[int, ...], str]], seed: int = 0) -> list[Placed]:
    random = np.random.default_rng(seed)
    placed = [emulation_.place(shape, dtype) for shape, dtype in arguments]
    for each in placed[:-1]:
        each.array[...] = random.standard_normal(each.shape)
    return placed


def test_a_home_that_is_a_file_is_refused(tmp_path: pathlib.Path) -> None:
    """Its parts have no place there, which is said with what to do."""
    (home := tmp_path / "home").write_text("")
    with pytest.raises(UnavailableError, match=r"cannot create the folder of the emulator's parts.*Not a directory"):
        emulation.prepare(dataclasses.replace(settings.load(), home=str(home)))


def test_it_computes_what_this_machine_computes(
    emulator: Emulator, built: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """Over all kinds of functions of a model: the board's schedule in the emulator against plain code here."""
    import tvm.runtime

    for number, (name, (library, plain, arguments)) in enumerate(built.items()):
        with emulator.open(library, 16 << 20, 64 << 20) as opened:
            tensors = fill(opened, arguments)
            here = [tvm.runtime.tensor(each.array.copy(), tvm.runtime.cpu()) for each in tensors]
            opened.call("main", tensors, CAP)
            path = tmp_path / f"{number}.so"
            path.write_bytes(plain)
            tvm.runtime.load_module(str(path))["main"](*here)
            np.testing.assert_allclose(tensors[-1].array, here[-1].numpy(), rtol=2e-5, atol=2e-6, err_msg=name)


def test_products_of_bytes_are_exact_by_any_plan(emulator: Emulator) -> None:
    """Also with the extremes of bytes, in panels or not: the best predicted plan and some that are drawn."""
    from farm.inventory.board_types import require_board_type
    from farm.search import cores, tvm_env
    from farm.search.codegen import lowering
    from farm.search.families.rule import read_outlook
    from farm.search.graph import dots
    from tests.integration.test_emulated_families import list_products_of_bytes

    tvm = tvm_env.load()
    nano = require_board_type("jetson-nano").target
    target, draw = nano.to_tvm(), random.Random(0)
    dots.register_all()
    for case, function, arguments, wanted in list_products_of_bytes(target):
        module = tvm.IRModule({"main": function})
        outlook = read_outlook(module, cores.core_of(target))
        best, *others = [plan for _, plan in outlook.plans()]
        for plan in (best, *draw.sample(others, min(len(others), 4))):
            schedule = tvm.s_tir.Schedule(module)
            outlook.apply(schedule, plan)
            library = lowering.build_candidate(tvm.ir.save_json(schedule.mod), target, standalone=True)
            with emulator.open(library, 1 << 20, 1 << 20) as opened:
                shapes = [*((each.shape, "int8") for each in arguments), (wanted.shape, "int32")]
                tensors = [opened.place(shape, dtype) for shape, dtype in shapes]
                for tensor, values in zip(tensors, arguments, strict=False):
                    tensor.array[...] = values
                tensors[-1].array[...] = -1
                opened.call("main", tensors, CAP)
                np.testing.assert_array_equal(tensors[-1].array, wanted, f"{case} {plan}")


def test_what_it_costs_is_the_same_every_time(emulator: Emulator, built: dict[str, Any]) -> None:
    """Instructions, cycles and lines, to the last digit, for any program; threads share out a region's work."""
    library, _, arguments = next(iter(built.values()))
    seen = []
    for seed in (0, 1):
        with emulator.open(library, 16 << 20, 64 << 20) as opened:
            seen.append(opened.call("main", fill(opened, arguments, seed), CAP, warm=(0,)))
    assert seen[0] == seen[1]
    with dataclasses.replace(emulator, tasks=4).open(library, 16 << 20, 64 << 20) as opened:
        shared = opened.call("main", fill(opened, arguments), CAP, warm=(0,))
    longest = max(segment[0] for segment in shared.segments[1:])
    whole = max(segment[0] for segment in seen[0].segments)
    assert whole / 4 <= longest < 0.6 * whole


def test_nothing_beats_the_multiply_adds(emulator: Emulator, tmp_path: pathlib.Path) -> None:
    """A matrix product of 64 x 64 x 64 takes the core no less than its 65,536 FMAs by four."""
    library = cross_compile(_MATMUL, tmp_path / "matmul.so", "-O3", "-mcpu=cortex_a57")
    with emulator.open(library, 1 << 20, 1 << 20) as opened:
        tensors = fill(opened, [((64, 64), "float32")] * 3)
        run = opened.call("matmul", tensors, CAP, warm=(0, 1, 2))
        np.testing.assert_allclose(tensors[2].array, tensors[0].array @ tensors[1].array, rtol=1e-3, atol=1e-4)
    assert sum(segment[0] for segment in run.segments) >= 64**3 / 4


def cross_compile(source: str, path: pathlib.Path, *options: str) -> bytes:
    path.with_suffix(".c").write_text(source)
    command = [*candidates._ZIG_CC, "-w", "-shared", "-fPIC", "-target", TRIPLE, *options]
    subprocess.run([*command, "-o", str(path), str(path.with_suffix(".c"))], check=True, timeout=240)
    return path.read_bytes()


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return cross_compile(_BAD, tmp_path_factory.mktemp("bad") / "bad.so")


@pytest.mark.parametrize(
    ("entry", "kind", "said"),
    [
        ("writes_nowhere", "fault", "write"),
        ("is_undefined", "fault", "instruction"),
        ("loops", "cap", "5,000,000"),
        ("fails", "fault", "returned"),
        ("recurses", "fault", "at 0x"),
        ("jumps", "fault", "fetch"),
        ("is_not_there", "missing", "is_not_there"),
    ],
)
def test_what_misbehaves_is_an_outcome(emulator: Emulator, bad: bytes, entry: str, kind: str, said: str) -> None:
    """It ends the call and nothing else: the same machine answers the next one, with the same end."""
    with emulator.open(bad, 4096, 1 << 20) as opened:
        for _ in range(2):
            with pytest.raises(ProgramError, match=said) as caught:
                opened.call(entry, [], 5_000_000)
            assert caught.value.kind == kind


def test_what_the_board_lacks_is_named(emulator: Emulator, tmp_path: pathlib.Path) -> None:
    """A library that needs a system is refused by the name of what it needs; one for this machine is none."""
    source = "int getpid(void);\nint __tvm_ffi_main(void) { return getpid(); }\n"
    library = cross_compile(source, tmp_path / "needs.so")
    with pytest.raises(Exception, match="getpid"), emulator.open(library, 4096, 4096):
        pass
    native = candidates.compile_c("int __tvm_ffi_main(void) { return 0; }\n", tmp_path / "native.so")
    with pytest.raises(Exception, match="aarch64"), emulator.open(native, 4096, 4096):
        pass


def test_a_client_that_leaves_takes_its_machine_along(emulator: Emulator, bad: bytes, tmp_path: pathlib.Path) -> None:
    """In the middle of a call that would never end."""
    own = psutil.Process()
    [server] = [
        each
        for each in own.children()
        if each.status() != psutil.STATUS_ZOMBIE  # other tests' processes that are not reaped yet
        and {"farm.virtual.emulated", str(emulator.socket)} <= set(each.cmdline())
    ]
    before = set(server.children())  # those of other clients may be ending
    script = (
        "import json, pathlib, sys; from farm.virtual.emulated.runs import Emulator;"
        "socket, core, library = sys.argv[1:];"
        "emulator = Emulator(pathlib.Path(socket), json.loads(core));"
        "opened = emulator.open(pathlib.Path(library).read_bytes(), 4096, 4096);"
        "print('here', flush=True); opened.call('loops', [], 10**18)"
    )
    path = tmp_path / "bad.so"
    path.write_bytes(bad)
    command = [own.exe(), "-c", script, str(emulator.socket), json.dumps(dict(emulator.core)), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout.readline() == b"here\n"
        wait_until(lambda: bool(set(server.children()) - before), "its machine")
        client.kill()
    wait_until(lambda: not set(server.children()) - before, "its machine's end")


# On a virtual board


@pytest.fixture(scope="module")
def nano(start_agent: Callable[..., Agent], natives: pathlib.Path) -> Agent:
    where = ("--port", "9500", "--port-end", "9599")
    return start_agent("--virtual", "jetson-nano", *where, "--emulator-folder", str(natives))


@pytest.fixture
def board(nano: Agent) -> Iterator[BlockingSession]:
    with BlockingSession(AgentAddress("127.0.0.1", nano.port), f"jetson-nano/{nano.key.partition('/')[2]}") as session:
        yield session


def measure(board: BlockingSession, built: dict[str, Any], freq_hz: int = 1_428_000_000) -> protocol.Outcome:
    """Time the model's first function with four threads at a clock."""
    assert board.pin(OperatingPoint(cpu_freq_hz={"a57": freq_hz})).status is PinStatus.OK
    library, _, arguments = next(iter(built.values()))
    specs = tuple(TensorSpec(*each) for each in arguments)
    return board.measure(MeasureSpec(specs, repeat=5, limits=Limits(timeout_s=30.0, threads=4)), library)


def test_a_virtual_board_runs_its_own_code(board: BlockingSession, built: dict[str, Any]) -> None:
    """It says what it is; its latency goes with the clock, and is what its core needs."""
    assert (board.description.architecture, board.description.simulated) == ("aarch64", True)
    assert Engine.ONNXRUNTIME not in board.description.engines
    slow, fast = (measure(board, built, freq_hz) for freq_hz in (614_400_000, 1_224_000_000))
    assert slow.status is fast.status is Status.OK, (slow.message, fast.message)
    assert fast.simulated
    ratio = np.median(slow.latency_s) / np.median(fast.latency_s)
    assert 0.98 * 1224 / 614.4 < ratio < 2.2  # memory is slower at low clocks, too


def test_figures_are_the_same_on_two_boards(
    board: BlockingSession,
    built: dict[str, Any],
    start_agent: Callable[..., Agent],
    natives: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    """To the digit, also without any earlier calibration: nothing of this machine is in them."""
    options = ("--virtual", "jetson-nano", "--port", "9500", "--port-end", "9599", "--emulator-folder", str(natives))
    other = start_agent(*options, "--work-folder", str(tmp_path / "work"))
    seen = []
    for port, name in ((other.port, other.key), (other.port, other.key)):
        with BlockingSession(AgentAddress("127.0.0.1", port), f"jetson-nano/{name.partition('/')[2]}") as session:
            seen.append(measure(session, built).latency_s)
    assert seen[0] == seen[1] == measure(board, built).latency_s


def compile_small_model(
    board_type: str, name: str, weights: str, in_8_bits: bool
) -> tuple[str, Compiled, dict[str, Any], Any]:
    """The board type's name, a model of the zoo's compiled for it, inputs, and ONNX Runtime's only output for these."""
    import onnxruntime

    from farm.artifacts import given_model
    from farm.inventory.board_types import require_board_type
    from farm.models import quantise
    from farm.models.inputs import make_inputs, read_inputs, resolve_inputs
    from farm.models.source import resolve_model
    from farm.search.graph.pipelines import store_weights

    kind = store_weights(require_board_type(board_type), weights)
    assert kind.target is not None
    source = resolve_model(name)
    inputs = resolve_inputs(read_inputs(source.load()), {})
    if in_8_bits:
        data = quantise.quantise(source, given_model.read_calibration("random", inputs, 4)).onnx_bytes
        source = dataclasses.replace(source, onnx_bytes=data)
    shapes = {each.name: each.static_shape for each in inputs}
    compiled = compile_model(source.load(), shapes, kind.target.to_tvm(), kind.pipeline, (), kind.link_triple)
    values = dict(make_inputs(inputs, 0))
    [wanted] = onnxruntime.InferenceSession(source.onnx_bytes).run(None, values)
    return board_type, compiled, values, wanted


@pytest.mark.parametrize(("weights", "in_8_bits", "tolerance"), [("fp16", False, 0.01), ("float32", True, 0.05)])
def test_a_later_core_has_its_own_instructions(
    natives: pathlib.Path, weights: str, in_8_bits: bool, tolerance: float
) -> None:
    """A Raspberry Pi 5 computes in half precision and multiplies four bytes at a time, which a Nano does not know."""
    board_type, compiled, values, wanted = compile_small_model("raspberry-pi-5", "tiny-cnn", weights, in_8_bits)
    with VirtualRig() as rig:
        runs = [rig.start_emulator(natives, load_board_types()[name].clusters) for name in (board_type, "jetson-nano")]
        own, other = (
            Execution(
                dataclasses.replace(each, tasks=1, kept=None), RunSpec(Engine.RELAX_VM), compiled.library, [values]
            )
            for each in runs
            if each is not None
        )
        [got] = collect(own.run())
        assert np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max()
        with pytest.raises((ProgramError, RuntimeError), match="an undefined instruction"):
            other.run()


@pytest.mark.parametrize(
    ("name", "weights", "in_8_bits", "tolerance"),
    [
        ("tiny-cnn", "float32", False, 1e-4),
        ("tiny-cnn", "float32", True, 0.05),  # steps of the outputs' scale
        ("mlp", "bf16-all", False, 0.02),  # 8 bits of mantissa
    ],
)
def test_a_whole_model_runs_in_the_emulator(
    board: BlockingSession, name: str, weights: str, in_8_bits: bool, tolerance: float
) -> None:
    """TVM's virtual machine here, each of its functions there: outputs are right, also in 8 bits, with weights in 16,
    and estimated as their sum.
    """
    _, compiled, values, wanted = compile_small_model("jetson-nano", name, weights, in_8_bits)
    outcome, outputs = board.run_model(
        RunSpec(Engine.RELAX_VM, runs=3, limits=Limits(threads=4)), compiled.library, values
    )
    assert outcome.status is Status.OK, outcome.message
    [got] = outputs.values()
    assert np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max()
    assert 10e-6 < float(np.median(outcome.latency_s)) < 1e-3
    stacked = {key: np.stack([each, np.zeros_like(each), each]) for key, each in values.items()}
    spec = RunSpec(Engine.RELAX_VM, stacked=3, limits=Limits(threads=4))
    outcome, outputs = board.run_model(spec, compiled.library, stacked)
    assert (outcome.status, len(outcome.latency_s)) == (Status.OK, 3), outcome.message
    [(first, other, last)] = outputs.values()
    np.testing.assert_array_equal(np.stack([first, last]), np.stack([got, got]))
    assert not np.array_equal(first, other)
    if weights != "float32":
        assert any(dtype == "bfloat16" for each in compiled.served for _, dtype in each.workload.arguments)
