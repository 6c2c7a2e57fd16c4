"""Facts of a workload's function: its contraction, the blocks around it, and the roles of its loops.

Nothing here changes a function; each family derives its schedules from the facts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad
from tvm_ffi import dtype as ffi_dtype

from farm.search.families import expressions

# MetaSchedule's post-processors look this block up by name.
ROOT = "root"


@dataclasses.dataclass(frozen=True)
class Axis:
    """A loop of a block: its position among the block's loops and its extent."""

    at: int
    extent: int


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A function around one block that sums products of two operands, `data` and `weight`.

    Loops: `pixels` index the data only, `channels` the weight only, `batch` both; `sums` are the reduction. Where both
    use the last loop (a grouped convolution), `group` is the number of its steps on the same data: 1 in a depthwise
    convolution, 0 without groups.
    Blocks: `pad` writes the padded data (None: there is none; `moved`: it only moves them), `last` writes the result
    (`main` itself where nothing follows), `between` are the others after `main`, in order.
    Per pixel loop and dimension, `stride` is the step of the data and `reach` the extent of the kernel; `room` is the
    extent of the data.
    `packed`: the weight may be stored in another order. `halved`: its elements are widened when loaded
    (`farm.search.graph.half_precision`). `data_at` is the position of the data among the reads of `main`, `weight_at`
    that of the weight among the parameters, or None. `line` is the number of contiguous elements in the last reduction
    loop, `row` in the last two together: a kernel row with all channels (1: not contiguous). `at_once` is the number of
    products that one instruction sums (`farm.search.graph.dots`). Sizes are in bytes.
    """

    main: str
    pad: str | None
    between: tuple[str, ...]
    last: str
    batch: tuple[Axis, ...]
    pixels: tuple[Axis, ...]
    channels: tuple[Axis, ...]
    sums: tuple[Axis, ...]
    stride: tuple[int, ...]
    reach: tuple[int, ...]
    room: tuple[int, ...]
    packed: bool
    element_bytes: int
    data_bytes: int
    weight_bytes: int
    result_bytes: int
    group: int = 0
    data_at: int = 0
    line: int = 1
    row: int = 1
    weight_at: int | None = None
    halved: bool = False
    at_once: int = 1
    moved: bool = False

    @property
    def weight_element_bytes(self) -> int:
        """Of one factor as loaded."""
        return self.element_bytes // 2 if self.halved else self.element_bytes

    @property
    def channel(self) -> int:
        """Channels of the result, in elements."""
        return self.channels[-1].extent

    @property
    def depth(self) -> int:
        """Products per element of the result."""
        return math.prod(axis.extent for axis in self.sums)

    @property
    def products(self) -> int:
        """FMAs of the whole function."""
        return math.prod(a.extent for a in (*self.batch, *self.pixels, *self.channels, *self.sums))


def is_schedulable(function: Any) -> bool:
    """Say whether a function has a root block; TVM writes scatters and sorts as programs without one."""
    body = function.body
    return isinstance(body, s_tir.SBlockRealize) and str(body.block.name_hint) == ROOT


def list_blocks(schedule: Any) -> list[str]:
    """List the names of a function's blocks, in order; none where it is one program that nothing can schedule."""
    if not is_schedulable(schedule.mod["main"]):
        return []
    root = schedule.get_sblock(ROOT)
    return [str(schedule.get(block).name_hint) for block in schedule.get_child_blocks(root)]


def read_contraction(schedule: Any, names: list[str] | None = None) -> Contraction | None:
    """Read a function with one contraction, at most a pad before it, and element-wise blocks after it.

    `names` are the blocks considered, by default all.
    """
    blocks = read_blocks(schedule, names)
    mains = [name for name, block in blocks.items() if has_sums(block)]
    if len(mains) != 1:
        return None
    (main,), names = mains, list(blocks)
    before, after = names[: names.index(main)], names[names.index(main) + 1 :]
    return None if len(before) > 1 else _read(schedule, blocks, main, before[0] if before else None, tuple(after))


def read_blocks(schedule: Any, names: list[str] | None = None) -> dict[str, Any]:
    """Return blocks by name in order, by default all; none where two have one name."""
    names = list_blocks(schedule) if names is None else names
    return {name: schedule.get(schedule.get_sblock(name)) for name in names} if len(set(names)) == len(names) else {}


