"""Lowering of scheduled functions: accumulators in registers, prefetched weights, the same results."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from farm.search import cores, tvm_env
from farm.search.codegen import lowering
from farm.search.families import facts, rule
from farm.search.families.dense import CHANNELS_OUTSIDE, PAD_ALL, ROWS_OUTSIDE
from farm.search.families.depthwise import PAD_NONE
from farm.search.graph import winograd
from farm.search.tuners.schedule_space import ScheduleSpace
from farm.search.tvm_env import make_code_target
from tests.integration.test_families import AVX2, AVX512, NANO, make_arguments, make_convolution, make_workload

tvm = tvm_env.load()

ZEN = AVX2 | {"mcpu": "znver3", "num-cores": 1}
# 147 and 590 KB of weights.
SMALL, LARGE = (1, 9, 9, 64), (1, 9, 9, 256)
# A tile's place is a row and a column of tiles.
IN_PLACE = {"vectors": 1, "pixels": 4, "rows": 2, "pad": PAD_NONE}


def schedule(module: Any, target: dict[str, Any], plan: dict[str, int]) -> Any:
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    outlook = rule.read_outlook(module, cores.core_of(target))
    space = ScheduleSpace(make_workload(module, target))
    genome = next(
        genome
        for (_, each), genome in zip(outlook.plans(), space.ranked, strict=False)
        if plan.items() <= dict(each).items()
    )
    (evaluated,) = space.evaluate([(genome, 0)])
    assert evaluated is not None
    ready = tvm.ir.load_json(space.describe(evaluated).module_json)
    return RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(ready)


def lower(module: Any, target: dict[str, Any], pipeline: str | None = None) -> str:
    """What code is made from, as text; by TVM's own passes where no pipeline is named."""
    passes, of_host, _ = tvm.tirx.get_tir_pipeline(pipeline or "s_tir")
    code = make_code_target(target)
    return str(of_host()(passes(tvm.tirx.transform.BindTarget(code.with_host(code))(module))).script())


def list_asked(module: Any, target: dict[str, Any]) -> list[str]:
    return re.findall(r"llvm\.prefetch", lower(module, target, lowering.use_pipeline()))


def test_sums_that_fill_the_registers_are_on_the_stack() -> None:
    """28 vectors of 64 bytes: TVM alone takes them from a pool, where they are memory."""
    module = schedule(
        make_convolution((1, 14, 14, 64), 64, (1, 1)), AVX512, {"lanes": 16, "vectors": 2, "pixels": 14, "rows": 1}
    )
    assert "TVMBackendAllocWorkspace" in lower(module, AVX512)
    assert "TVMBackendAllocWorkspace" not in lower(module, AVX512, lowering.use_pipeline())


@pytest.mark.parametrize(
    ("order", "asks"),
    [
        pytest.param(CHANNELS_OUTSIDE, True, id="tiles share a block of weights"),
        pytest.param(ROWS_OUTSIDE, False, id="each tile reads another block"),
    ],
)
def test_weights_that_tiles_share_are_fetched_ahead(order: int, *, asks: bool) -> None:
    """Of a 1x1 convolution, whose pixels are one loop."""
    plan = {"lanes": 8, "vectors": 2, "pixels": 4, "rows": 1, "order": order}
    module = schedule(make_convolution((1, 8, 8, 512), 128, (1, 1)), AVX2, plan)
    assert bool(list_asked(module, AVX2)) is asks


def test_only_large_shared_weights_on_x86_are_fetched_ahead() -> None:
    """Arm cores prefetch in hardware; software prefetch is not measured there. They reach L2 soon enough. Of a Zen 3's
    L2, 192 KiB are for it: three by three of 512 channels to 16 are 288, a row of them 96.
    """
    module = make_convolution(LARGE, 64, (3, 3), padding=(1, 1, 1, 1))
    assert not list_asked(schedule(module, NANO, {}), NANO)
    plan = {"lanes": 8, "vectors": 1, "pixels": 9, "rows": 1, "order": CHANNELS_OUTSIDE, "pad": PAD_ALL}
    module = make_convolution((1, 9, 9, 16), 64, (3, 3), padding=(1, 1, 1, 1))
    assert not list_asked(schedule(module, AVX2, plan), AVX2)
    plan = {"lanes": 8, "vectors": 2, "pixels": 2, "rows": 1, "order": CHANNELS_OUTSIDE, "pad": PAD_ALL}
    less, more = (make_convolution((1, 7, 14, depth), 32, (3, 3), padding=(1, 1, 1, 1)) for depth in (256, 512))
    assert list_asked(schedule(less, ZEN, plan), ZEN)
    assert not list_asked(schedule(more, ZEN, plan | {"parts": 1}), ZEN)
    assert list_asked(schedule(more, ZEN, plan | {"parts": 3}), ZEN)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_is_fetched_ahead_changes_no_result(size: tuple[int, int, int, int]) -> None:
    """A few lines at once, or line by line as the sums go on, and beyond the last block, where there is nothing."""
    plan = {"lanes": 8, "vectors": 1, "pixels": 9, "rows": 1, "order": CHANNELS_OUTSIDE, "pad": PAD_ALL}
    module = schedule(make_convolution(size, 64, (3, 3), padding=(1, 1, 1, 1)), AVX2, plan)
    assert list_asked(module, AVX2)
    check_same(module)


