"""Convolutions whose result only a pool of maxima reads: the rows that a strip of the pool's needs, and then their maxima.

What is between the two stays in the second cache. Tiles of the convolution are `dense`'s; the rows that two strips need
are computed for both. `farm.search.graph.pool_fusion` makes such functions, where this is predicted to gain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from farm.search.cores import Core
from farm.search.families import expressions
from farm.search.families import facts as reading
from farm.search.families import loops as steps
from farm.search.families.dense import CHANNELS_OUTSIDE, PAD_ALL, PAD_ROWS, Dense
from farm.search.families.facts import Axis, Contraction
from farm.search.families.family import Plan, Prediction

# Cycles of one of the pool's own tiles beside its loads and maxima.
_TILE_CYCLES = 10.0


@dataclasses.dataclass(frozen=True)
class PooledContraction:
    """`contraction` is the function without its last block, `pool`, which takes maxima of `window` rows by columns.

    `stride`: rows by which the window moves. `rows` and `columns` are the pool's results, `most_rows`
    for how many of them there is data. `at_edge` says whether rows
    of the convolution are the nearest that there are. Sizes in bytes.
    """

    contraction: Contraction
    pool: str
    rows: int
    most_rows: int
    columns: int
    window: tuple[int, int]
    stride: int
    at_edge: bool
    result_bytes: int

    def count_strips(self, strip: int) -> int:
        """Strips of so many rows, the last one perhaps shorter."""
        return -(-self.rows // strip)

    def count_rows(self, strip: int) -> int:
        """Rows of the convolution that so many rows of the pool read."""
        return (strip - 1) * self.stride + self.window[0]


class Pooled:
    """Functions of a convolution and a pool."""

    name = "pooled"

    def __init__(self) -> None:
        self._tiles = Dense()

    def read(self, schedule: Any) -> PooledContraction | None:
        names = reading.list_blocks(schedule)
        if len(set(names)) < len(names) or len(names) < 2:
            return None
        found = self._tiles.read_blocks(schedule, names[:-1])
        if found is None or len(found.pixels) != 3 or found.pixels[0].extent != 1:
            return None
        return _read_pool(schedule, found, names[-1])

    def options(self, facts: PooledContraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Those of `dense`, with its rows those of a strip; `strip`, rows of the pool's result that are one share.

        With blocks of channels outside each of them is a share of its own.
        """
        strips = [s for s in range(1, facts.rows + 1) if s * facts.count_strips(s) <= facts.most_rows]
        rows = sorted({r for s in strips for r in steps.divisors(facts.count_rows(s)) if r <= 4})
        own = {name: options for name, options in self._tiles.options(facts.contraction, core).items() if name != "parts"}
        # TVM cannot tell how many rows of data those at the edge read.
        pads = tuple(pad for pad in own["pad"] if pad != PAD_ROWS or not facts.at_edge)
        return {**own, "rows": tuple(rows), "pad": pads, "strip": tuple(strips)}

    def predict(self, facts: PooledContraction, plan: Plan, core: Core) -> Prediction | None:
        rows = facts.count_rows(plan["strip"])
        if rows % plan["rows"]:
            return None
        contraction = facts.contraction
        strips = facts.count_strips(plan["strip"])
        block = plan["lanes"] * plan["vectors"]
        width = block if plan["order"] == CHANNELS_OUTSIDE else contraction.channel
        if contraction.channel % block:
            return None
        one, _, column = contraction.pixels
        whole = dataclasses.replace(
            contraction, pixels=(one, Axis(contraction.pixels[1].at, strips * rows), column), result_bytes=0
        )
        tiles = self._tiles.predict(whole, {**plan, "pad": PAD_ALL if plan["pad"] == PAD_ROWS else plan["pad"]}, core)
        if tiles is None:
            return None
        shares = strips * (contraction.channel // width)
        threads = min(core.threads, shares)
        balance = math.ceil(shares / threads) * threads / shares
        between = rows * column.extent * width * contraction.element_bytes
        near = between <= core.l2_bytes
        bits = plan["lanes"] * contraction.element_bytes * 8
        taps = math.prod(facts.window)
        results = facts.rows * facts.columns * contraction.channel // plan["lanes"]
        maxima = results * (taps / core.loads_per_cycle(bits) + 2 + _TILE_CYCLES / plan["vectors"])
        moved = 2 * between * shares / (core.l2_bytes_per_cycle if near else core.far_bytes_per_cycle)
        pool = maxima + moved + facts.result_bytes / core.far_bytes_per_cycle
        seconds = tiles.seconds * balance + pool * balance / threads / core.freq_hz
        return Prediction(seconds, {**tiles.terms, "pool": pool, "balance": balance})

    def apply(self, schedule: Any, facts: PooledContraction, plan: Plan) -> None:
        contraction = facts.contraction
        contraction = self._tiles.begin(schedule, contraction, plan)
        last = self._tiles.write_apart(schedule, contraction)
        pool = schedule.get_sblock(facts.pool)
        one, row, column, channel, down, across = schedule.get_loops(pool)
        strip, row = schedule.split(row, [None, plan["strip"]])
        block, vector, lane = schedule.split(channel, [None, plan["vectors"], plan["lanes"]])
        outside = plan["order"] == CHANNELS_OUTSIDE
        order = [one, strip, block, row, column] if outside else [one, strip, row, column, block]
        schedule.reorder(*order, down, across, vector, lane)
        share = schedule.fuse(*order[: 3 if outside else 2])
        schedule.compute_at(last, share, preserve_unit_loops=True)
        schedule.set_scope(last, 0, "global")
        for loop in (vector, across):
            schedule.unroll(loop)
        schedule.vectorize(lane)
        _, at, tile = self._tiles.tile(schedule, schedule.get_loops(last)[1:], plan, by_rows=False)
        self._tiles.fill(schedule, contraction, plan, share, at, tile)
        schedule.decompose_reduction(pool, down)
        schedule.unroll(down)


def _read_pool(schedule: Any, contraction: Contraction, name: str) -> PooledContraction | None:
    from tvm import tirx

    block = schedule.get(schedule.get_sblock(name))
    store = block.body
    kinds = [reading.is_sum(v) for v in block.iter_vars]
    if kinds != [False] * 4 + [True] * 2 or not isinstance(store, tirx.BufferStore):
        return None
    if not isinstance(store.value, tirx.Max):
        return None
    variables = [v.var for v in block.iter_vars]
    written = schedule.get(schedule.get_sblock(contraction.last)).writes[0].source
    loads, comparisons = expressions.read_value(store.value)
    loads = [load for load in loads if not load.source.same_as(store.buffer)]
    if len(loads) != 1 or comparisons or not loads[0].source.same_as(written):
        return None
    one, row, column, channel, down, across = variables
    others = [index for index in store.indices if not expressions.mentions(index, row)]
    if len(others) != 3 or not all(a.same_as(b) for a, b in zip(others, (one, column, channel), strict=True)):
        return None
    indices = list(loads[0].indices)
    if not indices[0].same_as(one) or not indices[3].same_as(channel):
        return None
    stride = expressions.slope(indices[1], row)
    if expressions.slope(indices[1], down) != 1 or stride < 1 or expressions.mentions(indices[1], column):
        return None
    extents = [int(v.dom.extent) for v in block.iter_vars]
    main = schedule.get(schedule.get_sblock(contraction.main))
    data = [range_.min for range_ in main.reads[contraction.data_at].region]
    # A row that is kept inside of the data does not move at first.
    contraction = dataclasses.replace(contraction, stride=tuple(max(1, each) for each in contraction.stride))
    return PooledContraction(
        contraction=contraction,
        pool=name,
        rows=extents[1],
        most_rows=(int(written.shape[1]) - extents[4]) // stride + 1,
        columns=extents[2],
        window=(extents[4], extents[5]),
        stride=stride,
        at_edge=any(expressions.holds(index, tirx.Min, tirx.Max) for index in data),
        result_bytes=reading.size_of(store.buffer),
    )
