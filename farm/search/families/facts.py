"""What a workload's function is made of: its contraction, the blocks before and after it, and the roles of its loops.

Reads TVM's functions and changes nothing; which schedule follows is each family's business.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Axis:
    """A loop of a block: its position among the block's loops and its extent."""

    at: int
    extent: int


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A function around one block that sums products of two operands, `data` and `weight`.

    `pixels` are loops that only the data follow, `channels` those that only the weight follows, `batch` those that both
    do, `sums` the reduction. `pad` is the block that writes the padded data, None where there is none; `last` the block
    that writes the result, `main` itself where nothing follows it; `between` all others after `main`, in order.
    `stride` and `reach` are, by pixel loop, how far the data move with it, and over how many elements the kernel goes.
    `packed` says whether the weight may be stored in another order. Sizes of an element in bytes.
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
    packed: bool
    element_bytes: int
    data_bytes: int
    weight_bytes: int
    result_bytes: int

    @property
    def channel(self) -> int:
        """Channels of the result, in elements."""
        return self.channels[-1].extent

    @property
    def depth(self) -> int:
        """Products summed up for one element of the result."""
        return math.prod(axis.extent for axis in self.sums)

    @property
    def products(self) -> int:
        """Multiply-accumulates in all."""
        return math.prod(a.extent for a in (*self.batch, *self.pixels, *self.channels, *self.sums))


def list_blocks(schedule: Any) -> list[str]:
    """Names of a function's blocks, in order."""
    root = schedule.get_sblock("root")
    return [str(schedule.get(block).name_hint) for block in schedule.get_child_blocks(root)]


def read_contraction(schedule: Any) -> Contraction | None:
    """The contraction of a function that has just one, with at most a pad before it and element-wise blocks after."""
    names = list_blocks(schedule)
    if len(set(names)) < len(names):
        return None
    blocks = {name: schedule.get(schedule.get_sblock(name)) for name in names}
    mains = [name for name in names if any(_is_sum(v) for v in blocks[name].iter_vars)]
    if len(mains) != 1:
        return None
    main = mains[0]
    before, after = names[: names.index(main)], names[names.index(main) + 1 :]
    if len(before) > 1 or any(_has_sums(blocks[name]) for name in (*before, *after)):
        return None
    return _read(schedule, blocks, main, before[0] if before else None, tuple(after))


def _is_sum(variable: Any) -> bool:
    return int(variable.iter_type) == 2


def _has_sums(block: Any) -> bool:
    return any(_is_sum(v) for v in block.iter_vars)


def _read(
    schedule: Any, blocks: dict[str, Any], main: str, pad: str | None, after: tuple[str, ...]
) -> Contraction | None:
    block = blocks[main]
    operands = _operands(block)
    if operands is None:
        return None
    variables = [v.var for v in block.iter_vars]
    axes = {v.var: Axis(at, int(v.dom.extent)) for at, v in enumerate(block.iter_vars)}
    sums = [v.var for v in block.iter_vars if _is_sum(v)]
    store = block.body
    final = list(store.indices)[-1]
    used = [_used(load.indices, variables) for load in operands]
    # The weight is the operand that the last dimension of the result follows alone.
    ends = [v for v in variables if _mentions(final, v)]
    if len(ends) != 1 or ends[0] in sums:
        return None
    owners = [which for which in (0, 1) if ends[0] in used[which]]
    if len(owners) != 1:
        return None
    weight, data = operands[owners[0]], operands[1 - owners[0]]
    in_weight, in_data = used[owners[0]], used[1 - owners[0]]
    spatial = [v for v in variables if v not in sums]
    batch = [v for v in spatial if v in in_weight and v in in_data]
    pixels = [v for v in spatial if v not in in_weight]
    channels = [v for v in spatial if v in in_weight and v not in in_data]
    strides, reaches = [], []
    for pixel in pixels:
        stride, reach = _movement(data.indices, pixel, sums, axes)
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
        packed=weight.source.name in free,
        element_bytes=_bytes(store.buffer.dtype),
        data_bytes=_size(data.source),
        weight_bytes=_size(weight.source),
        result_bytes=_size(written),
    )


def _operands(block: Any) -> tuple[Any, Any] | None:
    """The two loads that a block multiplies and adds up, through casts to a wider type."""
    from tvm import tirx
    from tvm.ir.expr import TensorLoad

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
    return {v for v in variables if any(_mentions(index, v) for index in indices)}


def _mentions(expression: Any, variable: Any) -> bool:
    if expression.same_as(variable):
        return True
    parts = [getattr(expression, name, None) for name in ("a", "b", "value", "condition")]
    parts += list(getattr(expression, "args", None) or ())
    return any(part is not None and hasattr(part, "same_as") and _mentions(part, variable) for part in parts)


def _movement(indices: Any, pixel: Any, sums: list[Any], axes: dict[Any, Axis]) -> tuple[int, int]:
    """How far the data move with one step of a pixel loop, and over how many elements the kernel goes along it."""
    for index in indices:
        if _mentions(index, pixel):
            within = [v for v in sums if _mentions(index, v)]
            return _slope(index, pixel), 1 + sum(abs(_slope(index, v)) * (axes[v].extent - 1) for v in within)
    return 1, 1


def _slope(index: Any, variable: Any) -> int:
    """By how much an index grows with the first step of a variable, all others at zero."""
    return _evaluate(index, variable) - _evaluate(index, None)


def _evaluate(expression: Any, one: Any) -> int:
    """An index where `one` is 1 and every other variable 0."""
    from tvm import tirx

    if isinstance(expression, tirx.IntImm):
        return int(expression)
    if expression.same_as(one):
        return 1
    if isinstance(expression, tirx.Cast):
        return _evaluate(expression.value, one)
    for kind, combine in (
        (tirx.Add, operator.add),
        (tirx.Sub, operator.sub),
        (tirx.Mul, operator.mul),
        (tirx.FloorDiv, operator.floordiv),
        (tirx.FloorMod, operator.mod),
    ):
        if isinstance(expression, kind):
            return int(combine(_evaluate(expression.a, one), _evaluate(expression.b, one)))
    return 0


def _bytes(dtype: Any) -> int:
    from tvm_ffi import dtype as ffi_dtype

    return max(1, int(ffi_dtype(str(dtype)).itemsize))


def _size(buffer: Any) -> int:
    return math.prod(int(d) for d in buffer.shape) * _bytes(buffer.dtype)


def is_copy(schedule: Any, name: str) -> bool:
    """Whether a block copies a buffer element by element to the same place: a pad that pads nothing."""
    from tvm.ir.expr import TensorLoad

    store = schedule.get(schedule.get_sblock(name)).body
    value = getattr(store, "value", None)
    if not isinstance(value, TensorLoad):
        return False
    same_shape = [int(d) for d in value.source.shape] == [int(d) for d in store.buffer.shape]
    return same_shape and all(a.same_as(b) for a, b in zip(value.indices, store.indices, strict=True))
