"""Fill kernel arguments with seeded values: fast, the same on every board, never constant."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A pool of values is repeated to fill a tensor. A prime length keeps its period off power-of-two strides.
_POOL_SIZE = 65_521
# Arguments start at different offsets, so that no two of a shape are equal.
_STRIDE_BETWEEN_ARGUMENTS = 7919


# Arguments between the first (the previous layer's output) and the last (the output) are weights if larger than L1d.
# A model passes so much data before it meets them again that the copies must exceed the boards' caches: 4 MiB on the
# largest Jetson.
_LARGE_BYTES, _COLD_BYTES = 256 << 10, 16 << 20
_MOST_INHERITED_BYTES = 64 << 20


class UnknownDtypeError(ValueError):
    """The agent cannot fill an argument of this dtype."""


@functools.lru_cache(maxsize=4)
def values(seed: int) -> NDArray[np.int32]:
    """Integers in [-32768, 32768], identical on all machines (no floating point is used)."""
    return np.random.default_rng(seed).integers(-32768, 32769, size=_POOL_SIZE, dtype=np.int32)


@functools.lru_cache(maxsize=32)
def pool(dtype: str, seed: int) -> NDArray[Any]:
    """Values of one dtype: floats in [-1, 1], integers in 0..7 (safe as indices of all but tiny axes), booleans.

    Raises UnknownDtypeError for a dtype unknown to NumPy and ml_dtypes.
    """
    raw = values(seed)
    kind = numpy_dtype(dtype)
    if kind.kind in "iu":
        return (raw & 7).astype(kind)
    if kind.kind == "b":
        return (raw & 1).astype(kind)
    return (raw.astype(np.float32) / 32768).astype(kind)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name, bfloat16 and the like included. Raises UnknownDtypeError."""
    try:
        return np.dtype(name)
    except TypeError:
        try:
            import ml_dtypes

            kind: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        except (ImportError, AttributeError, TypeError) as error:
            raise UnknownDtypeError(f"arguments of dtype {name!r} are not known to this agent") from error
        return kind


def _count_bytes(spec: Any) -> int:
    """Bytes of a tensor. Raises UnknownDtypeError."""
    return int(math.prod(spec.shape)) * numpy_dtype(spec.dtype).itemsize


def fill(destination: NDArray[Any], source: NDArray[Any], start: int) -> None:
    """Fill the flat `destination` with `source`, cyclically from position `start`."""
    start %= len(source)
    filled = 0
    for part in (source[start:], source[:start]):
        part = part[: len(destination) - filled]
        destination[filled : filled + len(part)] = part
        filled += len(part)
    while filled < len(destination):  # doubling keeps the period and runs at memcpy speed
        step = min(filled, len(destination) - filled)
        destination[filled : filled + step] = destination[:step]
        filled += step


def copy_weights(specs: Any, tensors: list[Any]) -> list[list[Any]]:
    """Further sets of arguments with copies of the large weights, enough that rotating calls find them in no cache.

    Empty without large weights.
    """
    import tvm.runtime  # here: clients of the emulator do without TVM

    large, copies = _plan_copies(specs)
    found = []
    for _ in range(copies):
        found.append(list(tensors))
        for index in large:
            found[-1][index] = tvm.runtime.empty(specs[index].shape, specs[index].dtype, tvm.runtime.cpu())
            tensors[index].copyto(found[-1][index])
    return found


def _plan_copies(specs: Any) -> tuple[list[int], int]:
    """Which arguments are large weights, and how many copies of all of them to make."""
    sizes = [_count_bytes(spec) for spec in specs]
    large = [index for index in range(1, len(specs) - 1) if sizes[index] >= _LARGE_BYTES]
    total = sum(sizes[index] for index in large)
    return large, math.ceil(_COLD_BYTES / total) if total else 0


# The last result of `prepare`: the tensors of one spec, the first set and those with copied weights. A session keeps
# only these.
_inherited: dict[tuple[tuple[Any, ...], int], list[list[Any]]] = {}


def allocate(specs: Any, seed: int) -> list[Any]:
    """Filled TVM tensors on the CPU for the given TensorSpecs. Raises UnknownDtypeError."""
    found = _inherited.get((tuple(specs), seed))
    return found[0] if found else _make(specs, seed)


def allocate_turns(specs: Any, seed: int) -> list[list[Any]]:
    """The tensors of `allocate`, and the further sets of `copy_weights`. Raises UnknownDtypeError."""
    found = _inherited.get((tuple(specs), seed)) or [_make(specs, seed)]
    return found if len(found) > 1 else [*found, *copy_weights(specs, found[0])]


def _make(specs: Any, seed: int) -> list[Any]:
    import tvm.runtime  # as above

    tensors = []
    for index, spec in enumerate(specs):
        source = pool(spec.dtype, seed)
        tensor = tvm.runtime.empty(spec.shape, spec.dtype, tvm.runtime.cpu())
        size = int(np.prod(spec.shape, dtype=np.int64))
        if size:
            # NumPy cannot view bfloat16 and the like through DLPack, but through their bytes.
            memory = (ctypes.c_uint8 * (size * source.itemsize)).from_address(tensor.data_ptr())
            fill_argument(np.frombuffer(memoryview(memory), dtype=source.dtype), spec.dtype, seed, index)
        tensors.append(tensor)
    return tensors


def fill_argument(destination: NDArray[Any], dtype: str, seed: int, index: int) -> None:
    """Fill the flat argument number `index` as `allocate` would. Raises UnknownDtypeError."""
    fill(destination, pool(dtype, seed), index * _STRIDE_BETWEEN_ARGUMENTS)


def prepare(specs: Any, seed: int, in_turns: bool = False) -> None:
    """Prepare what `allocate`, `in_turns` also `allocate_turns`, needs before the candidate's limits apply.

    Small enough tensors are made here and inherited copy-on-write by consecutive workers of one spec: filling megabytes
    costs each worker some milliseconds of page faults, and the copies of weights 10 to 30. Unknown dtypes fail later.
    """
    for spec in specs:
        with contextlib.suppress(UnknownDtypeError):
            pool(spec.dtype, seed)
    key = (tuple(specs), seed)
    with contextlib.suppress(UnknownDtypeError):
        sizes = [_count_bytes(spec) for spec in specs]
        if key not in _inherited:
            _inherited.clear()
            if sum(sizes) <= _MOST_INHERITED_BYTES:
                _inherited[key] = [_make(specs, seed)]
        sets = _inherited.get(key, [])
        large, copies = _plan_copies(specs)
        more = copies * sum(sizes[index] for index in large)
        if in_turns and len(sets) == 1 and sum(sizes) + more <= _MOST_INHERITED_BYTES:
            sets += copy_weights(specs, sets[0])
