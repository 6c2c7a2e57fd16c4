"""Adapt PTX to a board's driver and check its registers and memory with `ptxas` for the exact GPU.

A kernel beyond a limit of the GPU is the candidate's fault, found before it is sent.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

from device_agent.protocol import WARP
from farm.errors import CodeRefusedError, DeadlineError, PermanentError, UnavailableError, UsageError

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

    `check` finds out whether the code fits that ISA. Raises PermanentError for text that is no PTX.
    """
    found = _VERSION.search(text)
    if found is None:
        raise PermanentError("the CUDA compiler gave PTX without a .version")
    if not is_newer(f"{found[1]}.{found[2]}", newest):
        return text
    return text[: found.start()] + f".version {newest}" + _HINT.sub("", text[found.end() :])


def check(text: str, arch: str, limits: PtxLimits) -> list[Usage]:
    """Return the resources of every kernel of the PTX on an architecture such as sm_53.

    Raises CodeRefusedError with the message of ptxas, or naming the kernel and the exceeded limit.
    """
    return assemble(text, arch, limits)[1]


def assemble(text: str, arch: str, limits: PtxLimits) -> tuple[bytes, list[Usage]]:
    """Return the machine code of PTX, a cubin, and the resources of its kernels. Raises as `check` does."""
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
