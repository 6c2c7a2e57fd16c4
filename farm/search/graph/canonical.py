"""Bring functions to the form that schedules are written for; results and arguments stay the same.

This happens once, before workloads are extracted, since traces cannot record layouts of intermediate buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Range
from tvm.ir.expr import TensorLoad, TensorRegion

from farm.search.families import expressions, facts, loops
from farm.search.families.facts import Contraction
from farm.search.graph import bindings

_log = logging.getLogger(__name__)


def repeat(
    schedule: Any,
    names: Collection[str],
    axis: int,
    extent: int,
    place: Callable[[Any], Any],
    wider: Mapping[Any, Any],
    zero: tuple[Any, Callable[[Any], Any]] | None = None,
) -> Any:
    """Return the body of a function in which loop `axis` of some blocks has `extent` steps.

    Accesses at a step become those at `place(step)`, except to buffers in `wider`: there each step accesses the
    replacement at its own index. `zero` is one of these buffers and a predicate of the steps that store zeros in it.
    """
    own = [schedule.get(schedule.get_loops(schedule.get_sblock(name))[axis]).loop_var for name in names]

    def find_wider(buffer: Any, default: Any = None) -> Any:
        return next((new for old, new in wider.items() if old.same_as(buffer)), default)

    def extend(loop: Any) -> Any:
        if not any(loop.loop_var.same_as(each) for each in own):
            return loop
        return tirx.For(loop.loop_var, loop.min, tirx.IntImm(loop.extent.ty.dtype, extent), loop.kind, loop.body)

    def rewrite(block: Any) -> Any:
        if not block.iter_vars:
            buffers = [find_wider(buffer, buffer) for buffer in block.alloc_buffers]
            return s_tir.SBlock([], [], [], block.name_hint, block.body, None, buffers)
        if block.name_hint not in names:
            return block
        variables = list(block.iter_vars)
        step = variables[axis]
        names_of_step = {step.var: place(step.var)}

        def change(node: Any) -> Any:
            return _move_accesses(node, find_wider, names_of_step, zero and (zero[0], zero[1](step.var)))

        variables[axis] = tirx.IterVar(Range(0, tirx.IntImm(step.var.ty.dtype, extent)), step.var, step.iter_type)
        return s_tir.SBlock(
            variables, [*map(change, block.reads)], [*map(change, block.writes)], block.name_hint, change(block.body),
            None if block.init is None else change(block.init), annotations=block.annotations,
        )  # fmt: skip

    return tvm_ffi.structural_map(schedule.mod["main"].body, [(tirx.For, extend), (s_tir.SBlock, rewrite)])


def _move_accesses(
    node: Any, find_wider: Callable[[Any], Any], names_of_step: Mapping[Any, Any], zero: tuple[Any, Any] | None
) -> Any:
    """Access wider buffers at the step's own index, others at another; store 0 in `zero`'s buffer where it holds."""

    def move(index: Any) -> Any:
        return expressions.replace(index, names_of_step)

    def store(node: Any) -> Any:
        new, value = find_wider(node.buffer), node.value
        if new is None:
            return tirx.BufferStore(node.buffer, value, [*map(move, node.indices)])
        if zero is not None and node.buffer.same_as(zero[0]):
            value = tirx.if_then_else(zero[1], tirx.FloatImm(str(node.buffer.dtype), 0.0), value)
        return tirx.BufferStore(new, value, [*node.indices])

    def load(node: Any) -> Any:
        new = find_wider(node.source)
        if new is None:
            return tirx.BufferLoad(node.source, [*map(move, node.indices)])
        return tirx.BufferLoad(new, [*node.indices])

    def region(node: Any) -> Any:
        new = find_wider(node.source)
        if new is None:
            return tirx.BufferRegion(node.source, [Range.from_min_extent(move(r.min), r.extent) for r in node.region])
        return tirx.BufferRegion(new, [*node.region])

    return tvm_ffi.structural_map(node, [(tirx.BufferStore, store), (TensorLoad, load), (TensorRegion, region)])


def canonicalise(function: Any) -> Any:
    """Inline pads of width zero, and fuse the pixel loops of 1x1 convolutions."""
    return _change(function, _inline_empty_pads, _join_pixels)


def _change(function: Any, *changes: Callable[[Any], bool]) -> Any:
    for change in changes:
        schedule = bindings.schedule(function)
        try:
            changed = change(schedule)
        except (RuntimeError, ValueError, TypeError) as error:  # TVM refuses; the function is left unchanged
            _log.debug("%s leaves a function as it is: %s", change.__name__, error)
            continue
        if changed:
            result = schedule.mod["main"]
            function = result.with_attrs(function.attrs) if function.attrs else result
    return function


def _inline_empty_pads(schedule: Any) -> bool:
    names = [name for name in facts.list_blocks(schedule)[:-1] if facts.is_copy(schedule, name)]
    loops.inline_blocks(schedule, names)
    return bool(names)


def _join_pixels(schedule: Any) -> bool:
    """Fuse all pixel loops where no reduction spans pixels, so that tiles need not end at rows of the image.

    Intermediate buffers get the same single dimension, or TVM could not bound their regions.
    """
    found = facts.read_contraction(schedule)
    if found is None or not _is_pointwise(found):
        return False
    join_pixels(schedule, found)
    return True


def join_pixels(schedule: Any, found: Contraction) -> None:
    """Fuse the pixel loops of a contraction, which must come first, before one of channels (`is_in_order`)."""
    loops.inline_blocks(schedule, found.between)
    extents = [axis.extent for axis in found.pixels]
    count, sums = len(extents), [axis.at for axis in found.sums if axis.extent > 1] or [found.sums[-1].at]
    main = schedule.get_sblock(found.main)
    if found.last != found.main:
        last = schedule.get_sblock(found.last)
        mapping = loops.index_map(lambda *i: (loops.flat_index(i[:count], extents), i[count]), count + 1)
        schedule.transform_layout(main, ("write", 0), mapping)
        schedule.transform_block_layout(last, mapping)
    mapping = loops.index_map(
        lambda *i: (loops.flat_index(i[:count], extents), i[count], *(i[at] for at in sums)),
        count + 1 + len(found.sums),
    )
    schedule.transform_block_layout(main, mapping)


def _is_pointwise(found: Contraction) -> bool:
    still = all(s == 1 for s in found.stride) and all(r == 1 for r in found.reach)
    return is_in_order(found) and still and len(found.pixels) > 1 and not found.pad


def is_in_order(found: Contraction) -> bool:
    """Say whether a contraction's loops are pixels, channels and a reduction of several steps, without a batch.

    TVM loses a reduction of one step when loops are fused.
    """
    own = [axis.at for axis in (*found.pixels, *found.channels)]
    return own == list(range(len(found.pixels) + 1)) and found.depth > 1 and not found.batch
