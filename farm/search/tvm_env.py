"""TVM's tuning parts without the minute that its tensor intrinsics cost.

Importing this module imports TVM's compiler and MetaSchedule (`ms`). Call `load` or `load_for` before schedules are
drawn or traces replayed: MetaSchedule's rules look intrinsics up by name.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import logging
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

# Families of tensor intrinsics that MetaSchedule's CPU rules look up by name: x86 for this kind of host and boards,
# arm_cpu for every Jetson. They cost 0.1 and 0.3 s; the package's own __init__ also builds cuda, rocm and hexagon,
# which no CPU target asks for.
_FAMILIES = ("x86", "arm_cpu")
_BY_MACHINE = {"x86_64": ("x86",), "aarch64": ("arm_cpu",)}
_INTRINSICS = "tvm.s_tir.tensor_intrin"
# What `_imported_quickly` changes for a while is the process's: one thread after the other.
_LOADING = threading.RLock()


@functools.cache
def load() -> Any:
    """Import the intrinsics of every family and return the `tvm` module. Later calls cost nothing."""
    for family in _FAMILIES:
        _load_intrinsics(family)
    return tvm


def load_compiler() -> Any:
    """Return the `tvm` module. Its compiler and MetaSchedule were imported with this module."""
    return tvm


def load_for(target: Any) -> None:
    """Import the intrinsics that MetaSchedule's rules look up for one target."""
    machine = str(target.attrs.get("mtriple", "")).partition("-")[0]
    for family in _BY_MACHINE.get(machine, _FAMILIES):
        _load_intrinsics(family)


@functools.cache
def _load_intrinsics(family: str) -> None:
    with _imported_quickly():
        importlib.import_module(f"{_INTRINSICS}.{family}")


@contextlib.contextmanager
def _imported_quickly() -> Iterator[None]:
    """Within the block TVM's modules are imported in half the time; the process is then as it was.

    Three things take it. Each function in TVM's script asks for the stack, and Python looks for each frame's module
    among all there are. Each of TVM's fifty tables of functions asks for all their names, one by one. And the
    collector goes again and again through what stays.
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
        if collecting:
            gc.enable()
        _LOADING.release()


def _import_compiler() -> Any:
    import tvm
    import tvm.s_tir

    if _INTRINSICS not in sys.modules:
        # A stand-in package: `import tvm.s_tir.tensor_intrin`, which TuneContext runs, then finds it and is content.
        package = types.ModuleType(_INTRINSICS)
        package.__path__ = [os.path.join(path, "tensor_intrin") for path in tvm.s_tir.__path__]
        package.__package__ = _INTRINSICS
        sys.modules[_INTRINSICS] = package
        tvm.s_tir.tensor_intrin = package
    import tvm.s_tir.meta_schedule

    return tvm


# XGBoost and TVM share the cores with the builders.
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() or 1)))
with _imported_quickly():
    tvm = _import_compiler()
ms = tvm.s_tir.meta_schedule
for _logger in ("tvm.s_tir.meta_schedule", "tvm.s_tir.meta_schedule.tune_context"):
    logging.getLogger(_logger).setLevel(logging.ERROR)
