"""Passes on the accumulators of tiles: initialise them with the bias, and unroll reduction loops.

Starting from the bias instead of zero saves one addition per vector of a tile; the registers are initialised anyway.
The new order of additions rounds no worse. The passes rewrite lowered functions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad

from farm.search.families.expressions import (
    find_whole,
    list_shared,
    list_statements,
    read_value,
    replace,
    rewrite,
    walk,
)
from farm.search.families.facts import is_small

# Unroll factors in order of preference, and the most FMAs in an unrolled body.
_STEPS, _MOST = (4, 3, 2), 128
# LLVM unrolls shorter loops itself.
_LEAST_STEPS, _LEAST_SUMS = 16, 4


def unroll_reductions(function: Any, tile_bytes: int) -> Any:
    """Unroll the innermost reduction loops of a lowered function.

    Accumulators are in local buffers of up to `tile_bytes`.
    """
    statements, shared = list(walk(function.body)), list_shared(function.body)
    own = {
        each.buffer for each in statements if isinstance(each, tirx.AllocBuffer) and is_small(each.buffer, tile_bytes)
    }
    own |= {alias for alias in shared if find_whole(alias, shared) in own}

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

    return rewrite(function, (tirx.For, unroll))


def _adds_up(store: Any, own: set[Any]) -> bool:
    """Say whether a statement adds to an accumulator."""
    if not isinstance(store.value, tirx.Add) or store.buffer not in own:
        return False
    return any(
        isinstance(side, TensorLoad) and side.source.same_as(store.buffer) for side in (store.value.a, store.value.b)
    )


def _take(body: list[Any], loop_var: Any, steps: int, step: int) -> list[Any]:
    """Return one step of the unrolled body, with fresh names."""
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


def init_with_bias(function: Any) -> Any:
    """Initialise accumulators with the bias in a lowered function."""
    statements, shared = list(walk(function.body)), list_shared(function.body)
    written = {each.buffer for each in statements if isinstance(each, tirx.BufferStore)}
    own = {each.buffer for each in statements if isinstance(each, tirx.AllocBuffer)}
    own -= {find_whole(alias, shared) for alias in shared}
    return rewrite(function, (tirx.SeqStmt, lambda sequence: _change(sequence, own, written)))


@dataclasses.dataclass
class _Sum:
    """One accumulator vector: the statement that zeroes it, the last one that reads it, and the addition there.

    `added` is the addend, valid where the tile begins.
    """

    begin: int
    end: int = -1
    addition: Any = None
    added: Any = None
    fits: bool = True


def _change(sequence: Any, own: set[Any], written: set[Any]) -> Any:
    """Change the statements of a tile whose accumulators are zeroed, summed up, and read once to be added to."""
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
    """Note what a statement does to accumulators; return False where one is used in an unsupported way."""
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
    # A sum that continues after the read is another accumulator.
    if own is not None and own.end >= 0:
        own.fits = False
    return True


def _place(buffer: Any, indices: Any) -> tuple[Any, int] | None:
    """Return the buffer and a constant index, or None."""
    if len(indices) != 1 or not isinstance(indices[0], tirx.IntImm):
        return None
    return buffer, int(indices[0])


def _is_zero(value: Any) -> bool:
    if isinstance(value, tirx.Broadcast):
        value = value.value
    return isinstance(value, tirx.FloatImm) and float(value) == 0.0 and str(value.ty.dtype) == _TYPE


def _adds(value: Any, load: Any) -> bool:
    """Say whether a value is the accumulator itself plus a term."""
    return isinstance(value, tirx.Add) and value.a.same_as(load)


def _find_addition(value: Any, load: Any) -> Any | None:
    """Find the addition of `load` and another load in an expression; None where there is none."""
    if _adds(value, load):
        return value if isinstance(value.b, TensorLoad) else None
    parts = (getattr(value, name, None) for name in ("a", "b", "value"))
    found = [_find_addition(part, load) for part in parts if part is not None]
    return next((each for each in found if each is not None), None)


def _spell(load: Any, names: dict[Any, Any]) -> Any:
    return tirx.BufferLoad(load.source, [replace(index, names) for index in load.indices])


def _leave_out(value: Any, addition: Any) -> Any:
    """Remove the addition from an expression."""
    return tvm_ffi.structural_map(value, [(tirx.Add, lambda node: node.a if node.same_as(addition) else node)])
