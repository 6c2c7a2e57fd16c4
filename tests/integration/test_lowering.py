"""What becomes of scheduled functions in lowering: sums in registers, weights fetched ahead, the same results."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from farm.search import cores, tvm_env
from farm.search.build import lowering
from farm.search.families import rule
from farm.search.families.dense import CHANNELS_OUTSIDE, PAD_ALL, ROWS_OUTSIDE
from farm.search.graph import winograd
from farm.search.target import make_code_target
from farm.search.tuners.schedule_space import ScheduleSpace
from tests.integration.test_families import AVX2, AVX512, NANO, make_arguments, make_convolution, make_workload

tvm = tvm_env.load()

ZEN = AVX2 | {"mcpu": "znver3", "num-cores": 1}
# 147 and 590 KB of weights.
SMALL, LARGE = (1, 9, 9, 64), (1, 9, 9, 256)


def schedule(module: Any, target: dict[str, Any], plan: dict[str, int]) -> Any:
    """The function by the best predicted plan with these options, its weights packed already."""
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    outlook = rule.read_outlook(module, cores.core_of(target))
    assert outlook is not None
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
    """All places where lines are asked for ahead."""
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


def test_only_x86_is_asked_to_fetch() -> None:
    """Cores of boards fetch ahead themselves, in ways that nobody here could time."""
    module = make_convolution(LARGE, 64, (3, 3), padding=(1, 1, 1, 1))
    assert not list_asked(schedule(module, NANO, {}), NANO)


def test_few_weights_are_not_fetched_ahead() -> None:
    """They are in the second cache soon enough."""
    plan = {"lanes": 8, "vectors": 1, "pixels": 9, "rows": 1, "order": CHANNELS_OUTSIDE, "pad": PAD_ALL}
    module = make_convolution((1, 9, 9, 16), 64, (3, 3), padding=(1, 1, 1, 1))
    assert not list_asked(schedule(module, AVX2, plan), AVX2)


def test_a_block_that_would_drive_out_the_present_one_is_not_fetched() -> None:
    """Of a Zen 3's second cache 192 KiB are for it: three by three of 512 channels to 16 are 288, a row of them 96."""
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


def test_products_of_winograd_fetch_the_next_matrix() -> None:
    """Tiles of a row share each of the weights' matrices."""
    function = winograd.make_function((1, 16, 16, 64), 64, (1, 1, 1, 1), 2, "float32")
    function = function.with_attr("layout_free_buffers", [1])
    module = schedule(tvm.IRModule({"main": function}), AVX2, {"vectors": 1, "pixels": 2, "rows": 1, "unit": 1})
    assert list_asked(module, AVX2)
    check_same(module)


def check_same(module: Any) -> None:
    """Our code and TVM's own compute the same, to the bit."""
    arguments, results = make_arguments(module), []
    for pipeline in ("default", lowering.use_pipeline()):
        library = tvm.runtime.Executable(tvm.tirx.build(module, make_code_target(AVX2), pipeline))
        tensors = [tvm.runtime.tensor(argument) for argument in arguments]
        library["main"](*tensors)
        results.append(tensors[-1].numpy())
    np.testing.assert_array_equal(*results)
