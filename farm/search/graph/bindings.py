"""Tools for graph passes: Relax functions as lists of bindings, TIR functions as lists of blocks, constant folding."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir import GenericConst, Range
from tvm.ir.expr import TensorLoad, TensorRegion
from tvm.relax.expr_functor import PyExprMutator, mutator

# TVM's pattern kind of functions that are never fused.
OPAQUE = 8
_log = logging.getLogger(__name__)


def _rearrange(data: Any, call: Any) -> npt.NDArray[Any] | None:
    """Return a constant as a transpose or a reshape makes it; None for another operator or an unknown shape."""
    array = data.value.numpy()
    if is_call(call, "relax.permute_dims"):
        axes = call.attrs.axes
        return np.transpose(array, None if axes is None else [int(axis) for axis in axes])
    if is_call(call, "relax.expand_dims"):
        return np.expand_dims(array, tuple(int(axis) for axis in call.attrs.axis))
    shape = static_shape(call.ty) if is_call(call, "relax.reshape") else None
    return None if shape is None else array.reshape(shape)


@functools.cache
def allocate_empty() -> Any:
    """Make a Relax pass that allocates constants without elements at run time: TVM cannot load them from a library."""

    @mutator
    class Emptier(PyExprMutator):
        def visit_generic_const_(self, constant: Any) -> Any:
            if not is_empty(constant.ty):
                return constant
            return self.builder_.emit(relax.op.zeros(static_shape(constant.ty), constant.ty.dtype))

    def allocate(module: Any, _: Any) -> Any:
        emptier = Emptier(module)
        for variable, function in list_functions(module):
            found: list[bool] = []
            relax.analysis.post_order_visit(function, lambda node, found=found: found.append(is_empty(node.ty)))
            if any(found):
                emptier.builder_.update_func(variable, emptier.visit_expr(function))
        return emptier.builder_.get()

    return tvm.transform.module_pass(allocate, opt_level=0, name="AllocateEmpty")


def is_empty(type_: Any) -> bool:
    """Say whether a type is of tensors without elements."""
    return 0 in (static_shape(type_) or ())


def fold_batch_norm(graph: onnx.GraphProto) -> None:
    """Fold each BatchNormalization that alone reads a convolution's result into the convolution's weights.

    All weights must be initializers of float32 or float16; the arithmetic is in float64. Unread weights are removed.
    """
    kinds = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    weights = {i.name: i for i in graph.initializer if i.data_type in kinds}
    readers: dict[str, int] = {}
    for name in [*(n for node in graph.node for n in node.input), *(value.name for value in graph.output)]:
        readers[name] = readers.get(name, 0) + 1
    convolutions = {node.output[0]: node for node in graph.node if node.op_type == "Conv"}
    # A branch could read the value between the two.
    if any(a.HasField("g") or a.graphs for node in graph.node for a in node.attribute):
        return
    kept = []
    for node in graph.node:
        conv = convolutions.get(node.input[0]) if node.op_type == "BatchNormalization" else None
        if (
            conv is None
            or node.domain not in ("", "ai.onnx")
            or readers[node.input[0]] != 1
            or any(node.output[1:])
            or _attribute(node, "training_mode", 0)
            or not all(name in weights for name in [*conv.input[1:], *node.input[1:]])
        ):
            kept.append(node)
            continue
        scale, offset, mean, variance = (_double(weights[name]) for name in node.input[1:5])
        factor = scale / np.sqrt(variance + _attribute(node, "epsilon", 1e-5))
        kernel = _double(weights[conv.input[1]])
        bias = _double(weights[conv.input[2]]) if len(conv.input) > 2 else np.zeros_like(mean)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(weights[conv.input[1]].data_type)
        folded = {
            f"{node.output[0]}__weight": kernel * factor.reshape(-1, *[1] * (kernel.ndim - 1)),
            f"{node.output[0]}__bias": (bias - mean) * factor + offset,
        }
        if max(np.abs(array).max() for array in folded.values()) > np.finfo(dtype).max:
            kept.append(node)
            continue
        for name, array in folded.items():
            graph.initializer.append(onnx.numpy_helper.from_array(array.astype(dtype), name))
        conv.input[1:] = list(folded)
        conv.output[0] = node.output[0]
    del graph.node[:]
    graph.node.extend(kept)
    used = {name for node in kept for name in node.input} | {value.name for value in graph.output}
    left = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(left)


def _attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    return next((float(onnx.helper.get_attribute_value(a)) for a in node.attribute if a.name == name), default)


def _double(tensor: onnx.TensorProto) -> npt.NDArray[np.float64]:
    return np.asarray(onnx.numpy_helper.to_array(tensor), dtype=np.float64)


def rewriting_pass(run: Callable[[Any, Any], Mapping[Any, Sequence[Any]]], name: str) -> Any:
    """Make a module pass over Relax functions.

    `run` takes a block builder, which holds the module, and a function; it returns the argument of `replace`. A
    function that TVM refuses to rewrite is left unchanged.
    """

    def apply(module: Any, _: Any) -> Any:
        builder = relax.BlockBuilder(module)
        for variable, function in list_functions(module):
            try:
                others = run(builder, function)
                if others:
                    builder.update_func(variable, replace(function, others))
            except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
                _log.warning("%s leaves %s as it is: %s", name, variable.name_hint, error)
        tidy = [relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()]
        return tvm.transform.Sequential(tidy)(builder.get())

    return tvm.transform.module_pass(apply, opt_level=0, name=name)


def rewriting(name: str) -> Callable[[Callable[[Any, Any], Mapping[Any, Sequence[Any]]]], Callable[[], Any]]:
    """Decorate the `run` of a rewriting pass: calling it then makes the module pass."""
    return lambda run: functools.partial(rewriting_pass, run, name)


def mapping_pass(change: Callable[[Any], Any], name: str) -> Any:
    """Make a module pass that changes every TIR function."""

    def run(module: Any, _: Any) -> Any:
        for variable, function in module.functions_items():
            if isinstance(function, tirx.PrimFunc):
                module.update_func(variable, change(function))
        return module

    return tvm.transform.module_pass(run, opt_level=0, name=name)


@rewriting("FoldEmpty")
def fold_empty(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    """Turn results without elements into constants, and concatenate none of them.

    TVM has no code for such intermediate buffers.
    """
    others = {}
    for binding in list_bindings(function):
        variable, value = binding.var, binding.value
        if is_empty(variable.ty):
            value = relax.const(tvm.runtime.empty(static_shape(variable.ty), variable.ty.dtype.dtype))
        elif is_call(value, "relax.concat") and any(is_empty(part.ty) for part in value.args[0]):
            kept = [part for part in value.args[0] if not is_empty(part.ty)]
            value = relax.op.concat(kept, value.attrs.axis) if len(kept) > 1 else kept[0]
        if value is not binding.value:
            others[variable] = [relax.VarBinding(variable, builder.normalize(value))]
    return others


@rewriting("FoldConstantShapes")
def fold_shapes(_: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    """Evaluate transposes and reshapes of constants; FoldConstant does the rest."""
    values: dict[Any, Any] = {}
    others: dict[Any, Sequence[Any]] = {}
    for binding in list_bindings(function):
        value = binding.value
        data = value.args[0] if isinstance(value, relax.Call) and value.args else None
        data = values.get(data, data)
        if isinstance(data, GenericConst) and (array := _rearrange(data, value)) is not None:
            value = relax.const(np.asarray(array, order="C"), data.ty.dtype)
            others[binding.var] = [relax.VarBinding(binding.var, value)]
        values[binding.var] = value
    return others


def list_functions(module: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the Relax functions of a module that are one sequence of bindings."""
    for variable, function in list(module.functions_items()):
        if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr):
            yield variable, function


