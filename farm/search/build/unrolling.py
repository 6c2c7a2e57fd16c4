"""Steps of a tile's sums taken several at a time, so that what a loop itself costs comes once for all of them.

LLVM does not unroll such loops: it counts on instructions that run beside each other. But a counter, a branch and the
address of what is fetched ahead take places of multiply-adds: four steps at a time took 0.91 to 0.99 of the time of one
(1x1 convolutions of ResNet-50, two Intel cores with AVX-512). Reads lowered functions; the order of additions stays.
"""

from __future__ import annotations

from typing import Any

from farm.search.families.expressions import list_statements, replace
from farm.search.families.facts import size_of
from tvm import tirx
from tvm.ir.expr import TensorLoad
import tvm_ffi

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
