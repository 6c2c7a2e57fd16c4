"""A workload for tests of stores and campaigns, which nothing compiles."""

from __future__ import annotations

from typing import Any

from farm.values import Workload


def make_workload(hash: str = "w", **changes: Any) -> Workload:
    """Return a convolution with one argument."""
    given: dict[str, Any] = {
        "name": f"conv2d {hash}",
        "flop": 1e6,
        "weight": 1,
        "arguments": (((1, 2), "float32"),),
        "module_json": "{}",
        "target": {"kind": "llvm"},
        "pipeline": "graph/2",
    }
    return Workload(hash, **given | changes)
