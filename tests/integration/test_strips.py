"""Convolutions joined with the pool or the depthwise convolution that alone reads their result."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.models import zoo
from farm.search import cores, tvm_env
from farm.search.families import rule
from farm.search.graph import dots, strip_fusion
from farm.search.workloads import prepare_model
from tests.integration.test_families import AVX2, NANO, make_arguments, make_convolution, run

tvm = tvm_env.load()

# A memory so slow that everything avoidable is fused.
SLOW = dataclasses.replace(cores.core_of(AVX2), far_bytes_per_cycle=0.01)


def make_pool(shape: tuple[int, ...], window: tuple[int, int], stride: int, padding: tuple[int, int, int, int]) -> Any:
    from tvm import te, topi

    data = te.placeholder(shape, name="data")
    result = topi.nn.pool2d(data, window, [stride, stride], [1, 1], padding, "max", layout="NHWC")
    return te.create_prim_func([data, result], index_dtype_override="int64")


def make_depthwise(shape: tuple[int, ...], side: int, stride: int, padding: tuple[int, int, int, int]) -> Any:
    from tvm import te, topi

    channels = shape[-1]
    data = te.placeholder(shape, name="data")
    weight = te.placeholder((side, side, 1, channels), name="weight")
    bias = te.placeholder((1, 1, 1, channels), name="bias")
    result = topi.nn.group_conv2d_nhwc(data, weight, stride, list(padding), 1, channels, "float32")
    result = topi.clip(topi.add(result, bias), 0.0, 6.0)
    return te.create_prim_func([data, weight, bias, result], index_dtype_override="int64").with_attr(
        "layout_free_buffers", [1, 2]
    )


def shape_of(module: Any) -> tuple[int, int, int, int]:
    """Of a function's result."""
    batch, height, width, channels = (int(d) for d in module["main"].params[-1].shape)
    return batch, height, width, channels


def check(convolution: Any, step: Any, plans: int, **wanted: int) -> None:
    """Joined, by the best predicted plans and some others with these options, both compute what they do apart."""
    function = strip_fusion.join_functions(convolution["main"], step, SLOW)
    joined = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    arguments = make_arguments(convolution)
    between = run(convolution, arguments)
    own = make_arguments(tvm.IRModule({"main": step}), 1)[1:]
    expected = run(tvm.IRModule({"main": step.with_attr("global_symbol", "main")}), [between, *own])
    outlook = rule.read_outlook(joined, SLOW)
    ranked = [plan for _, plan in outlook.plans() if wanted.items() <= dict(plan).items()]
    for plan in [ranked[0], *ranked[1 :: max(1, len(ranked) // plans)]][:plans]:
        schedule = tvm.s_tir.Schedule(joined)
        outlook.apply(schedule, plan)
        result = run(schedule.mod, [*arguments[:-1], *own])
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4, err_msg=str(plan))


SIZES = st.integers(9, 14)
CHANNELS = st.sampled_from([8, 24])


@settings(max_examples=10)
@given(
    height=SIZES,
    width=SIZES,
    channels=CHANNELS,
    kernel=st.sampled_from([1, 3]),
    window=st.sampled_from([(2, 2), (3, 3), (3, 2)]),
    stride=st.integers(1, 2),
    padding=st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 1, 1), (1, 0, 0, 1)]),
    bare=st.booleans(),
)
def test_pools_with_convolutions_compute_the_same(
    height: int, width: int, channels: int, kernel: int, window: tuple[int, int], stride: int,
    padding: tuple[int, int, int, int], *, bare: bool,
) -> None:  # fmt: skip
    """Any window, stride and padding, also after a convolution that nothing else follows: maxima may be below zero."""
    module = make_convolution((1, height, width, 8), channels, (kernel, kernel), padding=(1, 1, 1, 1), bare=bare)
    check(module, make_pool(shape_of(module), window, stride, padding), plans=3)


