"""Kernels written in CUDA on the stand-in for the driver, through the driver's own entry points."""

from __future__ import annotations

import ctypes
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.gpu import code
from farm.virtual import gpu_time

Array = npt.NDArray[Any]
ROOMY = code.PtxLimits(65536, 49152, 1024)
BEGINS = "#include <cuda_fp16.h>\n"


def assemble(source: str, arch: str = "sm_53") -> bytes:
    """Machine code of CUDA source."""
    return code.assemble(code.compile_ptx(source, arch), arch, ROOMY)[0]


class VirtualGpu:
    """The driver in this process; `settings` as in the variable TVM_FARM_VIRTUAL_GPU."""

    def __init__(self, driver: pathlib.Path, **settings: object) -> None:
        os.environ["TVM_FARM_VIRTUAL_GPU"] = ";".join(f"{key}={value}" for key, value in settings.items())
        self.library = gpu_time.open_driver(str(driver))
        self._ask("cuInit", 0)

    def _ask(self, entry: str, *arguments: Any) -> None:
        number = getattr(self.library, entry)(*arguments)
        if number:
            name = ctypes.c_char_p()
            self.library.cuGetErrorName(number, ctypes.byref(name))
            raise RuntimeError(f"{entry}: {(name.value or b'').decode()}")

    def run(
        self,
        cubin: bytes,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Array | int | float],
    ) -> list[Array]:
        """Launch a kernel; arrays are copied there and back. Raises RuntimeError with the error's name."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        image = code.pack_cubin(cubin)
        self._ask("cuModuleLoadDataEx", ctypes.byref(module), image, 0, None, None)
        self._ask("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        held: list[tuple[ctypes.c_ulonglong, Array]] = []
        values: list[Any] = []
        for each in arguments:
            if not isinstance(each, np.ndarray):
                values.append(ctypes.c_int(each) if isinstance(each, int) else ctypes.c_float(each))
                continue
            pointer, array = ctypes.c_ulonglong(), np.ascontiguousarray(each)
            self._ask("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(array.nbytes))
            self._ask(
                "cuMemcpyHtoDAsync_v2",
                pointer,
                array.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_size_t(array.nbytes),
                None,
            )
            held.append((pointer, array.copy()))
            values.append(pointer)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
        self._ask("cuLaunchKernel", function, *_three(grid), *_three(block), 0, None, pointers, None)
        for pointer, array in held:
            self._ask(
                "cuMemcpyDtoHAsync_v2",
                array.ctypes.data_as(ctypes.c_void_p),
                pointer,
                ctypes.c_size_t(array.nbytes),
                None,
            )
            self._ask("cuMemFree_v2", pointer)
        return [array for _, array in held]


def _three(sizes: Sequence[int]) -> tuple[int, ...]:
    return (*sizes, *[1] * (3 - len(sizes)))
