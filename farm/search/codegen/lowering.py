"""Lower scheduled functions to code: TVM's own passes, then ours for CPUs.

On every CPU, accumulators stay in registers and rows are vectorised whole (`rows`). On x86, shared weights are
prefetched (`prefetch`) and reduction loops unrolled (`accumulators`). On Arm, which issues fewer instructions a cycle,
passes remove instructions (`borders`, `accumulators`). GPU kernels are lowered by TVM alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import dlight
from tvm.s_tir.pipeline import default_s_tir_pipeline
from tvm.tirx import compilation_pipeline
from tvm_ffi import register_global_func, remove_global_func

from farm.errors import FarmError
from farm.gpu.code import Made, make_code
from farm.search import gpus
from farm.search.codegen import accumulators, borders, prefetch, rows
from farm.search.cores import find_core
from farm.search.families.expressions import rewrite, walk
from farm.search.families.facts import is_small

# TVM's code generator calls this hook with the source of all kernels and stores the result (codegen_cuda.cc).
_HOOK = "tvm_callback_cuda_postproc"


@contextlib.contextmanager
def making(target: Mapping[str, Any]) -> Iterator[list[Made]]:
    """Compile the CUDA source of everything built in the block; yield the list of what was made.

    Does nothing for CPU targets. Raises CodeRefusedError for code that exceeds the GPU's resources.
    """
    made: list[Made] = []
    if not gpus.is_gpu(target):
        yield made
        return

    plan, simulated = gpus.gpu_of(target).plan, gpus.is_virtual(target)
    failed: list[FarmError] = []

    def make(source: str, _: Any) -> bytes:
        try:
            made.append(make_code(source, plan, simulated))
        except FarmError as error:
            failed.append(error)
            raise
        return made[-1].code

    register_global_func(_HOOK, make, override=True)
    try:
        yield made
    except (FarmError, RuntimeError, ValueError, TypeError) as error:
        # TVM passes exceptions on as text; the original says more.
        raise (failed[0] if failed else error) from None
    finally:
        remove_global_func(_HOOK)


def bind_rest(module: Any, target: Any) -> Any:
    """Schedule the unscheduled functions of a model with TVM's defaults for GPUs (DLight)."""
    gpu = dlight.gpu
    rules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())
    with target:
        return dlight.ApplyDefaultSchedule(*rules)(module)


_TYPE = "float32"


def use_minmax_intrinsics(function: Any) -> Any:
    """Use LLVM's vector maximum and minimum in a lowered function.

    A constant operand cannot be NaN, so LLVM needs no intrinsic for it.
    """

    def change(node: Any) -> Any:
        dtype = str(node.ty.dtype)
        if not dtype.startswith(f"{_TYPE}x") or any(_is_constant(each) for each in (node.a, node.b)):
            return node
        name = "llvm.maximum" if isinstance(node, tirx.Max) else "llvm.minimum"
        return tirx.call_llvm_pure_intrin(dtype, name, node.a, node.b)

    return rewrite(function, (tirx.Max, change), (tirx.Min, change))


def keep_nan(function: Any) -> Any:
    """Put constants before what they bound, in a lowered function.

    Code for a maximum or minimum compares, and where either operand is NaN it takes the second.
    """

    def change(node: Any) -> Any:
        return type(node)(node.b, node.a) if _is_constant(node.b) else node

    return rewrite(function, (tirx.Max, change), (tirx.Min, change))


def _is_constant(value: Any) -> bool:
    return isinstance(value.value if isinstance(value, tirx.Broadcast) else value, tirx.FloatImm)


# The name that `tvm.tirx.build` and `relax.build` look up.
PIPELINE = "farm"
# Larger buffers stay in memory. A tile of all vector registers takes half of this; TVM places what another step needs
# beside it. TVM's own limit is 1 KiB (kMaxStackAlloca, src/runtime): on Zen 4 that costs 270 cycles for a tile of
# 1 KiB and 520 for one of 1.75 KiB (1x1 56x56x24>144 and 112x112x16>96).
STACK_BYTES = 4096
# Architectures whose narrow cores gain from fewer instructions.
_FEW_AT_A_TIME = ("aarch64",)
# TVM leaves an allocation with this annotation alone (`LowerTVMBuiltin`), and LLVM puts it on the stack.
_ON_STACK = "disable_lower_builtin"


def use_pipeline() -> str:
    """Register the pipeline with TVM in this process and return its name."""
    compilation_pipeline.register_tir_pipeline(PIPELINE, _make)
    return PIPELINE


def _make() -> tuple[Any, Any, Any]:
    passes, of_host, of_device = default_s_tir_pipeline()

    def run(module: Any, _: Any) -> Any:
        module = passes(module)
        targets = {variable: (function.attrs or {}).get("target") for variable, function in module.functions_items()}
        # The buffers of functions that launch kernels are a GPU's.
        if any(target is not None and target.kind.name == "cuda" for target in targets.values()):
            return module
        for variable, function in module.functions_items():
            target = targets[variable]
            if not isinstance(function, tirx.PrimFunc) or target is None or target.kind.name != "llvm":
                continue
            if _has_known_sizes(function):
                core = find_core(dict(target.export()))
                if core is not None:
                    function = rows.use_vectors(function, core.lanes(4))
                if str(target.export().get("mtriple", "")).startswith(_FEW_AT_A_TIME):
                    function = accumulators.init_with_bias(use_minmax_intrinsics(function))
                    function = borders.peel_borders(function)
                else:
                    function = accumulators.unroll_reductions(function, STACK_BYTES)
                function = prefetch.prefetch_weights(function, target, STACK_BYTES)
            module.update_func(variable, keep_nan(keep_on_stack(function)))
        return module

    return tvm.transform.module_pass(run, opt_level=0, name="FarmPipeline"), of_host, of_device


def _has_known_sizes(function: Any) -> bool:
    """Say whether all loop extents and buffer shapes are constants; scalable-vector kernels have others."""
    for each in walk(function.body):
        buffers = isinstance(each, tirx.AllocBuffer | tirx.DeclBuffer)
        sizes = each.buffer.shape if buffers else [each.extent] if isinstance(each, tirx.For) else ()
        if not all(isinstance(size, tirx.IntImm) for size in sizes):
            return False
    return True


def keep_on_stack(function: Any) -> Any:
    """Put all buffers of up to `STACK_BYTES` on the stack, where LLVM promotes them to registers."""

    def keep(node: Any) -> Any:
        if not is_small(node.buffer, STACK_BYTES):
            return node
        return tirx.AllocBuffer(node.buffer, {**(node.annotations or {}), _ON_STACK: tirx.IntImm("bool", 1)})

    return rewrite(function, (tirx.AllocBuffer, keep))
