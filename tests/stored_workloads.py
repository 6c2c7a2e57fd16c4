"""Workloads for tests of stores and campaigns, which nothing compiles, and trials and records of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from device_agent.protocol import Outcome, Status
from farm.values import DEFAULT_POINT, Record, Trial, Workload


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


def make_trial(
    candidate: str = "c1",
    median_s: float | None = 1.0,
    status: Status | None = None,
    simulated: bool = False,
    **changes: Any,
) -> Trial:
    """A trial of w1 on a Nano in campaign 1; with neither a time nor a status it computed a wrong result."""
    samples = () if median_s is None else (median_s,)
    status = status or (Status.OK if samples else Status.WRONG_RESULT)
    outcome = Outcome(status, latency_s=samples, board="nano-1", simulated=simulated)
    given: dict[str, Any] = {"campaign": 1, "workload": "w1", "operating_point": DEFAULT_POINT, "attempt": 1}
    given |= {"board_type": "jetson-nano", "outcome": outcome, "trace_json": "[]"}
    return Trial(candidate=candidate, **given | changes)


def make_record(median_s: float, candidate: str = "c1", **changes: Any) -> Record:
    values = ("w1", "conv2d w1", "jetson-nano", DEFAULT_POINT, "graph/2", candidate, median_s, 1e6, 0.0, 1e-6, False)
    return dataclasses.replace(Record(*values, "[]"), **changes)
