"""Pad channels to a whole number of vectors, and fused pixels to a better tile: passes of a graph pipeline.

Only where the target's core is predicted to gain. Padded weights and addends are constants.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst

from farm.search import gpus
from farm.search.cores import Core, find_core
from farm.search.families import expressions, facts
from farm.search.families.dense import MOST_ROWS, MOST_VECTORS, Dense, step_cycles
from farm.search.families.facts import Axis, Contraction
from farm.search.families.family import Family, Unit
from farm.search.families.gpu_tiles import GpuTiles
from farm.search.families.loops import divisors, inline_blocks, join_pixels_written
from farm.search.families.rule import Outlook
from farm.search.gpus import TargetGpu
from farm.search.graph import bindings, canonical
from farm.search.graph.canonical import repeat

_log = logging.getLogger(__name__)

# Most additional pixels, and the fraction of the predicted time below which padding is used.
_MOST_MORE, _GAIN = 7, 0.96
# Sides of tiles of a GPU, which divide its pixels.
_UNITS = (4, 7, 8, 14, 16, 28, 32, 56, 64)
# Channels of a thread.
_GPU_CHANNELS = 8
# Least steps of the innermost reduction loop, before which each pixel's address is computed (3x3/2 111x111x3>64 took
# 1.07 times as long on Zen 3).
_LEAST_LINE = 16
# The fraction for lane FMAs: 32 registers hold good tiles anyway, and no predicted gain of 5 % was confirmed.
_LANE_GAIN = 0.9
_LAST = ("NWC", "NHWC", "NDHWC")
_CONVOLUTIONS = tuple(f"relax.nn.conv{n}d" for n in (1, 2, 3))
# Safe on padded channels: finite values stay finite, so zero weights cancel them.
_HARMLESS = frozenset(
    f"relax.{name}"
    for name in (
        "abs", "add", "clip", "erf", "maximum", "minimum", "multiply", "negative", "sigmoid", "subtract", "tanh",
        "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.silu",
    )
)  # fmt: skip
# Readers may take padded channels up to this fraction; beyond it they are cut off first.
_MOST_READ = 1 / 4
# Required speedup by the fraction of channels added.
_GAINS = ((1 / 8, 1.05), (_MOST_READ, 1.5), (math.inf, 2.0))


def pad_all(target: Any) -> Any:
    """Make a module pass for a target (TVM's) and canonical functions; does nothing for unknown cores.

    For a GPU pixels become one loop (`join`).
    """
    known = dict(target.export())
    core, is_gpu = find_core(known), gpus.is_gpu(known)

    def change(function: Any) -> Any:
        if core is not None:
            return pad(function, core)
        return join(function, gpus.gpu_of(known)) if is_gpu else function

    return bindings.mapping_pass(change, "PadPixels")


def join(function: Any, gpu: TargetGpu) -> Any:
    """Make the pixels of a contraction one loop, a little longer where its tiles then are better."""
    schedule = bindings.schedule(function)
    found = facts.read_contraction(schedule)
    if found is None or found.group or not found.pixels or not canonical.is_in_order(found):
        return function
    area, wanted = math.prod(axis.extent for axis in found.pixels), choose_pixels(found, gpu)
    return function if wanted == area and len(found.pixels) == 1 else _try(function, schedule, found, wanted)


def choose_pixels(found: Contraction, gpu: TargetGpu) -> int:
    """Return the number of pixels, the same or more, whose best tile on a GPU is predicted fastest."""
    area = math.prod(axis.extent for axis in found.pixels)
    counts = sorted({area, *(-(-area // unit) * unit for unit in _UNITS if unit <= area)})
    joined = {count: dataclasses.replace(found, pixels=(Axis(0, count),)) for count in counts}
    return min(counts, key=lambda count: _predict(joined[count], gpu, GpuTiles()))


def round_up(area: int) -> int:
    """Return the next number of pixels that tiles of a GPU divide, of 7 or 8 for each thread."""
    units = (1,) if area < 4 else (7, 8) if area <= 64 else (14, 16) if area < 512 else (28, 32)
    return min(-(-area // unit) * unit for unit in units)


def pad(function: Any, core: Core) -> Any:
    """Pad the pixels of a function where the core gains."""
    schedule = bindings.schedule(function)
    found = facts.read_contraction(schedule)
    if found is None or not canonical.is_in_order(found) or found.line < _LEAST_LINE:
        return function
    wanted = padded(found, core)
    return _try(function, schedule, found, wanted) if wanted else function


def _try(function: Any, schedule: Any, found: Contraction, wanted: int) -> Any:
    try:
        result = _pad(schedule, found, wanted)
    except (RuntimeError, ValueError, TypeError) as error:  # TVM refuses; the function is left unchanged
        _log.debug("pixels are not padded to %d: %s", wanted, error)
        return function
    return result.with_attrs(function.attrs) if function.attrs else result


def padded(found: Contraction, core: Core) -> int:
    """Return the number of fused pixels that takes the least predicted time; 0 to leave the function unchanged."""
    area = math.prod(axis.extent for axis in found.pixels)
    if core.lane_fma and len(found.pixels) > 1:
        # Each pixel's address would take a register, which predictions ignore: 3x3 7x7x512>512 on a Cortex-A53 had a
        # prediction of 0.91, but 39 spills in its loop and 0.12 of the peak instead of 0.34 (llvm-mca).
        return 0
    best, least = 0, _predict(found, core, Dense()) * (_LANE_GAIN if core.lane_fma else _GAIN)
    # A copy of a single pixel shares nothing: 1x1024 by 1024x1024 took 41 us instead of 23 (Zen 5).
    for count in range(area, area + 1 + (_MOST_MORE if area > 1 else 0)):
        joined = dataclasses.replace(found, pixels=(Axis(0, count),), between=())
        seconds = _predict(joined, core, Dense(), more=True)
        if seconds < least:
            best, least = count, seconds
    return best


def _predict(found: Contraction, unit: Unit, family: Family, *, more: bool = False) -> float:
    """Predict the seconds of the best plan; with `more` pixels, infinity where the prediction is known to be wrong."""
    plans = Outlook(family, found, unit, family.options(found, unit)).plans()
    lanes = isinstance(unit, Core) and unit.lane_fma
    if not plans or (more and lanes and plans[0][1].get("steps", 1) == 1):
        # Tiles of 25 pixels by one vector without lane FMAs spill, since LLVM hoists loads (1x1 7x7x960>320 on a
        # Cortex-A53: predicted 0.85, but 36 spills and 0.15 of the peak instead of 0.19).
        return math.inf
    return plans[0][0].seconds


def _pad(schedule: Any, found: Contraction, wanted: int) -> Any:
    """Return the function over `wanted` pixels: accumulators for all of them, results for the real ones."""
    area = math.prod(axis.extent for axis in found.pixels)
    if len(found.pixels) > 1:
        canonical.join_pixels(schedule, found)
    else:
        inline_blocks(schedule, found.between)
    if wanted == area:
        return schedule.mod["main"]
    if found.last == found.main:
        main = schedule.get_sblock(found.main)
        join_pixels_written(schedule, main, schedule.cache_write(main, 0, "global"))
    names = (found.main, facts.list_blocks(schedule)[-1])
    sums = schedule.get(schedule.get_sblock(found.main)).writes[0].source
    if [int(d) for d in sums.shape] != [area, found.channel]:
        raise ValueError("sums that are not over pixels and channels")
    wide = tirx.decl_buffer([wanted, found.channel], sums.dtype, sums.name)
    body = repeat(
        schedule, names, 0, wanted, lambda step: tirx.min(step, tirx.IntImm(step.ty.dtype, area - 1)), {sums: wide}
    )
    return expressions.with_body(schedule.mod["main"], body)


def widen(target: Any) -> Any:
    """Make a module pass that pads channels for a target (TVM's); does nothing for unknown cores."""

    def run(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
        known = dict(target.export())
        core = find_core(known)
        if core is not None:
            return _Widening(builder, functools.partial(widened, core=core)).plan(function)
        return _Widening(builder, round_channels).plan(function) if gpus.is_gpu(known) else {}

    return bindings.rewriting_pass(run, "WidenChannels")


def round_channels(channels: int, element_bytes: int, pixels: Sequence[int] = (1,)) -> int:
    """Return the channels, or a few more that threads of a GPU divide in vectors."""
    more = -(-channels // _GPU_CHANNELS) * _GPU_CHANNELS
    return more if math.prod(pixels) > 1 and more - channels <= channels * _GAINS[0][0] else channels


def widened(channels: int, element_bytes: int, pixels: Sequence[int] = (1,), *, core: Core) -> int:
    """Return the number of channels that takes the least time for `channels`: the same or more.

    `pixels` are the rows and columns of the result, which limit the tiles.
    """
    full = core.lanes(element_bytes)
    own = least = count_cycles(channels, core, element_bytes, pixels)
    best = channels
    for lanes in (full // 2, full):
        more = -(-channels // lanes) * lanes if lanes > 1 else channels
        cycles = count_cycles(more, core, element_bytes, pixels)
        wanted = next(gain for share, gain in _GAINS if more - channels <= channels * share)
        if own / cycles >= wanted and cycles < least:
            best, least = more, cycles
    return best


def count_cycles(channels: int, core: Core, element_bytes: int, pixels: Sequence[int]) -> float:
    """Estimate the cycles of one FMA per channel of a pixel, in the best tile (`families.dense`)."""
    rows, columns = (1, *pixels)[-2:]
    if rows == columns == 1:  # bound by the bandwidth of the weights: loads of factors do not matter
        rows, columns = 1, core.vector_registers // 2
    tiles = {row * column for row in divisors(rows) if row <= MOST_ROWS for column in divisors(columns)}
    full = core.lanes(element_bytes)
    found = []
    for lanes in {full, full // 2, full // 4, 1}:
        blocks = channels // lanes if lanes and channels % lanes == 0 else 0
        for vectors in divisors(blocks)[:MOST_VECTORS] if blocks else ():
            for tile in tiles:
                if vectors <= MOST_VECTORS and tile * vectors + vectors < core.vector_registers:
                    cycles = step_cycles(core, lanes * element_bytes * 8, tile, vectors)
                    found.append(blocks / vectors * cycles / tile)
    return min(found)


class _Widening:
    def __init__(self, builder: Any, count: Callable[[int, int, Sequence[int]], int]) -> None:
        self._builder = builder
        self._count = count
        # By variable, the one with more channels, in the last dimension, that replaces it.
        self._wide: dict[Any, Any] = {}
        self._cut: set[Any] = set()

    def plan(self, function: Any) -> Mapping[Any, Sequence[Any]]:
        """Return the replacements of each binding."""
        others: dict[Any, list[Any]] = {}
        for binding in bindings.list_bindings(function):
            out: list[Any] = []
            wide = self._widen(binding, out) if isinstance(binding.value, relax.Call) else None
            if wide is not None:
                self._wide[binding.var] = wide
            else:
                for variable in bindings.list_variables(binding.value):
                    self._narrow(variable, binding, out)
                out.append(binding)
            if wide is not None and not isinstance(binding.var, relax.DataflowVar):
                self._narrow(binding.var, binding, out)
            others[binding.var] = out
        return others if self._wide else {}

    def _narrow(self, variable: Any, at: Any, out: list[Any]) -> None:
        """Cut off the padded channels, once."""
        if variable not in self._wide or variable in self._cut:
            return
        self._cut.add(variable)
        shape = bindings.static_shape(variable.ty) or ()
        value = relax.op.strided_slice(self._wide[variable], [len(shape) - 1], [0], [shape[-1]])
        out.append(relax.VarBinding(variable, value))

    def _widen(self, binding: Any, out: list[Any]) -> Any | None:
        """Return the variable of the call with more channels; None to keep it."""
        call = binding.value
        name = getattr(call.op, "name", "")
        shape = bindings.static_shape(binding.var.ty)
        if shape is None or not shape or "float" not in str(binding.var.ty.dtype):
            return None
        if name in _CONVOLUTIONS or name == "relax.matmul":
            made = self._contract(binding, shape[-1], out)
        elif name in _HARMLESS:
            made = self._elementwise(call, shape)
        elif name == "relax.mean" and call.args[0] in self._wide and self._is_spatial(call, len(shape)):
            made = _with(call, [self._wide[call.args[0]]])
        else:
            return None
        if made is None:
            return None
        new = self._builder.normalize(made)
        out.append(bindings.bind_before(binding, "wide", new, new.ty))
        return out[-1].var

    def _is_spatial(self, call: Any, rank: int) -> bool:
        axes = call.attrs.axis
        return bool(call.attrs.keepdims) and axes is not None and all(int(a) % rank != rank - 1 for a in axes)

    def _contract(self, binding: Any, channels: int, out: list[Any]) -> Any | None:
        """Widen the output of a convolution or product with a constant weight, and its input where the data is wide."""
        call = binding.value
        data, weight = call.args
        if not isinstance(weight, GenericConst) or not isinstance(data, relax.Var):
            return None
        if call.op.name != "relax.matmul" and (call.attrs.groups != 1 or call.attrs.data_layout not in _LAST):
            return None
        array = weight.value.numpy()
        if array.ndim < 2 or array.shape[-1] != channels:
            return None
        shape = bindings.static_shape(binding.var.ty) or (1,)
        wanted = self._count(channels, array.dtype.itemsize, shape[-3:-1] if array.ndim == 4 else shape[-2:-1])
        source = self._wide.get(data)
        if source is not None and _channels(source) > array.shape[-2] * (1 + _MOST_READ):
            source = None
        if wanted == channels and source is None:
            return None
        more = [(0, 0)] * array.ndim
        more[-1] = (0, wanted - channels)
        if source is not None:
            more[-2] = (0, _channels(source) - array.shape[-2])
        else:
            self._narrow(data, binding, out)
        return _with(call, [data if source is None else source, relax.const(np.pad(array, more), weight.ty.dtype)])

    def _elementwise(self, call: Any, shape: tuple[int, ...]) -> Any | None:
        counts = {_channels(self._wide[a]) for a in call.args if isinstance(a, relax.Var) and a in self._wide}
        if len(counts) != 1:
            return None
        channels = counts.pop()
        operands: list[Any] = []
        for operand in call.args:
            own = bindings.static_shape(getattr(operand, "ty", None))
            if isinstance(operand, relax.Var) and operand in self._wide:
                operands.append(self._wide[operand])
            elif isinstance(operand, GenericConst):
                array = operand.value.numpy()
                if array.ndim and array.shape[-1] == shape[-1] != 1:
                    more = [(0, 0)] * (array.ndim - 1) + [(0, channels - shape[-1])]
                    operand = relax.const(np.pad(array, more, mode="edge"), operand.ty.dtype)
                operands.append(operand)
            elif own[-1:] == (1,) if own is not None else not isinstance(operand, relax.Var):
                operands.append(operand)
            else:
                return None
        return _with(call, operands)


def _channels(variable: Any) -> int:
    return (bindings.static_shape(variable.ty) or ())[-1]


def _with(call: Any, operands: Sequence[Any]) -> Any:
    return relax.Call(call.op, list(operands), call.attrs, call.ty_args)
