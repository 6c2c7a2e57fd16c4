"""Copies that are left out, since TVM fuses none of them: passes of a graph pipeline.

A concatenation is written in place by its producers. A convolution is fused with the copies before it (`gather`), so
that no result of megabytes goes through memory.

`mark` runs before TVM fuses operators, `split` after it, and `share` when schedules are applied and weights packed.
Between `split` and `share` every function is valid by itself: each producer writes its part of a full-size buffer, and
a joining function, which `share` removes, combines them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.ir.expr import Call, TensorLoad

from farm.search.families import expressions, facts
from farm.search.graph import bindings, canonical

# Annotation of a function that joins its arguments along this axis; it is no workload.
MARK = "farm.join"


def is_join(function: Any) -> bool:
    """Say whether a function only joins what others wrote."""
    return bool(function.attrs and MARK in function.attrs)


@bindings.rewriting("MarkJoins")
def mark(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    """Turn concatenations with single-use operands into functions that TVM does not fuse."""
    uses = bindings.count_uses(function)
    values = {binding.var: binding.value for binding in bindings.list_bindings(function)}
    others: dict[Any, list[Any]] = {}
    for binding in bindings.list_bindings(function):
        operands = _operands(binding.value, values, uses)
        shapes = [bindings.static_shape(operand.ty) for operand in operands]
        shape = bindings.static_shape(binding.var.ty)
        if shape is None or None in shapes or not any(_is_own(operand, values, uses) for operand in operands):
            continue
        axis = _axis(binding.value)
        joining = _joining([s for s in shapes if s is not None], shape, axis, binding.var.ty.dtype, whole=False)
        call = relax.call_tir(builder.add_func(joining, "join"), relax.Tuple(operands), out_ty=binding.var.ty)
        others[binding.var] = [relax.VarBinding(binding.var, call)]
    return others


def _operands(value: Any, values: Mapping[Any, Any], uses: Mapping[Any, int]) -> list[Any]:
    """List the operands of a concatenation, with those of nested single-use ones along the same axis."""
    if not bindings.is_call(value, "relax.concat"):
        return []
    tensors = value.args[0]
    if isinstance(tensors, relax.Var):
        tensors = values.get(tensors)
    if not isinstance(tensors, relax.Tuple):
        return []
    found = []
    for operand in tensors.fields:
        inner = values.get(operand) if isinstance(operand, relax.Var) else None
        if inner is not None and uses[operand] == 1 and bindings.is_call(inner, "relax.concat"):
            parts = _operands(inner, values, uses)
            if parts and _axis(inner) == _axis(value):
                found += parts
                continue
        found.append(operand)
    return found


def _axis(value: Any) -> int:
    axis = value.attrs.axis
    return (0 if axis is None else int(axis)) % len(bindings.static_shape(value.ty) or (0,))


def _is_own(operand: Any, values: Mapping[Any, Any], uses: Mapping[Any, int]) -> bool:
    """Say whether an operand is computed for one reader only."""
    value = values.get(operand) if isinstance(operand, relax.Var) else None
    if not isinstance(value, relax.Call) or uses[operand] != 1:
        return False
    return not bindings.is_call(value, "relax.reshape")  # is free and writes nothing


def _joining(shapes: Sequence[tuple[int, ...]], shape: tuple[int, ...], axis: int, dtype: Any, whole: bool) -> Any:
    """Make a function that joins tensors of these shapes; with `whole`, each has the full shape and holds its part."""
    ends = [sum(s[axis] for s in shapes[: at + 1]) for at in range(len(shapes))]
    parts = [te.placeholder(shape if whole else s, dtype, f"part{at}") for at, s in enumerate(shapes)]

    def value(*indices: Any) -> Any:
        chosen = None
        for part, end, own in reversed(list(zip(parts, ends, shapes, strict=True))):
            moved = list(indices)
            if not whole:
                moved[axis] = indices[axis] - (end - own[axis])
            element = part(*moved)
            chosen = element if chosen is None else tirx.if_then_else(indices[axis] < end, element, chosen)
        return chosen

    function = te.create_prim_func([*parts, te.compute(shape, value, "join")])
    attributes = {MARK: axis, "op_pattern": bindings.OPAQUE, "tirx.noalias": True}
    return function.with_attrs(attributes).without_attr("global_symbol")


@bindings.rewriting("SplitJoins")
def split(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    """Make the producers of a marked concatenation write into full-size buffers."""
    module = builder.get()
    uses = bindings.count_uses(function)
    made = {binding.var: binding for binding in bindings.list_bindings(function)}
    others: dict[Any, list[Any]] = {}
    for binding in bindings.list_bindings(function):
        called = bindings.called_function(module, binding.value)
        shape = bindings.static_shape(binding.var.ty)
        if called is None or shape is None or not is_join(called):
            continue
        axis = int(called.attrs[MARK])
        fields = list(binding.value.args[1].fields)
        shapes = [bindings.static_shape(operand.ty) or () for operand in fields]
        new: dict[Any, list[Any]] = {}
        parts, offset = [], 0
        for operand, own in zip(fields, shapes, strict=True):
            source = made.get(operand) if isinstance(operand, relax.Var) and uses[operand] == 1 else None
            producer = None if source is None else bindings.called_function(module, source.value)
            call = None
            if source is not None and producer is not None and not is_join(producer):
                written = _write_part(producer, shape, axis, offset)
                if written is not None:
                    name = source.value.args[0].name_hint
                    call = relax.call_tir(builder.add_func(written, name), source.value.args[1], binding.var.ty)
            at = source if source is not None and call is not None else binding
            if call is None:
                copying = _write_part(_copying(own, binding.var.ty.dtype), shape, axis, offset)
                call = relax.call_tir(builder.add_func(copying, "copy"), relax.Tuple([operand]), binding.var.ty)
            part = bindings.bind_before(at, "part", call, binding.var.ty)
            new.setdefault(at.var, []).append(part)
            parts.append(part.var)
            offset += own[axis]
        if set(new) == {binding.var}:
            continue  # only copies
        joining = builder.add_func(_joining(shapes, shape, axis, binding.var.ty.dtype, whole=True), "join")
        whole = relax.call_tir(joining, relax.Tuple(parts), binding.var.ty)
        new.setdefault(binding.var, []).append(relax.VarBinding(binding.var, whole))
        others.update(new)
    return others


def _copying(shape: tuple[int, ...], dtype: Any) -> Any:
    source = te.placeholder(shape, dtype, "source")
    function = te.create_prim_func([source, te.compute(shape, lambda *indices: source(*indices), "copy")])
    return function.with_attr("tirx.noalias", True).without_attr("global_symbol")


def _write_part(function: Any, shape: tuple[int, ...], axis: int, offset: int) -> Any | None:
    """Make the function write its result into a larger tensor, from `offset` along an axis."""
    result = function.params[-1]
    if len(result.shape) != len(shape):
        return None

    def move(indices: list[Any]) -> list[Any]:
        return [index + offset if at == axis and offset else index for at, index in enumerate(indices)]

    joint = tirx.decl_buffer([tirx.IntImm("int64", d) for d in shape], result.dtype, result.name)
    body = bindings.replace_buffer(function.body, result, joint, move)
    new = expressions.with_body(function, body, [*function.params[:-1], joint])
    return new.with_attr("op_pattern", bindings.OPAQUE)


@bindings.rewriting("ShareJoins")
def share(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    """Merge the full-size buffers and removes the joining functions."""
    module = builder.get()
    order = {binding.var: at for at, binding in enumerate(bindings.list_bindings(function))}
    made = {binding.var: binding for binding in bindings.list_bindings(function)}
    others: dict[Any, list[Any]] = {}
    for binding in bindings.list_bindings(function):
        called = bindings.called_function(module, binding.value)
        if called is None or not is_join(called):
            continue
        parts = list(binding.value.args[1].fields)
        whole = bindings.static_shape(binding.var.ty)
        if any(bindings.static_shape(part.ty) != whole or part not in order for part in parts):
            continue  # not split, or TVM has folded the copy of a constant
        first, *rest = sorted(parts, key=lambda part: order[part])
        for part in rest:
            value = made[part].value
            arguments = [*value.args[1].fields, first]
            call = relax.op.call_tir_inplace(value.args[0], relax.Tuple(arguments), len(arguments) - 1, part.ty)
            others[part] = [relax.VarBinding(part, call)]
            first = part
        others[binding.var] = [relax.VarBinding(binding.var, first)]
    return others


@bindings.rewriting("GatherCopies")
def gather(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    """Fuse copies into the convolution that reads them."""
    return bindings.join_pairs(builder, function, _gather_pair)


def _gather_pair(copying: Any, called: Any) -> Any | None:
    if is_join(copying) or not _only_copies(copying) or not _gains(called):
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
