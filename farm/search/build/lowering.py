"""How scheduled functions become code: TVM's own passes, and some of ours for processors.

Sums of a tile stay in registers up to what a core has of them, rows go by whole vectors (`rows`), and weights that the
next tiles read are fetched while the present ones compute (`fetching`). On Arm, where instructions are few at a time,
there are fewer of them (`borders`, `sums`, `extremes`); on x86 loops take several steps at once (`unrolling`). Functions
of a GPU's own are left as TVM lowers them.
"""

from __future__ import annotations

from typing import Any

from farm.search.build import borders, fetching, rows, sums
from farm.search.cores import find_core
from farm.search.families.facts import size_of
from tvm import tirx
from tvm.s_tir.pipeline import default_s_tir_pipeline
from tvm.tirx import compilation_pipeline
import tvm
import tvm_ffi
import contextlib
from collections.abc import Iterator
from collections.abc import Mapping
from farm.errors import FarmError
from farm.gpu.code import Made
from farm.gpu.code import make_code
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




_TYPE = "float32"


def use_instructions(function: Any) -> Any:
    """A lowered function with LLVM's own maximum and minimum of vectors.

    A limit that is a constant is left: a compiler sees that it is a number.
    """

    def change(node: Any) -> Any:
        dtype = str(node.ty.dtype)
        if not dtype.startswith(f"{_TYPE}x") or any(_is_constant(each) for each in (node.a, node.b)):
            return node
        name = "llvm.maximum" if isinstance(node, tirx.Max) else "llvm.minimum"
        return tirx.call_llvm_pure_intrin(dtype, name, node.a, node.b)

    body = tvm_ffi.structural_map(function.body, [(tirx.Max, change), (tirx.Min, change)])
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


def _is_constant(value: Any) -> bool:
    return isinstance(value.value if isinstance(value, tirx.Broadcast) else value, tirx.FloatImm)



# What `tvm.tirx.build` and `relax.build` are asked for by name.
PIPELINE = "farm"
# Buffers of up to so many bytes are on the stack: a tile of all vector registers takes half of it, and TVM puts what
# another step needs meanwhile beside it. By itself it takes those of 1 KiB and more from a pool (kMaxStackAlloca,
# src/runtime), where they are memory: 270 cycles a tile for 1 KiB and 520 for 1.75 KiB on Zen 4 (1x1 56x56x24>144 and
# 112x112x16>96, tiles of 16 and 28 vectors beside tiles of 14).
STACK_BYTES = 4096
# Where few instructions are issued at a time. x86 compares and selects in one instruction, adds a bias from memory and
# foresees branches: its code was not measured so.
_FEW_AT_A_TIME = ("aarch64",)
# TVM leaves an allocation with this annotation alone (`LowerTVMBuiltin`), and LLVM puts it on the stack.
_ON_STACK = "disable_lower_builtin"


def use_pipeline() -> str:
    """Make our pipeline known to TVM in this process and return its name. The compiler must be loaded."""

    compilation_pipeline.register_tir_pipeline(PIPELINE, _make)
    return PIPELINE


def _make() -> tuple[Any, Any, Any]:
    passes, of_host, of_device = default_s_tir_pipeline()

    def run(module: Any, _: Any) -> Any:
        module = passes(module)
        for variable, function in module.functions_items():
            target = (function.attrs or {}).get("target")
            if not isinstance(function, tirx.PrimFunc) or target is None or target.kind.name != "llvm":
                continue
            if _has_known_sizes(function):
                core = find_core(dict(target.export()))
                if core is not None:
                    function = rows.use_vectors(function, core.lanes(4))
                if str(target.export().get("mtriple", "")).startswith(_FEW_AT_A_TIME):
                    for change in (use_instructions, sums.begin_with_bias, borders.set_apart):
                        function = change(function)
                else:
                    function = sums.unroll_sums(function, STACK_BYTES)
                function = fetching.fetch_ahead(function, target, STACK_BYTES)
            module.update_func(variable, keep_on_stack(function))
        return module

    return tvm.transform.module_pass(run, opt_level=0, name="FarmPipeline"), of_host, of_device


def _has_known_sizes(function: Any) -> bool:
    """Whether all loops and all data have a number of steps and elements; kernels that ask a core have others."""

    sizes: list[Any] = []

    def note_loop(loop: Any) -> Any:
        sizes.append(loop.extent)
        return loop

    def note_buffer(node: Any) -> Any:
        sizes.extend(node.buffer.shape)
        return node

    visits = [(tirx.For, note_loop), (tirx.AllocBuffer, note_buffer), (tirx.DeclBuffer, note_buffer)]
    tvm_ffi.structural_map(function.body, visits)
    return all(isinstance(size, tirx.IntImm) for size in sizes)


def keep_on_stack(function: Any) -> Any:
    """The same lowered function with all buffers of up to `STACK_BYTES` on the stack, where LLVM makes registers of
    them if it can.
    """

    def keep(node: Any) -> Any:
        known = all(isinstance(extent, tirx.IntImm) for extent in node.buffer.shape)
        if not known or size_of(node.buffer) > STACK_BYTES:
            return node
        return tirx.AllocBuffer(node.buffer, {**(node.annotations or {}), _ON_STACK: tirx.IntImm("bool", 1)})

    body = tvm_ffi.structural_map(function.body, [(tirx.AllocBuffer, keep)])
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)
