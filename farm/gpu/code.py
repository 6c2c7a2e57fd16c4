"""Turn TVM's CUDA source into PTX checked for the exact GPU, or into its machine code for virtual boards.

`farm/search/codegen/lowering.py` makes the source. The native libraries that boards need beside the code, TVM's plug-in
and a virtual board's CUDA driver, are built here with zig.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import struct
import tempfile
from pathlib import Path

from farm import folders, linker
from farm.errors import CodeRefusedError, UsageError
from farm.gpu import ptx
from farm.inventory.board_types import BoardType

PLUGIN = "libtvm_farm_cuda.so"
DRIVER = "libcuda_virtual.so"
_TOOLS = ("apache-tvm", "apache-tvm-ffi", "ziglang")


# Marks machine code for the virtual driver; its size and content follow. The plug-in takes it for text.
_MARK = b"FARMGPU2"
# The limit of every GPU from Maxwell to Ampere (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability").
THREADS_PER_BLOCK = 1024


def build_plugin(folder: Path, triple: str | None) -> Path:
    """Build TVM's device "cuda" over the CUDA driver, for a system that zig calls `triple` (None: this machine)."""
    sources = linker.find_package("device_agent") / "native"
    includes = [linker.find_package(name) / "include" for name in ("tvm", "tvm_ffi")]
    options = [word for path in includes for word in ("-I", str(path), f"-ffile-prefix-map={path}=include")]
    linker.link_cpp(folder / PLUGIN, sorted(sources.glob("*.cc")), triple, options)
    return folder / PLUGIN


def build_driver(folder: Path, triple: str | None) -> Path:
    """Build the substitute for the CUDA driver of virtual boards."""
    vectors = ["-march=x86_64_v3"] if triple is None and _has_vectors() else []
    linker.link_cpp(folder / DRIVER, sorted(find_virtual_gpu().glob("*.cc")), triple, ["-ffp-contract=off", *vectors])
    return folder / DRIVER


def _has_vectors() -> bool:
    """Say whether this machine has the instructions of x86-64-v3, which emulate a warp in few steps."""
    words = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    return {"avx2", "bmi2", "f16c", "fma"} <= set(words)


def read_files(triple: str | None, *, simulated: bool) -> dict[str, bytes]:
    """Return the files that accompany GPU code to a system that zig calls `triple`, with the driver if `simulated`.

    The first build for a system takes a minute; then the linker's cache has it.
    """
    builds = (build_plugin, build_driver) if simulated else (build_plugin,)
    with tempfile.TemporaryDirectory(prefix="farm-gpu-") as folder:
        return {path.name: path.read_bytes() for path in (build(Path(folder), triple) for build in builds)}


def list_tools() -> list[str]:
    """List the tools that the libraries are built with, with versions that identify the result."""
    return [f"{name} {importlib.metadata.version(name)}" for name in _TOOLS]


def find_folder(home: Path) -> Path:
    """Return the folder of this home's libraries, named by a hash of their sources and tools."""
    return home / "cache" / "gpu" / _digest()


def prepare(home: Path) -> None:
    """Build the missing libraries of this home. Safe in concurrent processes."""
    folder = find_folder(home)
    folders.make_private(folder)
    for name, build in ((PLUGIN, build_plugin), (DRIVER, build_driver)):
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
                build(Path(partial), None).replace(folder / name)


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256(repr((list_tools(), _has_vectors())).encode())
    for path in sorted([*(linker.find_package("device_agent") / "native").iterdir(), *find_virtual_gpu().iterdir()]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def find_virtual_gpu() -> Path:
    """Return the folder of the virtual GPU's sources."""
    return linker.find_package("farm") / "virtual" / "gpu"


def require_emulated(arch: str) -> None:
    """Raise CodeRefusedError for a GPU that virtual boards do not emulate."""
    if not 50 <= int(arch.removeprefix("sm_")) <= 62:
        raise CodeRefusedError(
            f"virtual boards do not emulate a GPU of {arch}, only of Maxwell and Pascal (sm_5x, sm_6x)",
            "Take a virtual jetson-nano or jetson-tx2, or a real board.",
        )


def pack_cubin(cubin: bytes) -> bytes:
    """Pack machine code as a module of a virtual board's driver."""
    return b"".join([_MARK, struct.pack("<Q", len(cubin)), cubin, b"\0"])


@dataclasses.dataclass(frozen=True)
class GpuPlan:
    """The GPU to compile for: architecture such as sm_53, its driver's newest PTX version, limits of a block."""

    arch: str
    newest_ptx: str
    limits: ptx.PtxLimits
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Made:
    """Compiled code, the resources of its kernels, and its CUDA C."""

    code: bytes = dataclasses.field(repr=False)
    usages: tuple[ptx.Usage, ...]
    source: str = dataclasses.field(repr=False)


def plan_gpu(board_type: BoardType) -> GpuPlan:
    """Return the GPU of a board type with the oldest driver of its boards. Raises UsageError where it has none."""
    gpu = board_type.gpu
    if gpu is None or not gpu.cuda or gpu.registers_per_block is None or gpu.shared_bytes_per_block is None:
        raise UsageError(
            f"{board_type.name} has no GPU that the farm compiles for",
            "Remove --device or name a board type with a GPU: see `farm board list --types`.",
        )
    newest = min(
        (ptx.find_newest(cuda) for cuda in gpu.cuda.values()), key=lambda each: tuple(map(int, each.split(".")))
    )
    limits = ptx.PtxLimits(gpu.registers_per_block, gpu.shared_bytes_per_block, THREADS_PER_BLOCK)
    return GpuPlan(gpu.arch, newest, limits, board_type.memory_bytes)


def make_code(source: str, plan: GpuPlan, simulated: bool) -> Made:
    """Compile and check CUDA source for a GPU; simulated boards get the GPU's machine code, which they emulate.

    Raises PermanentError where a compiler refuses it or a kernel exceeds the GPU's resources, and for a simulated board
    of a GPU that is not emulated.
    """
    if simulated:
        require_emulated(plan.arch)
    text = ptx.rewrite_version(ptx.compile_ptx(source, plan.arch), plan.newest_ptx)
    cubin, usages = ptx.assemble(text, plan.arch, plan.limits)
    return Made(pack_cubin(cubin) if simulated else text.encode(), tuple(usages), source)
