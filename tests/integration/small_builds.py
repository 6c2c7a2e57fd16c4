"""Modules that compile at once, and what becomes of them in a build farm."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait

from farm.campaign.engine.builds import BuildFarm
from farm.search import tvm_env
from farm.search.codegen.build_pool import BuildResult

tvm = tvm_env.load()

TIMEOUT_S = 240.0


def make_module(size: int) -> str:
    from tvm import te

    a = te.placeholder((size,), name="A")
    b = te.compute((size,), lambda i: a[i] + 1.0, name="B")
    return str(tvm.ir.save_json(tvm.IRModule({"main": te.create_prim_func([a, b])})))


def collect(farm: BuildFarm, *answers: Future[BuildResult]) -> list[BuildResult]:
    deadline = time.monotonic() + TIMEOUT_S
    while not all(answer.done() for answer in answers):
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S:g} s for {len(answers)} builds"
        if pending := farm.pending:
            wait(pending, 0.2, FIRST_COMPLETED)
        farm.poll()
    return [answer.result() for answer in answers]
