"""Turn TVM's CUDA source into PTX checked for the exact GPU, or into CPU code for virtual boards.

`farm/search/build/lowering.py` makes the source.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

from farm import linker
from farm.errors import CodeRefusedError, UsageError
from farm.gpu import native, ptx
from farm.inventory.board_types import BoardType

# Marks a library for the virtual driver. Its size and content follow, then those of the source, from which the board
# estimates the time.
_MARK = b"FARMGPU1"
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")
_SHARED = re.compile(r"__shared__\s+(alignas\(\d+\))")
_DYNAMIC_SHARED = re.compile(r"extern\s+(alignas\(\d+\)\s+)?__shared__\s+([\w ]+?)\s+(\w+)\[\];")
# Synchronisation among the threads of a block.
_MEETING = re.compile(r"\b(__syncthreads|__syncwarp|__shfl\w*)\s*\(")
# No virtual GPU allows a block more.
_MOST_SHARED_BYTES = 96 << 10
# Half precision needs a library that virtual GPUs lack.
_HALF = re.compile(r"\bhalf[1-8]?\b")


def compile_kernels(source: str, triple: str | None, usages: Sequence[ptx.Usage] = ()) -> bytes:
    """Compile kernels to a module of a virtual board's driver, for the CPU that zig calls `triple` (None: this one).

    `usages` are the kernels' resources on the GPU. Raises PermanentError for source that cannot be compiled.
    """
    if _HALF.search(source.partition('extern "C"')[2]):
        raise CodeRefusedError("this model uses half precision, which virtual GPUs do not support")
    facts = "".join(f"// farm: {u.kernel} registers={u.registers} shared_bytes={u.shared_bytes}\n" for u in usages)
    # The plug-in refuses text that looks like CUDA source.
    estimated = (facts + source.partition('extern "C"')[2].replace("__global__", "__kernel__")).encode()
    # C++ requires the alignment first, and a size.
    source = _DYNAMIC_SHARED.sub(
        lambda found: f"alignas(16) __shared__ {found[2]} {found[3]}[{_MOST_SHARED_BYTES} / sizeof({found[2]})];",
        _SHARED.sub(r"\1 __shared__", source),
    )
    with tempfile.TemporaryDirectory(prefix="farm-gpu-") as folder:
        path, output = Path(folder) / "kernels.cc", Path(folder) / "kernels.so"
        path.write_text(f'#include "cuda_on_host.h"\n{source}\n{_write_entries(source)}', encoding="utf-8")
        options = ["-fno-strict-aliasing", "-w", "-I", str(native.find_virtual_gpu())]
        linker.link_cpp(output, [path], triple, options)
        library = output.read_bytes()
    return b"".join(
        [_MARK, struct.pack("<Q", len(library)), library, struct.pack("<Q", len(estimated)), estimated, b"\0"]
    )


def _write_entries(source: str) -> str:
    """Write a function per kernel with the arguments of cuLaunchKernel."""
    places = [(found.start(), found[1]) for found in _KERNEL.finditer(source)]
    entries: dict[str, bool] = {}
    for (start, name), (end, _) in zip(places, [*places[1:], (len(source), "")], strict=True):
        meets = bool(_MEETING.search(source, start, end))
        entries[name] = entries.get(name, False) or meets
    return "".join(
        f'extern "C" __attribute__((visibility("default"))) void farm_gpu_{name}(void** arguments, '
        "const unsigned* sizes, unsigned) {\n"
        f"  farm_host::run({name}, arguments, sizes, {'true' if meets else 'false'});\n}}\n"
        f'extern "C" __attribute__((visibility("default"))) const unsigned farm_pointers_{name} = '
        f"farm_host::pointers({name});\n"
        for name, meets in entries.items()
    )


@dataclasses.dataclass(frozen=True)
class GpuPlan:
    """The GPU to compile for: architecture such as sm_53, its driver's newest PTX version, limits of a block."""

    arch: str
    newest_ptx: str
    limits: ptx.PtxLimits
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Made:
    """Compiled code and the resources of its kernels."""

    code: bytes = dataclasses.field(repr=False)
    usages: tuple[ptx.Usage, ...]


# The limit of every GPU from Maxwell to Ampere (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability").
THREADS_PER_BLOCK = 1024


def plan_gpu(board_type: BoardType) -> GpuPlan:
    """Return the GPU of a board type with the oldest driver of its boards. Raises UsageError where it has none."""
    gpu = board_type.gpu
    if gpu is None or not gpu.cuda or gpu.registers_per_block is None or gpu.shared_bytes_per_block is None:
        raise UsageError(
            f"{board_type.name} has no GPU that the farm compiles for",
            "Remove --device or name a board type with a GPU: see `farm board types`.",
        )
    newest = min(
        (ptx.find_newest(cuda) for cuda in gpu.cuda.values()), key=lambda each: tuple(map(int, each.split(".")))
    )
    limits = ptx.PtxLimits(gpu.registers_per_block, gpu.shared_bytes_per_block, THREADS_PER_BLOCK)
    return GpuPlan(gpu.arch, newest, limits, board_type.memory_bytes)


def make_code(source: str, plan: GpuPlan, simulated: bool) -> Made:
    """Compile and check CUDA source for a GPU; simulated boards get code for this machine after the same check.

    Raises PermanentError where a compiler refuses it or a kernel exceeds the GPU's resources.
    """
    text = ptx.rewrite_version(ptx.compile_ptx(source, plan.arch), plan.newest_ptx)
    usages = tuple(ptx.check(text, plan.arch, plan.limits))
    return Made(compile_kernels(source, None, usages) if simulated else text.encode(), usages)
