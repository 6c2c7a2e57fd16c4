"""Graph pipelines: their table, and the passes on a model before workloads are extracted, repeated when it is compiled.

A pipeline's name is part of a workload's identity: a changed pipeline needs a new name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any, Literal

import tvm
from tvm import relax, tirx
from tvm.relax import transform

from farm.errors import ModelRefusedError, UsageError
from farm.inventory.board_types import BoardType
from farm.search import gpus
from farm.search.graph import (
    attention,
    bindings,
    canonical,
    channel_padding,
    decomposition,
    dots,
    half_precision,
    importer,
    in_place_concat,
    quantised,
    recurrent,
    transposes,
    winograd,
)
from farm.search.tvm_errors import find_reason
from farm.values import is_for_gpu

Weights = Literal["float32", "bf16", "bf16-all", "fp16"]
# As in the model; bfloat16 weights where that is predicted to gain; bfloat16 weights in all register tiles; all
# arithmetic in float16.
FLOAT32: Weights = "float32"
BF16: Weights = "bf16"
BF16_ALL: Weights = "bf16-all"
FP16: Weights = "fp16"
KNOWN: tuple[Weights, ...] = (FLOAT32, BF16, BF16_ALL, FP16)
# Calls that the executable makes itself; any other needs a function.
_CALLS = frozenset(
    {
        "relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed", "relax.call_pure_packed",
        "relax.call_builtin_with_ctx", "relax.invoke_closure", "relax.tensor_to_shape", "relax.shape_of",
    }
)  # fmt: skip
# Registered by TVM's Python package, which boards do not have.
_PYTHON_ONLY = "relax.run."
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class GraphPipeline:
    """A graph pipeline and its options.

    `layout` is the data and kernel layout of convolutions, None for the model's own. `prepack` packs weights.
    `canonical` brings functions to the form of the schedule families. `winograd` allows Winograd's algorithm, `exact`
    only where it rounds no worse than a direct convolution. `polynomials` vectorises exponentials and similar functions
    instead of calling the C library. `weights` selects half precision.
    """

    name: str
    layout: tuple[str, str] | None
    prepack: bool
    canonical: bool = False
    winograd: Literal["never", "exact", "any"] = "never"
    polynomials: bool = False
    weights: Weights = FLOAT32

    @property
    def tuned_as(self) -> str:
        """The pipeline that its workloads name: a function itself shows how its weights are stored."""
        return self.name.removesuffix(f"-{self.weights}")


_FLOAT32 = (
    # The fastest measured on x86 and estimated on Arm.
    GraphPipeline("graph/2", ("NHWC", "HWIO"), prepack=True, canonical=True, winograd="any", polynomials=True),
    GraphPipeline("graph/2-exact", ("NHWC", "HWIO"), prepack=True, canonical=True, winograd="exact"),
    # For GPUs: weights keep their layout and are read in rows.
    GraphPipeline(gpus.PIPELINE, ("NHWC", "HWIO"), prepack=False, canonical=True, winograd="any"),
    GraphPipeline(gpus.EXACT_PIPELINE, ("NHWC", "HWIO"), prepack=False, canonical=True, winograd="exact"),
    # Where TVM cannot convert a model's layout.
    GraphPipeline("graph/2-nchw", None, prepack=True),
    # For untuned code.
    GraphPipeline("graph/2-plain", None, prepack=False),
)
_HALVED = (
    dataclasses.replace(p, name=f"{p.name}-{weights}", weights=weights)
    for p in _FLOAT32
    if p.canonical
    for weights in (KNOWN[1:] if p.prepack else (FP16,))
)
PIPELINES = {p.name: p for p in (*_FLOAT32, *_HALVED)}


def require_pipeline(name: str) -> GraphPipeline:
    """Return the pipeline called `name`. Raises UsageError that lists the known ones."""
    try:
        return PIPELINES[name]
    except KeyError:
        raise UsageError(f"no graph pipeline {name!r}; known: {', '.join(PIPELINES)}") from None


def is_canonical(name: str) -> bool:
    """Say whether a pipeline brings functions to the form of the schedule families; no unknown one does."""
    return name in PIPELINES and PIPELINES[name].canonical


def exact(name: str) -> str:
    """Return the name of the pipeline like `name`, without what rounds worse than the model."""
    pipeline = require_pipeline(name)
    if pipeline.winograd != "any":
        return name
    wanted = dataclasses.replace(pipeline, winograd="exact", polynomials=False)
    return next(each for each, p in PIPELINES.items() if p == dataclasses.replace(wanted, name=each))


def make_exact(kind: BoardType, wanted: bool) -> BoardType:
    """Return the board type, with the `exact` variant of its graph pipeline where `wanted`."""
    return kind.model_copy(update={"pipeline": exact(kind.pipeline)}) if wanted else kind


def store_weights(kind: BoardType, weights: str) -> BoardType:
    """Return the board type with the graph pipeline that stores weights so. Raises UsageError where there is none."""
    if weights not in KNOWN:
        raise UsageError(f"--weights {weights!r} is unknown", f"Known: {', '.join(KNOWN)}.")
    own = require_pipeline(kind.pipeline)
    for name, each in PIPELINES.items():
        if each == dataclasses.replace(own, name=name, weights=weights):
            if weights == FP16 and kind.target is not None and not is_for_gpu(name):
                half_precision.require(kind.target.to_tvm())
            return kind.model_copy(update={"pipeline": name})
    raise UsageError(
        f"the graph pipeline {own.name} cannot store weights as {weights}",
        "CPU pipelines such as graph/2 can; those of GPUs only compute in fp16.",
    )


def find_operators(module: Any, target: Any) -> list[str]:
    """List the operators without code after the compiler's legalisation, such as `nn.conv2d`."""
    # `relax.build` begins with these passes; sorting and scanning become code there, not in our pipelines.
    passes = [relax.backend.DispatchSampling(), relax.backend.DispatchSortScan(), relax.transform.LegalizeOps()]
    with target:
        lowered = tvm.transform.Sequential(passes)(module)
    found: dict[str, None] = {}
    for call in _list_calls(lowered):
        if isinstance(call.op, relax.ExternFunc):
            name = str(call.op.global_symbol)
        elif call.op.name not in _CALLS:
            name = f"{_PYTHON_ONLY}{_short(call)}"
        elif call.args and isinstance(call.args[0], relax.ExternFunc):
            name = str(call.args[0].global_symbol)
        else:
            continue
        if name.startswith(_PYTHON_ONLY):
            found.setdefault(name.removeprefix(_PYTHON_ONLY))
    if any(_returns_shape(function) for _, function in bindings.list_functions(lowered)):
        found.setdefault("shape (as an output of the model)")
    return list(found)


