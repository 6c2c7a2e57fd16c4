"""The golden kernel: one fixed, versioned program that every board runs, so that times compare over boards and days.

`farm.services` and `farm.crew.calibration` decide when it runs and judge its time. Here it is built in a child process
and kept under FARM_HOME.

On one core, it fills a 4 MiB table with the outer product of two vectors and multiplies the table by a narrow matrix.
The table exceeds the 2 MiB L2 of a Jetson Nano or TX2, so it measures memory; the product measures the core's clock.
The schedule is fixed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import te

from farm import folders
from farm.errors import DeadlineError, FarmError, PermanentError, UnavailableError
from farm.processes.jobs import compile_in_subprocess
from farm.search.codegen.build_pool import BuildCache
from farm.search.codegen.lowering import try_to_build

# Raise the number when the kernel changes: times of different versions are never compared.
NAME = "golden-matmul/1"
ENTRY = "main"
_ROWS, _COLUMNS = 1024, 8
# Rows and columns of one tile of accumulators: 8 NEON or SSE registers.
_TILE_ROWS = 4
_LANES = 16
_SEED = 20

# Loading the compiler takes 3 to 10 s on two busy cores, building 0.5 s.
BUILD_TIMEOUT_S = 90.0
_LOCK_LOOK_S = 0.05
# Reordering a sum of 1024 float32 products: see `farm/artifacts/verify.py`.
_TOLERANCE = 1e-4

# Baseline targets for board types without one for their architecture, so that a virtual board or the local machine
# keeps its times on any host.
_GENERIC: dict[str, dict[str, Any]] = {
    "x86_64": {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v2", "num-cores": 1},
    "aarch64": {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "generic", "mattr": ["+neon"], "num-cores": 1},
}

Arrays = dict[str, npt.NDArray[Any]]
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class GoldenKernel:
    """A linked library; call `ENTRY` with `make_inputs()`. `name` changes with all that may change its speed."""

    name: str
    library: bytes = dataclasses.field(repr=False)


class GoldenKernels:
    """Golden kernels by target, built once per FARM_HOME. Thread-safe; several processes may share the folder."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds the libraries and is created on the first write."""
        self._folder, self._kept = folder, BuildCache(folder, _log.warning)
        self._lock = threading.Lock()
        self._known: dict[str, GoldenKernel] = {}

    def require(self, target: Mapping[str, Any]) -> GoldenKernel:
        """Return the kernel for a target from memory, the folder, or a build (some seconds).

        Raises DeadlineError where the compiler times out, UnavailableError where it fails.
        """
        name, key = name_kernel(target)
        with self._lock:
            if name not in self._known:
                self._known[name] = GoldenKernel(name, self._fetch(target, key))
            return self._known[name]

    def _fetch(self, target: Mapping[str, Any], key: str) -> bytes:
        if (library := self._kept.find(key)) is not None:
            return library
        deadline = time.monotonic() + BUILD_TIMEOUT_S
        with contextlib.ExitStack() as stack:
            try:
                folders.make_private(self._folder)
                stack.enter_context(_locked(self._folder / "lock", deadline))
            except OSError as error:
                _log.warning("cannot keep the golden kernel in %s: %s", self._folder, error)
            if (library := self._kept.find(key)) is not None:  # another process built it meanwhile
                return library
            library = build(target, max(deadline - time.monotonic(), BUILD_TIMEOUT_S / 2))
            self._kept.keep(key, library)
        return library


def plan_target(board_type_target: Mapping[str, Any] | None, architecture: str) -> dict[str, Any]:
    """Return the board type's target where it matches `architecture` (as from uname -m), else a generic one.

    A virtual board runs its host's code, even for a type of another architecture. Raises UnavailableError for an
    unknown architecture.
    """
    if board_type_target is not None and str(board_type_target["mtriple"]).partition("-")[0] == architecture:
        return dict(board_type_target)
    if architecture in _GENERIC:
        return dict(_GENERIC[architecture])
    raise UnavailableError(
        f"there is no golden kernel for {architecture or 'an architecture that the board does not name'}",
        f"Give its board type a target. Known without one: {', '.join(sorted(_GENERIC))}.",
    )


