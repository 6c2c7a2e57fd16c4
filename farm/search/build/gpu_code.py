"""Code for a board's GPU made while TVM builds: what it writes as CUDA source becomes what the board, or a virtual one,
runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from farm.errors import FarmError
from farm.gpu.code import Made, make_code
from farm.search import gpus
from tvm.s_tir import dlight
from tvm_ffi import register_global_func
from tvm_ffi import remove_global_func

# TVM's code generator calls it with the source of all kernels and stores what it returns (codegen_cuda.cc).
_HOOK = "tvm_callback_cuda_postproc"


@contextlib.contextmanager
def making(target: Mapping[str, Any]) -> Iterator[list[Made]]:
    """Have the CUDA source of what is built in the block made into code; what was made is in the list.

    Nothing is done for a target that is no GPU's. Raises CodeRefusedError for code that takes more than the GPU has.
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
        # TVM passes an exception on as text: the error itself says more.
        raise (failed[0] if failed else error) from None
    finally:
        remove_global_func(_HOOK)


def bind_rest(module: Any, target: Any) -> Any:
    """Give the functions of a model that are not scheduled yet TVM's defaults for GPUs (DLight)."""

    rules = (
        dlight.gpu.Matmul(),
        dlight.gpu.GEMV(),
        dlight.gpu.Reduction(),
        dlight.gpu.GeneralReduction(),
        dlight.gpu.Fallback(),
    )
    with target:
        return dlight.ApplyDefaultSchedule(*rules)(module)
