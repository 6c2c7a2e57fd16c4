"""Values of another farm's records: what no farm writes is refused, from a file and from a store alike."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from device_agent.protocol import Outcome, ProtocolError, Status
from farm.metaschedule.exchange import require_bundle
from farm.store.imports import RecordBundle
from farm.values import DEFAULT_POINT, Record, Trial
from tests.stored_workloads import make_workload

_WORKLOAD = make_workload()
_RECORD = Record("w", "dense", "local", DEFAULT_POINT, "graph/2", "c", 1e-3, 1e6, 0.0, 0.0, False, "[]", 1.7e9)
_TRIAL = Trial(1, "w", "c", DEFAULT_POINT, 1, Outcome(Status.OK, latency_s=(1e-3,)), "[]", board_type="local")


def make_bundle(
    record: dict[str, Any] | None = None,
    trial: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
    at: float = 1.7e9,
) -> RecordBundle:
    return RecordBundle(
        "other",
        (dataclasses.replace(_RECORD, **(record or {})),),
        ((dataclasses.replace(_TRIAL, **(trial or {})), at),),
        (dataclasses.replace(_WORKLOAD, **(workload or {})),),
        {1: "tiny-cnn"},
    )


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_a_good_bundle_is_taken() -> None:
    """Evidence and origin as a farm writes them included."""
    evidence = {"boards": {"b": {"median_s": 1.0}}, "rivals": [{"ratio": 1.1, "low": 1.0, "high": None}]}
    origin = {"store": "other", "source": "/srv", "by": "ann", "at": 1.7e9}
    require_bundle(make_bundle({"evidence": evidence, "origin": origin}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"record": {"median_s": 1e-10, "flop": 0.0}},
        {"record": {"median_s": 1e9}},
        {"record": {"median_s": 1e-7, "flop": 1e12}},
        {"record": {"median_s": float("nan")}},
        {"record": {"median_s": True}},
        {"record": {"flop": float("inf")}},
        {"record": {"max_abs_error": -1.0}},
        {"record": {"verified_at": 1e300}},
        {"record": {"verified_at": 5.0}},
        {"record": {"board_type": "Local"}},
        {"record": {"operating_point": "d\u0435fault"}},
        {"trial": {"board_type": "local "}},
        {"trial": {"outcome": Outcome(Status.OK, latency_s=(1e-10,))}},
        {"workload": {"name": "dense\u200b"}},
        {"record": {"verified_at": time.time() + 1e6}},
        {"record": {"candidate": "c" * 2000}},
        {"record": {"workload": "unknown"}},
        {"record": {"evidence": {"boards": 5}}},
        {"record": {"evidence": {"campaign": nest(990)}}},
        {"record": {"evidence": {"x": float("nan")}}},
        {"record": {"origin": {"store": 5}}},
        {"record": {"origin": {"store": "o", "source": "s", "by": "b", "at": 1e300}}},
        {"trial": {"attempt": 2**40}},
        {"trial": {"campaign": 2**70}},
        {"trial": {"held_s": float("inf")}},
        {"trial": {"outcome": Outcome(Status.OK, latency_s=(1e300,))}},
        {"trial": {"outcome": Outcome(Status.OK, latency_s=(1e-3,), started_at=1e300)}},
        {"at": 1e300},
        {"workload": {"flop": 1e300}},
        {"workload": {"target": {"kind": nest(50)}}},
    ],
)
def test_a_value_that_no_farm_writes_is_refused(wrong: dict[str, Any]) -> None:
    """One wrong value, and nothing of the bundle is taken."""
    with pytest.raises((ValueError, ProtocolError, TypeError)):
        require_bundle(make_bundle(**wrong))
