"""Winograd convolutions: matrices, place in a graph, that every schedule computes the same, when they are chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.search import cores, tvm_env, workloads
from farm.search.families import rule
from farm.search.families.dense import CHANNELS_OUTSIDE, ROWS_OUTSIDE
from farm.search.families.winograd import count_direct_flop
from farm.search.graph import half_precision, pipelines, winograd
from farm.search.graph.pipelines import PIPELINES
from farm.search.graph.winograd import Padding, Shape
from farm.search.tuners.schedule_space import ScheduleSpace
from farm.values import Workload

tvm = tvm_env.load()

AVX2 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}
INTEL = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "sapphirerapids", "num-cores": 1}
NANO = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57", "mattr": ["+neon"], "num-cores": 4}
ONES: Padding = (1, 1, 1, 1)
Array = npt.NDArray[Any]


def convolve(data: Array, weights: Array, padding: Padding) -> Array:
    top, left, bottom, right = padding
    padded = np.pad(data.astype(np.float64), ((0, 0), (top, bottom), (left, right), (0, 0)))
    rows, columns = padded.shape[1] - 2, padded.shape[2] - 2
    parts = [
        padded[:, a : a + rows, b : b + columns] @ weights[a, b].astype(np.float64) for a in range(3) for b in range(3)
    ]
    return np.asarray(sum(parts))


def make_data(shape: Shape, channels: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((3, 3, shape[3], channels)) / np.sqrt(9 * shape[3])
    return rng.standard_normal(shape).astype("float32"), weights.astype("float32")


def make_module(shape: Shape, channels: int, padding: Padding, m: int) -> Any:
    function = winograd.make_function(shape, channels, padding, m)
    return tvm.IRModule({"main": function.with_attr("layout_free_buffers", [1])})


def run(module: Any, arguments: list[Array], result: tuple[int, ...]) -> Array:
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    module = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=False)(module)
    library = tvm.compile(module, target=tvm.target.Target(AVX2))
    written = tvm.runtime.tensor(np.full(result, np.nan, "float32"))
    library["main"](*[tvm.runtime.tensor(each) for each in arguments], written)
    return np.asarray(written.numpy())


def error_of(found: Array, expected: Array) -> float:
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))


@pytest.mark.parametrize("m", [2, 4, 6])
def test_the_matrices_convolve(m: int) -> None:
    """In exact enough arithmetic A^T [(G g) * (B^T d)] is the convolution, and shared sums change nothing."""
    result, data, kernel = winograd.matrices(m)
    rng = np.random.default_rng(0)
    d, g = rng.standard_normal(m + 2), rng.standard_normal(3)
    expected = [d[k : k + 3] @ g for k in range(m)]
    np.testing.assert_allclose(result @ ((kernel @ g) * (data @ d)), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=8)
@given(
    m=st.sampled_from([2, 4, 6]),
    height=st.integers(3, 15),
    width=st.integers(3, 15),
    inputs=st.sampled_from([1, 3, 8, 20]),
    channels=st.sampled_from([7, 8, 24]),
    padding=st.sampled_from([(0, 0, 0, 0), ONES, (0, 1, 2, 1)]),
    batch=st.integers(1, 2),
    place=st.floats(0, 1),
)
def test_every_schedule_computes_the_convolution(
    m: int, height: int, width: int, inputs: int, channels: int, padding: Padding, batch: int, place: float
) -> None:
    """Any size, tiles that reach over the end, odd channels, batches; some plan of all that make sense."""
    shape = (batch, height, width, inputs)
    module = make_module(shape, channels, padding, m)
    outlook = rule.read_outlook(module, cores.core_of(AVX2))
    assert outlook.family.name == "winograd"
    plans = outlook.plans()
    schedule = tvm.s_tir.Schedule(module)
    outlook.apply(schedule, plans[int(place * (len(plans) - 1))][1])
    data, weights = make_data(shape, channels)
    expected = convolve(data, weights, padding)
    found = run(schedule.mod, [data, winograd.transform_weights(weights, m)], expected.shape)
    assert error_of(found, expected) < 1e-5


@pytest.mark.parametrize(("m", "limit"), [(2, 4e-7), (4, 1.1e-6), (6, 5e-6)])
def test_the_error_stays_what_it_was_measured_to_be(m: int, limit: float) -> None:
    """64 channels: the docstring's figures and half of them again."""
    shape = (1, 14, 14, 64)
    module = make_module(shape, 16, ONES, m)
    outlook = rule.read_outlook(module, cores.core_of(AVX2))
    schedule = tvm.s_tir.Schedule(module)
    outlook.apply(schedule, outlook.plans()[0][1])
    data, weights = make_data(shape, 16)
    expected = convolve(data, weights, ONES)
    found = run(schedule.mod, [data, winograd.transform_weights(weights, m)], expected.shape)
    assert error_of(found, expected) < limit


@pytest.mark.parametrize("target", [AVX2, NANO], ids=["avx2", "nano"])
def test_a_trace_holds_its_plan(target: dict[str, Any]) -> None:
    """Either order of loops comes back from its own trace, as JSON, with the same code."""
    module = make_module((1, 13, 13, 16), 32, ONES, 4)
    key = workloads.workload_hash(module, target, "graph/2")
    space = ScheduleSpace(Workload(key, "test", 1.0, 1, (), tvm.ir.save_json(module), target, "graph/2"))
    order = list(rule.read_outlook(module, cores.core_of(target)).options).index("order")  # type: ignore[union-attr]
    for wanted in (ROWS_OUTSIDE, CHANNELS_OUTSIDE):
        genome = next(each for each in space.ranked if each.decisions[order] == wanted)
        [found] = space.evaluate([(genome, 0)])
        assert found is not None
        candidate = space.describe(found)
        assert space.read(candidate.trace_json) == genome
        assert tvm.ir.save_json(tvm.ir.load_json(space.replay(candidate.trace_json))) == candidate.module_json


