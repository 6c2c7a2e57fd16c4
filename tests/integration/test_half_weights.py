"""Weights in 16 bits: which functions get them, what these compute, and that schedules and records know them."""

from __future__ import annotations

import functools
import pathlib
import random
from typing import Any

import numpy as np
import onnxruntime
import pytest

from farm.artifacts.compile import Compiled, compile_model
from farm.artifacts.verify import compare
from farm.models.inputs import make_inputs, read_inputs, resolve_inputs
from farm.models.onnx_builder import GraphBuilder
from farm.search import cores, traces, tvm_env
from farm.search.families.rule import read_outlook
from farm.search.graph import canonical, half_precision
from farm.search.traces import find_default
from farm.search.workloads import Prepared, prepare_model

tvm = tvm_env.load()

NANO = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57", "mattr": ["+neon"], "num-cores": 4}
AVX2 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2}
AVX512 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver4", "num-cores": 2}
SHAPES = {"x": (1, 16, 12, 12)}
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "dense": ((1, 9, 14, 8), (3, 3, 8, 24), lambda topi, x, w: topi.nn.conv2d_nhwc(x, w, 1, [1, 1, 1, 1], 1)),
    "pixels": ((1, 7, 7, 40), (1, 1, 40, 32), lambda topi, x, w: topi.nn.conv2d_nhwc(x, w, 1, [0, 0, 0, 0], 1)),
    "row": ((1, 40), (40, 36), lambda topi, x, w: topi.matmul(x, w)),
    "odd": ((3, 31), (31, 13), lambda topi, x, w: topi.matmul(x, w)),
}


@functools.cache
def make_model() -> bytes:
    """Two convolutions, which use each weight often, and two dense layers, one of 9.4 MB."""
    graph = GraphBuilder(0)
    x = graph.relu(graph.conv(graph.input("x", SHAPES["x"]), 16, 1))
    x = graph.relu(graph.conv(x, 16, 3, stride=2, pad=1))
    x = graph.relu(graph.dense(graph.flatten(x, 16 * 6 * 6), 4096))
    return graph.finish("made", {"y": (graph.dense(x, 8), (1, 8))})


def load_model() -> Any:
    import onnx

    return onnx.load_model_from_string(make_model())


def prepare(pipeline: str, config: Any = NANO) -> Prepared:
    return prepare_model(load_model(), SHAPES, config, pipeline)


def list_halved(workloads: Any) -> list[str]:
    found = [w.name for w in workloads if half_precision.is_halved(w.arguments)]
    assert found == [w.name for w in workloads if w.name.startswith(half_precision.PREFIX)]
    return found


def test_only_what_waits_for_weights_gets_them() -> None:
    """By prediction dense layers alone, on request all that register tiles read, otherwise none. Workloads with
    weights in float32 are those of the plain pipeline; the others are workloads of their own.
    """
    assert list_halved(prepare("graph/2").workloads) == []
    large, small = "bf16_matmul_add_relu 576>4096", "bf16_matmul_add 4096>8"
    assert list_halved(prepare("graph/2-bf16").workloads) == [large, small]
    # Here the small one's weights are still in the last cache at the next inference.
    assert list_halved(prepare("graph/2-bf16", AVX2).workloads) == [large]
    assert len(list_halved(prepare("graph/2-bf16-all").workloads)) == 4
    plain, halved = (prepare(name).workloads for name in ("graph/2", "graph/2-bf16"))
    known = {w.hash for w in plain}
    assert all((w.hash in known) != half_precision.is_halved(w.arguments) for w in halved)
    assert {w.pipeline for w in halved} == {"graph/2"}
    flop = {w.name: w.flop for w in plain}
    assert {w.name.removeprefix(half_precision.PREFIX): w.flop for w in halved} == flop


def test_a_record_leads_back_to_its_schedule() -> None:
    """The trace of a function with such weights survives as text."""
    import tvm.s_tir.meta_schedule as ms

    prepared = prepare("graph/2-bf16", AVX2)
    (workload,) = (w for w in prepared.workloads if half_precision.is_halved(w.arguments))
    entry = ms.database.MemoryDatabase().commit_workload(tvm.ir.load_json(workload.module_json))
    found = find_default(workload, entry, prepared.target)
    assert found.family == "dense"
    again = traces.restore(traces.dump(found.candidate, entry, prepared.target), entry, prepared.target)
    tvm.ir.assert_structural_equal(again.sch.mod, found.candidate.sch.mod)