def name_kernel(target: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name that samples are stored under, and the full hash of program, target and compiler versions."""
    made_from = {
        "kernel": NAME,
        "shape": [_ROWS, _COLUMNS, _TILE_ROWS, _LANES],
        "target": dict(target),
        "versions": _read_versions(),
    }
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    return f"{NAME}+{key[:8]}", key


@functools.cache
def make_inputs() -> Arrays:
    """Return all arguments in order, the output buffer last; deterministic."""
    random = np.random.default_rng(_SEED)
    return {
        "arg_000": random.standard_normal(_ROWS).astype("float32"),
        "arg_001": random.standard_normal(_ROWS).astype("float32"),
        "arg_002": random.standard_normal((_ROWS, _COLUMNS)).astype("float32"),
        "arg_003": np.zeros((_ROWS, _COLUMNS), "float32"),
    }


def find_mismatch(outputs: Mapping[str, npt.NDArray[Any]]) -> str:
    """Compare a board's result with NumPy's; return the difference in words, or ""."""
    if not outputs:
        return "the golden kernel returned no output"
    result, wanted = list(outputs.values())[-1], _compute_reference()
    if result.shape != wanted.shape or result.dtype != wanted.dtype:
        return f"the golden kernel returned {result.dtype}{list(result.shape)}"
    if not np.isfinite(result).all():
        return "the golden kernel returned values that are not finite"
    error = float(np.abs(result - wanted).max() / np.abs(wanted).max())
    return "" if error <= _TOLERANCE else f"the golden kernel's result is wrong, by {error:.1e} of its largest value"


@functools.cache
def _compute_reference() -> npt.NDArray[Any]:
    x, y, z, _ = (array.astype("float64") for array in make_inputs().values())
    return np.asarray(np.outer(x, y) @ z, dtype="float32")


@functools.cache
def _read_versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("apache-tvm", "apache-tvm-ffi", "ziglang")}


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    """Hold the lock of the only builder; after `deadline` (monotonic) build anyway."""
    with folders.open_private(path, os.O_WRONLY, "wb") as file:
        while not folders.try_lock(file) and time.monotonic() <= deadline:
            time.sleep(_LOCK_LOOK_S)
        yield


def build(target: Mapping[str, Any], timeout_s: float = BUILD_TIMEOUT_S) -> bytes:
    """Build the kernel's library in a child process. Raises DeadlineError, UnavailableError."""
    try:
        return compile_in_subprocess(functools.partial(_build, dict(target)), "the golden kernel", timeout_s)
    except DeadlineError:
        raise
    except FarmError as error:
        raise UnavailableError(
            f"the golden kernel cannot be built: {error.message}", "`farm doctor` looks at the compiler and the linker."
        ) from error


def _build(target: Mapping[str, Any]) -> bytes:
    status, library, reason = try_to_build(_make_module(), target, standalone=True)
    if not library:
        raise PermanentError(f"{status}: {reason}")
    return library


def _make_module() -> str:
    """Return the scheduled function in TVM's JSON."""
    x, y = (te.placeholder((_ROWS,), "float32", name=name) for name in "xy")
    z = te.placeholder((_ROWS, _COLUMNS), "float32", name="z")
    k = te.reduce_axis((0, _ROWS), name="k")
    table = te.compute((_ROWS, _ROWS), lambda i, j: x[i] * y[j], name="table")
    product = te.compute((_ROWS, _COLUMNS), lambda i, j: te.sum(table[i, k] * z[k, j], axis=k), name="product")
    function = te.create_prim_func([x, y, z, product]).with_attr("global_symbol", ENTRY)
    schedule = tvm.s_tir.Schedule(tvm.IRModule({ENTRY: function}))
    filling = schedule.get_sblock("table")
    _, lanes = schedule.split(schedule.get_loops(filling)[1], [None, _LANES])
    schedule.vectorize(lanes)
    block = schedule.get_sblock("product")
    row, column, term = schedule.get_loops(block)
    rows, row = schedule.split(row, [None, _TILE_ROWS])
    schedule.reorder(rows, term, row, column)
    sums = schedule.cache_write(block, 0, "local")
    schedule.reverse_compute_at(sums, rows)
    schedule.vectorize(schedule.get_loops(sums)[-1])
    schedule.unroll(row)
    schedule.vectorize(column)
    # Last, since the initialisation becomes a block that no longer counts as a reduction.
    schedule.decompose_reduction(block, term)
    return str(tvm.ir.save_json(schedule.mod))
