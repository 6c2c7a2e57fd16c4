"""Lower scheduled functions to code: TVM's own passes, then ours for CPUs; link a candidate, or print its code.

On every CPU, accumulators stay in registers and rows are vectorised whole (`use_vectors`). On x86, shared weights are
prefetched (`prefetch`) and reduction loops unrolled (`accumulators`). On Arm, which issues fewer instructions a cycle,
passes remove instructions (`borders`, `accumulators`). GPU kernels are lowered by TVM alone.

A killed compiler leaves its folder; the next one to start removes it (`remove_left`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import dlight
from tvm.s_tir.pipeline import default_s_tir_pipeline
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock
from tvm.tirx import compilation_pipeline
from tvm_ffi import register_global_func, remove_global_func

from device_agent.protocol import Status
from farm import linker
from farm.errors import CodeRefusedError, FarmError, UsageError
from farm.gpu.code import Made, make_code
from farm.search import gpus, traces
from farm.search.codegen import accumulators, borders, prefetch
from farm.search.cores import find_core
from farm.search.families.expressions import rewrite, walk
from farm.search.families.facts import is_small
from farm.search.tvm_env import make_code_target, make_target
from farm.search.tvm_errors import find_reason

# TVM's code generator calls this hook with the source of all kernels and stores the result (codegen_cuda.cc).
_HOOK = "tvm_callback_cuda_postproc"
_TYPE = "float32"
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
# What can be printed, and TVM's name of it for CPUs; None: the farm's own.
FORMS: Mapping[str, str | None] = {"tir": None, "llvm": "ll", "asm": "s", "cuda": None, "ptx": None}
_MULTIPLIES = re.compile(r"\tv?(fn?m[alsu]|mul|mla|[us]ml|[us]dot|pdp|pmadd)")
_PREFIX = "farm-build-"
_LOOK_S = 0.05


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
                    function = accumulators.use_vectors(function, core.lanes(4))
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


_OF_CPUS, _OF_GPUS = ("llvm", "asm"), ("cuda", "ptx")


def require_form(form: str, target: Mapping[str, Any]) -> None:
    """Raise UsageError for code that a target's device does not have."""
    own, others = (_OF_GPUS, _OF_CPUS) if gpus.is_gpu(target) else (_OF_CPUS, _OF_GPUS)
    if form in others:
        named = ", ".join(f"--{each}" for each in ("tir", *own))
        raise UsageError(
            f"this record is {gpus.device_of(target).upper()} code: it has no --{form}", f"It has {named}."
        )


def print_code(module_json: str, trace_json: str, target: Mapping[str, Any], form: str) -> str:
    """Rebuild a recorded candidate as a compiled model has it, weights packed, and return its code.

    An empty trace is TVM's default. A virtual board's GPU code is that of the real GPU. Loads TVM's compiler. Raises
    UsageError, InternalError where the trace does not fit, and CodeRefusedError.
    """
    require_form(form, target)
    config = {**target, "libs": [each for each in target.get("libs", ()) if each != gpus.VIRTUAL]}
    made_for = make_target(target)
    if trace_json:
        module = tvm.ir.load_json(traces.replay(module_json, trace_json, made_for))
    else:
        module = tvm.ir.load_json(module_json)
        module = bind_rest(module, made_for) if gpus.is_gpu(target) else module
    module = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
    if form == "tir":
        return str(module.script())
    with making(config) as made:
        built = tvm.tirx.build(module, make_code_target(config), use_pipeline())
    if form in _OF_CPUS:
        text = str(built.inspect_source(FORMS[form]))
        return "".join(f"# {line}\n" for line in find_hot_loop(text)) + text if form == "asm" else text
    return "\n".join(each.source if form == "cuda" else each.code.decode() for each in made)


def find_hot_loop(asm: str) -> list[str]:
    """Return a heading and the loop with the largest share of multiplications, a line each; [] where none has any."""
    lines = asm.splitlines()
    starts = {line.removesuffix(":"): number for number, line in enumerate(lines) if line.endswith(":")}
    loops = [
        lines[start : end + 1]
        for end, line in enumerate(lines)
        if line.startswith("\t") and (start := starts.get(line.split()[-1], end)) < end
    ]
    shares = [sum(_MULTIPLIES.match(line) is not None for line in loop) / len(loop) for loop in loops]
    if not any(shares):
        return []
    return ["the hot loop, by its share of multiplications; all code follows", *loops[shares.index(max(shares))], ""]


def build_candidate(module_json: str, target_config: Mapping[str, Any], *, standalone: bool = False) -> bytes:
    """Build the shared library of a scheduled function with the entry `main`.

    Weights that the schedule packs are expected packed, as in the compiled model. With `standalone` the function packs
    them itself and so accepts ordinary weights. Raises CodeRefusedError for code that the board's GPU cannot run, and
    TVM's own errors.
    """
    module = tvm.ir.load_json(module_json)
    if not standalone:
        module = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
    with making(target_config):
        built = tvm.tirx.build(module, make_code_target(target_config), use_pipeline())
    return link_candidate(built)


def link_candidate(built: Any) -> bytes:
    """Link a built module of TVM's as a shared library."""
    with _folder() as folder:
        path = folder / "candidate.so"
        # TVM's own folder for objects would be left behind if this process were killed.
        built.export_library(str(path), fcompile=_link, workspace_dir=str(folder))
        return path.read_bytes()


def try_to_build(
    module_json: str, target_config: Mapping[str, Any], *, standalone: bool = False
) -> tuple[Status, bytes | None, str]:
    """Call `build_candidate` and classify its errors; return the status, the library and the reason."""
    try:
        return Status.OK, build_candidate(module_json, target_config, standalone=standalone), ""
    except CodeRefusedError as error:  # the GPU assembler refused the code
        return Status.BUILD_FAILED, None, _one_line(error)
    except (OSError, FarmError) as error:  # a full disk or a broken linker is not the candidate's fault
        return Status.FARM_ERROR, None, _one_line(error)
    except Exception as error:  # noqa: BLE001 - edge of a process: a compiler error is the candidate's fault
        return Status.BUILD_FAILED, None, _one_line(error)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {find_reason(error)}"


def content_address(library: bytes) -> str:
    """Return the SHA-256 of the library as hexadecimal: its name in every cache."""
    return hashlib.sha256(library).hexdigest()


def remove_left(timeout_s: float = 0.0) -> None:
    """Remove the folders of compilers killed during a build.

    Wait up to `timeout_s` for folders in use: a compiler killed just now may still hold its lock.
    """
    deadline = time.monotonic() + timeout_s
    while left := list(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        for folder in left:
            with contextlib.suppress(OSError), _lock(folder):
                shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() >= deadline:
            return
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a locked folder for one build; the kernel releases the lock when this process ends."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as text, _lock(Path(text)):
        yield Path(text)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError where another process holds it or another user owns the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _link(output: str, objects: list[str] | str, options: list[str] | None = None, **_: Any) -> None:
    files = [objects] if isinstance(objects, str) else list(objects)
    linker.link_candidate(Path(output), [Path(f) for f in files])
