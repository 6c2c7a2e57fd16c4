"""Which device a model is compiled for where both are asked for: what is expected of each, copies counted."""

from __future__ import annotations

from typing import Any

import pytest

from farm.artifacts import devices
from farm.artifacts.manifest import GpuCode, Manifest, Tensor, WorkloadServed
from farm.errors import PermanentError, UsageError
from farm.inventory.board_types import load_board_types
from farm.search import gpus
from tests.unit.artifacts import make_manifest

NANO = load_board_types()["jetson-nano"]
CODE = GpuCode(arch="sm_53", ptx="6.5", kernels=1, registers=1, shared_bytes=0, threads=1, spilled_bytes=0)


def make(latency_s: float | None = 1e-3, **changes: Any) -> Manifest:
    """An artifact with one workload that takes so long."""
    served = WorkloadServed(
        hash="0", name="conv2d", flop=1.0, weight=1, algorithm="direct", source="rule", latency_s=latency_s
    )
    return make_manifest(workloads=(served,), predicted_latency_s=latency_s, **changes)


def test_copies_count_for_a_gpu_alone() -> None:
    """A GPU's inputs and outputs are brought to it and back, each with a start and its bytes."""
    large = Tensor(name="x", shape=(1, 3, 1024, 1024), dtype="float32")
    on_cpu, on_gpu, with_more = (
        devices.estimate(make(**each), NANO) for each in ({}, {"gpu": CODE}, {"gpu": CODE, "inputs": (large,)})
    )
    assert (on_cpu.latency_s, on_cpu.copies_s) == (1e-3, 0.0)
    assert on_gpu.latency_s == pytest.approx(1e-3 + on_gpu.copies_s)
    assert on_gpu.copies_s > 0
    more_bytes = large.size_bytes - make().inputs[0].size_bytes
    assert with_more.copies_s - on_gpu.copies_s == pytest.approx(2 * more_bytes / gpus.count_memory_rate(NANO))


def test_no_device_is_taken_where_a_time_is_unknown() -> None:
    """The workload that nobody knows anything of is named."""
    with pytest.raises(PermanentError, match="no prediction for conv2d"):
        devices.estimate(make(None), NANO)


def test_what_is_measured_runs_on_one_device() -> None:
    """`both` is refused there, with what to do; for compiling it stands for two devices, of boards that have a GPU."""
    with pytest.raises(UsageError, match="for `farm model compile` alone"):
        gpus.require_device(NANO, gpus.BOTH)
    assert gpus.list_devices(gpus.BOTH) == ("cpu", "gpu")
    with pytest.raises(UsageError, match="has no GPU"):
        [gpus.require_device(load_board_types()["raspberry-pi-4"], each) for each in gpus.list_devices(gpus.BOTH)]
