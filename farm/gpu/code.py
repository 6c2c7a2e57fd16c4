"""Turn TVM's CUDA source into PTX checked for the exact GPU, or into its machine code for virtual boards.

PTX is adapted to a board's driver, and `ptxas` checks its registers and memory: a kernel beyond a limit of the GPU is
the candidate's fault, found before it is sent.

`farm/search/codegen/lowering.py` makes the source. The native libraries that boards need beside the code, TVM's plug-in
and a virtual board's CUDA driver, are built here with zig.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import struct
import subprocess
import tempfile
from pathlib import Path

from device_agent.protocol import WARP
from farm import folders, linker
from farm.errors import CodeRefusedError, DeadlineError, PermanentError, UnavailableError, UsageError
from farm.inventory.board_types import BoardType

# The headers that TVM's CUDA source includes, by name, reduced to what it uses (`include/`): NVRTC's wheel has no
# `cuda_fp16.h`, and its libcu++ is slow to read.
HEADERS = {
    name: (Path(__file__).parent / "include" / f"{name.removesuffix('.h')}.h").read_text("utf-8")
    for name in ("cuda/std/cstdint", "cuda/std/type_traits", "cuda_fp16.h")
}

# 70 ms for a matrix product, some seconds for all kernels of a big model.
_TIMEOUT_S = 120.0
_VERSION = re.compile(r"^\.version\s+(\d+)\.(\d+)", re.MULTILINE)
# A hint of PTX 8.3 that older drivers refuse.
_HINT = re.compile(r'^\s*\.pragma\s+"used_bytes_mask[^"]*";\n', re.MULTILINE)
_COMPILED = re.compile(
    r"Compiling entry function '(\w+)'.*?\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(.*?)$",
    re.DOTALL | re.MULTILINE,
)
_THREADS = re.compile(r"\.entry\s+(\w+)\s*\(.*?\)\s*((?:\.(?:maxntid|minnctapersm|reqntid)\b[^{.]*)*)\{", re.DOTALL)
# The newest PTX version for the driver of a CUDA version (PTX ISA, "Release History"). A Jetson's driver is fixed by
# its L4T release.
NEWEST = {
    "9.0": "6.0",
    "10.0": "6.3",
    "10.2": "6.5",
    "11.0": "7.0",
    "11.4": "7.4",
    "11.8": "7.8",
    "12.0": "8.0",
    "12.2": "8.2",
    "12.4": "8.4",
    "12.6": "8.5",
}
PLUGIN = "libtvm_farm_cuda.so"
DRIVER = "libcuda_virtual.so"
_TOOLS = ("apache-tvm", "apache-tvm-ffi", "ziglang")
# Marks machine code for the virtual driver; its size and content follow. The plug-in takes it for text.
_MARK = b"FARMGPU2"
# The limit of every GPU from Maxwell to Ampere (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability").
THREADS_PER_BLOCK = 1024


def compile_ptx(source: str, arch: str) -> str:
    """Compile CUDA source to PTX for an architecture such as sm_53; the header names NVRTC's own PTX version.

    Raises CodeRefusedError with the compiler's log, UnavailableError without the compiler.
    """
    library = _load()
    program = ctypes.c_void_p()
    texts, names = (
        (ctypes.c_char_p * len(HEADERS))(*(each.encode() for each in words)) for words in (HEADERS.values(), HEADERS)
    )
    _check(
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", len(HEADERS), texts, names),
        "nvrtcCreateProgram",
    )
    try:
        options = [
            f"--gpu-architecture={arch.replace('sm_', 'compute_')}",
            "--std=c++17",
            "--disable-warnings",
            "--device-as-default-execution-space",
        ]
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), words) != 0:
            log = _read(library, program, "nvrtcGetProgramLog").strip()
            raise CodeRefusedError(f"the CUDA compiler refuses the code: {log[:2000]}")
        return _read(library, program, "nvrtcGetPTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(getattr(library, f"{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, what)(program, buffer), what)
    return buffer.value.decode(errors="replace")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise PermanentError(f"{what} failed with {result}")


@functools.cache
def _load() -> ctypes.CDLL:
    return ctypes.CDLL(str(find_file("cuda_nvrtc", "lib/libnvrtc.so.12")))


def find_file(package: str, name: str) -> Path:
    """Find a file of NVIDIA's wheels. Raises UnavailableError that names what to install."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        if (path := Path(place) / package / name).is_file():
            return path
    raise UnavailableError(
        f"{Path(name).name} of NVIDIA's CUDA 12, the compiler for GPUs, is not installed",
        "Install it (130 MB): pip install nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-nvrtc-cu12==12.9.86",
    )


@dataclasses.dataclass(frozen=True)
class PtxLimits:
    """A GPU's limits of a block: 32-bit registers, bytes of shared memory, threads."""

    registers: int
    shared_bytes: int
    threads: int


@dataclasses.dataclass(frozen=True)
class Usage:
    """One kernel's registers and spilled bytes per thread, and static shared bytes and threads per block."""

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    threads: int