def test_sums_take_four_steps_at_a_time_on_x86() -> None:
    """Of a reduction of 64 there are 16 steps, with four times the FMAs; where there are 18, six of three. Nor do they
    on Arm, where four steps' data are one vector already.
    """
    plan = {"lanes": 8, "vectors": 2, "pixels": 4, "rows": 1}
    for depth, loops in ((64, 16), (18, 6)):
        module = schedule(make_convolution((1, 8, 8, depth), 32, (1, 1)), AVX2, plan)
        ours, theirs = (lower(module, AVX2, name) for name in (lowering.use_pipeline(), None))
        assert re.search(rf"in range\({depth}\):", theirs)
        assert re.search(rf"in range\({loops}\):", ours)
        assert not re.search(rf"in range\({depth}\):", ours)
        check_same(module)
    module = make_convolution((1, 8, 8, 64), 32, (1, 1))
    listing = lower(schedule(module, NANO, {"steps": 4}), NANO, lowering.use_pipeline())
    assert re.search(r"in range\(16\):", listing)


def test_what_a_step_asks_for_is_found_without_a_division() -> None:
    """Nine tiles share a block: a division by nine takes as many instructions as three FMAs."""
    plan = {"lanes": 8, "vectors": 1, "pixels": 9, "rows": 1, "order": CHANNELS_OUTSIDE, "pad": PAD_ALL}
    module = schedule(make_convolution(LARGE, 64, (3, 3), padding=(1, 1, 1, 1)), AVX2, plan)
    listing = lower(module, AVX2, lowering.use_pipeline())
    (asked,) = {line.strip() for line in listing.split("\n") if "llvm.prefetch" in line}
    assert ">>" in asked or "shift_right" in asked
    assert "//" not in asked


def test_products_of_winograd_fetch_the_next_matrix() -> None:
    """Tiles of a row share each of the weights' matrices."""
    function = winograd.make_function((1, 16, 16, 64), 64, (1, 1, 1, 1), 2, "float32")
    function = function.with_attr("layout_free_buffers", [1])
    module = schedule(tvm.IRModule({"main": function}), AVX2, {"vectors": 1, "pixels": 2, "rows": 1, "unit": 1})
    assert list_asked(module, AVX2)
    check_same(module)


def make_depthwise(size: int, channels: int) -> Any:
    from tvm import te, topi

    data = te.placeholder((1, size, size, channels), name="data")
    weight = te.placeholder((3, 3, channels, 1), name="weight")
    bias = te.placeholder((1, 1, 1, channels), name="bias")
    result = topi.nn.depthwise_conv2d_nhwc(data, weight, 1, [1, 1, 1, 1], 1)
    result = topi.clip(topi.add(result, bias), 0.0, 6.0)
    return tvm.IRModule({"main": te.create_prim_func([data, weight, bias, result], index_dtype_override="int64")})


def test_tiles_inside_an_image_compare_nothing_on_arm() -> None:
    """Of 24 x 24 results in tiles of 2 x 4: those of rows inside and of all columns but the first and the last. Not
    measured there.
    """
    module = schedule(make_depthwise(24, 16), NANO, IN_PLACE)
    before, between, after = re.split(r"for \w+ in range\(1, 5\):", lower(module, NANO, lowering.use_pipeline()))
    first, inside, rest = before.partition("compute_scope")[2], between.partition("else:")[0], after
    assert "if_then_else" in lower(module, NANO)
    assert all("if_then_else" not in each for each in (first, inside))
    assert "if_then_else" in rest
    module = schedule(make_depthwise(24, 32), AVX2, IN_PLACE)
    ours, theirs = (lower(module, AVX2, name).count("if_then_else") for name in (lowering.use_pipeline(), None))
    assert ours == theirs


