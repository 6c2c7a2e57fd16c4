"""What a graph pipeline chooses by prediction, before any measurement: half precision, and a convolution's algorithm.

Convolutions are direct or Winograd's F(m, 3), with a layout of their weights. Half precision is weights in bfloat16,
widened on loading, or whole models in float16.

With bfloat16, accumulators stay in float32. It halves the time of a bandwidth-bound function and slows a compute-bound
one: functions get it by prediction, or all do. It is the last pass, so that it sees functions as they are scheduled.

Models that are float16 themselves are computed in float32 where the core has no arithmetic on float16, as ONNX Runtime
does: LLVM would widen and round at every operation. Their inputs and outputs stay float16.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.shape_inference
import tvm
from tvm import relax, te, tirx, topi
from tvm.ir import GenericConst
from tvm.relax import transform
from tvm.target import Target, codegen

from farm.errors import ModelRefusedError, UsageError
from farm.search import cores, gpus
from farm.search.cores import Core
from farm.search.families import expressions, facts, rule
from farm.search.families.dense import Dense
from farm.search.families.dense_forms import Grouped
from farm.search.families.family import Unit
from farm.search.families.gpu_tiles import GpuWinograd
from farm.search.graph import bindings, canonical, channel_padding, dots, folding
from farm.search.graph.pipelines import BF16_ALL, FLOAT32, FP16, Weights
from farm.search.graph.winograd import KERNEL, Choose, Make, Padding, Shape, count_tiles, make_function

FLOAT16 = "float16"
# LLVM's features for arithmetic on float16 vectors, by architecture; Arm's is optional since Armv8.2.
_FEATURE = "fullfp16"
_FEATURES: Mapping[str, str] = {"aarch64": _FEATURE, "x86_64": "avx512fp16"}
# Operators that select, move or clamp elements; TVM has no policy for them.
_FOLLOW = ("clip", "max", "min", "nn.leakyrelu", "nn.pad", "nn.prelu", "take", "where")
# Operators that sum or square elements, or whose polynomials are in float32; TVM would convert these.
_STAY = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp", "log", "log_add_exp",
    "nn.adaptive_avg_pool1d", "nn.adaptive_avg_pool2d", "nn.adaptive_avg_pool3d", "nn.attention", "nn.attention_bias",
    "nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d", "nn.gelu", "nn.gelu_tanh", "nn.group_norm", "nn.instance_norm",
    "nn.layer_norm", "nn.rms_norm", "nn.selu", "nn.silu", "power", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "square",
    "tan", "tanh",
)  # fmt: skip
# TVM's policies: float16 where the operands are, and never.
_POLICIES = dict.fromkeys(_FOLLOW, 1) | dict.fromkeys(_STAY, 2)
DTYPE = "bfloat16"
# The prefix of workload names with such weights.
PREFIX = "bf16_"
# It costs accuracy and predictions are within 10 %, so it must promise more.
_GAIN = 0.9
# Attributes that name the element type of a result or of an accumulator.
_TYPES = frozenset({"dtype", "output_dtype", "softmax_precision", "stash_type", "to"})
# Input channels below which a GPU's transforms outweigh the products.
_FEWEST_INPUTS = 8
# Fraction of the last-level cache that holds a convolution's weights until the next inference.
_KEPT = 0.125


def require(target: Mapping[str, Any]) -> None:
    """Raise UsageError where a target, in TVM's dict form, has no arithmetic on float16 vectors; every GPU has."""
    if gpus.is_gpu(target):
        return
    machine, mcpu = str(target.get("mtriple", "")).partition("-")[0], str(target.get("mcpu", ""))
    if machine != "aarch64" or not codegen.target_has_features(_FEATURE, Target(dict(target))):
        raise UsageError(
            f"{mcpu or machine or 'this target'} cannot compute in 16 bits (--weights fp16)",
            "Arm cores since Armv8.2 can: Carmel, Cortex-A76, A78AE. For any other core use --weights bf16.",
        )


@functools.cache
def _register_policies() -> None:
    """Register policies above TVM's own, which have level 10; TVM accepts each level once."""
    for name, policy in _POLICIES.items():
        tvm.ir.register_op_attr(f"relax.{name}", "TMixedPrecisionPolicy", policy, 20)


