"""Turn a board type's target into TVM's; ask LLVM about the local machine.

Code may be generated for another CPU name than the target's, since some of LLVM's CPU models are poor.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from tvm.backend import loader as backends
from tvm.target import Target, codegen

from farm.errors import UsageError
from farm.inventory.core_types import find_core_type


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
