"""TVM's tuning parts without the minute that importing all of its tensor intrinsics takes, and TVM's targets.

Importing this module imports TVM's compiler and MetaSchedule (`ms`). Call `load` or `load_for` before drawing schedules
or replaying traces: MetaSchedule's rules look intrinsics up by name.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import logging
import os
import platform
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

from tvm.backend import loader as backends
from tvm.target import Target, codegen

from farm.errors import UsageError
from farm.inventory.core_types import find_core_type

# Families of tensor intrinsics for CPU targets: x86 for hosts, arm_cpu for Jetsons. They import in 0.1 and 0.3 s; the
# package's __init__ would also import cuda, rocm and hexagon.
_FAMILIES = ("x86", "arm_cpu")
_BY_MACHINE = {"x86_64": ("x86",), "aarch64": ("arm_cpu",)}
# Compute capability 8.0, Ampere.
_FIRST_WITH_TENSOR_CORES = 80
_INTRINSICS = "tvm.s_tir.tensor_intrin"
# `_imported_quickly` changes global state, so one thread at a time.
_LOADING = threading.RLock()


@functools.cache
def load() -> Any:
    """Import the intrinsics of every family and return the `tvm` module. Cached."""
    for family in _FAMILIES:
        _load_intrinsics(family)
    return tvm


def load_compiler() -> Any:
    """Return the `tvm` module; its compiler and MetaSchedule were imported with this module."""
    return tvm


def load_for(target: Any) -> None:
    """Import the intrinsics that MetaSchedule looks up for one target.

    Those of tensor cores only where TVM's rules for GPUs ask for them: they take half a second.
    """
    if str(target.kind.name) == "cuda":
        if int(str(target.attrs["arch"]).removeprefix("sm_")) >= _FIRST_WITH_TENSOR_CORES:
            _load_intrinsics("cuda")
        target = target.host
    machine = str(target.attrs.get("mtriple", "")).partition("-")[0]
    for family in _BY_MACHINE.get(machine, _FAMILIES):
        _load_intrinsics(family)


@functools.cache
def _load_intrinsics(family: str) -> None:
    with _imported_quickly():
        importlib.import_module(f"{_INTRINSICS}.{family}")


@contextlib.contextmanager
def _imported_quickly() -> Iterator[None]:
    """Halve the time of importing TVM within the block.

    TVM's script decorators inspect the stack, each of its fifty function tables lists all global names, and the garbage
    collector scans what stays. The block caches the first two and stops the collector.
    """
    from tvm_ffi import registry

    _LOADING.acquire()
    find_module, list_names, collecting = inspect.getmodule, registry.list_global_func_names, gc.isenabled()
    known: list[str] = []

    def find_module_of(thing: Any, _filename: str | None = None) -> Any:
        if inspect.isframe(thing):
            return sys.modules.get(thing.f_globals.get("__name__", ""))
        return find_module(thing, _filename)

    def list_known_names() -> list[str]:
        count = registry.get_global_func("ffi.FunctionListGlobalNamesFunctor")()(-1)
        if count != len(known):  # names are added only
            known[:] = list_names()
        return known

    inspect.getmodule, registry.list_global_func_names = find_module_of, list_known_names  # type: ignore[assignment]
    gc.disable()
    try:
        yield
    finally:
        inspect.getmodule, registry.list_global_func_names = find_module, list_names
        gc.freeze()  # it stays to the end
        if collecting:
            gc.enable()
        _LOADING.release()


def _import_compiler() -> Any:
    import tvm
    import tvm.s_tir
    from tvm.backend import _autoload_backends

    # Of all that TVM loads by itself only the runtime's further functions: sorting, random numbers.
    _autoload_backends._BUILTIN_BACKENDS = ()
    _autoload_backends._load_builtin_backends()

    if _INTRINSICS not in sys.modules:
        # A stub package satisfies the `import tvm.s_tir.tensor_intrin` in TuneContext.
        package = types.ModuleType(_INTRINSICS)
        package.__path__ = [os.path.join(path, "tensor_intrin") for path in tvm.s_tir.__path__]
        package.__package__ = _INTRINSICS
        sys.modules[_INTRINSICS] = package
        tvm.s_tir.tensor_intrin = package
    import tvm.s_tir.meta_schedule

    return tvm


# TVM would load the backends of nine kinds of devices, a seventh of its time; `farm.search.target` loads ours.
os.environ.setdefault("TVM_DEVICE_BACKEND_AUTOLOAD", "0")
# XGBoost and TVM share the cores with the compilers.
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() or 1)))
with _imported_quickly():
    tvm = _import_compiler()
ms = tvm.s_tir.meta_schedule
for _logger in ("tvm.s_tir.meta_schedule", "tvm.s_tir.meta_schedule.tune_context"):
    logging.getLogger(_logger).setLevel(logging.ERROR)


def host_target(cores: int) -> dict[str, Any]:
    """Return the target of this machine with `cores` cores: triple and CPU as LLVM detects them."""
    machine = platform.machine()
    return {
        "kind": "llvm",
        # LLVM's triple names the vendor of the wheel's build machine; the generic one has the same ABI.
        "mtriple": f"{machine}-linux-gnu",
        "mcpu": str(codegen.llvm_get_system_cpu()),
        "num-cores": cores,
    }


def make_target(config: Mapping[str, Any]) -> Any:
    """Make a `tvm.target.Target` from its dict form. Raises UsageError where TVM refuses it."""
    if config.get("kind") == "cuda":
        backends.load("cuda")
    try:
        return Target(dict(config))
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"TVM refuses the target {dict(config)}: {error}") from error


def make_code_target(config: Mapping[str, Any]) -> Any:
    """Make the target for code generation: the same, except for a CPU that is better `compiled_as` another.

    Schedules, records and files name the original CPU. Raises UsageError where TVM refuses it.
    """
    mcpu, machine = str(config.get("mcpu", "")), str(config.get("mtriple", "")).partition("-")[0]
    core = find_core_type(mcpu, machine) if mcpu else None
    return make_target({**config, "mcpu": core.compiled_as[mcpu]} if core and mcpu in core.compiled_as else config)
