"""Sums of a tile that begin as the bias instead of as zero, so that it need not be added to the results.

A tile's results are its sums plus a vector of the bias each: as many additions as there are vectors in the tile, beside
a limit or two and a store. Beginning as the bias costs nothing, for something has to be put into the registers anyway.
The order of additions is another one, and rounds no worse. Reads lowered functions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from farm.search.families.expressions import read_value, replace, walk
from tvm import tirx
from tvm.ir.expr import TensorLoad
import tvm_ffi
from farm.search.families.expressions import list_statements
from farm.search.families.facts import size_of


# Steps taken at a time, those preferred first, and how many multiply-adds they are at most.
_STEPS, _MOST = (4, 3, 2), 128
# Shorter loops LLVM unrolls by itself, or they hardly matter.
_LEAST_STEPS, _LEAST_SUMS = 16, 4


def unroll_sums(function: Any, tile_bytes: int) -> Any:
    """A lowered function whose innermost loops over a reduction take several steps at a time.

    Sums of a tile are in buffers of its own of up to so many bytes.
    """

    own: list[Any] = []

    def note(node: Any) -> Any:
        if all(isinstance(extent, tirx.IntImm) for extent in node.buffer.shape) and size_of(node.buffer) <= tile_bytes:
            own.append(node.buffer)
        return node

    def share(node: Any) -> Any:
        # A part of another; TVM lets several tiles lie in one after the other.
        whole = next(iter(getattr(node.data, "args", None) or ()), None)
        if any(each.same_as(whole) for each in own):
            own.append(node.buffer)
        return node

    tvm_ffi.structural_map(function.body, [(tirx.AllocBuffer, note)])
    tvm_ffi.structural_map(function.body, [(tirx.DeclBuffer, share)])

    def unroll(loop: Any) -> Any:
        body = list_statements(loop.body)
        stores = [each for each in body if isinstance(each, tirx.BufferStore)]
        steps = next((s for s in _STEPS if int(loop.extent) % s == 0 and s * len(stores) <= _MOST), 1)
        plain = all(isinstance(each, tirx.BufferStore | tirx.Bind) for each in body)
        if int(loop.kind) != 0 or not plain or steps == 1 or len(stores) < _LEAST_SUMS:
            return loop
        if int(loop.extent) < _LEAST_STEPS or not all(_adds_up(store, own) for store in stores):
            return loop
        return tirx.For(
            loop.loop_var, loop.min, tirx.IntImm(loop.extent.ty.dtype, int(loop.extent) // steps), loop.kind,
            tirx.SeqStmt([new for step in range(steps) for new in _take(body, loop.loop_var, steps, step)]),
            loop.thread_binding, loop.annotations,
        )  # fmt: skip

    body = tvm_ffi.structural_map(function.body, [(tirx.For, unroll)])
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


def _adds_up(store: Any, own: list[Any]) -> bool:
    """Whether a statement adds to sums of a tile."""

    if not isinstance(store.value, tirx.Add) or not any(store.buffer.same_as(each) for each in own):
        return False
    return any(isinstance(side, TensorLoad) and side.source.same_as(store.buffer) for side in (store.value.a, store.value.b))


def _take(body: list[Any], loop_var: Any, steps: int, step: int) -> list[Any]:
    """One of so many steps, with names of its own."""

    names = {loop_var: loop_var * steps + step}
    taken = []
    for each in body:
        if isinstance(each, tirx.Bind):
            value = replace(each.value, names)
            names[each.var] = tirx.Var(each.var.name, each.var.ty)
            taken.append(tirx.Bind(names[each.var], value))
        else:
            taken.append(replace(each, names))
    return taken



_TYPE = "float32"


def begin_with_bias(function: Any) -> Any:
    """A lowered function whose tiles' sums begin as what is added to them."""

    statements = list(walk(function.body))
    written = {each.buffer for each in statements if isinstance(each, tirx.BufferStore)}
    own = {each.buffer for each in statements if isinstance(each, tirx.AllocBuffer)}
    shared = [each.data for each in statements if isinstance(each, tirx.DeclBuffer)]
    own -= {each for each in own if any(data.same_as(each.data) or each in _list_arguments(data) for data in shared)}

    def change(sequence: Any) -> Any:
        return _change(sequence, own, written)

    body = tvm_ffi.structural_map(function.body, [(tirx.SeqStmt, change)])
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