def is_sum(variable: Any) -> bool:
    """Say whether a block's variable is a reduction variable."""
    return int(variable.iter_type) == 2


def has_sums(block: Any) -> bool:
    """Say whether a block reduces."""
    return any(is_sum(v) for v in block.iter_vars)


def _read(
    schedule: Any, blocks: dict[str, Any], main: str, pad: str | None, after: tuple[str, ...]
) -> Contraction | None:
    block = blocks[main]
    operands = _operands(block)
    if operands is None:
        return None
    variables = [v.var for v in block.iter_vars]
    axes = {v.var: Axis(at, int(v.dom.extent)) for at, v in enumerate(block.iter_vars)}
    sums = [v.var for v in block.iter_vars if is_sum(v)]
    store = block.body
    used = [_used(load.indices, variables) for load in operands]
    ends = [v for v in variables if any(expressions.mentions(final, v) for final in list(store.indices)[-1:])]
    if len(ends) != 1 or ends[0] in sums:
        return None
    owners = _find_weight(ends[0], used, set(sums))
    if len(owners) != 1:
        return None
    weight, data = operands[owners[0]], operands[1 - owners[0]]
    in_weight, in_data = used[owners[0]], used[1 - owners[0]]
    group = _standstill(data.indices, ends[0], axes[ends[0]].extent) if ends[0] in in_data else 0
    spatial = [v for v in variables if v not in sums]
    batch = [v for v in spatial if v in in_weight and v in in_data]
    pixels = [v for v in spatial if v not in in_weight]
    channels = [v for v in spatial if v in in_weight and v not in in_data]
    strides, reaches = [], []
    for pixel in pixels:
        for stride, reach in _movement(data.indices, pixel, sums, axes):
            strides.append(stride)
            reaches.append(reach)
    function = schedule.mod["main"]
    free = {function.params[int(i)].name for i in ((function.attrs or {}).get("layout_free_buffers") or ())}
    written = blocks[after[-1]].writes[0].source if after else store.buffer
    return Contraction(
        main=main,
        pad=pad,
        between=after[:-1],
        last=after[-1] if after else main,
        batch=tuple(axes[v] for v in batch),
        pixels=tuple(axes[v] for v in pixels),
        channels=tuple(axes[v] for v in channels),
        sums=tuple(axes[v] for v in sums),
        stride=tuple(strides),
        reach=tuple(reaches),
        room=tuple(_room(data, pixel) for pixel in pixels),
        packed=weight.source.name in free,
        element_bytes=bytes_of(store.buffer.dtype),
        data_bytes=size_of(data.source),
        weight_bytes=size_of(weight.source),
        result_bytes=size_of(written),
        group=group,
        data_at=next(at for at, region in enumerate(block.reads) if region.source.same_as(data.source)),
        line=axes[sums[-1]].extent if list(data.indices)[-1].same_as(sums[-1]) else 1,
        row=_row(data, pixels, sums, axes),
        weight_at=next((at for at, each in enumerate(function.params) if each.same_as(weight.source)), None),
        moved=pad is not None and is_moved(schedule, pad),
        halved=(str(weight.source.dtype), str(store.buffer.dtype)) == ("bfloat16", "float32"),
    )


def _find_weight(end: Any, used: list[set[Any]], sums: set[Any]) -> list[int]:
    """Return which operand is the weight: it alone uses the result's last dimension `end`, or it has no pixels."""
    owners = [which for which in (0, 1) if end in used[which]]
    if len(owners) == 2:
        owners = [which for which in owners if used[which] - sums < used[1 - which] - sums]
    return owners


def _operands(block: Any) -> tuple[Any, Any] | None:
    """Return the two loads that a block multiplies and accumulates, through widening casts."""
    store = block.body
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add):
        return None
    total, product = store.value.a, store.value.b
    if not isinstance(total, TensorLoad) or not total.source.same_as(store.buffer):
        return None
    if not isinstance(product, tirx.Mul):
        return None
    loads = []
    for side in (product.a, product.b):
        while isinstance(side, tirx.Cast):
            side = side.value
        if not isinstance(side, TensorLoad):
            return None
        loads.append(side)
    return loads[0], loads[1]


def _used(indices: Any, variables: list[Any]) -> set[Any]:
    return {v for v in variables if any(expressions.mentions(index, v) for index in indices)}