def compute() -> Any:
    """Make a module pass that computes in float16 between inputs and outputs, which stay float32."""
    _register_policies()

    def check(module: Any, _: Any) -> Any:
        for _, function in bindings.list_functions(module):
            for binding in bindings.list_bindings(function):
                tvm.relax.analysis.post_order_visit(binding.value, _require_finite)
        return module

    return tvm.transform.Sequential(
        [
            transform.ToMixedPrecision(out_dtype=FLOAT16),
            transform.FoldConstant(),
            tvm.transform.module_pass(check, opt_level=0, name="RequireFinite"),
        ]
    )


def _require_finite(expression: Any) -> None:
    """Refuse weights that float16 cannot hold; a scalar bound may be infinite."""
    if not isinstance(expression, GenericConst):
        return
    values = expression.value.numpy()
    if values.dtype == np.float16 and values.size > 1 and not np.isfinite(values).all():
        raise ModelRefusedError(
            "this model has weights that float16 cannot hold: they exceed 65,504",
            "Remove --weights fp16 or choose --weights bf16.",
        )


def round_weights(weights: npt.NDArray[np.float32]) -> npt.NDArray[Any] | None:
    """Round weights to bfloat16, ties to even; None where one is or becomes infinite."""
    import ml_dtypes

    with np.errstate(over="ignore"):
        rounded: npt.NDArray[Any] = weights.astype(ml_dtypes.bfloat16)
    return rounded if np.isfinite(rounded.astype(np.float32)).all() else None


