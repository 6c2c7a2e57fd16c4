"""Which device a model is compiled for where both are asked for: what is expected of each, copies counted."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from farm.artifacts import compile
from farm.artifacts import make as artifacts
from farm.artifacts.artifact_folder import open_artifact
from farm.artifacts.compile import Served
from farm.artifacts.manifest import GpuCode, Manifest, ModelFacts, RecordUsed, Tensor, WorkloadServed
from farm.cli import model_artifacts
from farm.errors import CodeRefusedError, FarmError, InternalError, ModelRefusedError, PermanentError, UsageError
from farm.inventory.board_types import load_board_types
from farm.search import gpus
from farm.settings import Settings
from tests.unit.artifacts import LIBRARY, make_manifest

NANO = load_board_types()["jetson-nano"]
CODE = GpuCode(arch="sm_53", ptx="6.5", kernels=1, registers=1, shared_bytes=0, threads=1, spilled_bytes=0)


def make(latency_s: float | None = 1e-3, **changes: Any) -> Manifest:
    served = WorkloadServed(
        hash="0", name="conv2d", flop=1.0, weight=1, algorithm="direct", source="rule", latency_s=latency_s
    )
    return make_manifest(workloads=(served,), predicted_latency_s=latency_s, **changes)


def test_copies_count_for_a_gpu_alone() -> None:
    """A GPU's inputs and outputs are brought to it and back, each with a start and its bytes."""
    large = Tensor(name="x", shape=(1, 3, 1024, 1024), dtype="float32")
    on_cpu, on_gpu, with_more = (
        compile.estimate(make(**each), NANO) for each in ({}, {"gpu": CODE}, {"gpu": CODE, "inputs": (large,)})
    )
    assert (on_cpu.latency_s, on_cpu.copies_s) == (1e-3, 0.0)
    assert on_gpu.latency_s == pytest.approx(1e-3 + on_gpu.copies_s)
    assert on_gpu.copies_s > 0
    more_bytes = large.size_bytes - make().inputs[0].size_bytes
    assert with_more.copies_s - on_gpu.copies_s == pytest.approx(2 * more_bytes / gpus.count_memory_rate(NANO))


def test_no_device_is_taken_where_a_time_is_unknown() -> None:
    """The workload that is unknown is named."""
    with pytest.raises(PermanentError, match="no prediction for conv2d"):
        compile.estimate(make(None), NANO)


def test_a_device_without_code_leaves_it_to_the_other() -> None:
    """It is taken at any time, known or not, and the manifest says why the other was not."""
    taken, said = compile.choose_device({"cpu": make(None)}, {"gpu": CodeRefusedError("ptxas refuses the code")}, NANO)
    assert (taken, said) == ("cpu", {"devices": {}, "not_made": {"gpu": "ptxas refuses the code"}})
    taken, said = compile.choose_device({"cpu": make(1e-3), "gpu": make(1e-4, gpu=CODE)}, {}, NANO)
    assert (taken, set(said["devices"]), said["not_made"]) == ("gpu", {"cpu", "gpu"}, {})


def compile_both(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, error: FarmError) -> Any:
    def compile_one(order: artifacts.CompileOrder, *_: Any) -> tuple[Manifest, dict[str, bytes]]:
        if order.board_type.pipeline == gpus.PIPELINE:
            raise error
        return make(None), {"model.so": LIBRARY}

    monkeypatch.setattr(artifacts, "_compile", compile_one)
    kinds = [gpus.require_device(NANO, each) for each in gpus.list_devices(gpus.BOTH)]
    orders: Any = [SimpleNamespace(board_type=kind) for kind in kinds]
    store: Any = None
    return artifacts.make_faster(orders, folder, Settings(home=str(folder.parent / "home")), store)


