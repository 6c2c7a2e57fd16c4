"""Compile a whole model for a board's GPU: TVM's thread-binding defaults (DLight), CUDA source, code that the GPU runs.

Nothing is tuned here yet: records are of processors' code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import onnx

from farm.artifacts.compile import UNTUNED_PIPELINE, Compiled, Served, build_library
from farm.errors import FarmError, InternalError
from farm.gpu.code import THREADS_PER_BLOCK, WARP, GpuPlan, Made, make_code
from farm.search import tvm_env
from farm.search.prepared import prepare_model

# TVM's code generator calls it with the source of all kernels and stores what it returns (codegen_cuda.cc).
_HOOK = "tvm_callback_cuda_postproc"


def to_gpu_config(plan: GpuPlan, host: Mapping[str, Any]) -> dict[str, Any]:
    """TVM's target for a GPU whose board's processor is `host`."""
    return {
        "kind": "cuda",
        "arch": plan.arch,
        "max_num_threads": THREADS_PER_BLOCK,
        "max_threads_per_block": THREADS_PER_BLOCK,
        "thread_warp_size": WARP,
        "max_shared_memory_per_block": plan.limits.shared_bytes,
        "registers_per_block": plan.limits.registers,
        "host": dict(host),
    }


def compile_for_gpu(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    plan: GpuPlan,
    host: Mapping[str, Any],
    link_triple: str | None,
    simulated: bool,
) -> tuple[Compiled, Made]:
    """The linked program, and what its kernels take. `host` is the target of the board's processor.

    Raises UsageError, PermanentError.
    """
    tvm_env.load_compiler()
    from tvm.s_tir import dlight

    config = to_gpu_config(plan, host)
    prepared = prepare_model(model, shapes, config, UNTUNED_PIPELINE)
    rules = (
        dlight.gpu.Matmul(),
        dlight.gpu.GEMV(),
        dlight.gpu.Reduction(),
        dlight.gpu.GeneralReduction(),
        dlight.gpu.Fallback(),
    )
    with prepared.target:
        module = dlight.ApplyDefaultSchedule(*rules)(prepared.module)
    served = tuple(Served(workload) for workload in prepared.workloads)
    with _making(plan, simulated) as made:
        compiled = build_library(module, prepared.target, link_triple, prepared.pipeline.name, served)
    if not made:
        raise InternalError("TVM wrote no code for the GPU")
    return compiled, made[0]


@contextlib.contextmanager
def _making(plan: GpuPlan, simulated: bool) -> Iterator[list[Made]]:
    """Have the CUDA source of what is built in the block made into code; what was made is in the list."""
    from tvm_ffi import register_global_func, remove_global_func

    made: list[Made] = []
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
    except FarmError as error:
        # TVM passes an exception on as text: the error itself says more.
        raise (failed[0] if failed else error) from None
    finally:
        remove_global_func(_HOOK)
