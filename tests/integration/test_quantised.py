"""Models in 8 bits compute what ONNX Runtime computes, with integers where they can, on any target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.artifacts import given_model
from farm.artifacts.verify import compare
from farm.models import inputs as model_inputs
from farm.models import quantise
from farm.models.quantise import open_session
from farm.models.source import resolve_model
from farm.search import cores, traces, tvm_env
from farm.search.families import rule
from farm.search.graph import dots, pipelines
from farm.search.workloads import Prepared, prepare_model

tvm = tvm_env.load()
from tvm.target import codegen  # noqa: E402

RNG = np.random.default_rng(5)
HOST = tvm_env.host_target(1)
# Without and with the instruction; neither depends on the machine that runs this.
PLAIN = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64", "num-cores": 1}
ABLE = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver4", "num-cores": 2}
PAIRS = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2}
HALF = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "alderlake", "num-cores": 2}
ORIN = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a78", "mattr": ["+neon"], "num-cores": 4}
NANO = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57", "mattr": ["+neon"], "num-cores": 4}


class Graph:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def constant(self, array: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"t{len(self.nodes)}"], **attributes))
        return str(self.nodes[-1].output[0])

    def quantised(self, x: str, scale: float = 0.02, zero: int = 117, dtype: str = "uint8") -> str:
        numbers = [self.constant(np.float32(scale)), self.constant(np.array(zero, dtype))]
        return self.node("DequantizeLinear", self.node("QuantizeLinear", x, *numbers), *numbers)

    def weight(self, *shape: int, axis: int | None = 0) -> str:
        scale = np.float32(0.01) if axis is None else RNG.uniform(0.002, 0.01, shape[axis]).astype("float32")
        data = self.constant(RNG.integers(-127, 128, shape).astype("int8"))
        zero = self.constant(np.zeros(np.shape(scale), "int8"))
        return self.node(
            "DequantizeLinear", data, self.constant(scale), zero, **({} if axis is None else {"axis": axis})
        )

    def bias(self, count: int) -> str:
        scale = self.constant(np.full(count, 1e-4, "float32"))
        data = self.constant(RNG.integers(-3000, 3000, count).astype("int32"))
        return self.node("DequantizeLinear", data, scale, self.constant(np.zeros(count, "int32")), axis=0)

    def finish(self, y: str) -> onnx.ModelProto:
        self.nodes[-1].output[0] = "y"
        graph = helper.make_graph(
            self.nodes,
            "bytes",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def padded_convolution() -> onnx.ModelProto:
    """Zero is no zero byte, and is what the convolution pads with; three channels fill no group of four."""
    g = Graph((2, 3, 9, 9))
    conv = g.node("Conv", g.quantised("x"), g.weight(16, 3, 3, 3), g.bias(16), pads=[1, 1, 1, 1], strides=[2, 2])
    return g.finish(g.quantised(g.node("Relu", conv), 0.03, 0))


def residual() -> onnx.ModelProto:
    """Two convolutions and a sum with what came before; the first result is read twice. Scales make no exact halves."""
    g = Graph((1, 8, 6, 6))
    first = g.quantised(g.node("Relu", g.node("Conv", g.quantised("x"), g.weight(8, 8, 1, 1), g.bias(8))), 0.0107, 0)
    conv = g.node("Conv", first, g.weight(8, 8, 3, 3, axis=None), pads=[1, 1, 1, 1])
    return g.finish(g.quantised(g.node("Relu", g.node("Add", g.quantised(conv, 0.0513, 120), first)), 0.0419, 0))


def signed() -> onnx.ModelProto:
    g = Graph((1, 8, 6, 6))
    conv = g.node("Conv", g.quantised("x", 0.03, -7, "int8"), g.weight(8, 8, 3, 3), pads=[1, 1, 1, 1])
    return g.finish(g.quantised(conv, 0.05, 3, "int8"))


def depthwise_and_pool() -> onnx.ModelProto:
    g = Graph((1, 8, 8, 8))
    conv = g.node("Conv", g.quantised("x"), g.weight(8, 1, 3, 3), g.bias(8), pads=[1, 1, 1, 1], group=8)
    pool = g.node("MaxPool", g.quantised(conv, 0.01, 100), kernel_shape=[2, 2], strides=[2, 2])
    return g.finish(g.quantised(pool, 0.01, 100))


def dense() -> onnx.ModelProto:
    """Gemm with a transposed weight, and a MatMul of rows by a weight with scales per column."""
    g = Graph((5, 24))
    first = g.quantised(g.node("Gemm", g.quantised("x"), g.weight(12, 24), g.bias(12), transB=1), 0.03, 90)
    return g.finish(g.quantised(g.node("MatMul", first, g.weight(12, 8, axis=1)), 0.05, 128))


def product_of_data() -> onnx.ModelProto:
    g = Graph((4, 4))
    return g.finish(g.node("MatMul", g.quantised("x"), g.quantised(g.node("Relu", "x"), 0.02, 0)))


GRAPHS = [padded_convolution, residual, signed, depthwise_and_pool, dense, product_of_data]


def prepared(model: onnx.ModelProto, config: Mapping[str, Any]) -> Prepared:
    shapes = {spec.name: spec.static_shape for spec in model_inputs.read_inputs(model)}
    return prepare_model(model, shapes, config, "graph/2")


def scheduled(model: onnx.ModelProto, config: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """What the rule makes of a model for a target, and the families that it takes."""
    import tvm.s_tir.meta_schedule as ms

    ready = prepared(model, config)
    database = ms.database.MemoryDatabase()
    families = []
    for workload in ready.workloads:
        entry = database.commit_workload(tvm.ir.load_json(workload.module_json))
        found = traces.find_default(workload, entry, ready.target)
        assert found is not None, workload.name
        families.append(found.family)
        # As records are: the trace alone, applied to the function again.
        again = traces.restore(traces.dump(found.candidate, entry, ready.target), entry, ready.target)
        database.commit_tuning_record(traces.as_record(again, entry, ready.target, 1.0))
    finished = pipelines.finish(ready.module, ready.target, database, ready.pipeline)
    return tvm.relax.build(finished, ready.target), families


def run(executable: Any, value: Any) -> Any:
    return tvm.relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(value)).numpy()


def reference(model: onnx.ModelProto, value: Any) -> Any:
    """What the operators compute one by one: ONNX Runtime's own integers round in other places."""
    return open_session(model.SerializeToString(), optimised=False).run(None, {"x": value})[0]