def list_bindings(function: Any) -> list[Any]:
    """List all bindings of a function in order."""
    return [binding for block in function.body.blocks for binding in block.bindings]


def replace(function: Any, others: Mapping[Any, Sequence[Any]]) -> Any:
    """Replace the bindings of some variables by others, or by none."""
    blocks = []
    for block in function.body.blocks:
        kind = relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else relax.BindingBlock
        blocks.append(kind([new for old in block.bindings for new in others.get(old.var, (old,))]))
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def bind_before(binding: Any, name: str, value: Any, type_: Any) -> Any:
    """Bind a new variable of the kind that the block of `binding` holds."""
    kind = relax.DataflowVar if isinstance(binding.var, relax.DataflowVar) else relax.Var
    return relax.VarBinding(kind(name, type_), value)


def count_uses(function: Any) -> Mapping[Any, int]:
    """Count the reads of each variable of a function, including its result."""
    read = [*(binding.value for binding in list_bindings(function)), function.body.body]
    return collections.Counter(variable for each in read for variable in list_variables(each))


def list_variables(expression: Any) -> list[Any]:
    """List the variables in an expression."""
    found: list[Any] = []
    relax.analysis.post_order_visit(expression, found.append)
    return [each for each in found if isinstance(each, relax.Var)]


def is_call(value: Any, operator: str) -> bool:
    """Say whether an expression calls the Relax operator of this name."""
    return isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and value.op.name == operator


def is_nhwc(attributes: Any) -> bool:
    """Say whether a convolution has NHWC data and results, HWIO weights and one group."""
    return (
        str(attributes.data_layout) == str(attributes.out_layout) == "NHWC"
        and str(attributes.kernel_layout) == "HWIO"
        and int(attributes.groups) == 1
    )


def called_function(module: Any, value: Any) -> Any | None:
    """Return the TIR function that an expression calls with `call_tir`, or None."""
    return module[value.args[0]] if is_call(value, "relax.call_tir") else None


