"""Build the folder `gpu-bundle`: kernels and models for a Nano's GPU, and all that runs and checks them elsewhere.

`make gpu-bundle` builds it without a GPU. Programs hold x86-64 code and PTX; with `--virtual` they hold the machine
code that the stand-in for the CUDA driver emulates, which comes along. The build emulates every program once: a wrong
result ends it, and the latency is the estimate beside the measured one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import math
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from device_agent import board_types as agent_types
from device_agent.protocol import GPU, Engine, RunSpec, Status
from device_agent.worker import engines
from farm.artifacts.compile import compile_model
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.models.zoo import ZOO
from farm.provision import bundle_build, interpreters, wheels
from farm.provision.layout import read_resource
from farm.search import gpus, tvm_env
from farm.search.codegen import lowering
from farm.virtual import gpu_time
from tests.gpu import check
from tests.integration import test_gpu_families as families

tvm = tvm_env.load()
tvm_env.load_compiler()
from tvm import te  # noqa: E402  TVM is found by then
from tvm.s_tir.meta_schedule.arg_info import ArgInfo  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]
BOARD = "jetson-nano"
MODELS = ("squeezenet1.1", "mobilenet_v2", "resnet18", "resnet50", "yolov4-tiny")
TRIPLE = f"x86_64-linux-gnu.2.{wheels.LEAST_GLIBC_MINOR}"
# Any x86-64 processor.
HOST = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64", "num-cores": 1}
MOST_BYTES = 60_000_000
# The machine with the GPU has NumPy; the others serve no GPU.
_LEFT_OUT = ("ml-dtypes", "numpy", "prometheus-client")
# A prime. Models are well-conditioned: resnet50's output changes by 3e-7 with the order of sums.
_CYCLE = 1021
# Largest error of kernels in float32 and float16, relative to the largest value of the reference.
TOLERANCES = {"": 1e-4, families.HALF: 1e-2}
# Layers propagate float16's rounding: yolov4-tiny is off by 1.9 % on the virtual GPU.
_HALF_MODEL = 5e-2

# Per faulty kernel: statements at its begin, the elements of its workspace, and the status of its run.
FAULTS: dict[str, tuple[str, int, Status]] = {
    "good": ("", 0, Status.OK),
    "write far out of bounds": ("B_ptr[1LL << 36] = 1.0f;", 0, Status.CRASHED),
    "endless": ("for (volatile float* at = B_ptr; at[0] != 1e30f;) at[0] = 0.0f;", 0, Status.RUN_TIMEOUT),
    "workspace of 1 TiB": ("", 1 << 38, Status.OUT_OF_MEMORY),
    "corrupt code": ("corrupt", 0, Status.LOAD_FAILED),
    "write past the end": ("B_ptr[1024 + threadIdx.x % 8] = 1.0f;", 0, Status.CRASHED),
}


def make_config(*, simulated: bool) -> dict[str, Any]:
    """The target of a Nano's GPU beside any x86-64 processor."""
    return gpus.to_config(BOARD, code.plan_gpu(load_board_types()[BOARD]), HOST, simulated=simulated)


def make_fault(statements: str, workspace: int, *, simulated: bool) -> bytes:
    """Build B = A + 1 over 1024 numbers, with a fault."""
    a = te.placeholder((1024,), "float32", "A")
    held = te.compute((workspace,), lambda i: a[i % 1024], "W") if workspace else a
    schedule = tvm.s_tir.Schedule(te.create_prim_func([a, te.compute((1024,), lambda i: held[i] + 1.0, "B")]))
    for name in ["W", "B"] if workspace else ["B"]:
        (loop,) = schedule.get_loops(schedule.get_sblock(name))
        for part, thread in zip(schedule.split(loop, [None, 256]), ("blockIdx.x", "threadIdx.x"), strict=True):
            schedule.bind(part, thread)

    def make(source: str, plan: code.GpuPlan, simulated: bool) -> code.Made:
        if statements == "corrupt":
            made = code.make_code(source, plan, simulated)
            half = len(made.code) // 2
            return dataclasses.replace(made, code=made.code[:half] + b"?" * half)
        head, begin, body = source.rpartition(") {\n")
        return code.make_code(f"{head}{begin}{statements}\n{body}", plan, simulated)

    # No schedule makes a faulty kernel, so its CUDA source or its code is changed on the way.
    with mock.patch.object(lowering, "make_code", make):
        return lowering.build_candidate(tvm.ir.save_json(schedule.mod), make_config(simulated=simulated))


