"""Pixels of a convolution in one loop, filled up with copies of the last one: part of a graph pipeline.

Rows of 13 pixels leave tiles of 13 or of 1, whose loads or waits bind; all 169 pixels and one more leave tiles of 5 by
two vectors, which fill sixteen registers. The pixels on top read what the last one reads and write the same result to
the same place, so that nothing is compared inside a tile and no padded copy of data is made. Only where the target's
core is predicted to gain: 1x1 convolutions have their pixels in one loop anyway (`canonical`), others get them here.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import tvm
from tvm import tirx

from farm.search.cores import Core, find_core
from farm.search.families import facts
from farm.search.families.dense import Dense
from farm.search.families.facts import Axis, Contraction
from farm.search.families.rule import Outlook
from farm.search.graph import bindings, canonical
from farm.search.graph.repeated_steps import repeat

_log = logging.getLogger(__name__)

# Most pixels on top, and what share of the predicted time has to be left for it to be done.
_MOST_MORE, _GAIN = 7, 0.96
# Least steps of the innermost reduction: each pixel's address is computed before it (3x3/2 111x111x3>64 took 1.07 times
# as long on Zen 3).
_LEAST_LINE = 16
# The share where factors come from lanes: 32 registers hold good tiles as it is, and no gain of one in twenty was
# confirmed.
_LANE_GAIN = 0.9


def pad_all(target: Any) -> Any:
    """A module pass for a target (TVM's) and canonical functions; does nothing for one whose cores are not known."""

    def run(module: Any, _: Any) -> Any:
        core = find_core(dict(target.export()))
        if core is None:
            return module
        for variable, function in module.functions_items():
            if isinstance(function, tirx.PrimFunc):
                module.update_func(variable, pad(function, core))
        return module

    return tvm.transform.module_pass(run, opt_level=0, name="PadPixels")


def pad(function: Any, core: Core) -> Any:
    """The same function with more pixels where the core gains by it."""
    schedule = bindings.schedule(function)
    found = facts.read_contraction(schedule)
    if found is None or not canonical.is_in_order(found) or found.line < _LEAST_LINE:
        return function
    wanted = padded(found, core)
    if not wanted:
        return function
    try:
        result = _pad(schedule, found, wanted)
    except (RuntimeError, ValueError, TypeError) as error:  # what TVM raises where it cannot; nothing is lost
        _log.debug("%d pixels stay as they are: %s", wanted, error)
        return function
    for key, value in (function.attrs or {}).items():
        result = result.with_attr(key, value)
    return result


def padded(found: Contraction, core: Core) -> int:
    """How many pixels to compute in one loop so that those of a contraction are had soonest; 0 where they stay."""
    area = math.prod(axis.extent for axis in found.pixels)
    if core.lane_fma and len(found.pixels) > 1:
        # Each pixel's address takes a register then, which no prediction counts: 3x3 7x7x512>512 on a Cortex-A53 was
        # foreseen at 0.91 and has 39 spills in its loop, 0.12 of the peak in place of 0.34 (llvm-mca).
        return 0
    best, least = 0, _predict(found, core) * (_LANE_GAIN if core.lane_fma else _GAIN)
    for count in range(area, area + 1 + _MOST_MORE):
        joined = dataclasses.replace(found, pixels=(Axis(0, count),), between=())
        seconds = _predict(joined, core, more=True)
        if seconds < least:
            best, least = count, seconds
    return best


def _predict(found: Contraction, core: Core, *, more: bool = False) -> float:
    """Seconds of the best plan; with `more` pixels none where that is known to be slower than foreseen."""
    family = Dense()
    plans = Outlook(family, found, core, family.options(found, core)).plans()
    if not plans or (more and core.lane_fma and plans[0][1].get("steps", 1) == 1):
        # Tiles of 25 pixels by one vector, each factor a load, spill, LLVM loading early (1x1 7x7x960>320 on a
        # Cortex-A53, foreseen at 0.85: 36 spills, 0.15 of the peak in place of 0.19).
        return math.inf
    return plans[0][0].seconds


def _pad(schedule: Any, found: Contraction, wanted: int) -> Any:
    """The function over `wanted` pixels: its sums are stored for all of them, its result for those that there are."""
    area = math.prod(axis.extent for axis in found.pixels)
    if len(found.pixels) > 1:
        canonical.join_pixels(schedule, found)
    else:
        for name in found.between:
            schedule.compute_inline(schedule.get_sblock(name))
    if wanted == area:
        return schedule.mod["main"]
    if found.last == found.main:
        _write_apart(schedule, found)
    names = (found.main, facts.list_blocks(schedule)[-1])
    sums = schedule.get(schedule.get_sblock(found.main)).writes[0].source
    if [int(d) for d in sums.shape] != [area, found.channel]:
        raise ValueError("sums that are not over pixels and channels")
    wide = tirx.decl_buffer([wanted, found.channel], sums.dtype, sums.name)
    body = repeat(
        schedule, names, 0, wanted, lambda step: tirx.min(step, tirx.IntImm(step.ty.dtype, area - 1)), {sums: wide}
    )
    function = schedule.mod["main"]
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


def _write_apart(schedule: Any, found: Contraction) -> None:
    """Let another block write the result of a contraction that nothing follows."""
    main = schedule.get_sblock(found.main)
    result = schedule.cache_write(main, 0, "global")
    *extents, _ = (int(d) for d in schedule.get(result).writes[0].source.shape)

    def join(*indices: Any) -> tuple[Any, Any]:
        *pixels, channel = indices
        joined = pixels[0]
        for index, extent in zip(pixels[1:], extents[1:], strict=True):
            joined = joined * extent + index
        return joined, channel

    if len(extents) > 1:
        mapping = canonical.index_map(join, len(extents) + 1)
        schedule.transform_layout(main, ("write", 0), mapping)
        schedule.transform_block_layout(result, mapping)
