"""Import TVM's tuning parts without the minute that its tensor intrinsics cost.

Call `load()` before anything else in a process that searches, `load_compiler()` in one that only imports models or
builds; nothing here does either.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import types
from typing import Any

# Families of tensor intrinsics that MetaSchedule's CPU rules look up by name: x86 for this kind of host and boards,
# arm_cpu for every Jetson. They cost 0.15 and 0.7 s; the package's own __init__ also builds cuda, rocm and hexagon
# (20 to 65 s on two cores), which no CPU target asks for.
_FAMILIES = ("x86", "arm_cpu")
_INTRINSICS = "tvm.s_tir.tensor_intrin"


@functools.cache
def load() -> Any:
    """Import TVM ready for tuning and return the `tvm` module. Later calls cost nothing."""
    tvm = load_compiler()
    for family in _FAMILIES:
        importlib.import_module(f"{_INTRINSICS}.{family}")
    return tvm


@functools.cache
def load_compiler() -> Any:
    """Import TVM ready for all but search, which needs intrinsics; returns the `tvm` module. Later calls cost nothing.

    Functions that were scheduled with intrinsics hold their code and are built without them.
    """
    # The XGBoost model and TVM share the cores with the builders; a thread pool per library would fight over them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1))))
    # A user's setting, or that of the process which started us: without the compiler nothing can be tuned.
    os.environ.pop("TVM_USE_RUNTIME_LIB", None)
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

    for logger in ("tvm.s_tir.meta_schedule", "tvm.s_tir.meta_schedule.tune_context"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return tvm
