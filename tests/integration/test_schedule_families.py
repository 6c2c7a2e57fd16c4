"""Every schedule family on small functions of all kinds: what is computed stays the same, for every kind of core."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from farm.search import cores, tvm_env, workloads
from farm.search.families import depthwise
from farm.search.families.rule import FAMILIES, Outlook
from farm.search.graph import canonical

AVX512 = {"mtriple": "x86_64-linux-gnu", "mcpu": "znver4", "num-cores": 2}
AVX2 = {"mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2}
NEON = {"mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57", "num-cores": 4}

Build = Callable[[Any, Any], Any]
Shape = tuple[int, ...]


def _depthwise(kernel: int, channels: int, **options: Any) -> Build:
    return lambda op, x, w: op.nn.relu(
        op.nn.conv2d(x, w, groups=channels, padding=kernel // 2, data_layout="NHWC", kernel_layout="HWIO", **options)
    )


def _dense(**options: Any) -> Build:
    return lambda op, x, w: op.nn.relu(op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO", **options))


CASES: dict[str, tuple[str, tuple[Any, ...], Callable[..., Any]]] = {
    "three channels 3x3/2": ("dense", ((2, 11, 15, 3), (3, 3, 3, 16)), _dense(strides=2, padding=1)),
    "one channel 5x5": ("dense", ((1, 12, 12, 1), (5, 5, 1, 8)), _dense(padding=2)),
    "three channels 3x3, dilated": ("dense", ((1, 11, 11, 3), (3, 3, 3, 8)), _dense(dilation=2)),
    "depthwise 3x3": ("depthwise", ((1, 9, 12, 32), (3, 3, 1, 32)), _depthwise(3, 32)),
    "depthwise 5x5/2, odd channels": ("depthwise", ((2, 11, 11, 30), (5, 5, 1, 30)), _depthwise(5, 30, strides=2)),
    "depthwise 3x3, dilated": ("depthwise", ((1, 8, 8, 8), (3, 3, 1, 8)), _depthwise(3, 8, dilation=2)),
    "groups": (
        "grouped",
        ((1, 7, 7, 32), (3, 3, 8, 48)),
        lambda op, x, w: op.nn.conv2d(x, w, groups=4, padding=1, data_layout="NHWC", kernel_layout="HWIO"),
    ),
    "groups of three": (
        "grouped",
        ((1, 6, 6, 6), (1, 1, 3, 6)),
        lambda op, x, w: op.nn.conv2d(x, w, groups=2, strides=2, data_layout="NHWC", kernel_layout="HWIO"),
    ),
    "1x1 alone": (
        "dense",
        ((2, 6, 10, 24), (1, 1, 24, 16)),
        lambda op, x, w: op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO"),
    ),
    "batched product": ("batched", ((3, 14, 20), (3, 20, 24)), lambda op, x, y: op.matmul(x, y)),
    "attention": ("batched", ((1, 2, 10, 8), (1, 2, 8, 10)), lambda op, x, y: op.nn.relu(op.matmul(x, y))),
    "softmax of one row": ("norm", ((1, 40),), lambda op, x: op.nn.softmax(x)),
    "softmax": ("norm", ((6, 40),), lambda op, x: op.nn.softmax(x)),
    "softmax of a prime": ("norm", ((2, 3, 31),), lambda op, x: op.nn.softmax(x)),
    "softmax of more than four vectors": ("norm", ((3, 197),), lambda op, x: op.nn.softmax(x)),
    "softmax over channels": ("norm", ((1, 5, 8, 24),), lambda op, x: op.nn.softmax(x, axis=1)),
    "logarithm of softmax": ("norm", ((6, 40),), lambda op, x: op.nn.log_softmax(x)),
    "layer norm": ("norm", ((1, 6, 48), (48,), (48,)), lambda op, x, a, b: op.nn.layer_norm(x, a, b, axes=[-1])),
    "group norm": (
        "norm",
        ((1, 12, 5, 6), (12,), (12,)),
        lambda op, x, a, b: op.nn.group_norm(x, a, b, num_groups=3, channel_axis=1, axes=[2, 3]),
    ),
    "instance norm": (
        "norm",
        ((2, 4, 6, 6), (4,), (4,)),
        lambda op, x, a, b: op.nn.instance_norm(x, a, b, channel_axis=1, axes=[2, 3]),
    ),
    "variance": ("norm", ((3, 77),), lambda op, x: op.sqrt(op.variance(x, [-1], keepdims=True))),
    "variance of maps": ("norm", ((2, 6, 5, 7),), lambda op, x: op.variance(x, [2, 3], keepdims=True)),
    "variance of columns": ("norm", ((1, 5, 7, 24),), lambda op, x: op.variance(x, [1, 2], keepdims=True)),
    "root mean square norm": ("norm", ((1, 6, 48), (48,)), lambda op, x, a: op.nn.rms_norm(x, a, axes=[-1])),
    "distance from the mean": ("norm", ((4, 6, 40),), lambda op, x: op.subtract(x, op.mean(x, [-1], keepdims=True))),
    "max pool": ("reduce", ((1, 9, 9, 24),), lambda op, x: op.nn.max_pool2d(x, 3, 2, 1, layout="NHWC")),
    "max pool, channels first": ("reduce", ((1, 5, 9, 9),), lambda op, x: op.nn.max_pool2d(x, 3, 1, 1)),
    "max pool of stride 2, channels first": ("reduce", ((1, 5, 9, 11),), lambda op, x: op.nn.max_pool2d(x, 3, 2, 1)),
    "mean pool of stride 2, channels first": ("reduce", ((2, 3, 9, 9),), lambda op, x: op.nn.avg_pool2d(x, 2, 2)),
    "mean pool of stride 3 in one dimension": ("reduce", ((2, 3, 17),), lambda op, x: op.nn.avg_pool1d(x, 3, 3, 1)),
    "max pool of stride 2 in three dimensions": (
        "reduce",
        ((1, 2, 6, 7, 9),),
        lambda op, x: op.nn.max_pool3d(x, 3, 2, 1),
    ),
    "mean pool": ("reduce", ((1, 8, 8, 20),), lambda op, x: op.nn.avg_pool2d(x, 3, 1, 1, layout="NHWC")),
    "global pool": ("reduce", ((2, 7, 7, 48),), lambda op, x: op.nn.adaptive_avg_pool2d(x, 1, layout="NHWC")),
    "global pool, channels first": ("reduce", ((2, 20, 7, 7),), lambda op, x: op.nn.adaptive_avg_pool2d(x, 1)),
    "part of a global pool": (
        "reduce",
        ((1, 7, 7, 48),),
        lambda op, x: op.strided_slice(op.nn.adaptive_avg_pool2d(x, 1, layout="NHWC"), [3], [0], [40]),
    ),
    "mean of rows": ("reduce", ((6, 40),), lambda op, x: op.mean(x, -1)),
    "maximum of columns": ("reduce", ((40, 6, 18),), lambda op, x: op.max(x, 0)),
    "sum of all": ("reduce", ((3, 40),), lambda op, x: op.sum(x)),
    "sum of a prime": ("reduce", ((5, 131),), lambda op, x: op.sum(x, -1)),
    "sum of integers": ("reduce", (((6, 40), "int32"),), lambda op, x: op.sum(x, -1)),
    "residual": ("elementwise", ((1, 7, 7, 40), (1, 7, 7, 40)), lambda op, x, y: op.nn.relu(op.add(x, y))),
    "broadcast": ("elementwise", ((1, 12, 7, 7), (1, 12, 1, 1)), lambda op, x, y: op.multiply(x, y)),
    "concatenation": ("elementwise", ((1, 5, 5, 24), (1, 5, 5, 13)), lambda op, x, y: op.concat([x, y], -1)),
    "concatenation of rows": ("elementwise", ((3, 40), (5, 40)), lambda op, x, y: op.concat([x, y], 0)),
    "transposition": ("elementwise", ((1, 24, 12, 12),), lambda op, x: op.permute_dims(x, [0, 2, 3, 1])),
    "transposition of few": ("elementwise", ((1, 3, 16, 18),), lambda op, x: op.permute_dims(x, [0, 2, 3, 1])),
    "transposition into groups": (
        "elementwise",
        ((1, 6, 6, 16),),
        lambda op, x: op.reshape(op.permute_dims(x, [0, 3, 1, 2]), (1, 4, 144)),
    ),
    "reshape": ("elementwise", ((1, 12, 48),), lambda op, x: op.reshape(x, (1, 12, 4, 12))),
    "groups as maps": ("elementwise", ((1, 4, 120),), lambda op, x: op.sigmoid(op.reshape(x, (1, 12, 5, 8)))),
    "rows that cross rows": ("elementwise", ((1, 7, 30),), lambda op, x: op.sigmoid(op.reshape(x, (1, 10, 3, 7)))),
    "slice": ("elementwise", ((1, 9, 9, 24),), lambda op, x: op.strided_slice(x, [1, 3], [1, 8], [8, 20], [2, 1])),
    "pad": ("elementwise", ((1, 5, 5, 17),), lambda op, x: op.nn.pad(x, (0, 0, 1, 2, 1, 0, 3, 3))),
    "resize": ("elementwise", ((1, 6, 6, 16),), lambda op, x: op.image.resize2d(x, (12, 12), layout="NHWC")),
    "gather": ("elementwise", ((20, 48), ((7,), "int64")), lambda op, x, i: op.take(x, i, axis=0)),
    "half precision": ("elementwise", (((3, 70), "float16"),), lambda op, x: op.add(x, x)),
    "bytes": ("elementwise", (((3, 70), "int8"),), lambda op, x: op.nn.relu(x)),
    "comparison": ("elementwise", (((3, 70), "int64"), ((3, 70), "int64")), lambda op, x, y: op.greater(x, y)),
}


@pytest.fixture(scope="module")
def host() -> Any:
    return tvm_env.make_target(tvm_env.host_target(2))


@pytest.mark.parametrize("name", CASES)
def test_a_family_computes_what_the_function_says(name: str, host: Any) -> None:
    """The first plan and one drawn of each kind of core give the unscheduled function's results."""
    family_name, shapes, build = CASES[name]
    function = build_canonical(shapes, build, host)
    tvm = tvm_env.load()
    functions = {"reference": function}
    draw = random.Random(name)
    for label, config in (("avx512", AVX512), ("avx2", AVX2), ("neon", NEON)):
        outlook = _read(function, config)
        assert outlook.family.name == family_name
        plans = [plan for _, plan in outlook.plans()]
        for kind, plan in (("first", plans[0]), ("drawn", draw.choice(plans))):
            schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": function}))
            outlook.apply(schedule, plan)
            again = tvm.s_tir.Schedule(tvm.IRModule({"main": function}))
            tvm.s_tir.schedule.Trace.apply_json_to_schedule(schedule.trace.as_json(), again)
            functions[f"{label}_{kind}"] = again.mod["main"]
    module = tvm.IRModule({key: f.with_attr("global_symbol", key) for key, f in functions.items()})
    results = _run(tvm.compile(module, target=host), function, list(functions))
    exact = results["reference"].dtype.kind != "f"
    for key, result in results.items():
        np.testing.assert_allclose(
            result, results["reference"], rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4, err_msg=key
        )