def make_graph(**attributes: Any) -> tuple[Any, Array, Array]:
    from tvm import relax

    size = attributes.pop("size", 3)
    weights = make_data((1, 9, 9, 8 // attributes.get("groups", 1)), 8)[1][:size, :size]
    bias = np.linspace(-1, 1, 8, dtype="float32").reshape(1, 1, 1, 8)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 9, 9, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = builder.emit(
                relax.op.nn.conv2d(
                    x,
                    relax.const(weights),
                    data_layout="NHWC",
                    kernel_layout="HWIO",
                    **{"padding": [1] * 4, **attributes},
                )
            )
            made = builder.emit(relax.op.add(made, relax.const(bias)))
            if not attributes and size == 3:
                made = builder.emit(relax.op.add(made, x))
            made = builder.emit_output(relax.op.nn.relu(made))
        builder.emit_func_output(made)
    return builder.get(), weights, bias


def test_what_follows_a_convolution_is_fused_into_it() -> None:
    """Bias, residual and activation end in one function, of a telling name, with a right result."""
    graph, weights, bias = make_graph()
    target = tvm.target.Target(AVX2)
    made = winograd.use_winograd(lambda *_: 4)(graph)
    public = [
        str(name.name_hint) for name, function in made.functions_items() if "global_symbol" in (function.attrs or {})
    ]
    assert public == ["main"], "two functions that the linker knows as main"
    module, used = pipelines.prepare(made, target, PIPELINES["graph/2"])
    [workload] = workloads.extract(module, target, AVX2, used.name)
    assert workload.name == "winograd4_conv2d_add_add_relu 3x3 9x9x8>8"
    assert workload.kind == "conv2d"
    outlook = rule.read_outlook(tvm.ir.load_json(workload.module_json), cores.core_of(AVX2))
    assert outlook.family.name == "winograd"
    schedule = tvm.s_tir.Schedule(tvm.ir.load_json(workload.module_json))
    outlook.apply(schedule, outlook.plans()[0][1])
    x = make_data((1, 9, 9, 8), 8)[0]
    arguments = [x, winograd.transform_weights(weights, 4), bias]
    expected = np.maximum(convolve(x, weights, ONES) + bias + x, 0)
    assert error_of(run(schedule.mod, arguments, expected.shape), expected) < 2e-6


@pytest.mark.parametrize(
    "attributes",
    [{"strides": 2}, {"dilation": 2}, {"groups": 2}, {"size": 1}],
    ids=lambda attributes: next(iter(attributes)),
)
def test_other_convolutions_stay(attributes: dict[str, Any]) -> None:
    """Strides, dilations, groups and other kernels are not what the algorithm computes."""
    graph, _, _ = make_graph(**attributes)
    module = winograd.use_winograd(lambda *_: 4)(graph)
    assert [str(variable.name_hint) for variable in module.get_global_vars()] == ["main"]


def test_the_choice_follows_the_prediction() -> None:
    """Middling layers gain; one input channel leaves nothing to sum up; what has to be exact is F(2, 3) at most."""
    core = cores.core_of(NANO)
    choose, exact = half_precision.choose_winograd(core), half_precision.choose_winograd(core, exact=True)
    assert choose((1, 56, 56, 64), 64, ONES, "float32") in (4, 6)
    assert exact((1, 56, 56, 64), 64, ONES, "float32") == 2
    assert choose((1, 3, 3, 1), 4, (0, 0, 0, 0), "float32") == 0


@pytest.mark.parametrize(
    ("shape", "channels", "m"),
    [
        ((1, 56, 56, 64), 64, 4),
        ((1, 28, 28, 128), 128, 4),
        ((1, 14, 14, 256), 256, 2),
        ((1, 13, 13, 64), 256, 2),
        ((1, 20, 20, 128), 128, 4),
    ],
    ids=str,
)
def test_an_intel_cores_choice_is_what_was_measured(shape: Shape, channels: int, m: int) -> None:
    """The fastest that was measured: F(4, 3)'s weights are waited for where they are many."""
    assert half_precision.choose_winograd(cores.core_of(INTEL))(shape, channels, ONES, "float32") == m


def test_rows_that_are_all_of_them_are_not_outside_where_weights_are_fetched() -> None:
    """TVM drops a loop of one step, and with it the buffers by which a tile is known; Arm's code fetches nothing."""
    for target, known in ((INTEL, False), (NANO, True)):
        outlook = rule.read_outlook(make_module((1, 16, 16, 16), 16, ONES, 4), cores.core_of(target))
        whole = [plan for _, plan in outlook.plans() if plan["unit"] == 4 and plan["order"] == ROWS_OUTSIDE]
        assert bool(whole) is known


def test_a_models_flop_do_not_depend_on_the_algorithm() -> None:
    """A Winograd function counts as the direct convolution that it stands for; any other is not counted."""
    shape = (1, 13, 13, 8)
    function = winograd.make_function(shape, 16, (1, 1, 1, 1), 4)
    assert count_direct_flop(tvm.IRModule({"main": function})) == 2 * 9 * 8 * 13 * 13 * 16
    from tvm import te

    data = te.placeholder((4,), name="data")
    twice = te.compute((4,), lambda i: data[i] * 2.0, name="twice")
    assert count_direct_flop(tvm.IRModule({"main": te.create_prim_func([data, twice])})) is None
