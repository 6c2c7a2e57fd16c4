"""Schedule families: what they read, that their code computes the same, and that traces hold their plans."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.search import cores, traces, tvm_env, workloads
from farm.search.codegen import lowering
from farm.search.families import rule
from farm.search.families.dense import PAD_ALL, PAD_SKEWED
from farm.search.families.elementwise import Elementwise
from farm.search.graph import canonical, channel_padding
from farm.search.tuners.decisions import Genome
from farm.search.tuners.schedule_space import ScheduleSpace
from farm.values import Workload

tvm = tvm_env.load()

AVX2 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}
RUN = AVX2 | {"opt-level": 0}  # LLVM's optimiser is not what is tested here
AVX512 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver4", "num-cores": 1}
NANO = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57", "mattr": ["+neon"], "num-cores": 4}


def make_convolution(
    size: tuple[int, int, int, int],
    channels: int,
    kernel: tuple[int, int],
    stride: int = 1,
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilation: int = 1,
    *,
    added: bool = False,
    bare: bool = False,
) -> Any:
    """A convolution in NHWC with bias and ReLU, something `added` or `bare`, in canonical form."""
    from tvm import te, topi

    data = te.placeholder(size, name="data")
    weight = te.placeholder((*kernel, size[3], channels), name="weight")
    bias = te.placeholder((1, 1, 1, channels), name="bias")
    parameters = [data, weight]
    result = topi.nn.conv2d_nhwc(data, weight, stride, list(padding), dilation)
    if not bare:
        parameters.append(bias)
        result = topi.nn.relu(topi.add(result, bias))
    if added:
        parameters.append(te.placeholder(result.shape, name="residual"))
        result = topi.add(result, parameters[-1])
    function = te.create_prim_func([*parameters, result], index_dtype_override="int64").with_attr(
        "layout_free_buffers", [1]
    )
    return tvm.IRModule({"main": canonical.canonicalise(function)})


def make_workload(module: Any, target: dict[str, Any]) -> Workload:
    key = workloads.workload_hash(module, target, "graph/2")
    return Workload(key, "test", 1.0, 1, (), tvm.ir.save_json(module), target, "graph/2")


def run(module: Any, arguments: list[Any]) -> Any:
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    ready = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=False)(module)
    library = tvm.runtime.Executable(tvm.tirx.build(ready, tvm.target.Target(RUN), lowering.use_pipeline()))
    tensors = [tvm.runtime.tensor(argument) for argument in arguments]
    library["main"](*tensors)
    return tensors[-1].numpy()


def make_arguments(module: Any, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    shapes = [[int(d) for d in parameter.shape] for parameter in module["main"].params]
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]


def read(module: Any) -> rule.Outlook:
    outlook = rule.read_outlook(module, cores.core_of(AVX2))
    assert outlook is not None
    return outlook


def check(module: Any, plans: int) -> None:
    outlook = read(module)
    ranked = [plan for _, plan in outlook.plans()]
    assert ranked
    arguments = make_arguments(module)
    expected = run(module, arguments)
    for plan in [ranked[0], *ranked[1 :: max(1, len(ranked) // plans)]][:plans]:
        schedule = tvm.s_tir.Schedule(module)
        outlook.apply(schedule, plan)
        np.testing.assert_allclose(run(schedule.mod, arguments), expected, rtol=1e-4, atol=1e-4, err_msg=str(plan))


@settings(max_examples=12)
@given(
    height=st.integers(5, 12),
    width=st.integers(5, 12),
    inputs=st.sampled_from([1, 3, 8]),
    channels=st.sampled_from([8, 10, 24, 7]),
    kernel=st.sampled_from([(1, 1), (3, 3), (1, 5), (2, 2)]),
    stride=st.integers(1, 2),
    padding=st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 2, 1)]),
    batch=st.integers(1, 2),
)
def test_dense_convolutions_compute_the_same(
    height: int,
    width: int,
    inputs: int,
    channels: int,
    kernel: tuple[int, int],
    stride: int,
    padding: tuple[int, int, int, int],
    batch: int,
) -> None:
    """Any kernel, stride and padding, odd channels and sizes, batches."""
    check(make_convolution((batch, height, width, inputs), channels, kernel, stride, padding), plans=2)


@settings(max_examples=8)
@given(
    area=st.sampled_from([(1, 7, 7), (1, 13, 13), (7, 7, 1), (1, 1, 197)]),
    inputs=st.sampled_from([128, 130]),
    channels=st.sampled_from([64, 48, 80]),
    kernel=st.sampled_from([(1, 1), (3, 3), (1, 7)]),
    followed=st.booleans(),
)
def test_more_pixels_compute_the_same(
    area: tuple[int, int, int], inputs: int, channels: int, kernel: tuple[int, int], followed: bool
) -> None:
    """Where no tile divides the pixels some are computed twice: also for batches, residuals, and products alone."""
    padding = (kernel[0] // 2, kernel[1] // 2) * 2
    module = make_convolution((*area, inputs), channels, kernel, padding=padding, added=followed, bare=not followed)
    padded = tvm.IRModule({"main": channel_padding.pad(module["main"], cores.core_of(AVX2))})
    assert [axis.extent for axis in read(padded).facts.pixels] > [math.prod(area)]
    arguments = make_arguments(module)
    np.testing.assert_array_equal(run(padded, arguments), run(module, arguments))
    check(padded, plans=2)


@settings(max_examples=8)
@given(
    size=st.sampled_from([(1, 7, 7), (1, 6, 16), (2, 5, 4)]),
    kernel=st.sampled_from([(3, 3), (3, 1), (2, 2)]),
    stride=st.integers(1, 2),
    skewed=st.booleans(),
    joined=st.booleans(),
)
def test_reductions_in_parts_compute_the_same(
    size: tuple[int, int, int], kernel: tuple[int, int], stride: int, *, skewed: bool, joined: bool
) -> None:
    """Rows of the kernel one after the other, as for a core whose L2 holds no block of weights."""
    batch, height, width = size
    module = make_convolution((batch, height, width, 256), 32, kernel, stride, (1, 1, 1, 1))
    if joined:
        module = tvm.IRModule({"main": channel_padding.pad(module["main"], cores.core_of(AVX2))})
    small = dataclasses.replace(cores.core_of(AVX2), l2_bytes=kernel[1] * 50_000)
    outlook = rule.read_outlook(module, small)
    pad = PAD_SKEWED if skewed and PAD_SKEWED in outlook.options["pad"] else PAD_ALL
    plans = [plan for _, plan in outlook.plans() if plan.get("parts") == kernel[0] and plan["pad"] == pad]
    arguments = make_arguments(module)
    expected = run(module, arguments)
    for plan in plans[:: max(1, len(plans) - 1)][:2]:
        schedule = tvm.s_tir.Schedule(module)
        outlook.apply(schedule, plan)
        np.testing.assert_allclose(run(schedule.mod, arguments), expected, rtol=1e-4, atol=1e-3, err_msg=str(plan))
    assert plans


def test_skewed_pads_compute_the_same() -> None:
    """Fourteen pixels, two by 512 channels apart, alias in L1 unless a line is skipped after each."""
    module = make_convolution((1, 4, 28, 512), 16, (3, 3), 2, (1, 1, 1, 1))
    outlook = read(module)
    alike, skewed = (
        next((prediction, plan) for prediction, plan in outlook.plans() if plan["pad"] == pad and plan["pixels"] == 14)
        for pad in (PAD_ALL, PAD_SKEWED)
    )
    assert skewed[0].terms["compute"] < alike[0].terms["compute"] / 2
    arguments = make_arguments(module)
    schedule = tvm.s_tir.Schedule(module)
    outlook.apply(schedule, skewed[1])
    np.testing.assert_allclose(run(schedule.mod, arguments), run(module, arguments), rtol=1e-4, atol=1e-3)


def test_pixels_are_padded_only_where_the_core_gains() -> None:
    """196 have good tiles, and a copy of a single pixel shares nothing.

    A Nano gains where 512 channels of data are loaded, and not where pixels have neighbours.
    """
    cases = (
        (14, 128, 64, 1, AVX2, False), (14, 512, 1000, 1, NANO, False),
        (13, 512, 1000, 1, NANO, True), (7, 128, 64, 3, NANO, False), (1, 256, 64, 1, AVX512, False),
    )  # fmt: skip
    for side, inputs, channels, kernel, target, gains in cases:
        function = make_convolution((1, side, side, inputs), channels, (kernel, kernel), padding=(kernel // 2,) * 4)
        function = canonical.canonicalise(function["main"])
        assert channel_padding.pad(function, cores.core_of(target)).same_as(function) is not gains


@pytest.mark.parametrize("target", [AVX2, NANO], ids=["avx2", "nano"])
def test_a_trace_holds_its_plan(target: dict[str, Any]) -> None:
    """What a search reads from its own trace are the decisions that made it, and the same code comes out again."""
    workload = make_workload(make_convolution((1, 14, 14, 16), 32, (3, 3), padding=(1, 1, 1, 1)), target)
    space = ScheduleSpace(workload)
    for genome in [*space.ranked[:2], space.ranked[-1]]:
        [found] = space.evaluate([(genome, 0)])
        assert found is not None
        candidate = space.describe(found)
        assert space.read(candidate.trace_json) == genome
        assert json.loads(candidate.trace_json)
        assert tvm.ir.save_json(tvm.ir.load_json(space.replay(candidate.trace_json))) == candidate.module_json


def test_the_best_predicted_are_drawn_first() -> None:
    """A search begins with the top of the prediction; an open genome becomes some plan that makes sense."""
    space = ScheduleSpace(make_workload(make_convolution((1, 14, 14, 16), 32, (3, 3)), NANO))
    assert list(space.drawn) == [0]
    found = space.evaluate([(space.undecided(0), seed) for seed in range(4)])
    assert all(each is not None and each.genome in space.ranked for each in found)
    assert len({each.hash for each in found if each is not None}) > 1


def test_plans_make_sense_or_are_refused() -> None:
    """More accumulators than there are registers. Weights of a block larger than L1 are read for every tile: a tile of
    one pixel would stall for them. The pipeline is part of a workload: what `graph/2-nchw` names is searched without
    families.
    """
    space = ScheduleSpace(make_workload(make_convolution((1, 28, 28, 16), 64, (3, 3)), NANO))
    largest = Genome(0, tuple(knob.options - 1 for knob in space.knobs[0]))  # type: ignore[union-attr]
    assert space.evaluate([(largest, 0)]) == [None]
    module = make_convolution((1, 14, 14, 1024), 2048, (1, 1), stride=2)
    outlook = rule.read_outlook(module, cores.core_of(AVX512))
    assert outlook.plans()[0][1]["pixels"] == 7
    module = make_convolution((1, 14, 14, 16), 32, (3, 3))
    plain = dataclasses.replace(make_workload(module, NANO), pipeline="graph/2-nchw")
    assert ScheduleSpace(plain).ranked == []


def test_a_function_that_tvm_trips_over_is_left_to_the_others() -> None:
    """Every second row, of these every second column, as detectors begin: taking back such a copy fails inside TVM."""
    from tvm import te, topi

    data = te.placeholder((1, 3, 32, 32), name="data")
    rows = topi.strided_slice(data, [0], [32], [2], axes=[2])
    result = topi.strided_slice(rows, [0], [32], [2], axes=[3])
    module = tvm.IRModule({"main": canonical.canonicalise(te.create_prim_func([data, result]))})
    assert [each.family.name for each in rule.list_outlooks(module, cores.core_of(AVX2))] == ["elementwise"]


class Unable(Elementwise):
    """A family that cannot do one of its acts."""

    name = "unable"

    def __init__(self, act: str) -> None:
        setattr(self, act, self.fail)

    def fail(self, *_: Any) -> Any:
        raise IndexError("list index out of range")


@pytest.mark.parametrize("act", ["read", "options", "predict", "apply"])
def test_what_a_family_cannot_do_is_left_to_others(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the next family, and without one to TVM; a search likewise."""
    from tvm import te, topi

    data = te.placeholder((4, 64), name="data")
    module = tvm.IRModule({"main": canonical.canonicalise(te.create_prim_func([data, topi.nn.relu(data)]))})
    workload, target = make_workload(module, AVX2), tvm.target.Target(AVX2)

    def find() -> Any:
        entry = tvm_env.ms.database.MemoryDatabase().commit_workload(module)
        return traces.find_default(workload, entry, target)

    monkeypatch.setattr(rule, "FAMILIES", (Unable(act),))
    assert find() is None
    assert ScheduleSpace(workload).ranked == []
    monkeypatch.setattr(rule, "FAMILIES", (Unable(act), Elementwise()))
    assert find().family == "elementwise"
    assert ScheduleSpace(workload).ranked


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "steps"),
    [((1, 16, 16, 64), (1, 1), 1, 4), ((1, 16, 16, 64), (3, 3), 1, 4), ((1, 37, 33, 3), (7, 7), 2, 21)],
)
def test_lanes_are_factors_of_multiply_adds(
    shape: tuple[int, int, int, int], kernel: tuple[int, int], stride: int, steps: int
) -> None:
    """On Arm data of four steps of the reduction are one vector, or all of a row; little but FMAs is left."""
    module = make_convolution(shape, 64, kernel, stride)
    outlook = rule.read_outlook(module, cores.core_of(NANO))
    _, plan = outlook.plans()[0]
    assert plan["steps"] == steps
    schedule = tvm.s_tir.Schedule(module)
    outlook.apply(schedule, plan)
    listing = tvm.compile(schedule.mod, target=tvm.target.Target(NANO)).mod.inspect_source("asm")
    blocks = [block.split("\n") for block in re.split(r"(?m)^\.L\w+:.*$|^\tb\.\w+\t.*$", listing)]
    inner = [line.split()[0] for line in max(blocks, key=lambda b: "".join(b).count("fmla")) if line[:1] == "\t"]
    share = inner.count("fmla") / len(inner)
    assert share > 0.7, share
