"""Every schedule family for GPUs on small functions of all kinds: a virtual GPU gives what the function says."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.search import gpus, traces, tvm_env
from farm.search.codegen import lowering
from farm.search.families import rule
from farm.search.graph import channel_padding
from farm.virtual import gpu_time
from tests.integration.test_schedule_families import CASES as CPU_CASES
from tests.integration.test_schedule_families import Build, _run, build_canonical

tvm_env.load_compiler()
from tvm.s_tir.meta_schedule.arg_info import ArgInfo  # noqa: E402  TVM is found by then

HALF = "half "
_HALVED = (
    "dense 3x3", "dense 3x3/2, odd", "product", "many products", "product with a vector", "depthwise 3x3", "max pool",
    "residual", "softmax of a prime", "layer norm", "transposition",
)  # fmt: skip
# In a process of its own, which is what a worker is: what the driver's stand-in says stays there.
_RUN = """
import json, pathlib, sys
import numpy as np
from device_agent import board_types
from farm.virtual import gpu_time
from device_agent.worker import engines
from device_agent.protocol import GPU, Engine, RunSpec
gpus, folder, names = sys.argv[1:]
gpu_time.use_folder(pathlib.Path(gpus), board_types.load_board_types()["jetson-nano"])
folder = pathlib.Path(folder)
for name in json.loads(names):
    arrays = dict(np.load(folder / f"{name.rpartition('_')[0]}.npz"))
    spec = RunSpec(Engine.KERNEL, device=GPU, entry=name)
    run, collect = engines.load_program(spec, folder / "kernels.so", arrays)
    np.save(folder / f"{name}.npy", collect(run())[-1])
