"""Names of blocks and buffers, which come from the model around a function and not from what the function does.

Structural hashes leave names out, but a trace finds blocks by them: `lv10_red` in one model is `lv36_red` in another.
Here they are numbered in the order in which they stand, so that equal functions have equal names.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tvm

# MetaSchedule's post-processors ask for this block by name.
ROOT = "root"
_CANONICAL = re.compile(r"block_\d+|root")


def canonical_json(module: Any) -> str:
    """A function's module in TVM's JSON with canonical names; structurally equal to what it was."""
    graph = json.loads(tvm.ir.save_json(module))
    nodes = graph["nodes"]
    counts: dict[str, int] = {}
    # TVM writes a node after what it is made of, so the order is that of the structure.
    for node in list(nodes):
        if node["type"] == "s_tir.SBlock":
            field, kind = "name_hint", "block"
        elif node["type"] == "ir.Var":
            buffer = nodes[node["data"]["ty"]]["type"] == "tirx.BufferType"
            field, kind = "name", "buffer" if buffer else "index"
        else:
            continue
        if kind == "block" and nodes[node["data"][field]]["data"] == ROOT:
            continue
        number = counts[kind] = counts.get(kind, -1) + 1
        # The old string stays where it is: other nodes may share it.
        node["data"][field] = len(nodes)
        nodes.append({"type": "ffi.String", "data": f"{kind}_{number}"})
    return str(tvm.ir.save_json(tvm.ir.load_json(json.dumps(graph))))


def list_blocks(module: Any) -> list[str]:
    """The names of a function's blocks in the order in which `canonical_json` numbers them, the root left out."""
    nodes = json.loads(tvm.ir.save_json(module))["nodes"]
    found = [nodes[node["data"]["name_hint"]]["data"] for node in nodes if node["type"] == "s_tir.SBlock"]
    return [name for name in found if name != ROOT]


def is_canonical(block: str) -> bool:
    """Whether `canonical_json` may have given this name."""
    return _CANONICAL.fullmatch(block) is not None


def number_blocks(blocks: list[str]) -> dict[str, str]:
    """From the names of `list_blocks` to the canonical ones."""
    return {name: f"block_{number}" for number, name in enumerate(blocks)}