def shrink(data: bytes) -> onnx.ModelProto:
    """Replace a model's weights by a short cycle of numbers of their scale, which compresses; biases stay.

    Scales and variances of batch norms become constant, so that folding them changes no cycle.
    """
    model = onnx.load_model_from_string(data)
    cycle = np.random.RandomState(0).standard_normal(_CYCLE)
    flat = {name for node in model.graph.node if node.op_type == "BatchNormalization" for name in node.input[1:5:3]}
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if tensor.name in flat:
            array = np.full_like(array, array.mean())
        elif array.dtype == np.float32 and array.ndim > 1:
            array = np.resize((cycle - cycle.mean()) * array.std(), array.shape).astype("f4")
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model


class Bundle:
    """A bundle in the making: programs in `folder`, described by `programs`."""

    def __init__(self, folder: pathlib.Path, work: pathlib.Path, *, virtual: bool) -> None:
        self.folder, self.work, self.virtual = folder, work, virtual
        self.programs: list[check.Item] = []
        facts = load_board_types()[BOARD].gpu
        assert facts is not None
        self._hz = float(max(facts.freqs_hz))
        self._facts = {"memory_bytes_per_s": facts.memory_bytes_per_s, "stretch": 1}
        code.prepare(work)
        gpu_time.use_folder(code.find_folder(work), agent_types.load_board_types()[BOARD])

    def write(self, name: str, library: bytes) -> str:
        """Add a library to the folder; return its name there."""
        (self.folder / f"{name}.so.xz").write_bytes(lzma.compress(library))
        return name

    def add(self, item: check.Item, entries: tuple[str, ...], make: Callable[..., bytes], wanted: list[Any]) -> None:
        """Add a program that `make(simulated=...)` builds, with the output that each entry must give."""
        number, emulated = f"{len(self.programs):03}", make(simulated=True)
        item |= {"file": self.write(number, emulated if self.virtual else make(simulated=False))}
        np.savez_compressed(self.folder / f"{number}.npz", *wanted)
        path = self.work / f"{number}.so"
        path.write_bytes(emulated)
        for entry in entries:
            gpu_time.take_launches()
            spec = RunSpec(Engine(item["engine"]), entry=entry, device=GPU)
            run, collect = engines.load_program(spec, path, check.draw(item))
            error = check.compare(collect(run()), wanted)
            launches = gpu_time.sum_up(gpu_time.take_launches(), 1)
            seconds, _, _ = gpu_time.compute_seconds(launches, self._facts, self._hz, 1.0)
            print(f"{item['name']}, {entry}: error {error:.1e}, estimate {seconds * 1e6:.1f} us", flush=True)
            if error > item["tolerance"]:
                raise SystemExit(f"error: {item['name']}, {entry} is wrong on the virtual GPU: {error:.1e}")
            name = f"{item['name']}, {entry}" if len(entries) > 1 else item["name"]
            self.programs.append(item | {"name": name, "entry": entry, "estimate_s": seconds})

    def add_kernel(self, name: str) -> None:
        """Add a case of the families' tests, by the first plan and by a drawn one."""
        module, scheduled = families.make_case(name, make_config(simulated=True))
        infos = ArgInfo.from_entry_func(module, remove_preproc=False)
        arguments = [([int(d) for d in info.shape], str(info.dtype)) for info in infos]
        item = {"name": f"{families.CASES[name][0]}: {name}", "engine": Engine.KERNEL, "arguments": arguments}
        item |= {"tolerance": TOLERANCES[find_precision(name)]}
        tensors = [tvm.runtime.tensor(array, tvm.runtime.cpu()) for array in check.draw(item).values()]
        tvm.compile(module, target=tvm_env.make_target(tvm_env.host_target(1)))["main"](*tensors)
        both = tvm.IRModule({key: each.with_attr("global_symbol", key) for key, each in scheduled.items()})

        def make(*, simulated: bool) -> bytes:
            config = make_config(simulated=simulated)
            return lowering.build_candidate(tvm.ir.save_json(both), config, standalone=True)

        self.add(item, tuple(scheduled), make, [tensors[-1].numpy()])

    def add_model(self, name: str, precision: str) -> None:
        """Add a model of the zoo, computed in a precision, with weights that compress."""
        entry, model = ZOO[name], shrink(ZOO[name].build())
        arguments = [(list(shape), "float32") for shape in entry.input_shapes.values()]
        item = {"name": precision + name, "engine": Engine.RELAX_VM, "arguments": arguments}
        item |= {"tolerance": _HALF_MODEL if precision else TOLERANCES[precision]}
        pipeline = f"{gpus.PIPELINE}-fp16" if precision else gpus.PIPELINE
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        wanted = session.run(None, dict(zip(entry.input_shapes, check.draw(item).values(), strict=True)))

        def make(*, simulated: bool) -> bytes:
            config = make_config(simulated=simulated)
            return compile_model(model, entry.input_shapes, config, pipeline, [], TRIPLE).library

        self.add(item, ("main",), make, wanted)

    def add_faults(self) -> dict[str, Any]:
        """Add the faulty kernels; return their part of the manifest."""
        arguments = [([1024], "float32")] * 2
        items = {
            name: {"name": name, "engine": Engine.KERNEL, "entry": "main", "arguments": arguments, "status": status}
            | {"timeout_s": 3.0 if status is Status.RUN_TIMEOUT else 60.0}
            | {"file": self.write(f"fault{at}", make_fault(statements, workspace, simulated=self.virtual))}
            for at, (name, (statements, workspace, status)) in enumerate(FAULTS.items())
        }
        good, control = items.pop("good")["file"], items.pop("write past the end")
        return {"good": good, "control": control, "faults": list(items.values())}

    def add_wheels(self, *, fetch: bool) -> dict[str, list[str]]:
        """Add the agent and what it needs, by Python series; without `fetch` this Python's own packages serve."""
        added = {
            f"device_agent/native/{name}": data
            for name, data in code.read_files(TRIPLE, simulated=self.virtual).items()
        }
        agent = bundle_build.pack_agent(bundle_build.find_agent_source(), self.folder, added, "linux_x86_64").name
        if not fetch:
            return {f"{sys.version_info[0]}.{sys.version_info[1]}": [agent]}
        found = {}
        for minor in range(interpreters.LEAST_PYTHON[1], interpreters.LAST_PYTHON[1] + 1):
            pins = wheels.choose_pins(read_resource("agent.txt"), f"3.{minor}", "x86_64")
            pins = tuple(pin for pin in pins if pin.name not in _LEFT_OUT)
            fetched = wheels.fetch_wheels(pins, f"3.{minor}", "x86_64", self.work / f"wheels{minor}")
            for wheel in fetched:
                wheels.slim_wheel(wheel)
                shutil.copy(wheel, self.folder)
            found[f"3.{minor}"] = [agent, *(wheel.name for wheel in fetched)]
        return found