def find_culprits(module: Any, target: Any) -> list[str]:
    """List the operators of an imported module that TVM cannot legalise, one by one, after the whole failed."""
    found: dict[str, None] = {}
    for call in _list_calls(module):
        if isinstance(call.op, relax.ExternFunc) or call.op.name in _CALLS:
            continue
        try:
            with target:
                relax.transform.LegalizeOps()(_alone(call))
        except (tvm.error.InternalError, AssertionError, ValueError, RuntimeError, TypeError):
            found.setdefault(_short(call))
    return list(found)


def _alone(call: Any) -> Any:
    """Make a module with only this call."""
    parameters: list[Any] = []

    def fresh(argument: Any) -> Any:
        if isinstance(argument, relax.Var):
            parameters.append(relax.Var(f"x{len(parameters)}", argument.ty))
            return parameters[-1]
        if isinstance(argument, relax.Tuple):
            return relax.Tuple([fresh(field) for field in argument.fields])
        return argument

    builder = relax.BlockBuilder()
    copied = relax.Call(call.op, [fresh(argument) for argument in call.args], call.attrs, call.ty_args)
    with builder.function("main", parameters):
        builder.emit_func_output(builder.emit(copied))
    return builder.get()


def _list_calls(module: Any) -> list[Any]:
    """List calls of TVM's operators and of external functions in order."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, relax.Call) and isinstance(node.op, tvm.ir.Op | relax.ExternFunc):
            found.append(node)

    for _, function in bindings.list_functions(module):
        relax.analysis.post_order_visit(function, visit)
    return found


def _returns_shape(function: Any) -> bool:
    result = function.ret_ty
    parts = result.fields if isinstance(result, relax.TupleType) else [result]
    return any(isinstance(part, relax.ShapeType) for part in parts)


def _short(call: Any) -> str:
    return str(call.op.name).removeprefix("relax.")


def prepare(module: Any, target: Any, pipeline: GraphPipeline) -> tuple[Any, GraphPipeline]:
    """Bring an imported module to the form whose functions are tuned; return it with the pipeline used.

    Falls back to the NCHW pipeline where TVM cannot convert the model's layout, or an operator would have no code.
    Raises ModelRefusedError that names the operators where that fails too.
    """
    if pipeline.weights == FP16:
        half_precision.require(target.export())
    tried = [pipeline] if pipeline.layout is None else [pipeline, PIPELINES["graph/2-nchw"]]
    operators: list[str] = []
    reason = ""
    for each in tried:
        why = reason or f"no code for {', '.join(operators)}"
        try:
            prepared = _run(module, target, each)
        except (tvm.error.InternalError, AssertionError, ValueError, RuntimeError, TypeError) as error:
            operators, reason = find_culprits(module, target), find_reason(error)
            continue
        operators, reason = find_operators(prepared, target), ""
        if not operators:
            if each is not pipeline:
                _log.warning("%s does not suit this model; using %s: %s", pipeline.name, each.name, why)
            return prepared, each
    named = f" the operator {', '.join(operators)}" if operators else " this model"
    raise ModelRefusedError(f"TVM cannot compile{named}" + (f": {reason}" if reason else ""), importer.HINT)


def _run(module: Any, target: Any, pipeline: GraphPipeline) -> Any:
    # Before constants are folded, which would turn 8-bit weights into float32.
    passes = [quantised.lower(dots.data_type(target))] if pipeline.canonical else []
    passes += [
        bindings.fold_empty(),
        decomposition.widen_sums(),
        transform.FoldBatchnormToConv2D(),
        transform.DecomposeOpsForInference(),
        transform.CanonicalizeBindings(),
        bindings.fold_shapes(),
        transform.FoldConstant(),
    ]
    if pipeline.canonical:
        passes += [decomposition.respell(), decomposition.convolve()]
    if pipeline.layout:
        # TVM has code for a transposed convolution in ONNX's layout only.
        layouts = {"relax.nn.conv2d": list(pipeline.layout), "relax.nn.conv2d_transpose": ["NCHW", "IOHW"]}
        if pipeline.canonical:
            layouts |= {"relax.nn.conv1d": ["NWC", "WIO"], "relax.nn.conv3d": ["NDHWC", "DHWIO"]}
        # TVM fails on some models without a convolution, which need no other layout.
        if any(str(getattr(call.op, "name", "")) in layouts for call in _list_calls(module)):
            passes += [transform.ConvertLayout(layouts), bindings.fold_shapes()]
    if pipeline.canonical:
        passes.append(transposes.sink())
        if pipeline.weights == FP16:
            passes.append(half_precision.compute())
        passes += [channel_padding.widen(target), attention.pad(target)]
    if pipeline.winograd != "never":
        unit = gpus.unit_of(target.export())
        choose = half_precision.choose_winograd(unit, exact=pipeline.winograd == "exact")
        passes.append(winograd.use_winograd(choose, half_precision.make_for(unit)))
    if pipeline.canonical:
        passes += [dots.use_instruction(target, half_precision.choose_panel(target)), in_place_concat.mark()]
    if pipeline.polynomials:
        passes.append(decomposition.legalise())
    passes.append(relax.get_pipeline("zero"))
    if pipeline.canonical:
        passes += [in_place_concat.split(), in_place_concat.gather()]
    if pipeline.prepack:
        passes.append(transform.AttachAttrLayoutFreeBuffers())
    if pipeline.canonical:
        passes += [bindings.mapping_pass(canonical.canonicalise, "Canonicalise"), channel_padding.pad_all(target)]
    if pipeline.weights in (BF16, BF16_ALL):
        passes.append(half_precision.halve(target, pipeline.weights))
    with target:
        return tvm.transform.Sequential(passes)(module)


def finish(module: Any, target: Any, database: Any | None, pipeline: GraphPipeline) -> Any:
    """Apply the database's schedules to a prepared module and pack its weights, ready for `relax.build`."""
    with target, contextlib.nullcontext() if database is None else database:
        passes = []
        if database is not None:
            passes.append(transform.MetaScheduleApplyDatabase(enable_warning=False))
        if pipeline.prepack:
            passes += [_split_preprocessing(), transform.LiftTransformParams(), transform.FoldConstant()]
        if pipeline.canonical:
            passes.append(in_place_concat.share())
        return tvm.transform.Sequential([*passes, bindings.allocate_empty()])(module)


def _split_preprocessing() -> Any:
    """Apply `SplitLayoutRewritePreproc` to scheduled functions only; it fails on functions without blocks."""

    def split(module: Any, _: Any) -> Any:
        apart = {
            variable: function
            for variable, function in module.functions_items()
            if isinstance(function, tirx.PrimFunc)
            and ("tirx.is_scheduled" not in (function.attrs or {}) or recurrent.is_loop(function))
        }
        done = transform.SplitLayoutRewritePreproc()(
            tvm.IRModule({v: f for v, f in module.functions_items() if v not in apart}, attrs=module.attrs)
        )
        done.update(tvm.IRModule(apart))
        return done

    return tvm.transform.module_pass(split, opt_level=0, name="SplitScheduledPreprocessing")