def bind(call: Any) -> Any:
    """Bind a call to a variable of the block that is being built, so that its type is known."""
    return relax.BlockBuilder.current().normalize(call)


def static_shape(type_: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor type; None where it has none or it is not static."""
    shape = getattr(type_, "shape", None)
    if not isinstance(type_, relax.TensorType) or not isinstance(shape, relax.ShapeExpr):
        return None
    if not all(isinstance(d, tirx.IntImm) for d in shape.values):
        return None
    return tuple(int(d) for d in shape.values)


def replace_buffer(
    body: Any,
    old: Any,
    new: Any,
    move: Callable[[list[Any]], list[Any]] = lambda indices: indices,
    read: Callable[[Any], Any] = lambda load: load,
) -> Any:
    """Replace the buffer `old` by `new` in a statement; `move` maps the indices and `read` wraps each load."""

    def store(node: Any) -> Any:
        return tirx.BufferStore(new, node.value, move(list(node.indices))) if node.buffer.same_as(old) else node

    def load(node: Any) -> Any:
        return read(tirx.BufferLoad(new, move(list(node.indices)))) if node.source.same_as(old) else node

    def region(node: Any) -> Any:
        if not node.source.same_as(old):
            return node
        starts = move([r.min for r in node.region])
        ranges = [Range.from_min_extent(start, r.extent) for start, r in zip(starts, node.region, strict=True)]
        return tirx.BufferRegion(new, ranges)

    return tvm_ffi.structural_map(body, [(tirx.BufferStore, store), (TensorLoad, load), (TensorRegion, region)])


def join_pairs(builder: Any, function: Any, merge: Callable[[Any, Any], Any | None]) -> Mapping[Any, Sequence[Any]]:
    """Merge TIR functions with the sole readers of their results as first argument; for use in `rewriting_pass`.

    `merge` makes one function of the two or returns None. Its arguments are those of both without the intermediate.
    """
    module, uses = builder.get(), count_uses(function)
    made = {binding.var: binding for binding in list_bindings(function)}
    others: dict[Any, list[Any]] = {}
    for binding in list_bindings(function):
        second = called_function(module, binding.value)
        arguments = list(binding.value.args[1].fields) if second is not None else []
        if not arguments or not isinstance(arguments[0], relax.Var) or uses[arguments[0]] != 1:
            continue
        source = made.get(arguments[0])
        first = called_function(module, source.value) if source is not None else None
        if source is None or first is None or source.var in others:
            continue
        merged = merge(first, second)
        if merged is None:
            continue
        words = [call.args[0].name_hint.removeprefix("fused_") for call in (source.value, binding.value)]
        call = relax.call_tir(
            builder.add_func(merged, "_".join(["fused", *words])),
            relax.Tuple([*source.value.args[1].fields, *arguments[1:]]),
            binding.var.ty,
        )
        others[source.var] = []
        others[binding.var] = [relax.VarBinding(binding.var, call)]
    return others


def chain(first: Any, second: Any) -> Any:
    """Make one TIR function that applies `first`, and then `second` with the result as its first argument.

    Its arguments are those of both without the intermediate, its attributes the second's. Block names are made unique.
    """
    renew = tvm_ffi.get_global_func("s_tir.RenewDefs")
    first = renew(first)
    data, between = second.params[0], first.params[-1]
    body = replace_buffer(_rename_blocks(second.body, first.body), data, between)
    roots = [first.body.block, body.block]
    root = s_tir.SBlock(
        [], [], [], "root", tirx.SeqStmt([root.body for root in roots]),
        alloc_buffers=[between, *(buffer for root in roots for buffer in root.alloc_buffers)],
    )  # fmt: skip
    merged = tirx.PrimFunc(
        [*first.params[:-1], *second.params[1:]], s_tir.SBlockRealize([], True, root), second.ret_type, second.attrs
    )
    return renew(merged)


def _rename_blocks(body: Any, other: Any) -> Any:
    """Rename the blocks of a statement that share a name with blocks of another."""
    taken: set[str] = set()

    def note(block: Any) -> Any:
        taken.add(str(block.name_hint))
        return block

    def rename(block: Any) -> Any:
        if not block.iter_vars or str(block.name_hint) not in taken:
            return block
        return s_tir.SBlock(
            block.iter_vars, block.reads, block.writes, f"{block.name_hint}_after", block.body, block.init,
            block.alloc_buffers, block.match_buffers, block.annotations,
        )  # fmt: skip

    tvm_ffi.structural_map(other, [(s_tir.SBlock, note)])
    return tvm_ffi.structural_map(body, [(s_tir.SBlock, rename)])


def schedule(function: Any) -> Any:
    """Make a schedule of a TIR function, to read or to change it."""
    return tvm.s_tir.Schedule(tvm.IRModule({"main": function}), error_render_level="none")
