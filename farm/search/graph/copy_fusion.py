"""Fuse a convolution with the copies before it: TVM does not, so a result of megabytes would go through memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir.expr import Call, TensorLoad

from farm.search.families import facts
from farm.search.graph import bindings, canonical, in_place_concat


def gather() -> Any:
    """Make a module pass that fuses copies into the convolution that reads them."""
    return bindings.rewriting_pass(_gather, "GatherCopies")


def _gather(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    return bindings.join_pairs(builder, function, _gather_pair)


def _gather_pair(copying: Any, called: Any) -> Any | None:
    if in_place_concat.is_join(copying) or not _only_copies(copying) or not _gains(called):
        return None
    return _merge(copying, called)


def _only_copies(function: Any) -> bool:
    """Say whether a function moves elements without computing; a plain reshape is free and does not count."""
    if relax.analysis.has_reshape_pattern(function):
        return False
    schedule = bindings.schedule(function)
    blocks = [schedule.get(schedule.get_sblock(name)) for name in facts.list_blocks(schedule)]
    return bool(blocks) and all(_moves(getattr(block.body, "value", None)) for block in blocks)


def _moves(value: Any) -> bool:
    if isinstance(value, Call) and getattr(value.op, "name", "").endswith(".if_then_else"):
        return all(isinstance(side, TensorLoad | tirx.FloatImm | tirx.IntImm) for side in value.args[1:])
    return isinstance(value, TensorLoad)


def _gains(function: Any) -> bool:
    """Say whether a function is a convolution that gains from a fused copy.

    A 1x1 convolution does not: its pixels are uniform as long as it reads them in place.
    """
    found = facts.read_contraction(bindings.schedule(canonical.canonicalise(function)))
    if found is None or len(found.pixels) < 2:
        return False
    return found.pad is not None or any(r != 1 for r in found.reach) or any(s != 1 for s in found.stride)


def _merge(copying: Any, function: Any) -> Any | None:
    """Fuse a copy and the function that reads it; None where no family reads the result."""
    schedule = bindings.schedule(bindings.chain(copying, function))
    names = facts.list_blocks(schedule)
    if len(set(names)) < len(names):
        return None
    copies = len(facts.list_blocks(bindings.schedule(copying)))
    found = facts.read_contraction(bindings.schedule(function))
    try:
        for name in names[: copies if found is not None and found.pad is not None else copies - 1]:
            schedule.compute_inline(schedule.get_sblock(name))
    except tvm.s_tir.ScheduleError:
        return None
    result = schedule.mod["main"]
    if facts.read_contraction(schedule) is None:
        return None
    for key, value in (function.attrs or {}).items():
        result = result.with_attr(key, value)
    return result.with_attr("op_pattern", bindings.OPAQUE)