def halve(target: Any, weights: Weights) -> Any:
    """Make a module pass for a target (TVM's) that stores the constant weights of products in bfloat16."""

    def run(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
        core, module = cores.core_of(dict(target.export())), builder.get()

        @functools.cache
        def make(name: Any) -> tuple[Any, int] | None:
            """Return the function with 16-bit weights, made once for all calls, and their place; None to keep it."""
            at = find_weight(module[name])
            if at is None:
                return None
            other = halve_function(module[name], at)
            if weights != BF16_ALL and not gains(module[name], other, at, core):
                return None
            return builder.add_func(other, f"{PREFIX}{name.name_hint}"), at

        others: dict[Any, Sequence[Any]] = {}
        for binding in bindings.list_bindings(function):
            is_called = bindings.is_call(binding.value, "relax.call_tir")
            halved = make(binding.value.args[0]) if is_called else None
            if halved is None:
                continue
            (name, at), arguments = halved, list(binding.value.args[1].fields)
            weight = arguments[at]
            rounded = round_weights(weight.value.numpy()) if isinstance(weight, GenericConst) else None
            if rounded is not None:
                arguments[at] = relax.const(rounded, DTYPE)
                call = relax.call_tir(name, relax.Tuple(arguments), binding.var.ty)
                others[binding.var] = [relax.VarBinding(binding.var, call)]
        return others

    return bindings.rewriting_pass(run, "HalveWeights")


def is_halved(arguments: Sequence[tuple[tuple[int, ...], str]]) -> bool:
    """Say whether a workload with these arguments, the result last, has 16-bit weights and 32-bit accumulators."""
    kinds = [dtype for _, dtype in arguments]
    return DTYPE in kinds[1:-1] and kinds[-1] == FLOAT32


def is_computed(weights: Weights, arguments: Sequence[tuple[tuple[int, ...], str]]) -> bool:
    """Say whether a workload with these arguments computes in float16, in a pipeline that stores `weights` so."""
    return weights == FP16 and any(dtype == "float16" for _, dtype in arguments)


def count_bytes(module: Any) -> int:
    """Count the bytes of a prepared module's 16-bit constants."""
    found: dict[Any, int] = {}

    def count(expression: Any) -> None:
        if isinstance(expression, GenericConst) and str(expression.ty.dtype) in (DTYPE, "float16"):
            found[expression] = 2 * int(np.prod(expression.value.shape))

    for _, function in bindings.list_functions(module):
        relax.analysis.post_order_visit(function, count)
    return sum(found.values())


def find_weight(function: Any) -> int | None:
    """Find the parameter that is the float32 weight of a contraction with register tiles.

    The first parameter is data, which distinguishes such a workload from one in float16 (`is_halved`).
    """
    schedule = bindings.schedule(function)
    found: facts.Contraction | None = Dense().read(schedule) or Grouped().read(schedule)
    if found is None or not found.weight_at or str(function.params[found.weight_at].dtype) != FLOAT32:
        return None
    return found.weight_at


def halve_function(function: Any, at: int) -> Any:
    """Store the parameter `at` in bfloat16 and widen its loads."""
    old = function.params[at]
    new = tirx.decl_buffer(list(old.shape), DTYPE, old.name)
    body = bindings.replace_buffer(function.body, old, new, read=lambda load: tirx.Cast(FLOAT32, load))
    return expressions.with_body(function, body, [*function.params[:at], new, *function.params[at + 1 :]])


def gains(function: Any, halved: Any, at: int, core: Core) -> bool:
    """Say whether 16-bit weights are predicted to make a function faster within a model.

    Never where the weights stay in a cache until the next inference.
    """
    if facts.size_of(function.params[at]) <= kept_bytes(core):
        return False
    before, after = (predict_in_model(each, core, at) for each in (function, halved))
    return after < _GAIN * before


_HALF, _FLOAT = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT


def needs_widening(graph: onnx.GraphProto, target: Any | None) -> bool:
    """Say whether a graph has float16 values, and the target (TVM's; None: unknown) is a CPU that cannot add them."""
    if target is None or target.kind.name != "llvm" or not _has_halves(graph):
        return False
    config: Mapping[str, Any] = dict(target.export())
    feature = _FEATURES.get(str(config.get("mtriple", "")).partition("-")[0])
    return feature is None or not codegen.target_has_features(feature, Target(dict(config)))


def _has_halves(graph: onnx.GraphProto) -> bool:
    nodes = list(folding.list_nodes(graph))
    if any(node.op_type == "BitCast" for node in nodes):
        return False
    return (
        any(tensor.data_type == _HALF for tensor in _list_tensors(graph))
        or any(value.type.tensor_type.elem_type == _HALF for value in (*graph.input, *graph.output))
        or any(each.name in _TYPES and each.i == _HALF for node in nodes for each in node.attribute)
    )


def widen_model(model: onnx.ModelProto) -> None:
    """Turn float16 values inside a model into float32. Casts to float16 still round."""
    graph = model.graph
    if not all(value.type.tensor_type.elem_type for value in graph.output):
        typed = onnx.shape_inference.infer_shapes(model).graph.output
        del graph.output[:]
        graph.output.extend(typed)
    inputs = [value.name for value in graph.input if value.type.tensor_type.elem_type == _HALF]
    outputs = [value.name for value in graph.output if value.type.tensor_type.elem_type == _HALF]
    names = {name: f"{name}__wide" for name in (*inputs, *outputs)}
    for tensor in _list_tensors(graph):
        if tensor.data_type == _HALF:
            wide = onnx.numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(wide, tensor.name))
    _widen_inner(graph)
    nodes = [_cast(name, names[name], _FLOAT) for name in inputs]
    for node in graph.node:
        copy = folding.renamed(node, names)
        for position, name in enumerate(copy.output):
            copy.output[position] = names.get(name, name)
        nodes.append(copy)
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    nodes += [_cast(names[name], name, _HALF) for name in outputs if name not in inputs]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)