def test_a_model_computes_nearly_what_it_did(tmp_path: pathlib.Path) -> None:
    """All weights in 16 bits: within two hundredths of the peak of ONNX Runtime's output, in half the room."""
    inputs = make_inputs(resolve_inputs(read_inputs(load_model()), {}), 0)
    wanted = onnxruntime.InferenceSession(make_model()).run(None, dict(inputs))
    plain, halved = (compile_here(pipeline) for pipeline in ("graph/2", "graph/2-bf16-all"))
    assert len(list_halved([each.workload for each in halved.served])) == 4
    assert len(halved.library) < 0.6 * len(plain.library)
    exact, rounded = (run(each.library, inputs, tmp_path) for each in (plain, halved))
    assert compare(exact, wanted).matches
    error = compare(rounded, wanted, 200.0)
    assert error.matches
    assert error.max_rel_error > error.rms_rel_error > 1e-4


def compile_here(pipeline: str) -> Compiled:
    return compile_model(load_model(), SHAPES, tvm_env.host_target(2), pipeline, [], None)


def run(library: bytes, inputs: Any, folder: pathlib.Path) -> list[Any]:
    from tvm.runtime.vm import VirtualMachine

    path = folder / f"model{len(library)}.so"
    path.write_bytes(library)
    machine = VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
    return [machine["main"](*[tvm.runtime.tensor(each) for each in inputs.values()]).numpy()]


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_widens_weights(name: str) -> None:
    """The best plan and one drawn, of each kind of core, give what float32 gives of the rounded weights."""
    from tvm import te, topi

    data, weight, build = CASES[name]
    operands = te.placeholder(data, name="x"), te.placeholder(weight, name="w")
    plain = canonical.canonicalise(
        te.create_prim_func([*operands, build(topi, *operands)], index_dtype_override="int64")
    )
    assert half_precision.find_weight(plain) == 1
    halved = half_precision.halve_function(plain, 1)
    assert half_precision.find_weight(halved) is None
    draw = random.Random(name)
    functions = {"reference": plain}
    for config in (NANO, AVX2, AVX512):
        outlook = read_outlook(tvm.IRModule({"main": halved}), cores.core_of(config))
        assert outlook.facts.halved
        plans = [plan for _, plan in outlook.plans()]
        for at, plan in enumerate((plans[0], draw.choice(plans))):
            schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": halved}))
            outlook.apply(schedule, plan)
            functions[f"{config['mcpu']}_{at}".replace("-", "_")] = schedule.mod["main"]
    module = tvm.IRModule({key: value.with_attr("global_symbol", key) for key, value in functions.items()})
    library = tvm.compile(module, target=tvm_env.make_target(tvm_env.host_target(2)))
    rng = np.random.default_rng(0)
    x = rng.standard_normal(data).astype("float32")
    rounded = half_precision.round_weights(rng.standard_normal(weight).astype("float32"))
    results = {}
    for key in functions:
        taken = rounded.astype("float32") if key == "reference" else rounded
        result = tvm.runtime.tensor(np.full([int(d) for d in plain.params[-1].shape], np.nan, "float32"))
        library[key](tvm.runtime.tensor(x), tvm.runtime.tensor(taken), result)
        results[key] = result.numpy()
    for found in results.values():
        np.testing.assert_allclose(found, results["reference"], rtol=1e-4, atol=1e-4)


def test_code_for_a_nano_widens_in_one_instruction() -> None:
    """No copy of the weights is written: `shll` stands beside the FMAs."""
    prepared = prepare("graph/2-bf16")
    workload = next(w for w in prepared.workloads if half_precision.is_halved(w.arguments))
    outlook = read_outlook(tvm.ir.load_json(workload.module_json), cores.core_of(NANO))
    schedule = tvm.s_tir.Schedule(tvm.ir.load_json(workload.module_json))
    outlook.apply(schedule, outlook.plans()[0][1])
    code = tvm.tirx.build(schedule.mod, target=prepared.target).inspect_source("asm")
    assert 0 < code.count("\tshll") <= code.count("\tfmla")


def test_weights_that_would_be_infinite_stay_as_they_are() -> None:
    """What bfloat16 cannot hold is no number afterwards: such a layer keeps float32."""
    graph = GraphBuilder(0)
    weight = graph._constant(np.full((8, 8), 3.4e38, "float32"))
    node = graph._node("MatMul", (graph.input("x", (1, 8)), weight), 8)
    data = graph.finish("large", {"y": (node, (1, 8))})
    import onnx

    found = prepare_model(onnx.load_model_from_string(data), {"x": (1, 8)}, NANO, "graph/2-bf16-all")
    assert list_halved(found.workloads) == []
