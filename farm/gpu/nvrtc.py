"""CUDA C to PTX with NVIDIA's run-time compiler, from the wheel `nvidia-cuda-nvrtc-cu12`; needs no GPU.

The compiler stays at 12.x: CUDA 13 knows neither Maxwell nor Pascal nor Volta.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

from farm.errors import CodeRefusedError, PermanentError, UnavailableError

# TVM's source includes two headers of libcu++, which take three times as long as the rest; this is all that it uses.
_HEADERS = {
    "cuda/std/cstdint": """#pragma once
namespace cuda { namespace std {
typedef signed char int8_t; typedef unsigned char uint8_t;
typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned int uint32_t;
typedef long long int64_t; typedef unsigned long long uint64_t;
} }
""",
    "cuda/std/type_traits": """#pragma once
namespace cuda { namespace std {
template <class T, class U> struct is_same { static constexpr bool value = false; };
template <class T> struct is_same<T, T> { static constexpr bool value = true; };
template <class T, class U> inline constexpr bool is_same_v = is_same<T, U>::value;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T, class U> struct conditional { typedef T type; };
template <class T, class U> struct conditional<false, T, U> { typedef U type; };
template <class T> struct is_integral { static constexpr bool value = T(1) / T(2) == T(0); };
template <class T> struct is_signed { static constexpr bool value = T(-1) < T(0); };
template <class T> struct is_unsigned { static constexpr bool value = !is_signed<T>::value; };
template <class T> struct is_floating_point { static constexpr bool value = !is_integral<T>::value; };
} }
""",
}


def compile_ptx(source: str, arch: str) -> str:
    """The PTX of CUDA source for an architecture such as sm_53; its header says NVRTC's own version of PTX.

    Raises CodeRefusedError with the compiler's words, UnavailableError without the compiler.
    """
    library = _load()
    program = ctypes.c_void_p()
    texts, names = (
        (ctypes.c_char_p * len(_HEADERS))(*(each.encode() for each in words)) for words in (_HEADERS.values(), _HEADERS)
    )
    _check(
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", len(_HEADERS), texts, names),
        "nvrtcCreateProgram",
    )
    try:
        options = [
            f"--gpu-architecture={arch.replace('sm_', 'compute_')}",
            "--std=c++17",
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
    """A file of one of NVIDIA's wheels. Raises UnavailableError saying what to install."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        if (path := Path(place) / package / name).is_file():
            return path
    raise UnavailableError(
        f"{Path(name).name} of NVIDIA's CUDA 12 is not installed, which makes code for GPUs",
        "Install it (130 MB): pip install nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-nvrtc-cu12==12.9.86",
    )
