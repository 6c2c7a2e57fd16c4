"""Functions of a graph pipeline brought to the form that schedules are written for. Same results, same arguments.

Done once, before workloads are extracted, since what it takes (layouts of intermediate buffers) cannot be recorded in
traces. Schedules themselves are `farm.search.families`' business.
"""

from __future__ import annotations

from typing import Any

from farm.search import tvm_env
from farm.search.families import facts


def canonicalise_all() -> Any:
    """A module pass that canonicalises every function of TIR."""
    tvm = tvm_env.load_compiler()
    from tvm import tirx

    def run(module: Any, _: Any) -> Any:
        for variable, function in module.functions_items():
            if isinstance(function, tirx.PrimFunc):
                module.update_func(variable, canonicalise(function))
        return module

    return tvm.transform.module_pass(run, opt_level=0, name="Canonicalise")


def canonicalise(function: Any) -> Any:
    """The same function without pads that pad nothing, and with the pixels of a 1x1 convolution in one loop."""
    tvm = tvm_env.load()
    from tvm import tirx

    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": function}), error_render_level="none")
    changed = _inline_empty_pads(schedule)
    changed |= _join_pixels(schedule)
    if not changed:
        return function
    result = schedule.mod["main"]
    for key, value in (function.attrs or {}).items():
        result = result.with_attr(key, value)
    return result


def _inline_empty_pads(schedule: Any) -> bool:
    changed = False
    for name in facts.list_blocks(schedule):
        block = schedule.get(schedule.get_sblock(name))
        if not facts.is_copy(block):
            continue
        try:
            schedule.compute_inline(schedule.get_sblock(name))
        except Exception:
            continue
        changed = True
    return changed


def _join_pixels(schedule: Any) -> bool:
    found = facts.read_contraction(schedule)
    if found is None or found.pad or found.batch or len(found.channels) != 1 or len(found.pixels) < 2:
        return False
    if any(s != 1 for s in found.stride) or any(r != 1 for r in found.reach):
        return False
    for name in found.between:
        schedule.compute_inline(schedule.get_sblock(name))
    extents = [a.extent for a in found.pixels]
    pixels = [a.at for a in found.pixels]

    def joined(*indices: Any) -> Any:
        total = indices[pixels[0]]
        for extent, at in zip(extents[1:], pixels[1:]):
            total = total * extent + indices[at]
        return total

    main, last = schedule.get_sblock(found.main), schedule.get_sblock(found.last)
    rank = len(pixels) + 1
    def map_write(*i): return (joined(*i[:rank]), i[rank-1])
    if found.last != found.main:
        schedule.transform_layout(main, ("write", 0), lambda a,b,c,d: (joined(a,b,c), d))
        schedule.transform_block_layout(last, lambda a,b,c,d: (joined(a,b,c), d))
    if len(found.sums)==3:
        schedule.transform_block_layout(main, lambda n,y,x,f,r,s,c: (joined(n,y,x), f, c))
    return True
