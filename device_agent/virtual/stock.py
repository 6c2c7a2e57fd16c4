"""Time code of stock TVM clients on a virtual board: for as long as it takes, or for a set time.

The farm's clients are timed in a worker (`device_agent/worker/timing.py`), at the board's pace (`pace.py`).
"""

from __future__ import annotations

import json
import struct
import time
from typing import Any

from device_agent.sysfs import Tree
from device_agent.virtual.tree import PACE

# TVM's name of a client's `time_evaluator`.
_EVALUATOR = "runtime.RPCTimeEvaluator"


def set_pace(tree: Tree) -> None:
    """Make this process time for stock clients as the virtual board `tree` says (`timing` of its faults)."""
    from tvm_ffi import get_global_func, register_global_func

    evaluator = get_global_func(_EVALUATOR)

    def make(
        module: Any, name: str, device: int, index: int, number: int, repeat: int, min_repeat_ms: int, *rest: Any
    ) -> Any:
        set_s = float(json.loads(tree.read(PACE))["timing_s"])
        if not set_s:
            return evaluator(module, name, device, index, number, repeat, min_repeat_ms, *rest)
        once = evaluator(module, name, device, index, 1, 1, 0, *rest)

        def time_it(*tensors: Any) -> bytes:
            began = time.monotonic()
            (call_s,) = struct.unpack("@d", once(*tensors))
            time.sleep(max(0.0, began + set_s - time.monotonic()))
            return struct.pack(f"@{repeat}d", *[call_s] * repeat)

        return time_it

    register_global_func(_EVALUATOR, make, override=True)