def has_instruction(config: Mapping[str, Any]) -> bool:
    """Whether this machine's programs may use it."""
    return dots.find_instruction(tvm_env.make_target(config)) is not None


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("config", [PLAIN, PAIRS, HOST], ids=["plain", "pairs", "host"])
def test_a_graph_computes_what_onnx_runtime_computes(
    build: Callable[[], onnx.ModelProto], config: Mapping[str, Any]
) -> None:
    """To a step of the output's bytes in a few places, where a sum is nearly a half; nearly everywhere exactly."""
    if config == PAIRS and not codegen.target_has_features("avx2", tvm_env.make_target(HOST)):
        config = PLAIN
    model = build()
    value = RNG.standard_normal(shape_of(model)).astype("float32")
    executable, _ = scheduled(model, config)
    found, wanted = run(executable, value), reference(model, value)
    assert found.shape == wanted.shape
    assert wanted.std() > 0
    off = np.abs(found - wanted)
    assert off.max() <= 0.051
    assert (off > 1e-5).mean() < 0.02


def shape_of(model: onnx.ModelProto) -> tuple[int, ...]:
    (spec,) = model_inputs.read_inputs(model)
    return spec.static_shape


@pytest.mark.parametrize(
    ("config", "instruction"),
    [(ABLE, "vpdpbusd"), (HALF, "vpdpbusd"), (PAIRS, "vpmaddubsw"), (ORIN, "sdot")],
    ids=["512 bits", "256 bits", "256 bits in pairs", "arm"],
)
@pytest.mark.parametrize("build", [padded_convolution, residual, signed, dense], ids=lambda build: build.__name__)
def test_products_of_bytes_are_the_instructions(
    build: Callable[[], onnx.ModelProto], config: Mapping[str, Any], instruction: str
) -> None:
    """For a target that has it every product is in the family, whichever bytes the model's are."""
    executable, families = scheduled(build(), config)
    products = sum(node.op_type in ("Conv", "Gemm", "MatMul") for node in build().graph.node)
    if (build, config) == (dense, PAIRS):
        products -= 1  # its twelve channels fill no vectors of eight
    assert families.count("dots") == products
    assert instruction in executable.mod.imports[0].inspect_source("asm")