"""


def _conv(*, kernel: int = 3, **options: Any) -> Build:
    return lambda op, x, w: op.nn.relu(
        op.nn.conv2d(x, w, padding=kernel // 2, data_layout="NHWC", kernel_layout="HWIO", **options)
    )


CASES: dict[str, tuple[str, tuple[Any, ...], Build]] = {
    "dense 3x3": ("gpu-tiles", ((1, 9, 11, 12), (3, 3, 12, 20)), _conv()),
    "dense 3x3/2, odd": ("gpu-tiles", ((1, 13, 13, 3), (3, 3, 3, 24)), _conv(strides=2)),
    "dense 3x3/2, a row left": ("gpu-tiles", ((1, 32, 32, 3), (3, 3, 3, 24)), _conv(kernel=1, strides=2)),
    "dense 1x1": ("gpu-tiles", ((1, 13, 13, 16), (1, 1, 16, 40)), _conv(kernel=1)),
    "product": ("gpu-tiles", ((30, 24), (24, 33)), lambda op, x, w: op.matmul(x, w)),
    "many products": ("gpu-tiles", ((3, 14, 20), (3, 20, 24)), lambda op, x, y: op.matmul(x, y)),
    "product with a vector": ("gpu-sums", ((1, 200), (200, 33)), lambda op, x, w: op.nn.relu(op.matmul(x, w))),
    "global pool": ("gpu-sums", *CPU_CASES["global pool"][1:]),
    "depthwise 3x3": ("gpu-flat", *CPU_CASES["depthwise 3x3"][1:]),
    "groups": ("gpu-flat", *CPU_CASES["groups"][1:]),
    "max pool": ("gpu-flat", *CPU_CASES["max pool"][1:]),
    "residual": ("gpu-flat", *CPU_CASES["residual"][1:]),
    "softmax": ("gpu-norm", *CPU_CASES["softmax"][1:]),
    "softmax of a prime": ("gpu-norm", *CPU_CASES["softmax of a prime"][1:]),
    "softmax over channels": ("gpu-norm", *CPU_CASES["softmax over channels"][1:]),
    "softmax of a long row": ("gpu-norm", ((2, 1000),), lambda op, x: op.nn.softmax(x)),
    "logarithm of softmax": ("gpu-norm", *CPU_CASES["logarithm of softmax"][1:]),
    "layer norm": ("gpu-norm", *CPU_CASES["layer norm"][1:]),
    "group norm": ("gpu-norm", *CPU_CASES["group norm"][1:]),
    "instance norm": ("gpu-norm", *CPU_CASES["instance norm"][1:]),
    "root mean square norm": ("gpu-norm", *CPU_CASES["root mean square norm"][1:]),
    "distance from the mean": ("gpu-norm", *CPU_CASES["distance from the mean"][1:]),
    "sum of a prime": ("gpu-sums", *CPU_CASES["sum of a prime"][1:]),
    "means of many rows": ("gpu-sums", ((3000, 40),), lambda op, x: op.mean(x, [-1])),
    "maximum of columns": ("gpu-sums", *CPU_CASES["maximum of columns"][1:]),
    "concatenation": ("gpu-flat", *CPU_CASES["concatenation"][1:]),
    "transposition": ("gpu-flat", *CPU_CASES["transposition"][1:]),
}


def _grid() -> dict[str, tuple[str, tuple[Any, ...], Build]]:
    """Shapes and axes for every family: odd extents, several channels and images, sums over each kind of axes."""
    found: dict[str, tuple[str, tuple[Any, ...], Build]] = {}
    shapes = [(1, 5, 8, 24), (1, 96, 14, 14), (2, 12, 12, 32), (1, 19, 32, 32)]
    for at, shape in enumerate(shapes):
        axis = 1 + at % 3
        apart = [each for each in range(1, 4) if each != axis]
        sized = tuple(shape[each] for each in apart)
        found[f"softmax of {shape} over {axis}"] = ("gpu-norm", (shape,), lambda op, x, a=axis: op.nn.softmax(x, a))
        found[f"log softmax of {shape}"] = ("gpu-norm", (shape,), lambda op, x: op.nn.log_softmax(x, 1))
        found[f"layer norm of {shape} over channels"] = (
            "gpu-norm",
            (shape, shape[1:2], shape[1:2]),
            lambda op, x, a, b: op.nn.layer_norm(x, a, b, axes=[1]),
        )
        found[f"layer norm of {shape} but {axis}"] = (
            "gpu-norm",
            (shape, sized, sized),
            lambda op, x, a, b, axes=tuple(apart): op.nn.layer_norm(x, a, b, axes=list(axes)),
        )
        found[f"instance norm of {shape}, channels last"] = (
            "gpu-norm",
            (shape, shape[3:], shape[3:]),
            lambda op, x, a, b: op.nn.instance_norm(x, a, b, channel_axis=3, axes=[1, 2]),
        )
        found[f"distance of {shape} from the mean over {axis}"] = (
            "gpu-norm",
            (shape,),
            lambda op, x, a=axis: op.subtract(x, op.mean(x, [a], keepdims=True)),
        )
        found[f"maximum of {shape} but {axis}"] = (
            "gpu-sums",
            (shape,),
            lambda op, x, axes=tuple(apart): op.max(x, list(axes)),
        )
        # Few sums beside many results need no block of threads each.
        summing = "gpu-sums" if axis == 3 else "gpu-flat"
        found[f"sum of {shape} over {axis}"] = (summing, (shape,), lambda op, x, a=axis: op.sum(x, [a]))
        found[f"convolution of {shape}"] = ("gpu-tiles", (shape, (3, 3, shape[3], 10 + at)), _conv(strides=1 + at % 2))
        found[f"transposition of {shape}"] = (
            "gpu-flat",
            (shape,),
            lambda op, x, a=axis: op.permute_dims(x, [0, a, *(each for each in (3, 2, 1) if each != a)]),
        )
    return found


for _name in _HALVED:
    _family, _shapes, _build = CASES[_name]
    CASES[f"{HALF}{_name}"] = _family, tuple((shape, "float16") for shape in _shapes), _build
CASES.update(_grid())


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[np.ndarray]]:
    """By case: what the unscheduled function gives, and a virtual Nano's GPU by the first plan and by a drawn one."""
    folder = tmp_path_factory.mktemp("families")
    tvm = tvm_env.load()
    host = tvm_env.host_target(2)
    config = gpus.to_config("jetson-nano", code.plan_gpu(load_board_types()["jetson-nano"]), host, simulated=True)
    kernels, results, inputs = {}, {}, {}
    for number, name in enumerate(CASES):
        module, scheduled = make_case(name, config)
        library = tvm.compile(module, target=tvm_env.make_target(host))
        draw = np.random.default_rng(0)
        infos = ArgInfo.from_entry_func(module, remove_preproc=False)
        arrays = [draw.standard_normal([int(d) for d in info.shape]).astype(str(info.dtype)) for info in infos]
        np.savez(folder / f"case{number}.npz", *arrays)
        results[name] = [_run(library, module["main"], ["main"])["main"]]
        kernels |= {f"case{number}_{label}": function for label, function in scheduled.items()}
        inputs[name] = number
    module = tvm.IRModule({key: function.with_attr("global_symbol", key) for key, function in kernels.items()})
    (folder / "kernels.so").write_bytes(lowering.build_candidate(tvm.ir.save_json(module), config, standalone=True))
    code.prepare(folder)
    command = [sys.executable, "-c", _RUN, str(code.find_folder(folder)), str(folder), json.dumps(list(kernels))]
    # Races, and reads of what nothing wrote, end a launch.
    environment = {**os.environ, gpu_time.VARIABLE: "prove=1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    for name, number in inputs.items():
        results[name] += [np.load(folder / f"case{number}_{label}.npy") for label in ("first", "drawn")]
    return results


def make_case(name: str, config: Any) -> tuple[Any, dict[str, Any]]:
    """A case's module before it is scheduled, and its function by the first plan and by a drawn one."""
    tvm, (family, shapes, build) = tvm_env.load(), CASES[name]
    host = tvm_env.make_target(config["host"])
    module = tvm.IRModule({"main": channel_padding.join(build_canonical(shapes, build, host), gpus.gpu_of(config))})
    plans = {"first": 0, "drawn": None}
    return module, {label: _schedule(module, config, family, index, name) for label, index in plans.items()}


def _schedule(module: Any, config: Any, family: str, index: int | None, name: str) -> Any:
    """The function by a plan that TVM takes, its trace gone through JSON: the best predicted, or one of the better."""
    tvm = tvm_env.load()
    outlook = rule.read_outlook(module, gpus.unit_of(config))
    assert outlook.family.name == family
    plans = [plan for _, plan in outlook.plans()]
    tried = plans if index is not None else random.Random(name).sample(plans, len(plans))
    context = traces.make_context(module, tvm_env.make_target(config))
    for plan in tried[:8]:
        schedule, again = (tvm.s_tir.Schedule(module, error_render_level="none") for _ in range(2))
        try:
            outlook.apply(schedule, plan)
            tvm.s_tir.schedule.Trace.apply_json_to_schedule(schedule.trace.as_json(), again)
            traces.finish(again, context)
        except (RuntimeError, ValueError, TypeError) as error:
            print(name, dict(plan), str(error)[:200])
            continue
        return again.mod["main"]
    pytest.fail(f"TVM takes none of eight plans of {name}")


@pytest.mark.parametrize("name", CASES)
def test_a_family_computes_what_the_function_says(name: str, computed: dict[str, list[np.ndarray]]) -> None:
    """For any plan."""
    reference, *others = computed[name]
    off = 5e-3 if name.startswith(HALF) else 1e-4
    most = off * float(np.abs(reference).max()) if name.startswith(HALF) else off
    for result in others:
        np.testing.assert_allclose(result.reshape(reference.shape), reference, rtol=off, atol=most)


OFFERED: dict[str, tuple[tuple[Any, ...], Build]] = {
    "max pool": (((1, 27, 27, 256),), lambda op, x: op.nn.max_pool2d(x, 3, 2, layout="NHWC")),
    "dense 3x3, odd": (((1, 27, 27, 32), (3, 3, 32, 128)), _conv()),
    "dense 3x3/2, a row left": (((1, 224, 224, 3), (3, 3, 3, 64)), _conv(kernel=1, strides=2)),
}


def _prepare(shapes: tuple[Any, ...], build: Build) -> tuple[Any, Any]:
    """A function's module as the graph pipeline makes it for a Nano, and the target."""
    host = tvm_env.host_target(2)
    config = gpus.to_config("jetson-nano", code.plan_gpu(load_board_types()["jetson-nano"]), host, simulated=True)
    function = build_canonical(shapes, build, tvm_env.make_target(host))
    return tvm_env.load().IRModule({"main": channel_padding.join(function, gpus.gpu_of(config))}), config


@pytest.mark.parametrize("name", OFFERED)
def test_tvm_takes_what_is_offered(name: str) -> None:
    """None of the 20 plans that are predicted best is refused: what a block stages is what its tile reads."""
    tvm, (module, config) = tvm_env.load(), _prepare(*OFFERED[name])
    outlook = rule.read_outlook(module, gpus.unit_of(config))
    context = traces.make_context(module, tvm_env.make_target(config))
    refused = []
    for _, plan in outlook.plans()[:20]:
        schedule = tvm.s_tir.Schedule(module, error_render_level="none")
        try:
            outlook.apply(schedule, plan)
            traces.finish(schedule, context)
        except (RuntimeError, ValueError, TypeError) as error:
            refused.append((dict(plan), str(error)[:100]))
    assert refused == []


@pytest.mark.parametrize("follows", [True, False])
def test_a_threads_sums_stay_in_registers(follows: bool) -> None:
    """Also where nothing follows a convolution whose pixels are one loop."""
    tvm = tvm_env.load()
    shapes = ((1, 28, 28, 32), (3, 3, 32, 64))
    module, config = _prepare(shapes, lambda op, x, w: _conv()(op, x, w) if follows else _conv()(op, x, w).args[0])
    schedule = tvm.s_tir.Schedule(module, error_render_level="none")
    outlook = rule.read_outlook(module, gpus.unit_of(config))
    plan = outlook.plans()[0][1]
    outlook.apply(schedule, plan)
    traces.finish(schedule, traces.make_context(module, tvm_env.make_target(config)))
    with lowering.making(config) as made:
        tvm.tirx.build(schedule.mod, tvm_env.make_code_target(config), lowering.use_pipeline())
    (usage,) = made[0].usages
    assert usage.registers > plan["columns"] * plan["channels"]
    assert usage.spilled_bytes == 0
