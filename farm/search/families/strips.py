"""Tiled producer-consumer fusion: a convolution feeds a second operator strip by strip, so the data between stay in L2.

The convolution uses `dense`'s tiles and recomputes rows that two strips share. The second operator is a pool (`Pooled`)
or a depthwise convolution (`Separable`). `farm.search.graph.strip_fusion` makes such functions where they are predicted
to gain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tvm import tirx

from farm.search.cores import Core
from farm.search.families import expressions, loops
from farm.search.families import facts as reading
from farm.search.families.dense import CHANNELS_OUTSIDE, PAD_ALL, PAD_ROWS, Dense
from farm.search.families.depthwise import PAD_NONE, UNROLL_COLUMNS, VECTORS, Depthwise
from farm.search.families.facts import Axis, Contraction, read_contraction
from farm.search.families.family import Plan, Prediction
from farm.search.families.loops import divisors, write_apart
from farm.search.graph import dots

# Most strip heights that are tried; low strips recompute much.
_MOST_STRIPS = 12


@dataclasses.dataclass(frozen=True)
class SlidingWindow:
    """How the second operator reads rows: each of its `rows` reads `reach` rows, `stride` apart.

    `step` holds the operator's own facts.
    """

    rows: int
    reach: int
    stride: int
    result_bytes: int
    step: Any


@dataclasses.dataclass(frozen=True)
class Strips:
    """A fused function: the `contraction` and the `window` on it.

    `most_rows` is the number of the window's rows for which there is data. `at_edge`: rows are clamped to the data.
    """

    contraction: Contraction
    window: SlidingWindow
    most_rows: int
    at_edge: bool

    def count_strips(self, strip: int) -> int:
        """Count the strips of `strip` rows, the last one perhaps shorter."""
        return -(-self.window.rows // strip)

    def count_rows(self, strip: int) -> int:
        """Count the convolution's rows that `strip` rows of the result read."""
        return (strip - 1) * self.window.stride + self.window.reach


