"""Choose a convolution's algorithm by prediction: direct, or Winograd's F(m, 3); and the layout of its weights.

The choice is made while the graph is prepared, before any measurement.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import tvm
from tvm import te, topi

from farm.search import cores
from farm.search.cores import Core
from farm.search.families import facts, rule
from farm.search.families.family import Unit
from farm.search.families.gpu_tiles import GpuWinograd
from farm.search.graph import canonical, channel_padding, dots
from farm.search.graph.winograd import KERNEL, Choose, Make, Padding, Shape, count_tiles, make_function

# F(2, 3) rounds better than a direct convolution, see the docstring of `winograd`.
EXACT_TILES, HALF_TILES, ALL_TILES = (2,), (2, 4), (2, 4, 6)
# A larger tile is less exact, and predictions are within 10 %, so it must promise more. On a GPU most layers gain much.
_GAIN, _GPU_GAIN = 0.9, 0.96
# Input channels below which a GPU's transforms outweigh the products.
_FEWEST_INPUTS = 8
# Fraction of the last-level cache that holds a convolution's weights until the next inference.
_KEPT = 0.125


def choose_winograd(unit: Unit, *, exact: bool = False) -> Choose:
    """Return a `choose` for `use_winograd` on a core or GPU; `exact` excludes what rounds worse than a direct one."""
    make, gain = make_for(unit), _GAIN if isinstance(unit, Core) else _GPU_GAIN

    @functools.cache
    def choose(shape: Shape, channels: int, padding: Padding, dtype: str) -> int:
        if shape[3] < _FEWEST_INPUTS and not isinstance(unit, Core):
            return 0
        direct = make_direct(shape, channels, padding, dtype)
        direct = channel_padding.pad(direct, unit) if isinstance(unit, Core) else channel_padding.join(direct, unit)
        best, least = 0, predict_in_model(direct, unit)
        for m in EXACT_TILES if exact else HALF_TILES if dtype == "float16" else ALL_TILES:
            seconds = predict_in_model(make(shape, channels, padding, m, dtype), unit)
            if seconds < gain * least:
                best, least = m, seconds
        return best

    return choose


@functools.cache
def make_for(unit: Unit) -> Make:
    """Return the `make` for `use_winograd`: on a GPU, all tiles are one loop that its tiles divide."""
    if isinstance(unit, Core):
        return make_function

    @functools.cache
    def make(shape: Shape, channels: int, padding: Padding, m: int, dtype: str) -> Any:
        count = shape[0] * math.prod(count_tiles(shape, padding, m))
        function = make_function(shape, channels, padding, m, dtype, count)
        found = GpuWinograd().read(tvm.s_tir.Schedule(function))
        wanted = channel_padding.choose_pixels(found.products, unit) if found is not None else count
        return function if wanted == count else make_function(shape, channels, padding, m, dtype, wanted)

    return make


def choose_panel(target: Any) -> dots.ChoosePanel:
    """Return a `choose_panel` for `dots.use_instruction` on a target (TVM's): the channels of a predicted tile."""

    def choose(function: Any) -> int:
        core = cores.core_of(target.export())
        outlook = rule.read_outlook(tvm.IRModule({"main": canonical.canonicalise(function)}), core)
        plans = outlook.plans() if outlook is not None else []
        return plans[0][1]["lanes"] * plans[0][1]["vectors"] if plans else 0

    return choose


def predict_in_model(function: Any, unit: Unit, weight_at: int = 1) -> float:
    """Predict the seconds of the best plan where most weights come from memory, as in a whole model.

    On a core, half of the transfer is hidden by computation. GPU families count it. Infinite where no family has a
    plan. Line stalls are left out, since not all families count them.
    """
    unit = dataclasses.replace(unit, line_wait=0.0) if isinstance(unit, Core) else unit
    outlook = rule.read_outlook(tvm.IRModule({"main": function}), unit)
    plans = outlook.plans() if outlook is not None else []
    if not plans or not isinstance(unit, Core):
        return plans[0][0].seconds if plans else math.inf
    fetched = max(0.0, facts.size_of(function.params[weight_at]) - kept_bytes(unit))
    return plans[0][0].seconds + fetched / unit.memory_bytes_per_s / 2


def kept_bytes(core: Core) -> float:
    """Return the bytes of a function's weights that stay in a cache until the next inference."""
    return max(core.l2_bytes, core.l3_bytes) * _KEPT


def make_direct(shape: Shape, channels: int, padding: Padding, dtype: str) -> Any:
    """Make the direct convolution as a TIR function of data and weights [3, 3, in, out]."""
    data = te.placeholder(shape, dtype, name="data")
    weight = te.placeholder((KERNEL, KERNEL, shape[3], channels), dtype, name="weight")
    result = topi.nn.conv2d_nhwc(data, weight, 1, list(padding), 1)
    return canonical.canonicalise(te.create_prim_func([data, weight, result], index_dtype_override="int64"))