def find_precision(name: str) -> str:
    """The key of `TOLERANCES` that a case belongs to."""
    return families.HALF if name.startswith(families.HALF) else ""


def choose_kernels(*, quick: bool) -> list[str]:
    """The cases of the families' tests; the first one of each family and precision if `quick`."""
    cases = reversed(families.CASES.items())
    first = {(family, find_precision(name)): name for name, (family, _, _) in cases}
    return list(first.values()) if quick else list(families.CASES)


def build(folder: pathlib.Path, *, quick: bool, virtual: bool) -> int:
    """Build the bundle in `folder`, which is made anew; return its size."""
    if folder.exists() and not (folder / "manifest.json").exists():
        raise SystemExit(f"error: {folder} is no bundle; it is left alone")
    command = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*")
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gpu-bundle-", dir=folder.parent) as text:
        work = pathlib.Path(text)
        made = work / "bundle"
        made.mkdir()
        bundle = Bundle(made, work, virtual=virtual)
        manifest = {"commit": commit, "board": BOARD, "virtual": virtual, "runs": 1 if virtual else 20}
        manifest |= {"wheels": bundle.add_wheels(fetch=not quick)} | bundle.add_faults()
        for name in choose_kernels(quick=quick):
            bundle.add_kernel(name)
        for name in ["tiny-cnn"] if quick else MODELS:
            for precision in TOLERANCES:
                bundle.add_model(name, precision)
        manifest["programs"] = bundle.programs
        (made / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for name in ("run", "check.py"):
            shutil.copy(pathlib.Path(__file__).with_name(name), made)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    """Build the folder, and an archive of it beside it."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.bundle", description=__doc__)
    parser.add_argument(
        "--out", type=pathlib.Path, default=ROOT / "build" / "gpu-bundle", help="default: build/gpu-bundle"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a kernel of each family and tiny-cnn, for this Python alone"
    )
    parser.add_argument("--virtual", action="store_true", help="for the stand-in for the CUDA driver")
    options = parser.parse_args()
    out = options.out.resolve()
    size = build(out, quick=options.quick, virtual=options.virtual)
    with tarfile.open(f"{out}.tar.gz", "w:gz") as archive:
        archive.add(out, out.name)
    print(f"{out}: {math.ceil(size / 1e6)} MB; {out}.tar.gz")
    if size > MOST_BYTES:
        raise SystemExit(f"error: more than {MOST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