def find_newest(cuda: str) -> str:
    """Return the newest PTX for the driver of a CUDA version; an unlisted version counts as the listed one before."""
    known = [version for version in NEWEST if _parse(version) <= _parse(cuda)]
    if not known:
        raise UsageError(f"a driver of CUDA {cuda} is too old: the oldest supported is {next(iter(NEWEST))}")
    return NEWEST[known[-1]]


def is_newer(version: str, than: str) -> bool:
    """Say whether a version such as 6.5 is newer than another."""
    return _parse(version) > _parse(than)


def _parse(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def rewrite_version(text: str, newest: str) -> str:
    """Lower the ISA version in a PTX header to `newest`, such as 6.5, and drop the hints that it does not know.

    `assemble` finds out whether the code fits that ISA. Raises PermanentError for text that is no PTX.
    """
    found = _VERSION.search(text)
    if found is None:
        raise PermanentError("the CUDA compiler gave PTX without a .version")
    if not is_newer(f"{found[1]}.{found[2]}", newest):
        return text
    return text[: found.start()] + f".version {newest}" + _HINT.sub("", text[found.end() :])


def assemble(text: str, arch: str, limits: PtxLimits) -> tuple[bytes, list[Usage]]:
    """Return the machine code of PTX, a cubin, and its kernels' resources, for an architecture such as sm_53.

    Raises CodeRefusedError with the message of ptxas, or naming the kernel and the exceeded limit.
    """
    threads = {name: _count_threads(words) for name, words in _THREADS.findall(text)}
    with tempfile.TemporaryDirectory(prefix="farm-ptx-") as folder:
        path, cubin = Path(folder) / "kernels.ptx", Path(folder) / "kernels.cubin"
        path.write_text(text, encoding="utf-8")
        command = [str(find_file("cuda_nvcc", "bin/ptxas")), f"--gpu-name={arch}", "--verbose", str(path)]
        try:
            done = subprocess.run(
                [*command, "--output-file", str(cubin)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"ptxas did not finish within {_TIMEOUT_S:g} s") from error
        if done.returncode != 0:
            raise CodeRefusedError(f"ptxas refuses the code for {arch}: {(done.stderr or done.stdout).strip()[:2000]}")
        code = cubin.read_bytes()
    usages = []
    for kernel, stores, loads, registers, rest in _COMPILED.findall(done.stderr + done.stdout):
        shared = re.search(r"(\d+) bytes smem", rest)
        usages.append(
            Usage(
                kernel,
                int(registers),
                int(stores) + int(loads),
                int(shared[1]) if shared else 0,
                threads.get(kernel, 1),
            )
        )
    for usage in usages:
        _require(usage, limits)
    return code, usages


def _count_threads(words: str) -> int:
    found = re.search(r"\.(?:maxntid|reqntid)\s+([\d,\s]+)", words)
    product = 1
    for each in found[1].split(",") if found else ():
        product *= int(each)
    return product


def _require(usage: Usage, limits: PtxLimits) -> None:
    """Refuse a kernel beyond the limits; registers come by 8 per thread and whole warps (CUDA's calculator)."""
    registers = -(-usage.registers // 8) * 8 * -(-usage.threads // WARP) * WARP
    for has, may, what in (
        (usage.threads, limits.threads, "threads"),
        (usage.shared_bytes, limits.shared_bytes, "bytes of shared memory"),
        (registers, limits.registers, "registers"),
    ):
        if has > may:
            raise CodeRefusedError(f"the kernel {usage.kernel} needs {has} {what} per block; the GPU has {may}")


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
    limits: PtxLimits
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Made:
    """Compiled code, the resources of its kernels, and its CUDA C."""

    code: bytes = dataclasses.field(repr=False)
    usages: tuple[Usage, ...]
    source: str = dataclasses.field(repr=False)


def plan_gpu(board_type: BoardType) -> GpuPlan:
    """Return the GPU of a board type with the oldest driver of its boards. Raises UsageError where it has none."""
    gpu = board_type.gpu
    if gpu is None or not gpu.cuda or gpu.registers_per_block is None or gpu.shared_bytes_per_block is None:
        raise UsageError(
            f"{board_type.name} has no GPU that the farm compiles for",
            "Remove --device or name a board type with a GPU: see `farm board list --types`.",
        )
    newest = min((find_newest(cuda) for cuda in gpu.cuda.values()), key=lambda each: tuple(map(int, each.split("."))))
    limits = PtxLimits(gpu.registers_per_block, gpu.shared_bytes_per_block, THREADS_PER_BLOCK)
    return GpuPlan(gpu.arch, newest, limits, board_type.memory_bytes)


def make_code(source: str, plan: GpuPlan, simulated: bool) -> Made:
    """Compile and check CUDA source for a GPU; simulated boards get the GPU's machine code, which they emulate.

    Raises PermanentError where a compiler refuses it or a kernel exceeds the GPU's resources, and for a simulated board
    of a GPU that is not emulated.
    """
    if simulated:
        require_emulated(plan.arch)
    text = rewrite_version(compile_ptx(source, plan.arch), plan.newest_ptx)
    cubin, usages = assemble(text, plan.arch, plan.limits)
    return Made(pack_cubin(cubin) if simulated else text.encode(), tuple(usages), source)
