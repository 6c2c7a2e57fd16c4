"""The golden kernel: one fixed, versioned program that every board runs now and then, so that boards and days compare.

Built here, in a process of its own that ends (a compiler takes seconds and hundreds of megabytes), and kept under
FARM_HOME. When it runs, and what its time says, is decided in `farm.services` and `farm.crew.calibration`.

It fills a table of 4 MiB with products of two vectors and multiplies the table with a narrow matrix, on one core. The
table exceeds the 2 MiB of second-level cache of a Jetson Nano or TX2, so it goes to memory and comes back; the product
is arithmetic that follows the core's clock. The schedule is written down, never searched for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
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

from farm import folders
from farm.errors import DeadlineError, FarmError, PermanentError, UnavailableError
from farm.processes.compile_subprocess import compile_in_subprocess
from farm.search.build.builder import try_to_build
from farm.search import tvm_env
from tvm import te
import tvm

# Raise the number whenever what the kernel does changes: times of different ones are never compared.
NAME = "golden-matmul/1"
ENTRY = "main"
_ROWS, _COLUMNS = 1024, 8
# Rows and columns of the result that are summed up in registers: 8 NEON or SSE registers.
_TILE_ROWS = 4
_LANES = 16
_SEED = 20

# Loading the compiler takes 3 to 10 s on two busy cores, building 0.5 s.
BUILD_TIMEOUT_S = 90.0
_LOCK_LOOK_S = 0.05
# Summing 1024 products of float32 in another order: see `farm/artifacts/verify.py`.
_TOLERANCE = 1e-4
_DIGEST_BYTES = 64

# For boards whose type names no target for their architecture: what every such machine runs, so that a virtual board
# or this machine itself keeps its times whichever host it is on.
_GENERIC: dict[str, dict[str, Any]] = {
    "x86_64": {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v2", "num-cores": 1},
    "aarch64": {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "generic", "mattr": ["+neon"], "num-cores": 1},
}

Arrays = dict[str, npt.NDArray[Any]]
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class GoldenKernel:
    """A linked library whose `ENTRY` takes `make_inputs()`. `name` changes with whatever may change its speed."""

    name: str
    library: bytes = dataclasses.field(repr=False)


class GoldenKernels:
    """Golden kernels by target, built once per FARM_HOME. Thread-safe; several processes may share the folder."""

    def __init__(self, folder: Path) -> None:
        """`folder` takes the libraries; it is made when there is something to keep."""
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[str, GoldenKernel] = {}

    def require(self, target: Mapping[str, Any]) -> GoldenKernel:
        """The kernel for a target, from memory, from the folder, or built (some seconds).

        Raises DeadlineError where the compiler does not end in time, UnavailableError where it cannot build it.
        """
        name, key = name_kernel(target)
        with self._lock:
            if name not in self._known:
                self._known[name] = GoldenKernel(name, self._fetch(target, self._folder / f"{key}.bin"))
            return self._known[name]

    def _fetch(self, target: Mapping[str, Any], path: Path) -> bytes:
        if (library := _find_kept(path)) is not None:
            return library
        deadline = time.monotonic() + BUILD_TIMEOUT_S
        with contextlib.ExitStack() as stack:
            try:
                folders.make_private(self._folder)
                stack.enter_context(_locked(self._folder / "lock", deadline))
            except OSError as error:
                _log.warning("cannot keep the golden kernel in %s: %s", self._folder, error)
            if (library := _find_kept(path)) is not None:  # somebody else built it while we waited
                return library
            library = build(target, max(deadline - time.monotonic(), BUILD_TIMEOUT_S / 2))
            try:
                _keep(path, library)
            except OSError as error:  # built again next time, then
                _log.warning("cannot keep the golden kernel in %s: %s", path, error)
        return library


def plan_target(board_type_target: Mapping[str, Any] | None, architecture: str) -> dict[str, Any]:
    """The target to build for: the board type's where it is of the board's `architecture` (as uname -m), else generic.

    A virtual board runs its host's code, whatever its type's architecture is. Raises UnavailableError for an
    architecture that there is no kernel for.
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
    """The name that samples are kept under, and the full hash behind it: of program, target and compiler."""
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
    """All arguments in order, the result's place last; the same everywhere."""
    random = np.random.default_rng(_SEED)
    return {
        "arg_000": random.standard_normal(_ROWS).astype("float32"),
        "arg_001": random.standard_normal(_ROWS).astype("float32"),
        "arg_002": random.standard_normal((_ROWS, _COLUMNS)).astype("float32"),
        "arg_003": np.zeros((_ROWS, _COLUMNS), "float32"),
    }


def find_mismatch(outputs: Mapping[str, npt.NDArray[Any]]) -> str:
    """How what a board computed differs from what NumPy does; empty where it does not."""
    if not outputs:
        return "the golden kernel gave nothing back"
    result, wanted = list(outputs.values())[-1], _compute_reference()
    if result.shape != wanted.shape or result.dtype != wanted.dtype:
        return f"the golden kernel gave back {result.dtype}{list(result.shape)}"
    if not np.isfinite(result).all():
        return "the golden kernel computed values that are no numbers"
    error = float(np.abs(result - wanted).max() / np.abs(wanted).max())
    return "" if error <= _TOLERANCE else f"the golden kernel's result is wrong, by {error:.1e} of its largest value"


@functools.cache
def _compute_reference() -> npt.NDArray[Any]:
    x, y, z, _ = (array.astype("float64") for array in make_inputs().values())
    return np.asarray(np.outer(x, y) @ z, dtype="float32")


@functools.cache
def _read_versions() -> dict[str, str]:
    found = {}
    for name in ("apache-tvm", "apache-tvm-ffi", "ziglang"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _find_kept(path: Path) -> bytes | None:
    """A library that was kept, or None where there is none or what is there is not what was written."""
    try:
        digest, library = (content := path.read_bytes())[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    except OSError:
        return None
    if library and hashlib.sha256(library).hexdigest().encode() == digest:
        return library
    _log.warning("%s is damaged; building the golden kernel again", path)
    return None


def _keep(path: Path, library: bytes) -> None:
    """Write in one step, so that nobody ever reads half of it."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_bytes(hashlib.sha256(library).hexdigest().encode() + library)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    """Be the only builder; whoever waits longer than `deadline` (monotonic) builds beside the other one."""
    with folders.open_private(path, os.O_WRONLY, "wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOCK_LOOK_S)
        yield


def build(target: Mapping[str, Any], timeout_s: float = BUILD_TIMEOUT_S) -> bytes:
    """The kernel's library, built in a process of its own. Raises DeadlineError, UnavailableError."""
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
    """The scheduled function in TVM's JSON."""


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
    # Last: it is what makes the sums' zeros a block of their own, which no longer passes for a reduction.
    schedule.decompose_reduction(block, term)
    return str(tvm.ir.save_json(schedule.mod))
