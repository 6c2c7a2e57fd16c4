"""Modules that compile at once, and what becomes of them in a build farm."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, wait

from farm.campaign.engine.builds import BuildAnswer, BuildFarm
from farm.search import tvm_env

tvm = tvm_env.load()

TIMEOUT_S = 90.0


def make_module(size: int) -> str:
    from tvm import te

    a = te.placeholder((size,), name="A")
    b = te.compute((size,), lambda i: a[i] + 1.0, name="B")
    return str(tvm.ir.save_json(tvm.IRModule({"main": te.create_prim_func([a, b])})))


def collect(farm: BuildFarm, count: int) -> list[BuildAnswer]:
    found: list[BuildAnswer] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S:g} s for {count - len(found)} builds"
        if pending := farm.pending:
            wait(pending, 0.2, FIRST_COMPLETED)
        found += farm.poll()
    return found