def _widen_inner(graph: onnx.GraphProto) -> None:
    """Change the types that nodes name, and those of inner graphs."""
    nodes = []
    for node in graph.node:
        nodes.append(node)
        for attribute in node.attribute:
            if attribute.name in _TYPES and attribute.i == _HALF:
                if node.op_type == "Cast":
                    rounded = f"{node.output[0]}__rounded"
                    nodes.append(_cast(rounded, node.output[0], _FLOAT))
                    node.output[0] = rounded
                else:
                    attribute.i = _FLOAT
        for body in folding.bodies(node):
            _widen_inner(body)
            del body.value_info[:]
            for value in (*body.input, *body.output):
                if value.type.tensor_type.elem_type == _HALF:
                    value.type.tensor_type.elem_type = _FLOAT
    copies = [folding.renamed(node, {}) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _list_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield every constant, also of inner graphs."""
    yield from graph.initializer
    yield from (sparse.values for sparse in graph.sparse_initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            elif attribute.HasField("sparse_tensor"):
                yield attribute.sparse_tensor.values
        for body in folding.bodies(node):
            yield from _list_tensors(body)


def _cast(source: str, result: str, kind: int) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [source], [result], to=kind)


# F(2, 3) rounds better than a direct convolution, see the docstring of `winograd`.
EXACT_TILES, HALF_TILES, ALL_TILES = (2,), (2, 4), (2, 4, 6)
# A larger tile is less exact, and predictions are within 10 %, so it must promise more. On a GPU most layers gain much.
_LEAST_GAIN, _GPU_GAIN = 0.9, 0.96


def choose_winograd(unit: Unit, *, exact: bool = False) -> Choose:
    """Return a `choose` for `use_winograd` on a core or GPU; `exact` excludes what rounds worse than a direct one."""
    make, gain = make_for(unit), _LEAST_GAIN if isinstance(unit, Core) else _GPU_GAIN

    @functools.cache
    def choose(shape: Shape, channels: int, padding: Padding, dtype: str) -> int:
        if shape[3] < _FEWEST_INPUTS and not isinstance(unit, Core):
            return 0
        direct = make_direct(shape, channels, padding, dtype)
        direct = channel_padding.pad(direct, unit) if isinstance(unit, Core) else channel_padding.join(direct, unit)
        best, least = 0, predict_in_model(direct, unit)
        for m in EXACT_TILES if exact else HALF_TILES if dtype == "float16" else ALL_TILES:
            seconds = predict_in_model(make(shape, channels, padding, m, dtype), unit)
            if seconds < gain * least:
                best, least = m, seconds
        return best

    return choose


@functools.cache
def make_for(unit: Unit) -> Make:
    """Return the `make` for `use_winograd`: on a GPU, all tiles are one loop that its tiles divide."""
    if isinstance(unit, Core):
        return make_function

    @functools.cache
    def make(shape: Shape, channels: int, padding: Padding, m: int, dtype: str) -> Any:
        count = shape[0] * math.prod(count_tiles(shape, padding, m))
        function = make_function(shape, channels, padding, m, dtype, count)
        found = GpuWinograd().read(tvm.s_tir.Schedule(function))
        wanted = channel_padding.choose_pixels(found.products, unit) if found is not None else count
        return function if wanted == count else make_function(shape, channels, padding, m, dtype, wanted)

    return make


def choose_panel(target: Any) -> dots.ChoosePanel:
    """Return a `choose_panel` for `dots.use_instruction` on a target (TVM's): the channels of a predicted tile."""

    def choose(function: Any) -> int:
        core = cores.core_of(target.export())
        outlook = rule.read_outlook(tvm.IRModule({"main": canonical.canonicalise(function)}), core)
        plans = outlook.plans() if outlook is not None else []
        return plans[0][1]["lanes"] * plans[0][1]["vectors"] if plans else 0

    return choose


def predict_in_model(function: Any, unit: Unit, weight_at: int = 1) -> float:
    """Predict the seconds of the best plan where most weights come from memory, as in a whole model.

    On a core, half of the transfer is hidden by computation. GPU families count it. Infinite where no family has a
    plan. Line stalls are left out, since not all families count them.
    """
    unit = dataclasses.replace(unit, line_wait=0.0) if isinstance(unit, Core) else unit
    outlook = rule.read_outlook(tvm.IRModule({"main": function}), unit)
    plans = outlook.plans() if outlook is not None else []
    if not plans or not isinstance(unit, Core):
        return plans[0][0].seconds if plans else math.inf
    fetched = max(0.0, facts.size_of(function.params[weight_at]) - kept_bytes(unit))
    return plans[0][0].seconds + fetched / unit.memory_bytes_per_s / 2


def kept_bytes(core: Core) -> float:
    """Return the bytes of a function's weights that stay in a cache until the next inference."""
    return max(core.l2_bytes, core.l3_bytes) * _KEPT


def make_direct(shape: Shape, channels: int, padding: Padding, dtype: str) -> Any:
    """Make the direct convolution as a TIR function of data and weights [3, 3, in, out]."""
    data = te.placeholder(shape, dtype, name="data")
    weight = te.placeholder((KERNEL, KERNEL, shape[3], channels), dtype, name="weight")
    result = topi.nn.conv2d_nhwc(data, weight, 1, list(padding), 1)
    return canonical.canonicalise(te.create_prim_func([data, weight, result], index_dtype_override="int64"))
