"""Contractions on a GPU: tiles of pixels by channels in shared memory, and Winograd convolutions around them.

A Winograd convolution is one function of three kernels, with their data between them in global memory. The first pads
and transforms data, the second multiplies, the third transforms products and applies the fused blocks. A thread of a
transform computes one tile of one channel in registers; neighbouring threads access neighbouring channels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from device_agent.protocol import START_S, WARP
from farm.search.families import facts as reading
from farm.search.families import gpu_cost, loops
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan, Prediction
from farm.search.families.winograd import read_blocks
from farm.search.gpus import TargetGpu
from farm.search.graph import winograd

# Threads of a block along one side, and in all; steps of the reduction that are unrolled; registers of a thread.
_MOST_SIDE, _MOST_THREADS, _UNROLLED, _MOST_REGISTERS = 32, 512, 8, 255
# Warps of a processor share four schedulers.
_SCHEDULERS = 4
# Fitted to the estimates of 967 plans on a Nano (7 % off in the median): instructions of an FMA with what delays it, of
# a staged vector, and of a stage; turns of shared memory for a word; the parts of staged and of written bytes that
# delay; cycles until a block's first stage is there.
_FMA, _MOVED, _STAGE, _TURN, _MISSED, _WRITTEN, _BEGUN = 1.29, 7.1, 50.0, 0.9, 0.77, 0.37, 400.0
# More copies' time where threads find their pixels and steps by division.
_DIVIDED = 4.0
# Banks of shared memory; the smallest transfer from global memory.
_BANKS, _SECTOR_BYTES = 32, 32
# An FMA of float16: `ptxas` pairs those of two channels, but their registers share banks.
_PAIRED = 0.92
# Bytes of a vector.
_VECTOR_BYTES = 16
# Beyond so many rounds of blocks, the last one need not be full.
_FEW_ROUNDS = 4
# Below this, threads that share reductions are faster (`GpuSums`).
_FEWEST_PIXELS = 4
# 64 to 512 threads of a transform were estimated equal within a tenth.
_THREADS = 128
# The share of loads of data that miss L1, since tiles overlap. Fitted to estimates on a Nano.
_READ_AGAIN = 0.5


class GpuTiles:
    """Dense convolutions and matrix products, also batched, as products of `pixels` by `channels` in shared memory.

    The graph pipeline makes pixels one loop (`channel_padding.join`). A block has `far` threads along pixels by
    `wide` along channels; each thread has `columns` x `channels` results. `steps` of the innermost reduction loop are
    staged at a time. Tiles divide what there is: a guard inside the sum would cost several times the sum.
    """

    name = "gpu-tiles"

    def read(self, schedule: Any) -> Contraction | None:
        found = reading.read_contraction(schedule)
        if found is None or found.group or len(found.channels) != 1 or len(found.pixels) != 1 or not found.sums:
            return None
        if found.pixels[0].extent < _FEWEST_PIXELS or found.element_bytes not in (2, 4):
            return None
        after = [name for name in (*found.between, found.last) if name != found.main]
        return found if all(reading.writes_once(schedule, name) for name in after) else None

    def options(self, facts: Contraction, core: TargetGpu) -> Mapping[str, tuple[int, ...]]:
        area, line = facts.pixels[0].extent, facts.sums[-1].extent
        row = math.prod(axis.extent for axis in facts.sums[-2:])
        return {
            "wide": tuple(n for n in loops.divisors(facts.channel) if n <= _MOST_SIDE),
            "channels": tuple(n for n in (1, 2, 4, 8, 16) if facts.channel % n == 0 and n * facts.element_bytes <= 32),
            "far": tuple(n for n in loops.divisors(area) if n <= _MOST_SIDE),
            "columns": tuple(n for n in (1, 2, 4, 5, 7, 8, 10, 14) if area % n == 0),
            # Short lines of a first layer are staged together.
            "steps": tuple(n for n in (4, 8, 16, 32) if line % n == 0) or (line, row),
        }

    def predict(self, facts: Contraction, plan: Plan, core: TargetGpu) -> Prediction | None:
        """Predict each stage by the scarcest of instructions, shared memory and L2, and the whole by memory."""
        area, limits, size, steps = facts.pixels[0].extent, core.plan.limits, facts.element_bytes, plan["steps"]
        threads = plan["wide"] * plan["far"]
        pixels, channels = plan["far"] * plan["columns"], plan["wide"] * plan["channels"]
        if not WARP <= threads <= _MOST_THREADS or area % pixels or facts.channel % channels:
            return None
        warps, staged = math.ceil(threads / WARP), (pixels + channels) * steps
        # Weights of float16 are loaded some steps ahead.
        run = 1 if _is_turned(plan, size) else _widest(steps, size)
        loaded = plan["columns"] * run + plan["channels"] * (4 // size) ** 2
        held = plan["columns"] * plan["channels"] + loaded + math.ceil(staged / threads)
        registers = held * size // 4 + gpu_cost.OTHER_REGISTERS
        allocated = math.ceil(warps / _SCHEDULERS) * _SCHEDULERS * WARP
        shared_bytes = 2 * staged * size
        if shared_bytes > limits.shared_bytes or registers > min(
            _MOST_REGISTERS * size // 4, limits.registers // allocated
        ):
            return None
        blocks = math.prod(axis.extent for axis in facts.batch) * (area // pixels) * (facts.channel // channels)
        own = blocks / core.processors
        resident = min(math.ceil(own), gpu_cost.count_resident(core.unit, threads, registers, shared_bytes))
        words = warps * steps * self._count_words(plan, size) + staged / WARP
        # Warps of a scheduler take turns at instructions, all warps at shared memory and at L2.
        busy = resident * warps / _SCHEDULERS
        issued = (busy + math.ceil(busy)) / 2 * self._count_issued(facts, plan)
        turns = resident * words * _TURN * size / 4
        # Short lines of a pixel waste a part of their sectors.
        line = max(steps * size, _SECTOR_BYTES) if steps % 4 == 0 else steps * size
        near = resident * (pixels * line + channels * steps * size) * _MISSED / gpu_cost.PORT_BYTES
        rounds = own / resident if own > _FEW_ROUNDS * resident else math.ceil(own / resident)
        stages = rounds * (facts.depth // steps)
        written = rounds * resident * pixels * channels * _WRITTEN * size / gpu_cost.PORT_BYTES
        cycles = stages * max(issued, turns, near) + written + rounds * _BEGUN / resident
        data_asked, weights_asked = (float(blocks * facts.depth * side * size) for side in (pixels, channels))
        far_bytes = (
            gpu_cost.count_fetched(data_asked, facts.data_bytes, core.unit.cache_bytes)
            + gpu_cost.count_fetched(weights_asked, facts.weight_bytes, core.unit.cache_bytes)
            + facts.result_bytes
        )
        far_s = far_bytes / core.memory_bytes_per_s
        terms = {
            "compute": stages * issued,
            "far": far_s * core.freq_hz,
            "pad": stages * turns,
            "balance": math.ceil(own) / own,
            "steps": float(resident * warps),
            "near": stages * near + written if near > max(issued, turns) else written,
        }
        # Traffic and work overlap, but not wholly.
        return Prediction(math.hypot(cycles / core.freq_hz, far_s) + START_S, terms)

    @staticmethod
    def _count_issued(facts: Contraction, plan: Plan) -> float:
        """Count a warp's instructions for one stage of `steps`."""
        steps, threads, wanted, size = plan["steps"], plan["wide"] * plan["far"], plan["channels"], facts.element_bytes
        fma = _PAIRED if size == 2 and wanted % 2 == 0 else _FMA
        turned = _is_turned(plan, size)
        loads = plan["columns"] / _widest(plan["columns"] if turned else steps, size) + wanted / _widest(wanted, size)
        products = steps * (plan["columns"] * wanted * fma + loads)
        pixels, channels = plan["far"] * plan["columns"], plan["wide"] * wanted
        copies = 0.0
        for count, run in ((pixels * steps, steps), (channels * steps, channels)):
            copies += math.ceil(count / _count_lanes(count, threads, run, size) / threads)
        if turned and (pixels % threads or pixels & (pixels - 1)):
            copies += _DIVIDED * math.ceil(pixels * steps / threads)
        return products + copies * _MOVED + _STAGE

    @staticmethod
    def _count_words(plan: Plan, size: int) -> float:
        """Count a warp's turns at shared memory for one step, of a word of each thread; more where banks are shared."""
        wide, columns, channels = min(WARP, plan["wide"]), plan["columns"], plan["channels"]
        others = max(1, min(WARP // wide, plan["far"]))
        banks = _BANKS * 4 // size
        row, run = (columns, columns) if _is_turned(plan, size) else (columns * plan["steps"], plan["steps"])
        data = max(1.0, others * math.gcd(banks, row) / banks / _widest(run, size))
        return columns * data + channels * max(1.0, wide * channels / banks / _widest(channels, size))

    def apply(self, schedule: Any, facts: Contraction, plan: Plan) -> None:
        """Tile the block of the result, compute the contraction inside, stage its operands."""
        main = schedule.get_sblock(facts.main)
        loops.inline_blocks(schedule, facts.between)
        # Indexed by the block's own loops, so that a tile stages its own elements. A pad is checked while staging.
        held = schedule.reindex(main, ("read", facts.data_at))
        schedule.set_scope(held, 0, "shared")
        turned = _is_turned(plan, facts.element_bytes)
        if turned:
            at = len(facts.batch)
            schedule.transform_layout(held, ("write", 0), lambda *all_: [*all_[:at], *all_[at + 1 :], all_[at]])
        if facts.pad:
            schedule.compute_inline(schedule.get_sblock(facts.pad))
        if facts.last == facts.main:
            last = schedule.cache_write(main, 0, "local")
            if not facts.batch:
                loops.join_pixels_written(schedule, main, last)
        else:
            last = schedule.get_sblock(facts.last)
            schedule.set_scope(main, 0, "local")
        *before, pixel, channel = schedule.get_loops(last)
        pixel_block, far, column = schedule.split(pixel, [None, plan["far"], plan["columns"]])
        # Neighbouring threads have neighbouring vectors of channels.
        lanes = _widest(plan["channels"], facts.element_bytes)
        channel_block, vectors, wide, lane = schedule.split(
            channel, [None, plan["channels"] // lanes, plan["wide"], lanes]
        )
        schedule.reorder(*before, pixel_block, channel_block, vectors, far, wide, column, lane)
        schedule.bind(schedule.fuse(*before, pixel_block, channel_block), "blockIdx.x")
        if lanes < plan["channels"]:
            schedule.bind(vectors, "vthread.x")
        inside = schedule.fuse(far, wide)
        schedule.bind(inside, "threadIdx.x")
        if lanes > 1:
            schedule.vectorize(lane)
        schedule.compute_at(main, inside, preserve_unit_loops=True)
        mine = schedule.get_loops(main)[-len(schedule.get(main).iter_vars) :]
        sums = [mine[axis.at] for axis in facts.sums]
        results = [loop for at, loop in enumerate(mine) if at not in {axis.at for axis in facts.sums}]
        if plan["steps"] > facts.sums[-1].extent:
            sums = [*sums[:-2], schedule.fuse(*sums[-2:])]
        stage, step = schedule.split(sums[-1], [None, plan["steps"]])
        # Unrolled steps let the compiler read a pixel's next elements at once.
        few = max(n for n in loops.divisors(plan["steps"]) if n <= _UNROLLED)
        step, unrolled = schedule.split(step, [None, few])
        schedule.reorder(*sums[:-1], stage, step, unrolled, *results)
        schedule.unroll(unrolled)
        stage = schedule.fuse(*sums[:-1], stage)
        if facts.element_bytes == 2 and (plan["columns"] if turned else few) % 2 == 0:
            # The compiler joins loads of float32 itself.
            near = schedule.cache_read(main, facts.data_at, "local")
            schedule.compute_at(near, step, preserve_unit_loops=True)
            schedule.vectorize(schedule.get_loops(near)[-1])
        _stage_operands(schedule, facts, plan, main, held, stage)
        # While one stage is computed, the next is loaded into registers, then stored to the other half of the memory.
        schedule.annotate(stage, "software_pipeline_stage", [0, 0, 0, 0, 1])
        schedule.annotate(stage, "software_pipeline_order", [0, 3, 1, 4, 2])
        schedule.decompose_reduction(main, stage)


def _stage_operands(schedule: Any, facts: Contraction, plan: Plan, main: Any, held: Any, stage: Any) -> None:
    """Copy the operands of one stage to shared memory with all threads; `held` copies the data."""
    threads = plan["wide"] * plan["far"]
    for at in range(len(schedule.get(main).reads)):
        is_data = at == facts.data_at
        copy = held if is_data else schedule.cache_read(main, at, "shared")
        schedule.compute_at(copy, stage, preserve_unit_loops=True)
        side = plan["far"] * plan["columns"] if is_data else plan["wide"] * plan["channels"]
        run = plan["steps"] if is_data else side
        lanes = _count_lanes(side * plan["steps"], threads, run, facts.element_bytes)
        if is_data and _is_turned(plan, facts.element_bytes):
            # Neighbouring threads stage neighbouring pixels.
            own = schedule.get_loops(copy)[-len(schedule.get(copy).iter_vars) :]
            schedule.reorder(*own[len(facts.batch) + 1 :], own[len(facts.batch)])
        gpu_cost.give_to_threads(schedule, copy, threads, lanes)
        schedule.annotate(copy, "tirx.manifest_shared_memory_local_stage", 1)


def _count_lanes(count: int, threads: int, run: int, size: int) -> int:
    """Return the elements that a thread stages at a time: most that leave no thread without, in runs of `run`."""
    lanes = [n for n in (8, 4, 2, 1) if run % n == 0 and n * size <= _VECTOR_BYTES]
    return next((n for n in lanes if count % (n * threads) == 0), lanes[0])


def _is_turned(plan: Plan, size: int) -> bool:
    """Say whether pixels are contiguous in shared memory: where steps would be staged by single elements."""
    staged = plan["far"] * plan["columns"] * plan["steps"]
    return _count_lanes(staged, plan["wide"] * plan["far"], plan["steps"], size) == 1


def _widest(run: int, size: int) -> int:
    """Return the length of the widest vectors that make up so many elements of `size` bytes."""
    return _count_lanes(run, 1, run, size)


_PRODUCTS = GpuTiles()


@dataclasses.dataclass(frozen=True)
class JoinedWinograd:
    """A convolution F(m, 3) as `farm.search.graph.winograd` writes it with joined tiles.

    `blocks` are the six of the algorithm; `between` are all others before `last`, which writes the result. `products`
    are the multiplications of all tiles. Sizes are in bytes.
    """

    m: int
    blocks: tuple[str, ...]
    between: tuple[str, ...]
    last: str
    products: Contraction
    data_bytes: int
    result_bytes: int


class GpuWinograd:
    """Family of Winograd convolutions on a GPU; its knobs are those of the products' tiles."""

    name = "gpu-winograd"

    def read(self, schedule: Any) -> JoinedWinograd | None:
        """Read a function whose fourth block has Winograd's mark, with element-wise blocks after the sixth."""
        found = read_blocks(schedule)
        if found is None:
            return None
        names, m = found
        count = len(winograd.BLOCKS)
        products = reading.read_contraction(schedule, [names[count - 3]])
        blocks = [schedule.get(schedule.get_sblock(name)) for name in names]
        shapes = [[int(v.dom.extent) for v in block.iter_vars] for block in blocks[count - 1 :]]
        if products is None or len(products.pixels) != 1 or any(shape != shapes[0] for shape in shapes):
            return None
        if not all(reading.writes_once(schedule, name) for name in names[count - 1 :]):
            return None
        return JoinedWinograd(
            m=m,
            blocks=tuple(names[:count]),
            between=tuple(names[count - 1 : -1]),
            last=names[-1],
            products=products,
            data_bytes=reading.size_of(schedule.mod["main"].params[0]),
            result_bytes=reading.size_of(blocks[-1].writes[0].source),
        )

    def options(self, facts: JoinedWinograd, core: TargetGpu) -> Mapping[str, tuple[int, ...]]:
        return _PRODUCTS.options(facts.products, core)

    def predict(self, facts: JoinedWinograd, plan: Plan, core: TargetGpu) -> Prediction | None:
        """Add the transforms, which L2 and memory bound, to the products."""
        products = _PRODUCTS.predict(facts.products, plan, core)
        if products is None:
            return None
        tiles = facts.products
        forth = _move(tiles.data_bytes * (1 + _READ_AGAIN), facts.data_bytes + tiles.data_bytes, core)
        back = _move(tiles.result_bytes + facts.result_bytes, tiles.result_bytes + facts.result_bytes, core)
        terms = {**products.terms, "transforms": (forth + back) * core.freq_hz}
        return Prediction(products.seconds + forth + back, {**terms, "kernels": 3.0})

    def apply(self, schedule: Any, facts: JoinedWinograd, plan: Plan) -> None:
        """Give each transform a kernel before and after the one of the products, and unroll a tile's own loops."""
        pad, strips, tiles, _, lines, _ = (schedule.get_sblock(name) for name in facts.blocks)
        loops.inline_blocks(schedule, facts.between)
        i, j, tile, channel = schedule.get_loops(tiles)
        thread = _bind(schedule, (tile, channel), (i, j))
        for block in (strips, pad):
            _hold(schedule, block, thread)
        _PRODUCTS.apply(schedule, facts.products, plan)
        image, row, column, channel = schedule.get_loops(schedule.get_sblock(facts.last))
        row, y = schedule.split(row, [None, facts.m])
        column, x = schedule.split(column, [None, facts.m])
        _hold(schedule, lines, _bind(schedule, (image, row, column, channel), (y, x)))


def _move(near_bytes: float, far_bytes: float, core: TargetGpu) -> float:
    """Estimate the seconds of a kernel that moves data past L1, a part of them to or from memory."""
    near_s = near_bytes / (gpu_cost.PORT_BYTES * core.processors * core.freq_hz)
    return max(near_s, far_bytes / core.memory_bytes_per_s) + START_S


def _bind(schedule: Any, outer: Sequence[Any], inner: Sequence[Any]) -> Any:
    """Give each step of the `outer` loops a thread that unrolls the `inner` ones; return the threads' loop."""
    schedule.reorder(*outer, *inner)
    block, thread = schedule.split(schedule.fuse(*outer), [None, _THREADS])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    for loop in inner:
        schedule.unroll(loop)
    return thread


def _hold(schedule: Any, block: Any, thread: Any) -> None:
    """Compute a block in registers of a thread."""
    schedule.compute_at(block, thread, preserve_unit_loops=True)
    schedule.set_scope(block, 0, "local")
    for loop in schedule.get_loops(block)[-len(schedule.get(block).iter_vars) :]:
        schedule.unroll(loop)