@settings(max_examples=10)
@given(
    height=SIZES,
    width=SIZES,
    channels=CHANNELS,
    kernel=st.sampled_from([1, 3]),
    side=st.sampled_from([3, 5]),
    stride=st.integers(1, 2),
    padded=st.sampled_from([(1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 1, 1), (2, 1, 1, 2)]),
)
def test_depthwise_convolutions_with_others_compute_the_same(
    height: int, width: int, channels: int, kernel: int, side: int, stride: int, padded: tuple[int, int, int, int]
) -> None:
    """With any padding, rows of zeros are made by the convolution before."""
    module = make_convolution((1, height, width, 8), channels, (kernel, kernel), padding=(1, 1, 1, 1))
    check(module, make_depthwise(shape_of(module), side, stride, padded), plans=3)


def test_strips_need_not_divide_the_rows() -> None:
    """Thirteen rows for two threads: the second has six, though as many rows of the convolution are made for both."""
    module = make_convolution((1, 29, 29, 8), 16, (3, 3))
    check(module, make_pool(shape_of(module), (3, 3), 2, (0, 0, 0, 0)), plans=2, strip=7)


def test_only_what_gains_is_joined() -> None:
    """3 MB go to memory and come back where L2 holds less; 25 KB do not leave it."""
    core = cores.core_of(AVX2)
    for side, gains in ((112, True), (10, False)):
        large = make_convolution((1, 2 * side, 2 * side, 3), 64, (3, 3), 2, (1, 1, 1, 1))
        pool = make_pool(shape_of(large), (3, 3), 2, (1, 1, 1, 1))
        assert (strip_fusion.join_functions(large["main"], pool, core) is not None) is gains


def test_other_steps_are_left_alone() -> None:
    """A convolution of all channels, a pool of means, one of several images, one that leaves rows out."""
    from tvm import te, topi

    module = make_convolution((1, 12, 12, 8), 16, (3, 3), padding=(1, 1, 1, 1))
    data = te.placeholder(shape_of(module), name="data")
    means = topi.nn.pool2d(data, (2, 2), [2, 2], [1, 1], (0, 0, 0, 0), "avg", layout="NHWC")
    several = make_convolution((2, 12, 12, 8), 16, (3, 3))
    for convolution, step in (
        (module, make_convolution(shape_of(module), 8, (3, 3))["main"]),
        (module, te.create_prim_func([data, means], index_dtype_override="int64")),
        (several, make_pool(shape_of(several), (2, 2), 2, (0, 0, 0, 0))),
        (module, make_pool(shape_of(module), (2, 2), 3, (0, 0, 0, 0))),
    ):
        assert strip_fusion.join_functions(convolution["main"], step, SLOW) is None


def test_products_of_bytes_stay_apart() -> None:
    """Strips know nothing of the instructions that multiply them: without, they take twice as long as both apart."""
    from tvm import te, topi

    shape = (1, 12, 12, 16)
    data = te.placeholder(shape, "int32", name="data")
    result = topi.nn.pool2d(data, (2, 2), [2, 2], [1, 1], (0, 0, 0, 0), "max", layout="NHWC")
    pool = te.create_prim_func([data, result], index_dtype_override="int64")
    window = dots.DotWindow((3, 3), padding=(1, 1, 1, 1))
    convolution = dots.make_convolution((1, 12, 12, 8), "int8", 16, window, 2)
    assert strip_fusion.join_functions(convolution, pool, SLOW) is None


def test_boards_do_not_fuse() -> None:
    """By the emulator's estimate, fusion gains nothing there."""
    model = zoo.ZOO["squeezenet1.1"]
    graph = onnx.load_model_from_string(model.build())
    for target, joined in ((AVX2, True), (NANO, False)):
        names = [workload.name for workload in prepare_model(graph, model.input_shapes, target, "graph/2").workloads]
        assert ("transpose_conv2d_add_relu_max_pool2d 3x3 3x224x224>55x55x64" in names) is joined
