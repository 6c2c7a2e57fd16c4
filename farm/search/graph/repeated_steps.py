"""Loops of a function made longer, so that tiles or shares divide them: steps on top read what others read.

They do it to the same end, so that nothing has to be compared. Which loops, and how long, is `pixel_padding`'s and
`strip_fusion`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Range
from tvm.ir.expr import TensorLoad, TensorRegion

from farm.search.families import expressions


def repeat(
    schedule: Any,
    names: Collection[str],
    axis: int,
    extent: int,
    place: Callable[[Any], Any],
    wider: Mapping[Any, Any],
    zero: tuple[Any, Callable[[Any], Any]] | None = None,
) -> Any:
    """The body of a function in which loop `axis` of some blocks has `extent` steps.

    They do to every buffer what the step `place(step)` did; to those of `wider` what their own step does, in the buffer
    that stands there for the old one. `zero`: one of these, and for which steps zeros are stored there.
    """
    loops = [schedule.get(schedule.get_loops(schedule.get_sblock(name))[axis]).loop_var for name in names]

    def find_wider(buffer: Any, default: Any = None) -> Any:
        return next((new for old, new in wider.items() if old.same_as(buffer)), default)

    def extend(loop: Any) -> Any:
        if not any(loop.loop_var.same_as(each) for each in loops):
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

        def move(index: Any) -> Any:
            return expressions.replace(index, names_of_step)

        def store(node: Any) -> Any:
            new = find_wider(node.buffer)
            if new is not None:
                value = node.value
                if zero is not None and node.buffer.same_as(zero[0]):
                    value = tirx.if_then_else(zero[1](step.var), tirx.FloatImm(str(node.buffer.dtype), 0.0), value)
                return tirx.BufferStore(new, value, [*node.indices])
            return tirx.BufferStore(node.buffer, node.value, [*map(move, node.indices)])

        def load(node: Any) -> Any:
            new = find_wider(node.source)
            if new is not None:
                return tirx.BufferLoad(new, [*node.indices])
            return tirx.BufferLoad(node.source, [*map(move, node.indices)])

        def region(node: Any) -> Any:
            new = find_wider(node.source)
            if new is not None:
                return tirx.BufferRegion(new, [*node.region])
            return tirx.BufferRegion(node.source, [Range.from_min_extent(move(r.min), r.extent) for r in node.region])

        def change(node: Any) -> Any:
            return tvm_ffi.structural_map(node, [(tirx.BufferStore, store), (TensorLoad, load), (TensorRegion, region)])

        variables[axis] = tirx.IterVar(Range(0, tirx.IntImm(step.var.ty.dtype, extent)), step.var, step.iter_type)
        return s_tir.SBlock(
            variables, [*map(change, block.reads)], [*map(change, block.writes)], block.name_hint, change(block.body),
            None if block.init is None else change(block.init), annotations=block.annotations,
        )  # fmt: skip

    return tvm_ffi.structural_map(schedule.mod["main"].body, [(tirx.For, extend), (s_tir.SBlock, rewrite)])
