"""Which device a model is compiled for where both are asked for: what is expected of each, copies counted."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from farm.artifacts import devices
from farm.artifacts import make as artifacts
from farm.artifacts.manifest import GpuCode, Manifest, Tensor, WorkloadServed, open_artifact
from farm.cli import model_artifacts
from farm.errors import CodeRefusedError, PermanentError, UsageError
from farm.inventory.board_types import load_board_types
from farm.search import gpus
from tests.unit.artifacts import LIBRARY, make_manifest

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


def test_a_device_without_code_leaves_it_to_the_other() -> None:
    """It is taken whatever its time is, known or not, and the manifest says why the other was not."""
    taken, said = devices.choose({"cpu": make(None)}, {"gpu": CodeRefusedError("ptxas refuses the code")}, NANO)
    assert (taken, said) == ("cpu", {"devices": {}, "not_made": {"gpu": "ptxas refuses the code"}})
    taken, said = devices.choose({"cpu": make(1e-3), "gpu": make(1e-4, gpu=CODE)}, {}, NANO)
    assert (taken, set(said["devices"]), said["not_made"]) == ("gpu", {"cpu", "gpu"}, {})


def test_the_manifest_and_the_command_say_why_a_device_was_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The artifact of the other one is written."""

    def compile_one(order: artifacts.CompileOrder, *_: Any) -> tuple[Manifest, dict[str, bytes]]:
        if order.board_type.pipeline == gpus.PIPELINE:
            raise CodeRefusedError("the kernel takes 99999 registers per block")
        return make(None), {"model.so": LIBRARY}

    monkeypatch.setattr(artifacts, "_compile", compile_one)
    kinds = [gpus.require_device(NANO, each) for each in gpus.list_devices(gpus.BOTH)]
    orders: Any = [SimpleNamespace(board_type=kind) for kind in kinds]
    nothing: Any = None
    written = artifacts.make_faster(orders, tmp_path / "art", nothing, nothing)
    assert open_artifact(tmp_path / "art").manifest == written.manifest
    assert (written.manifest.device, list(written.manifest.not_made)) == ("cpu", ["gpu"])
    model_artifacts._show(written, False, 0.0)
    assert "taken for the cpu, since no code can be made for the gpu: the kernel takes 99999" in capsys.readouterr().out


def test_no_device_with_code_is_an_error_that_names_both() -> None:
    """What is wrong with the model itself is said once."""
    with pytest.raises(PermanentError, match="for a jetson-nano: not for the cpu: no a; not for the gpu: no b"):
        devices.choose({}, {"cpu": PermanentError("no a"), "gpu": CodeRefusedError("no b")}, NANO)
    with pytest.raises(PermanentError, match=r"^a bad model$"):
        devices.choose({}, {"cpu": PermanentError("a bad model"), "gpu": PermanentError("a bad model")}, NANO)


def test_what_is_measured_runs_on_one_device() -> None:
    """`both` is refused there, with what to do; for compiling it stands for two devices, of boards that have a GPU."""
    with pytest.raises(UsageError, match="for `farm model compile` alone"):
        gpus.require_device(NANO, gpus.BOTH)
    assert gpus.list_devices(gpus.BOTH) == ("cpu", "gpu")
    with pytest.raises(UsageError, match="has no GPU"):
        [gpus.require_device(load_board_types()["raspberry-pi-4"], each) for each in gpus.list_devices(gpus.BOTH)]