def _list_arguments(expression: Any) -> list[Any]:
    return list(getattr(expression, "args", None) or ())


@dataclasses.dataclass
class _Sum:
    """One vector of a tile's sums: the statement that sets it to zero, the one that reads it last, where that adds to it.

    `added` is what, as it can be said where the tile begins.
    """

    begin: int
    end: int = -1
    addition: Any = None
    added: Any = None
    fits: bool = True


def _change(sequence: Any, own: set[Any], written: set[Any]) -> Any:
    """The statements of a tile, changed where its sums are set to zero, summed up, and read once to be added to."""

    parts = list(sequence.seq)
    found: dict[tuple[Any, int], _Sum] = {}
    for at, part in enumerate(parts):
        if isinstance(part, tirx.BufferStore) and part.buffer in own and _is_zero(part.value):
            place = _place(part.buffer, part.indices)
            if place is not None:
                found.setdefault(place, _Sum(at))
    if not found:
        return sequence
    buffers = {buffer for buffer, _ in found}
    names: dict[Any, Any] = {}
    for at, part in enumerate(parts):
        for each in walk(part):
            if isinstance(each, tirx.Bind):
                names[each.var] = replace(each.value, names)
            if isinstance(each, tirx.BufferStore) and not _follow(each, at, each is part, found, buffers, names):
                return sequence
    changed = False
    for each in found.values():
        if not each.fits or each.added is None or each.added.source in written:
            continue
        begin, end, added = parts[each.begin], parts[each.end], each.added
        parts[each.begin] = tirx.BufferStore(begin.buffer, added, begin.indices)
        parts[each.end] = tirx.BufferStore(end.buffer, _leave_out(end.value, each.addition), end.indices)
        changed = True
    return tirx.SeqStmt(parts) if changed else sequence


def _follow(
    store: Any, at: int, outermost: bool, found: dict[Any, _Sum], buffers: set[Any], names: dict[Any, Any]
) -> bool:
    """Note what a statement does to sums; False where one of their buffers is used in a way that is not followed."""
    target = _place(store.buffer, store.indices)
    if target is None and store.buffer in buffers:
        return False
    own = found.get(target)
    sums_up = False
    for load in read_value(store.value)[0]:
        if load.source not in buffers:
            continue
        place = _place(load.source, load.indices)
        if place is None:
            return False
        each = found.get(place)
        if each is None:
            continue
        if each is own and _adds(store.value, load):
            sums_up = True
        elif outermost and each.end < 0 and each is not own and at > each.begin:
            each.end, each.addition = at, _find_addition(store.value, load)
            each.added = None if each.addition is None else _spell(each.addition.b, names)
            each.fits &= each.added is not None
        else:
            each.fits = False
    if own is not None and not sums_up and at != own.begin:
        own.fits = False
    # What is summed up after it was read is another sum.
    if own is not None and own.end >= 0:
        own.fits = False
    return True


def _place(buffer: Any, indices: Any) -> tuple[Any, int] | None:
    """A buffer and a constant place in it."""

    if len(indices) != 1 or not isinstance(indices[0], tirx.IntImm):
        return None
    return buffer, int(indices[0])


def _is_zero(value: Any) -> bool:
    if isinstance(value, tirx.Broadcast):
        value = value.value
    return isinstance(value, tirx.FloatImm) and float(value) == 0.0 and str(value.ty.dtype) == _TYPE


def _adds(value: Any, load: Any) -> bool:
    """Whether a value is a load of the sum itself and something more."""

    return isinstance(value, tirx.Add) and value.a.same_as(load)


def _find_addition(value: Any, load: Any) -> Any | None:
    """The addition of a load and another one in an expression; None where there is none, or something else is added."""

    if _adds(value, load):
        return value if isinstance(value.b, TensorLoad) else None
    parts = (getattr(value, name, None) for name in ("a", "b", "value"))
    found = [_find_addition(part, load) for part in parts if part is not None]
    return next((each for each in found if each is not None), None)


def _spell(load: Any, names: dict[Any, Any]) -> Any:
    return tirx.BufferLoad(load.source, [replace(index, names) for index in load.indices])


def _leave_out(value: Any, addition: Any) -> Any:
    """An expression with a sum in place of what is added to it."""

    def change(node: Any) -> Any:
        return node.a if node.same_as(addition) else node

    return tvm_ffi.structural_map(value, [(tirx.Add, change)])
