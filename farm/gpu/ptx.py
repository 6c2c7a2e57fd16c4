"""PTX made fit for a board: its header's version, and what `ptxas` says of registers and memory for the exact GPU.

A kernel beyond a limit of the GPU is a fault of the candidate, found here, before it travels.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path

from device_agent.protocol import WARP
from farm.errors import CodeRefusedError, DeadlineError, PermanentError, UsageError
from farm.gpu.nvrtc import find_file

# 70 ms for a matrix product, some seconds for all kernels of a big model.
_TIMEOUT_S = 120.0
_VERSION = re.compile(r"^\.version\s+(\d+)\.(\d+)", re.MULTILINE)
_COMPILED = re.compile(
    r"Compiling entry function '(\w+)'.*?\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(.*?)$",
    re.DOTALL | re.MULTILINE,
)
_THREADS = re.compile(r"\.entry\s+(\w+)\s*\(.*?\)\s*((?:\.(?:maxntid|minnctapersm|reqntid)\b[^{.]*)*)\{", re.DOTALL)


# The newest PTX that the driver of a version of CUDA takes (PTX ISA, "Release History"). On a Jetson the driver is part
# of L4T and no newer one can be had.
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


@dataclasses.dataclass(frozen=True)
class PtxLimits:
    """What a GPU lets a block have: registers of 32 bits, bytes of shared memory, threads."""

    registers: int
    shared_bytes: int
    threads: int


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one kernel takes: registers and spilled bytes per thread, static shared bytes and threads per block."""

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    threads: int


def find_newest(cuda: str) -> str:
    """The newest PTX that the driver of this version of CUDA takes; of one between two that are known, the older's."""
    known = [version for version in NEWEST if _parse(version) <= _parse(cuda)]
    if not known:
        raise UsageError(f"a driver of CUDA {cuda} is too old: {next(iter(NEWEST))} is the oldest that is served")
    return NEWEST[known[-1]]


def is_newer(version: str, than: str) -> bool:
    """Whether a version such as 6.5 is newer than another."""
    return _parse(version) > _parse(than)


def _parse(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def rewrite_version(text: str, newest: str) -> str:
    """PTX whose header asks for the ISA `newest`, such as 6.5, where it asks for a newer one.

    Whether what it uses is in that ISA is for `check` to say. Raises PermanentError for what is no PTX.
    """
    found = _VERSION.search(text)
    if found is None:
        raise PermanentError("the CUDA compiler gave PTX without a .version")
    if not is_newer(f"{found[1]}.{found[2]}", newest):
        return text
    return text[: found.start()] + f".version {newest}" + text[found.end() :]


def check(text: str, arch: str, limits: PtxLimits) -> list[Usage]:
    """What every kernel of the PTX takes on an architecture such as sm_53.

    Raises CodeRefusedError with ptxas' words for PTX that it refuses, or naming the kernel and the limit it breaks.
    """
    threads = {name: _count_threads(words) for name, words in _THREADS.findall(text)}
    with tempfile.TemporaryDirectory(prefix="farm-ptx-") as folder:
        path = Path(folder) / "kernels.ptx"
        path.write_text(text, encoding="utf-8")
        command = [str(find_file("cuda_nvcc", "bin/ptxas")), f"--gpu-name={arch}", "--verbose", str(path)]
        try:
            done = subprocess.run(
                [*command, "--output-file", "/dev/null"],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"ptxas did not finish within {_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise CodeRefusedError(f"ptxas refuses the code for {arch}: {(done.stderr or done.stdout).strip()[:2000]}")
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
    return usages


def _count_threads(words: str) -> int:
    found = re.search(r"\.(?:maxntid|reqntid)\s+([\d,\s]+)", words)
    product = 1
    for each in found[1].split(",") if found else ():
        product *= int(each)
    return product


def _require(usage: Usage, limits: PtxLimits) -> None:
    """The driver hands out registers in units of 8 per thread and whole warps (CUDA's occupancy calculator)."""
    registers = -(-usage.registers // 8) * 8 * -(-usage.threads // WARP) * WARP
    for has, may, what in (
        (usage.threads, limits.threads, "threads"),
        (usage.shared_bytes, limits.shared_bytes, "bytes of shared memory"),
        (registers, limits.registers, "registers"),
    ):
        if has > may:
            raise CodeRefusedError(f"the kernel {usage.kernel} takes {has} {what} per block; the GPU has {may}")