def test_a_target_without_products_of_bytes_has_plain_integers() -> None:
    """Plain x86-64's functions sum up in 32 bits, and are of the dense family."""
    assert not has_instruction(PLAIN)
    assert find_families(PLAIN) == {"dense"}


def test_pairs_are_exact_at_the_ends() -> None:
    """-128 and 127 times -127 and 127, all of one sign: two products just have room in 16 bits."""
    data = RNG.choice(np.array([-128, 127], "int8"), (6, 64))
    weights = RNG.choice(np.array([-127, 127], "int8"), (64, 16))
    data[0], data[1] = -128, 127
    weights[:, 0], weights[:, 1] = 127, -127
    function = dots.make_product(data.shape, "int8", weights.shape[1], 2).with_attr("global_symbol", "main")
    module = tvm.IRModule({"main": function})
    able = codegen.target_has_features("avx2", tvm_env.make_target(HOST))
    outlook = rule.read_outlook(module, cores.core_of(PAIRS))
    assert outlook.family.name == "dots"
    for _, plan in outlook.plans()[:3] if able else ():
        schedule = tvm.s_tir.Schedule(module)
        outlook.apply(schedule, plan)
        result = tvm.runtime.tensor(np.zeros((6, 16), "int32"))
        built = tvm.compile(schedule.mod, tvm_env.make_target(PAIRS))
        built["main"](tvm.runtime.tensor(data), tvm.runtime.tensor(dots.pack(weights)), result)
        np.testing.assert_array_equal(result.numpy(), data.astype("int32") @ weights.astype("int32"))


def test_a_nano_multiplies_eight_bytes_at_a_time() -> None:
    """It has no instruction for sums of four products: they are made of three that it has."""
    assert has_instruction(NANO)
    assert "dense" not in find_families(NANO)
    code = scheduled(residual(), NANO)[0].mod.imports[0].inspect_source("asm")
    assert "smlal" in code
    assert "dot\t" not in code


def find_families(target: dict[str, Any]) -> set[str]:
    products = [w for w in prepared(residual(), target).workloads if "int8_conv2d" in w.name]
    assert len(products) == 2, [w.name for w in products]
    outlooks = [rule.read_outlook(tvm.ir.load_json(each.module_json), cores.core_of(target)) for each in products]
    return {outlook.family.name for outlook in outlooks if outlook is not None}


def test_layers_that_differ_in_their_scales_alone_are_one_workload() -> None:
    """Scales are tensors, not numbers in the code."""
    g = Graph((1, 8, 6, 6))
    x = g.quantised("x")
    for scale, zero in ((0.03, 100), (0.05, 120), (0.02, 90)):
        x = g.quantised(g.node("Conv", x, g.weight(8, 8, 1, 1), g.bias(8)), scale, zero)
    ready = prepared(g.finish(x), ABLE)
    assert [w.weight for w in ready.workloads if w.name == "int8_conv2d_quantize 1x1 6x6x8>8"] == [2]


def test_a_quantised_zoo_model_is_near_the_float_one() -> None:
    """From `farm model quantize` through import, pipeline and rule: within the loss that was reported."""
    source = resolve_model("tiny-cnn")
    specs = model_inputs.read_inputs(source.load())
    examples = given_model.read_calibration("random", specs, 4)
    done = quantise.quantise(source, examples)
    executable, families = scheduled(onnx.load_model_from_string(done.onnx_bytes), HOST)
    (name,) = examples[0]
    wanted = open_session(source.onnx_bytes).run(None, dict(examples[0]))[0]
    found = run(executable, examples[0][name])
    assert compare([found], [wanted], 500.0).matches
    assert not compare([found], [wanted]).matches
    assert families
