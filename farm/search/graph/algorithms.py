"""Which algorithm computes a convolution, by prediction alone: directly, or Winograd's F(m, 3); how weights lie.

Decided as the graph is prepared, before there is anything to measure: each algorithm is a function of its own.
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
from farm.search.graph import canonical, dots, pixel_padding, winograd
from farm.search.graph.winograd import Choose, Padding, Shape

# F(2, 3) rounds better than a direct convolution, see `farm.search.graph.winograd`.
EXACT_TILES, HALF_TILES, ALL_TILES = (2,), (2, 4), (2, 4, 6)
# A larger tile is less exact, and predictions are right within a tenth: it has to promise more.
_GAIN = 0.9
# Share of the last cache that holds a convolution's weights until the next inference.
_KEPT = 0.125


def choose_winograd(core: Core, *, exact: bool = False) -> Choose:
    """What `winograd.use_winograd` asks, for a target's core; `exact` leaves out what rounds worse than direct."""

    @functools.cache
    def choose(shape: Shape, channels: int, padding: Padding, dtype: str) -> int:
        direct = pixel_padding.pad(make_direct(shape, channels, padding, dtype), core)
        best, least = 0, predict_in_model(direct, core)
        for m in EXACT_TILES if exact else HALF_TILES if dtype == "float16" else ALL_TILES:
            seconds = predict_in_model(winograd.make_function(shape, channels, padding, m, dtype), core)
            if seconds < _GAIN * least:
                best, least = m, seconds
        return best

    return choose


def choose_panel(target: Any) -> dots.ChoosePanel:
    """What `dots.use_instruction` asks for a target (TVM's): as many channels as a tile is predicted to have."""

    def choose(function: Any) -> int:
        core = cores.core_of(target.export())
        outlook = rule.read_outlook(tvm.IRModule({"main": canonical.canonicalise(function)}), core)
        plans = outlook.plans() if outlook is not None else []
        return plans[0][1]["lanes"] * plans[0][1]["vectors"] if plans else 0

    return choose


def predict_in_model(function: Any, core: Core, weight_at: int = 1) -> float:
    """Seconds by the best plan where all weights but a few come from memory, as they do when a whole model runs.

    Half of that time is taken to pass while the core computes. Infinite where no family has a plan. Waits for single
    lines are left out, which not all families count.
    """
    core = dataclasses.replace(core, line_wait=0.0)
    outlook = rule.read_outlook(tvm.IRModule({"main": function}), core)
    plans = outlook.plans() if outlook is not None else []
    if not plans:
        return math.inf
    fetched = max(0.0, facts.size_of(function.params[weight_at]) - kept_bytes(core))
    return plans[0][0].seconds + fetched / core.memory_bytes_per_s / 2


def kept_bytes(core: Core) -> float:
    """So much of one function's weights is still in a cache at the next inference."""
    return max(core.l2_bytes, core.l3_bytes) * _KEPT


def make_direct(shape: Shape, channels: int, padding: Padding, dtype: str) -> Any:
    """The convolution as a TIR function of data and of weights [3, 3, in, out], directly."""
    data = te.placeholder(shape, dtype, name="data")
    weight = te.placeholder((winograd.KERNEL, winograd.KERNEL, shape[3], channels), dtype, name="weight")
    result = topi.nn.conv2d_nhwc(data, weight, 1, list(padding), 1)
    return canonical.canonicalise(te.create_prim_func([data, weight, result], index_dtype_override="int64"))
