"""A compiler that stays warm: one candidate at a time, for one script. Started by `builder`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from farm.dropin.children import Parent, StoppedError
from farm.errors import FarmError
from farm.search.tvm_errors import find_reason

# A script that proposes nothing for long keeps its compilers; this only bounds one look.
_LOOK_S = 60.0


def main(arguments: list[str]) -> None:
    """Serve until the script is gone. Messages: `("build", module JSON, target)`, answered by `("built", …)`."""
    from farm.search import builder, tvm_env

    parent = Parent(arguments)
    tvm_env.load_compiler()
    parent.send("ready")
    while True:
        message = parent.receive(_LOOK_S)
        if message is not None:
            parent.send("built", *_build(builder.build_candidate, *message[1:]))


def _build(build: Any, module_json: str, target: Mapping[str, Any]) -> tuple[bytes | None, str]:
    """The library, or None and the reason."""
    try:
        return build(module_json, target), ""
    except (OSError, FarmError) as error:
        return None, f"not the candidate's fault: {_one_line(error)}"
    except Exception as error:  # noqa: BLE001 - edge of a process: what the compiler raises is the candidate's fault
        return None, _one_line(error)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {find_reason(error)}"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except StoppedError:
        sys.exit(0)
