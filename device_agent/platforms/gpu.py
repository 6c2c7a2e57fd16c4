"""The board's GPU: TVM's plug-in for it, the driver's description, and the meaning of its errors.

CUDA does not survive a fork, so only workers and other children load the plug-in (`native/`). Their parent only sets
its folder (`use_folder`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import select
import signal
import time
from pathlib import Path
from typing import Any

from device_agent import processes
from device_agent.board_types import BoardType
from device_agent.errors import AgentError
from device_agent.protocol import Status

# A driver's first use takes some tenths of a second, more on a busy board. The farm waits 15 s for a description, so a
# hung driver must not cost a board its CPUs.
PROBE_TIMEOUT_S = 10.0
PLUGIN = "libtvm_farm_cuda.so"
# Errors after which a process can no longer use the GPU (CUDA driver API, "CUresult").
_STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "INVALID_ADDRESS_SPACE",
        "INVALID_PC", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "MISALIGNED_ADDRESS",
    )
)  # fmt: skip
# For the processes forked from here; native/driver.cc reads the second.
PLUGIN_VARIABLE, DRIVER_VARIABLE = "TVM_FARM_GPU_PLUGIN", "TVM_FARM_CUDA_DRIVER"
_MOST_SAID = 2000
_TVM_LIBRARIES = (("tvm_ffi", "libtvm_ffi.so"), ("tvm", "libtvm_runtime.so"))
_ERROR = re.compile(r"\bCUDA_ERROR_[A-Z_]+")
_STATUS = {
    "CUDA_ERROR_OUT_OF_MEMORY": Status.OUT_OF_MEMORY,
    "CUDA_ERROR_INVALID_IMAGE": Status.LOAD_FAILED,
    "CUDA_ERROR_INVALID_PTX": Status.LOAD_FAILED,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": Status.LOAD_FAILED,
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": Status.LOAD_FAILED,
    "CUDA_ERROR_LAUNCH_TIMEOUT": Status.RUN_TIMEOUT,
    # These occur before any candidate code runs.
    "CUDA_ERROR_NO_DEVICE": Status.FARM_ERROR,
    "CUDA_ERROR_DEVICE_UNAVAILABLE": Status.FARM_ERROR,
    "CUDA_ERROR_NOT_INITIALIZED": Status.FARM_ERROR,
    "CUDA_ERROR_OPERATING_SYSTEM": Status.FARM_ERROR,
}


def use_folder(folder: Path | None, facts: BoardType | None) -> None:
    """Set the plug-in's folder for forked processes. None: the one that came in the agent's bundle, with a GPU."""
    if folder is None:
        folder = Path(__file__).parents[1] / "native"
        if facts is None or facts.gpu is None or not (folder / PLUGIN).exists():
            return
    os.environ[PLUGIN_VARIABLE] = str(folder / PLUGIN)


def open_device() -> Any:
    """TVM's device for the GPU, with its driver ready. Raises AgentError with the reason."""
    import tvm.runtime

    if not (plugin := os.environ.get(PLUGIN_VARIABLE)):
        raise AgentError("this board's agent serves no GPU")
    load_plugin(Path(plugin))
    device = tvm.runtime.cuda(0)
    try:
        device.sync()
    except RuntimeError as error:
        raise AgentError(str(error)) from error
    return device


def allow_memory(more_bytes: int) -> None:
    """Let this process take so much more of the GPU's memory, beside what it holds. `open_device` comes first."""
    ctypes.CDLL(os.environ[PLUGIN_VARIABLE]).tvm_farm_allow_memory(ctypes.c_size_t(more_bytes))


def forget_memory() -> None:
    """Release memory that TVM caches for programs that have ended."""
    from tvm_ffi import get_global_func

    get_global_func("vm.builtin.memory_manager.clear")()


def load_plugin(path: Path) -> None:
    """Register TVM's device "cuda" in this process. Raises AgentError if the plug-in does not load."""
    try:
        # The plug-in takes TVM's and the C++ runtime's symbols from globally loaded libraries.
        for package, name in _TVM_LIBRARIES:
            spec = importlib.util.find_spec(package)
            ctypes.CDLL(str(Path((spec.origin if spec else None) or "").parent / "lib" / name), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise AgentError(f"the GPU plug-in does not load: {error}") from error


def find_status(text: str) -> Status | None:
    """The status that a driver error means for the work that met it; None without a driver error."""
    found = _ERROR.search(text)
    return _STATUS.get(found[0], Status.CRASHED) if found else None


def find_consequence(text: str) -> str:
    """A note on a driver error that its process does not survive; "" for any other."""
    found = _ERROR.search(text)
    return "; the GPU's context is lost, and the next run has another worker" if found and found[0] in _STICKY else ""


def describe() -> tuple[str, str]:
    """CUDA's version and the GPU's architecture, such as `10.2 sm_53`, and the problem, "" for none."""
    plugin = os.environ.get(PLUGIN_VARIABLE)
    if not plugin or not Path(plugin).exists():
        return "", ""
    found = probe()
    if "error" in found:
        return "", f"the GPU cannot be used: {found['error']}"
    major, minor = divmod(int(found["driver_version"]) // 10, 100)
    return f"{major}.{minor} sm_{str(found['compute_capability']).replace('.', '')}", ""


def probe() -> dict[str, Any]:
    """Query the driver in a child process; returns `error` with the reason if the GPU is unusable."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(_ask()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    # Short enough for one read.
    answered = bool(select.select([reading], [], [], PROBE_TIMEOUT_S)[0])
    text = os.read(reading, select.PIPE_BUF) if answered else b""
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    processes.reap(child, time.monotonic() + processes.KILL_TIMEOUT_S)  # one stuck in the driver stays
    if not answered:
        return {"error": f"the CUDA driver did not answer within {PROBE_TIMEOUT_S:g} s"}
    found: dict[str, Any] = json.loads(text) if text else {"error": "the CUDA driver ended the process that asked it"}
    return found


def _ask() -> dict[str, Any]:
    try:
        device = open_device()
        return {
            "driver_version": device.api_version,  # 10020 is CUDA 10.2
            "name": device.device_name,
            "compute_capability": device.compute_version,
            "memory_bytes": device.total_global_memory,
        }
    except (AgentError, RuntimeError) as error:
        return {"error": str(error)[:_MOST_SAID]}