class StripFamily:
    """Common part of the fused families; a subclass per kind of second operator."""

    name = ""

    def __init__(self) -> None:
        self._tiles = Dense()

    def read(self, schedule: Any) -> Strips | None:
        names = reading.list_blocks(schedule)
        if len(set(names)) < len(names):
            return None
        sums = [at for at, name in enumerate(names) if any(map(reading.is_sum, _read_block(schedule, name).iter_vars))]
        if len(sums) != 2:
            return None
        first = self.find_first(schedule, names, sums[1])
        found = self._tiles.read_blocks(schedule, names[:first])
        if found is None or len(found.pixels) != 3 or found.pixels[0].extent != 1:
            return None
        if dots.MARK in _read_block(schedule, found.main).annotations:  # only `dots` knows its instruction
            return None
        between = _read_block(schedule, found.last).writes[0].source
        window = self.read_window(schedule, names[first:], between)
        # TVM cannot schedule a window that skips rows.
        if window is None or window.stride > window.reach or len(between.shape) != 4:
            return None
        data = _read_block(schedule, found.main).reads[found.data_at].region
        return Strips(
            # A clamped row index has no slope at first.
            contraction=dataclasses.replace(found, stride=tuple(max(1, each) for each in found.stride)),
            window=window,
            most_rows=(int(between.shape[1]) - window.reach) // window.stride + 1,
            at_edge=any(expressions.holds(each.min, *_bounds()) for each in data),
        )

    def find_first(self, schedule: Any, names: list[str], main: int) -> int:
        """Return the index of the second operator's first block; `main` is its reduction."""
        return main

    def read_window(self, schedule: Any, names: list[str], data: Any) -> SlidingWindow | None:
        """Read the second operator, which reads the buffer `data`, or return None."""
        raise NotImplementedError

    def list_own(self, facts: Strips, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Return the second operator's own knobs."""
        return {}

    def predict_own(self, facts: Strips, plan: Plan, core: Core) -> float | None:
        """Estimate its cycles on one core with its data in L2; None for an invalid plan."""
        raise NotImplementedError

    def options(self, facts: Strips, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Extend the options of `dense`, with rows of a strip, by `strip`: rows of the result per chunk.

        With blocks of channels outside, each block is a chunk of its own.
        """
        rows = facts.window.rows
        strips = [s for s in range(1, rows + 1) if s * facts.count_strips(s) <= facts.most_rows][-_MOST_STRIPS:]
        lines = {row for s in strips for row in loops.divisors(facts.count_rows(s), 4)}
        own = {name: known for name, known in self._tiles.options(facts.contraction, core).items() if name != "parts"}
        # TVM cannot derive how many rows of data the edge strips read.
        pads = tuple(pad for pad in own["pad"] if pad != PAD_ROWS or not facts.at_edge)
        return {**own, "rows": tuple(sorted(lines)), "pad": pads, "strip": tuple(strips), **self.list_own(facts, core)}

    def predict(self, facts: Strips, plan: Plan, core: Core) -> Prediction | None:
        """Estimate the cycles of all tiles, of the second operator, and of the traffic between them."""
        contraction, rows = facts.contraction, facts.count_rows(plan["strip"])
        block = plan["lanes"] * plan["vectors"]
        if rows % plan["rows"] or contraction.channel % block:
            return None
        own = self.predict_own(facts, plan, core)
        strips, (one, line, column) = facts.count_strips(plan["strip"]), contraction.pixels
        pixels = (one, Axis(line.at, strips * rows), column)
        whole = dataclasses.replace(contraction, pixels=pixels, result_bytes=0)
        pad = PAD_ALL if plan["pad"] == PAD_ROWS else plan["pad"]
        tiles = None if own is None else self._tiles.predict(whole, {**plan, "pad": pad}, core)
        if own is None or tiles is None:
            return None
        width = block if plan["order"] == CHANNELS_OUTSIDE else contraction.channel
        shares = strips * (contraction.channel // width)
        threads = min(core.threads, shares)
        balance = math.ceil(shares / threads) * threads / shares
        between = rows * column.extent * width * contraction.element_bytes
        near = between <= core.l2_bytes
        moved = 2 * between * shares / (core.l2_bytes_per_cycle if near else core.far_bytes_per_cycle)
        own += moved + loops.moving_cycles(float(facts.window.result_bytes), core)
        seconds = (tiles.seconds + own / threads / core.freq_hz) * balance
        return Prediction(seconds, {**tiles.terms, "step": own, "balance": balance})

    def apply(self, schedule: Any, facts: Strips, plan: Plan) -> None:
        """Split the second operator's rows into strips and call `compute_rows` for each."""
        raise NotImplementedError

    def compute_rows(self, schedule: Any, facts: Contraction, plan: Plan, last: Any, share: Any) -> None:
        """Compute the convolution's rows at the parallel loop `share`; the block `last` writes them."""
        schedule.compute_at(last, share, preserve_unit_loops=True)
        schedule.set_scope(last, 0, "global")
        _, at, tile = self._tiles.tile(schedule, schedule.get_loops(last)[1:], plan, by_rows=False)
        self._tiles.fill(schedule, facts, plan, share, at, tile)


def _read_block(schedule: Any, name: str) -> Any:
    return schedule.get(schedule.get_sblock(name))


def _bounds() -> tuple[type, ...]:
    return tirx.Min, tirx.Max


# Cycles of one tile of the pool besides its loads and maxima.
_TILE_CYCLES = 10.0


@dataclasses.dataclass(frozen=True)
class MaxPool:
    """A max pool: its block, the columns of its result, and rows by columns of its window."""

    block: str
    columns: int
    window: tuple[int, int]


class Pooled(StripFamily):
    """Convolution and max pool, with tiles of one width."""

    name = "pooled"

    def read_window(self, schedule: Any, names: list[str], data: Any) -> SlidingWindow | None:
        block = schedule.get(schedule.get_sblock(names[0]))
        store = block.body
        kinds = [reading.is_sum(v) for v in block.iter_vars]
        if len(names) > 1 or kinds != [False] * 4 + [True] * 2 or not isinstance(store, tirx.BufferStore):
            return None
        variables = [v.var for v in block.iter_vars]
        loads, comparisons = expressions.read_value(store.value)
        loads = [load for load in loads if not load.source.same_as(store.buffer)]
        if (
            not isinstance(store.value, tirx.Max)
            or comparisons
            or [load.source.same_as(data) for load in loads] != [True]
        ):
            return None
        one, row, column, channel, down, _ = variables
        indices = list(loads[0].indices)
        if not all(a.same_as(b) for a, b in zip(store.indices, variables[:4], strict=True)):
            return None
        if not indices[0].same_as(one) or not indices[3].same_as(channel) or expressions.mentions(indices[1], column):
            return None
        stride, extents = expressions.slope(indices[1], row), [int(v.dom.extent) for v in block.iter_vars]
        if stride < 1 or expressions.slope(indices[1], down) != 1:
            return None
        pool = MaxPool(names[0], extents[2], (extents[4], extents[5]))
        return SlidingWindow(extents[1], extents[4], stride, reading.size_of(store.buffer), pool)

    def predict_own(self, facts: Strips, plan: Plan, core: Core) -> float | None:
        pool, contraction = facts.window.step, facts.contraction
        results = facts.window.rows * pool.columns * contraction.channel // plan["lanes"]
        loads = math.prod(pool.window) / core.loads_per_cycle(plan["lanes"] * contraction.element_bytes * 8)
        return float(results * (loads + 2 + _TILE_CYCLES / plan["vectors"]))

    def apply(self, schedule: Any, facts: Strips, plan: Plan) -> None:
        contraction = self._tiles.begin(schedule, facts.contraction, plan)
        last = write_apart(schedule, contraction)
        pool = schedule.get_sblock(facts.window.step.block)
        one, row, column, channel, down, across = schedule.get_loops(pool)
        strip, row = schedule.split(row, [None, plan["strip"]])
        block, vector, lane = schedule.split(channel, [None, plan["vectors"], plan["lanes"]])
        outside = plan["order"] == CHANNELS_OUTSIDE
        order = [one, strip, block, row, column] if outside else [one, strip, row, column, block]
        schedule.reorder(*order, down, across, vector, lane)
        share = schedule.fuse(*order[: 3 if outside else 2])
        for loop in (vector, across):
            schedule.unroll(loop)
        schedule.vectorize(lane)
        self.compute_rows(schedule, contraction, plan, last, share)
        schedule.decompose_reduction(pool, down)
        schedule.unroll(down)


# Most pixels of a tile of the depthwise convolution.
_MOST_PIXELS = 14


class Separable(StripFamily):
    """Convolution and depthwise convolution, whose tiles have one row."""

    name = "separable"

    def __init__(self) -> None:
        super().__init__()
        self._depthwise = Depthwise()

    def find_first(self, schedule: Any, names: list[str], main: int) -> int:
        """Include a pad before the reduction: it is inlined with bounds checks."""
        value = getattr(schedule.get(schedule.get_sblock(names[main - 1])).body, "value", None)
        pads = str(getattr(getattr(value, "op", None), "name", "")).endswith(".if_then_else")
        return main - 1 if pads else main

    def read_window(self, schedule: Any, names: list[str], data: Any) -> SlidingWindow | None:
        found = read_contraction(schedule, names)
        if found is None or found.group != 1 or found.channels or len(found.batch) != 1 or len(found.pixels) != 3:
            return None
        block = schedule.get(schedule.get_sblock(found.pad or found.main))
        if not any(region.source.same_as(data) for region in block.reads):
            return None
        return SlidingWindow(found.pixels[1].extent, found.reach[1], found.stride[1], found.result_bytes, found)

    def list_own(self, facts: Strips, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Offer `own_vectors` and `own_pixels` of the depthwise tiles."""
        columns = facts.window.step.pixels[-1].extent
        return {"own_vectors": VECTORS, "own_pixels": tuple(divisors(columns, _MOST_PIXELS))}

    @staticmethod
    def _own_plan(plan: Plan) -> dict[str, int]:
        own = {"vectors": plan["own_vectors"], "pixels": plan["own_pixels"], "lanes": plan["lanes"]}
        return {**own, "rows": 1, "pad": PAD_NONE, "unroll": UNROLL_COLUMNS}

    def predict_own(self, facts: Strips, plan: Plan, core: Core) -> float | None:
        if plan["vectors"] % plan["own_vectors"]:
            return None
        prediction = self._depthwise.predict(facts.window.step, self._own_plan(plan), core)
        return None if prediction is None else prediction.terms["compute"]

    def apply(self, schedule: Any, facts: Strips, plan: Plan) -> None:
        contraction = self._tiles.begin(schedule, facts.contraction, plan)
        step, own = facts.window.step, self._own_plan(plan)
        last = write_apart(schedule, contraction)
        result = self._depthwise.begin(schedule, step, own)
        (one, line, block), column, tile = self._depthwise.tile(schedule, step, schedule.get_loops(result), own)
        strip, line = schedule.split(line, [None, plan["strip"]])
        block, part = schedule.split(block, [None, plan["vectors"] // plan["own_vectors"]])
        outside = plan["order"] == CHANNELS_OUTSIDE
        order = [one, strip, block, line, part, column] if outside else [one, strip, line, block, part, column]
        schedule.reorder(*order, *tile)
        share = schedule.fuse(*order[: 3 if outside else 2])
        first = self._depthwise.fill(schedule, step, own, column, tile)
        self.compute_rows(schedule, contraction, plan, last, share)
        schedule.decompose_reduction(schedule.get_sblock(step.main), first)