@pytest.mark.parametrize("kind", [CodeRefusedError, ModelRefusedError])
def test_the_manifest_and_the_command_say_why_a_device_was_not_taken(
    kind: type[FarmError], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The artifact of the other one is written, whether TVM refused the model or an assembler its code."""
    written = compile_both(monkeypatch, tmp_path / "art", kind("the kernel takes 99999 registers per block"))
    assert open_artifact(tmp_path / "art").manifest == written.manifest
    assert (written.manifest.device, list(written.manifest.not_made)) == ("cpu", ["gpu"])
    assert [each["not_made"] for each in model_artifacts._show(written, 0.0)] == [written.manifest.not_made]
    assert "taken for the cpu, since no code was made for the gpu: the kernel takes 99999" in capsys.readouterr().out


def test_imported_records_are_told_apart(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says how many of the records used no board of this farm has verified; the table names each."""
    used = RecordUsed(
        fit="exact", candidate="c", board_type="jetson-nano", operating_point="default", latency_s=1e-5,
        simulated=False, verified_at=1.0,
    )  # fmt: skip
    workloads = tuple(
        WorkloadServed(
            hash=str(is_imported), name="dense", flop=1.0, weight=1, algorithm="", source="record", latency_s=1e-5,
            record=used.model_copy(update={"imported": is_imported}),
        )
        for is_imported in (False, True)
    )  # fmt: skip
    said: list[str] = []
    files, settings = {"model.so": LIBRARY}, Settings(home=str(tmp_path))
    artifact = artifacts._write(tmp_path / "a", make_manifest(workloads=workloads), files, settings, said.append)
    assert said == ["tiny-cnn: 1 of 2 records used are imported: no board of this farm has verified them"]
    list(model_artifacts._show(artifact, 0.0))
    assert "imported record" in capsys.readouterr().out


def test_a_bug_of_ours_is_called_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other device's code is kept, with a warning; what is wrong with the order itself ends everything."""
    written = compile_both(monkeypatch, tmp_path / "art", InternalError("KeyError: 3"))
    assert written.manifest.not_made == {"gpu": "internal error of the farm: KeyError: 3"}
    assert "no code for the gpu: internal error of the farm: KeyError: 3" in caplog.text
    with pytest.raises(UsageError, match="no record of"):
        compile_both(monkeypatch, tmp_path / "other", UsageError("no record of it was made at that point"))


def test_no_device_with_code_is_an_error_that_names_both() -> None:
    """What is wrong with the model itself is said once."""
    with pytest.raises(PermanentError, match="for a jetson-nano: not for the cpu: no a; not for the gpu: no b"):
        compile.choose_device({}, {"cpu": PermanentError("no a"), "gpu": CodeRefusedError("no b")}, NANO)
    with pytest.raises(UsageError, match="not for the cpu: no a; not for the gpu: no b"):
        compile.choose_device({}, {"cpu": ModelRefusedError("no a"), "gpu": ModelRefusedError("no b")}, NANO)
    with pytest.raises(InternalError, match="not for the gpu: internal error of the farm: KeyError: 3"):
        compile.choose_device({}, {"cpu": PermanentError("no a"), "gpu": InternalError("KeyError: 3")}, NANO)
    with pytest.raises(PermanentError, match=r"^a bad model$"):
        compile.choose_device({}, {"cpu": PermanentError("a bad model"), "gpu": PermanentError("a bad model")}, NANO)


def test_what_makes_the_missing_records_is_offered_whole() -> None:
    """`--missing refuse` names the command with all that decides what the workloads are."""
    kind = NANO.model_copy(update={"pipeline": "graph/2-exact-bf16"})
    about = ModelFacts(name="mlp", sha256="0" * 64, origin="zoo:mlp", shapes=("x=4,64",), batch=4)
    order: Any = SimpleNamespace(board_type=kind, opened=SimpleNamespace(about=about), source=about)
    with pytest.raises(UsageError, match="1 of 1 workloads of mlp have no record") as caught:
        artifacts._require_records(order, [Served(SimpleNamespace(name="dense"))])  # type: ignore[arg-type]
    assert caught.value.hint.startswith(
        "`farm tune mlp --board-type jetson-nano --batch 4 --shape x=4,64 --exact --weights bf16` makes some"
    )


def test_what_is_measured_runs_on_one_device() -> None:
    """`both` is refused there, with what to do; for compiling it stands for two devices, of boards that have a GPU."""
    with pytest.raises(UsageError, match="for `farm model compile` only"):
        gpus.require_device(NANO, gpus.BOTH)
    assert gpus.list_devices(gpus.BOTH) == ("cpu", "gpu")
    with pytest.raises(UsageError, match="has no GPU"):
        [gpus.require_device(load_board_types()["raspberry-pi-4"], each) for each in gpus.list_devices(gpus.BOTH)]