def test_sums_begin_as_the_bias_on_arm() -> None:
    """So that nothing is added to results, which have their limits alone. The bias; what is added to a block's result
    later, a residual, still is.
    """
    module = schedule(make_depthwise(24, 16), NANO, IN_PLACE)
    ours, theirs = (lower(module, NANO, name) for name in (lowering.use_pipeline(), None))
    bias = r"T\.m\w+\(\w+\[\d+\] \+ "
    assert re.search(bias, theirs)
    assert not re.search(bias, ours)
    assert not re.search(r"\w+\[\d+\] = T.Broadcast\(T.float32\(0.0\), 4\)", ours)
    module = schedule(make_convolution((1, 8, 8, 32), 32, (1, 1), added=True), NANO, {"steps": 4})
    assert "T.Broadcast(T.float32(0.0), 4)\n" in lower(module, NANO)
    assert "T.Broadcast(T.float32(0.0), 4)\n" not in lower(module, NANO, lowering.use_pipeline())


def test_maxima_are_one_instruction_on_arm() -> None:
    """Of two vectors that are no constants; elsewhere they are TVM's."""
    from tvm import te, topi

    data = te.placeholder((1, 9, 9, 32), name="data")
    result = topi.nn.pool2d(data, [3, 3], [2, 2], [1, 1], [0, 0, 0, 0], "max", layout="NHWC")
    module = tvm.IRModule({"main": te.create_prim_func([data, result], index_dtype_override="int64")})
    for target, wanted in ((NANO, True), (AVX2, False)):
        assert ("llvm.maximum" in lower(schedule(module, target, {}), target, lowering.use_pipeline())) is wanted


def make_rows(elements: int) -> Any:
    """Of three rows: the largest, the sum of powers and the least, reduced element by element."""
    from tvm import te, topi

    data = te.placeholder((3, elements), name="data")
    results = [topi.max(data, 1), topi.sum(topi.fast_exp(data), 1), topi.min(data, 1)]
    found = tvm.s_tir.Schedule(te.create_prim_func([data, *results], index_dtype_override="int64"))
    for name in facts.list_blocks(found):
        block = found.get_sblock(name)
        if any(map(facts.is_sum, found.get(block).iter_vars)):
            found.decompose_reduction(block, found.get_loops(block)[-1])
    return found.mod


@pytest.mark.parametrize("elements", [8, 9, 15, 31, 64, 65, 197, 1001])
def test_rows_of_any_length_go_by_vectors(elements: int) -> None:
    """No step of a loop is one element then, and what the last vector has in common with others counts once."""
    module = make_rows(elements)
    assert re.search(rf"for \w+ in range\({elements}\)", lower(module, AVX2))
    assert not re.search(rf"for \w+ in range\({elements}\)", lower(module, AVX2, lowering.use_pipeline()))
    rows = np.random.default_rng(0).standard_normal((3, elements)).astype("float32")
    results = [np.zeros(3, "float32") for _ in range(3)]
    tensors = [tvm.runtime.tensor(each) for each in (rows, *results)]
    tvm.runtime.Executable(tvm.tirx.build(module, make_code_target(AVX2), lowering.use_pipeline()))["main"](*tensors)
    largest, powers, least = (each.numpy() for each in tensors[1:])
    np.testing.assert_array_equal(largest, rows.max(1))
    np.testing.assert_array_equal(least, rows.min(1))
    np.testing.assert_allclose(powers, np.exp(rows.astype("float64")).sum(1), rtol=1e-6)


def test_short_rows_and_unknown_cores_are_left() -> None:
    """Seven elements fill no vector of eight; a pad's condition is decided element by element. How long its vectors
    are is not known.
    """
    from tvm import te, topi

    short = make_rows(7)
    assert "partial" not in lower(short, AVX2, lowering.use_pipeline())
    data = te.placeholder((3, 60), name="data")
    result = topi.sum(topi.nn.pad(data, [0, 2], [0, 2]), 1)
    found = tvm.s_tir.Schedule(te.create_prim_func([data, result], index_dtype_override="int64"))
    pad, total = facts.list_blocks(found)
    found.compute_inline(found.get_sblock(pad))
    found.decompose_reduction(found.get_sblock(total), found.get_loops(found.get_sblock(total))[-1])
    assert "partial" not in lower(found.mod, AVX2, lowering.use_pipeline())
    target = {"kind": "llvm", "mtriple": "i686-linux-gnu", "num-cores": 1}
    assert "partial" in lower(make_rows(64), AVX2, lowering.use_pipeline())
    assert "partial" not in lower(make_rows(64), target, lowering.use_pipeline())


def check_same(module: Any) -> None:
    """Our code and TVM's own compute the same, to the bit."""
    arguments, results = make_arguments(module), []
    for pipeline in ("default", lowering.use_pipeline()):
        library = tvm.runtime.Executable(tvm.tirx.build(module, make_code_target(AVX2), pipeline))
        tensors = [tvm.runtime.tensor(argument) for argument in arguments]
        library["main"](*tensors)
        results.append(tensors[-1].numpy())
    np.testing.assert_array_equal(*results)
