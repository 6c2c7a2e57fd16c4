"""What becomes of the CUDA source that TVM writes: checked for the exact GPU, then PTX, or code for a processor.

Nothing here compiles a model; that takes TVM (`farm/search/build/gpu_code.py`).
"""

from __future__ import annotations

import dataclasses

from farm.errors import UsageError
from farm.gpu import host_code, nvrtc, ptx
from farm.inventory.board_types import BoardType


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
    text = ptx.rewrite_version(nvrtc.compile_ptx(source, plan.arch), plan.newest_ptx)
    usages = tuple(ptx.check(text, plan.arch, plan.limits))
    return Made(host_code.compile_kernels(source, None, usages) if simulated else text.encode(), usages)
