"""Turn a board type's target into TVM's, asking LLVM where the target is this machine itself.

What code is made for may go by another name than what it is for: some of LLVM's descriptions of cores are poor.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from tvm.target import Target, codegen

from farm.errors import UsageError
from farm.inventory.core_types import find_core_type


def host_target(cores: int) -> dict[str, Any]:
    """The target of this machine: triple and CPU as LLVM detects them, `cores` of them."""
    machine = platform.machine()
    return {
        "kind": "llvm",
        # LLVM's own triple names the vendor of the wheel's build machine; the generic one says the same of the ABI.
        "mtriple": f"{machine}-linux-gnu",
        "mcpu": str(codegen.llvm_get_system_cpu()),
        "num-cores": cores,
    }


def make_target(config: Mapping[str, Any]) -> Any:
    """A `tvm.target.Target` from its dict form. Raises UsageError where TVM refuses it."""
    try:
        return Target(dict(config))
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"TVM refuses the target {dict(config)}: {error}") from error


def make_code_target(config: Mapping[str, Any]) -> Any:
    """The target that code is generated for: the same, but for a core that is better `compiled_as` another one.

    Schedules, records and files name the core itself. Raises UsageError where TVM refuses it.
    """
    mcpu, machine = str(config.get("mcpu", "")), str(config.get("mtriple", "")).partition("-")[0]
    core = find_core_type(mcpu, machine) if mcpu else None
    return make_target({**config, "mcpu": core.compiled_as[mcpu]} if core and mcpu in core.compiled_as else config)
