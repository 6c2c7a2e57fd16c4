"""Run one compiled model on this machine with TVM's runtime and the library beside this file.

Not called `model`, since Python would import `model.so` by that name.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .inputs import fit

# TVM's AffinityMode (include/tvm/runtime/threading_backend.h): fast cores first.
_FAST_CORES_FIRST = 1
# Files beside a GPU library: TVM's plug-in and, for virtual boards, the substitute of the driver.
_PLUGIN, _VIRTUAL_DRIVER, _DRIVER_VARIABLE = "libtvm_farm_cuda.so", "libcuda_virtual.so", "TVM_FARM_CUDA_DRIVER"


class Model:
    """The model of this package. Not thread-safe; TVM's threads belong to the process."""

    def __init__(self, threads: int | None = None, folder: str | Path | None = None) -> None:
        """Load the library; `threads` defaults to the compiled number, `folder` to this package.

        Raises OSError where the library is missing or made for another machine, and where it is for a GPU that cannot
        be used; ImportError without TVM's runtime.
        """
        self.folder = Path(folder) if folder is not None else Path(__file__).parent
        self.manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        self.inputs: list[dict[str, Any]] = self.manifest["inputs"]
        self.outputs: list[dict[str, Any]] = self.manifest["outputs"]
        if (here := platform.machine()) != self.manifest["architecture"]:
            raise OSError(f"{self.manifest['name']} is compiled for {self.manifest['architecture']}; this is {here}")
        self.last_latency_s: float | None = None
        tvm = _import_runtime()
        self._is_on_gpu = bool(self.manifest.get("gpu"))
        self._tensor = tvm.runtime.tensor
        self._device = _open_gpu(tvm, self.folder) if self._is_on_gpu else tvm.runtime.cpu()
        count = threads or min(int(self.manifest["threads"]), len(os.sched_getaffinity(0)))
        self.threads = count
        os.environ["TVM_NUM_THREADS"] = str(count)
        # Threads that wait for the next kernel sleep after 1 ms. TVM's own 300,000 turns keep cores busy between
        # inferences, and the process waits for them when it ends: minutes, on a busy machine.
        os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "1000")
        tvm.get_global_func("runtime.config_threadpool")(_FAST_CORES_FIRST, count)
        self._tvm = tvm
        self._functions: dict[str, Any] = {}
        self._load("model.so")

    def run(self, inputs: Mapping[str, npt.NDArray[Any]] | npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """One inference: arrays by input name, or the only input's array; returns arrays by output name.

        A model compiled for a range of lengths takes any of them; the first run of each size loads its library.

        Raises InputError where they are not what the model takes. `last_latency_s` is then the time of the model
        alone, without what is done to arrays before and after.
        """
        fitted = fit(self.manifest, inputs)
        function = self._load(fitted.library)
        tensors = [self._tensor(array, self._device) for array in fitted.inputs.values()]
        begun = time.perf_counter()
        result = function(*tensors)
        if self._is_on_gpu:
            self._device.sync()  # kernels are queued
        self.last_latency_s = time.perf_counter() - begun
        found = fitted.crop(_collect(result))
        return {each["name"]: array for each, array in zip(self.outputs, found, strict=True)}

    def _load(self, library: str) -> Any:
        """Return the main function of a library."""
        if library not in self._functions:
            module = self._tvm.runtime.load_module(str(self.folder / library))
            self._functions[library] = self._tvm.runtime.vm.VirtualMachine(module, self._device)["main"]
        return self._functions[library]


def _import_runtime() -> Any:
    """Import TVM with its runtime library only, as on boards, unless the process has loaded more."""
    chosen = os.environ.get("TVM_USE_RUNTIME_LIB")
    if "tvm" not in sys.modules:
        os.environ["TVM_USE_RUNTIME_LIB"] = chosen or "1"
    try:
        import tvm
        import tvm.runtime.vm
    finally:
        if chosen is None:
            os.environ.pop("TVM_USE_RUNTIME_LIB", None)
    return tvm


def _open_gpu(tvm: Any, folder: Path) -> Any:
    """Return TVM's GPU device from the plug-in beside the library. Raises OSError where it is unusable."""
    import tvm_ffi

    if (driver := folder / _VIRTUAL_DRIVER).is_file():
        os.environ.setdefault(_DRIVER_VARIABLE, str(driver))
    # The plug-in needs symbols of TVM and the C++ runtime from globally loaded libraries.
    for package, name in ((tvm_ffi, "libtvm_ffi.so"), (tvm, "libtvm_runtime.so")):
        ctypes.CDLL(str(Path(package.__file__).parent / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / _PLUGIN), ctypes.RTLD_GLOBAL)
    device = tvm.runtime.cuda(0)
    try:
        device.sync()
    except RuntimeError as error:
        raise OSError(f"the GPU cannot be used: {error}") from error
    return device


def _collect(result: Any) -> list[npt.NDArray[Any]]:
    """Copy the tensors of a result: one, or nested tuples of them."""
    if hasattr(result, "numpy"):
        return [np.asarray(result.numpy())]
    return [array for item in result for array in _collect(item)]
