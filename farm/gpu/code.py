"""What becomes of the CUDA source that TVM writes: checked for the exact GPU, then PTX, or code for a processor.

Nothing here compiles a model; that takes TVM (`farm/search/build/lowering.py`).
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

# What the stand-in for the driver knows a library by; its size and itself follow, then so the source, by which the
# board's model says how long it takes.
_MARK = b"FARMGPU1"
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")
_SHARED = re.compile(r"__shared__\s+(alignas\(\d+\))")
_DYNAMIC_SHARED = re.compile(r"extern\s+(alignas\(\d+\)\s+)?__shared__\s+([\w ]+?)\s+(\w+)\[\];")
# Where threads of a block wait for each other.
_MEETING = re.compile(r"\b(__syncthreads|__syncwarp|__shfl\w*)\s*\(")
# No GPU that is played here lets a block have more.
_MOST_SHARED_BYTES = 96 << 10
# Half precision would need a library of its own here.
_HALF = re.compile(r"\bhalf[1-8]?\b")


def compile_kernels(source: str, triple: str | None, usages: Sequence[ptx.Usage] = ()) -> bytes:
    """What a virtual board's driver loads as a module, for the processor that zig calls `triple` (None: this one).

    `usages` are what its kernels take on the GPU. Raises PermanentError for source that cannot be compiled so.
    """
    if _HALF.search(source.partition('extern "C"')[2]):
        raise CodeRefusedError("this model computes in half precision, which virtual GPUs do not do")
    facts = "".join(f"// farm: {u.kernel} registers={u.registers} shared_bytes={u.shared_bytes}\n" for u in usages)
    # The plug-in refuses what looks like CUDA source.
    told = (facts + source.partition('extern "C"')[2].replace("__global__", "__kernel__")).encode()
    # C++ wants the alignment first, and a size.
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
    return b"".join([_MARK, struct.pack("<Q", len(library)), library, struct.pack("<Q", len(told)), told, b"\0"])


def _write_entries(source: str) -> str:
    """A function per kernel that takes what cuLaunchKernel is given."""
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
    """The GPU that code is for: architecture such as sm_53, newest PTX of its driver, limits of a block."""

    arch: str
    newest_ptx: str
    limits: ptx.PtxLimits
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Made:
    """Code as it travels, and what every kernel takes on the GPU."""

    code: bytes = dataclasses.field(repr=False)
    usages: tuple[ptx.Usage, ...]


# Of every GPU from Maxwell to Ampere (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
THREADS_PER_BLOCK = 1024


def plan_gpu(board_type: BoardType) -> GpuPlan:
    """The GPU of a board type, for the oldest driver that its boards may have. Raises UsageError where it has none."""
    gpu = board_type.gpu
    if gpu is None or not gpu.cuda or gpu.registers_per_block is None or gpu.shared_bytes_per_block is None:
        raise UsageError(
            f"{board_type.name} has no GPU that code is made for",
            "Leave --device out, or name a board type with a GPU: `farm board types` shows them.",
        )
    newest = min(
        (ptx.find_newest(cuda) for cuda in gpu.cuda.values()), key=lambda each: tuple(map(int, each.split(".")))
    )
    limits = ptx.PtxLimits(gpu.registers_per_block, gpu.shared_bytes_per_block, THREADS_PER_BLOCK)
    return GpuPlan(gpu.arch, newest, limits, board_type.memory_bytes)


def make_code(source: str, plan: GpuPlan, simulated: bool) -> Made:
    """Compile and check CUDA source for a GPU; for simulated boards, checked alike, as code for this machine.

    Raises PermanentError where a compiler refuses it or a kernel takes more than the GPU has.
    """
    text = ptx.rewrite_version(ptx.compile_ptx(source, plan.arch), plan.newest_ptx)
    usages = tuple(ptx.check(text, plan.arch, plan.limits))
    return Made(compile_kernels(source, None, usages) if simulated else text.encode(), usages)
