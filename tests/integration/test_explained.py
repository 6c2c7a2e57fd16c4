"""The code of a record, and what explains an artifact's layers: on a small model, for a Nano's processor and GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farm import settings
from farm.artifacts import explain, make
from farm.artifacts.given_model import open_model
from farm.errors import UsageError
from farm.gpu import code
from farm.inventory.board_types import require_board_type
from farm.report import model_pages
from farm.search import gpus, traces, tvm_env
from farm.search.codegen import lowering
from farm.search.families import family
from farm.search.workloads import prepare_model
from farm.store import Store

tvm = tvm_env.load()
NANO = require_board_type("jetson-nano")


def print_workload(index: int, target: dict[str, Any], pipeline: str, *forms: str) -> list[str]:
    """The code of one of tiny-cnn's workloads by its predicted plan, in each form."""
    import tvm.s_tir.meta_schedule as ms

    opened = open_model("tiny-cnn")
    shapes = {spec.name: spec.static_shape for spec in opened.inputs}
    prepared = prepare_model(opened.source.load(), shapes, target, pipeline)
    workload = prepared.workloads[index]
    entry = ms.database.MemoryDatabase().commit_workload(tvm.ir.load_json(workload.module_json))
    found = traces.find_default(workload, entry, prepared.target)
    assert found is not None
    trace = traces.dump(found.candidate, entry, prepared.target)
    return [lowering.print_code(workload.module_json, trace, target, form) for form in forms]


def test_a_cpu_record_has_tir_llvm_and_assembly() -> None:
    """They are the board's: vector FMAs of Arm; PTX is refused in a sentence."""
    target = NANO.target.to_tvm()
    tir, llvm, asm = print_workload(1, target, NANO.pipeline, "tir", "llvm", "asm")
    assert "T.prim_func" in tir
    assert 'target triple = "aarch64' in llvm
    hot = asm.partition("\n# \n")[0].splitlines()
    assert "the hot loop" in hot[0]
    assert sum("fmla" in line for line in hot) > len(hot) / 2
    assert hot[-1].split()[-1] == hot[1].strip("# :")  # the branch to its label
    with pytest.raises(UsageError, match="CPU code: it has no --ptx"):
        lowering.require_form("ptx", target)


def test_a_virtual_boards_gpu_record_has_the_real_gpus_code() -> None:
    """CUDA C and PTX for sm_53, also of a plan that changes a layout; assembly is refused."""
    target = gpus.to_config(NANO.name, code.plan_gpu(NANO), NANO.target.to_tvm(), simulated=True)
    cuda, ptx = print_workload(0, target, gpus.PIPELINE, "cuda", "ptx")
    assert "__global__" in cuda
    assert ".target sm_53" in ptx
    assert ".entry" in ptx
    with pytest.raises(UsageError, match="GPU code: it has no --asm"):
        lowering.require_form("asm", target)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_layers_are_explained(tmp_path: Path, device: str) -> None:
    """Each has a plan in words, an estimate, shares of the roofline and a limit; a chart shows them."""
    loaded = settings.load()
    with Store(tmp_path / "farm.db") as store:
        order = make.CompileOrder(open_model("tiny-cnn"), gpus.require_device(NANO, device))
        artifact = make.make_artifact(order, tmp_path / "artifact", loaded, store)
        document = explain.explain(artifact, order.opened, store)
    assert len(document["layers"]) == len(artifact.manifest.workloads)
    ruled = [each for each in document["layers"] if each["source"] == "rule"]
    assert ruled
    for each in ruled:
        assert each["words"]
        assert each["limit"] in family.LIMITS
        assert each["estimated_s"] == pytest.approx(each["total_s"] / each["weight"])
        assert each["measured_s"] is None
        assert 0 <= each["compute_share"] < 3
    assert document["whole"] is None
    # Four cores, each with four lanes, or a GPU with 128, each an FMA per cycle, at their highest clocks.
    lanes, freqs_hz = (16, NANO.clusters[0].freqs_hz) if device == "cpu" else (128, NANO.gpu.freqs_hz)
    assert document["roofline"]["flop_per_s"] == pytest.approx(2 * lanes * max(freqs_hz))
    chart = model_pages.plan_layers(document)
    assert sum(len(marks.x) for marks in chart.list_marks()) == sum(bool(e["total_s"]) for e in document["layers"])