def _movement(indices: Any, pixel: Any, sums: list[Any], axes: dict[Any, Axis]) -> list[tuple[int, int]]:
    """Return the data's step per pixel and the kernel's extent, for each dimension that the loop indexes."""
    found = []
    for index in indices:
        if expressions.mentions(index, pixel):
            within = [v for v in sums if expressions.mentions(index, v)]
            reach = 1 + sum(abs(expressions.slope(index, v)) * (axes[v].extent - 1) for v in within)
            found.append((expressions.slope(index, pixel), reach))
    return found or [(1, 1)]


def _room(load: Any, pixel: Any) -> int:
    """Return the extent of the dimension that a pixel loop moves along."""
    dimensions = zip(load.indices, load.source.shape, strict=True)
    return next((int(extent) for index, extent in dimensions if expressions.mentions(index, pixel)), 1)


def _row(data: Any, pixels: list[Any], sums: list[Any], axes: dict[Any, Axis]) -> int:
    """Return the steps of the last two reduction loops where they read contiguous data along a pixel loop, else 1."""
    if len(sums) < 3 or len(data.indices) < 2 or not pixels:
        return 1
    *_, along, last = data.indices
    whole = last.same_as(sums[-1]) and axes[sums[-1]].extent == int(data.source.shape[-1])
    if not whole or expressions.slope(along, sums[-2]) != 1 or not expressions.mentions(along, pixels[-1]):
        return 1
    return axes[sums[-2]].extent * axes[sums[-1]].extent


def _standstill(indices: Any, variable: Any, extent: int) -> int:
    """Return the number of steps of a variable before an operand's indices change."""
    for step in range(1, extent):
        if any(expressions.evaluate(index, variable, step) != expressions.evaluate(index, None) for index in indices):
            return step
    return extent


def bytes_of(dtype: Any) -> int:
    """Return the size of an element."""
    return max(1, int(ffi_dtype(str(dtype)).itemsize))


def size_of(buffer: Any) -> int:
    """Return the size of a buffer in bytes."""
    return math.prod(int(d) for d in buffer.shape) * bytes_of(buffer.dtype)


def is_small(buffer: Any, most_bytes: int) -> bool:
    """Say whether a buffer is known to have at most `most_bytes`."""
    return all(isinstance(extent, tirx.IntImm) for extent in buffer.shape) and size_of(buffer) <= most_bytes


def is_moved(schedule: Any, name: str) -> bool:
    """Say whether a block only moves elements: a transpose, or a pad of width zero."""
    return _find_copied(schedule, name) is not None


def _find_copied(schedule: Any, name: str) -> Any | None:
    """Return the load whose element a block stores as it is, or None."""
    value = getattr(schedule.get(schedule.get_sblock(name)).body, "value", None)
    return value if isinstance(value, TensorLoad) else None


def is_copy(schedule: Any, name: str) -> bool:
    """Say whether a block copies a buffer unchanged: a pad of width zero."""
    store, load = schedule.get(schedule.get_sblock(name)).body, _find_copied(schedule, name)
    if load is None or [int(d) for d in load.source.shape] != [int(d) for d in store.buffer.shape]:
        return False
    return all(a.same_as(b) for a, b in zip(load.indices, store.indices, strict=True))


def is_cut(schedule: Any, name: str) -> bool:
    """Say whether a block copies a part of a buffer: a slice or a gather."""
    block, load = schedule.get(schedule.get_sblock(name)), _find_copied(schedule, name)
    steps = math.prod(int(v.dom.extent) for v in block.iter_vars)
    return load is not None and steps < math.prod(int(d) for d in load.source.shape)


def writes_once(schedule: Any, name: str) -> bool:
    """Say whether a block stores one element per step of its own loops, without a reduction."""
    block = schedule.get(schedule.get_sblock(name))
    count = len(schedule.get_loops(schedule.get_sblock(name)))
    return isinstance(block.body, tirx.BufferStore) and len(block.iter_vars) == count and not has_sums(block)


def is_plain(schedule: Any, name: str) -> bool:
    """Say whether a block writes once, in the order of its loops."""
    block = schedule.get(schedule.get_sblock(name))
    if not writes_once(schedule, name) or len(block.body.indices) != len(block.iter_vars):
        return False
    return all(index.same_as(v.var) for index, v in zip(block.body.indices, block.iter_vars, strict=True))