@pytest.mark.parametrize(
    ("name", "flat"), [("groups as maps", 4), ("rows that cross rows", 4), ("transposition", 1), ("slice", 1)]
)
def test_a_run_goes_through_a_reshape(name: str, flat: int, host: Any) -> None:
    """However rows are cut anew, all elements come one after the other."""
    _, shapes, build = CASES[name]
    assert _read(build_canonical(shapes, build, host), AVX512).facts.flat == flat


def test_the_data_of_a_tile_of_joined_pixels_fit_registers(host: Any) -> None:
    """Where a lane is a factor, a tile of 1x1 convolution holds its pixels by its steps and no more, amid rows too."""
    tvm = tvm_env.load()
    function = build_canonical(
        ((1, 14, 14, 64), (1, 1, 64, 96)),
        lambda op, x, w: op.nn.relu(op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO")),
        host,
    )
    outlook = _read(function, NEON)
    plan = next(plan for _, plan in outlook.plans() if plan["steps"] > 1 and plan["pixels"] == 7)
    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": function}))
    outlook.apply(schedule, plan)
    assert plan["pixels"] * plan["steps"] in list_buffer_sizes(schedule)


def test_the_accumulators_of_joined_pixels_alone_fit_registers(host: Any) -> None:
    """A 1x1 convolution that nothing follows has the accumulators of its tile, not those of whole rows."""
    tvm = tvm_env.load()
    _, shapes, build = CASES["1x1 alone"]
    function = build_canonical(shapes, build, host)
    for config in (NEON, AVX512):
        outlook = _read(function, config)
        plan = outlook.plans()[0][1]
        schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": function}))
        outlook.apply(schedule, plan)
        assert plan["pixels"] * plan["vectors"] * plan["lanes"] in list_buffer_sizes(schedule)


def list_buffer_sizes(schedule: Any) -> set[int]:
    """The elements of each buffer that a schedule allocates, once TVM has made them as small as it can."""
    passes = tvm_env.load().s_tir.transform
    module = schedule.mod
    for each in (
        passes.LowerInitBlock(),
        passes.PlanAndUpdateBufferAllocationLocation(),
        passes.ConvertBlocksToOpaque(),
        passes.CompactBufferAllocation(),
    ):
        module = each(module)
    shapes = re.findall(r"alloc_buffer\(\((.*?)\)\)", module["main"].script())
    return {math.prod(int(d) for d in re.findall(r"\((\d+)", shape)) for shape in shapes}


def test_a_depthwise_pad_is_compared_where_it_is_read_or_copied_as_its_option_says(host: Any) -> None:
    """Data are read where they lie by the best plan; a copy compares all columns, or where lanes are factors, few."""
    tvm = tvm_env.load()
    _, shapes, build = CASES["depthwise 3x3"]
    function = build_canonical(shapes, build, host)
    for config in (NEON, AVX512):
        outlook = _read(function, config)
        plans = [plan for _, plan in outlook.plans()]
        assert plans[0]["pad"] == depthwise.PAD_NONE
        for pad in outlook.options["pad"]:
            schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": function}))
            outlook.apply(schedule, next(plan for plan in plans if plan["pad"] == pad))
            copies = schedule.mod.script().count("= T.if_then_else(")
            assert (copies > 1) if pad == depthwise.PAD_APART else copies == (pad != depthwise.PAD_NONE)
        assert (depthwise.PAD_APART in outlook.options["pad"]) == (config is NEON)


def build_canonical(shapes: tuple[Any, ...], build: Callable[..., Any], host: Any) -> Any:
    """The only function that a graph of these arguments becomes, canonical as the search sees it."""
    tvm = tvm_env.load()
    from tvm import relax

    typed = [shape if shape and isinstance(shape[0], tuple) else (shape, "float32") for shape in shapes]
    arguments = [relax.Var(f"x{at}", relax.TensorType(shape, dtype)) for at, (shape, dtype) in enumerate(typed)]
    builder = relax.BlockBuilder()
    with builder.function("main", arguments):
        with builder.dataflow():
            result = builder.emit_output(builder.normalize(build(relax.op, *arguments)))
        builder.emit_func_output(result)
    with host:
        module = relax.get_pipeline("zero")(builder.get())
    (workload,) = workloads.extract(module, host, {}, "graph/2")
    return canonical.canonicalise(tvm.ir.load_json(workload.module_json)["main"])


def _read(function: Any, config: dict[str, Any]) -> Outlook | None:
    tvm = tvm_env.load()
    core = cores.core_of(config)
    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": function}))
    for family in FAMILIES:
        facts = family.read(schedule)
        if facts is not None:
            return Outlook(family, facts, core, family.options(facts, core))
    return None


def _run(library: Any, function: Any, names: list[str]) -> dict[str, np.ndarray]:
    tvm = tvm_env.load()
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    draw = np.random.default_rng(0)
    arguments = []
    for info in ArgInfo.from_entry_func(tvm.IRModule({"main": function}), remove_preproc=False):
        shape, dtype = [int(d) for d in info.shape], str(info.dtype)
        values = draw.integers(0, 5, shape) if "int" in dtype else draw.standard_normal(shape)
        arguments.append(np.asarray(values).astype(dtype))
    results = {}
    for name in names:
        tensors = [tvm.runtime.tensor(a, tvm.cpu()) for a in arguments]
        library[name](*tensors)
        results[name] = tensors[-1].numpy()
    return results
