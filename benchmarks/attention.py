"""Attention as exporters write it, and encoders built of it, beside ONNX Runtime: medians of alternating rounds.

Compiled without a trial. Attention: 12 heads of 64, 128 and 512 tokens: the operator of opset 23, with and without a
causal mask; written out by other operators, with and without a mask of the tokens; four queries for each key.
Encoders: the sizes of MiniLM-L6 and bge-small (384 wide, 12 heads, 6 and 12 layers) with a mask of the tokens, and
of ViT-S/16 (384 wide, 6 heads, 12 layers, 197 tokens), seeded weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import _machine
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from farm.artifacts.compile import compile_model
from farm.search import tvm_env
from farm.search.tvm_env import tvm

HEADS, SIZE = 12, 64
FORMS = ("operator", "causal", "written out", "masked", "grouped")
ENCODERS = {"MiniLM-L6": (384, 12, 6, 128), "bge-small": (384, 12, 12, 128), "ViT-S/16": (384, 6, 12, 197)}


@dataclasses.dataclass
class Graph:
    """Nodes and weights, written one after another."""

    nodes: list[onnx.NodeProto] = dataclasses.field(default_factory=list)
    weights: list[onnx.TensorProto] = dataclasses.field(default_factory=list)
    random: np.random.Generator = dataclasses.field(default_factory=lambda: np.random.default_rng(1))

    def op(self, operator: str, *inputs: Any, **attributes: Any) -> str:
        """Add a node; inputs that are no names become constants. Return its output's name."""
        names = []
        for each in inputs:
            if not isinstance(each, str):
                self.weights.append(numpy_helper.from_array(np.asarray(each), f"w{len(self.weights)}"))
                each = self.weights[-1].name
            names.append(each)
        self.nodes.append(helper.make_node(operator, names, [f"t{len(self.nodes)}"], **attributes))
        return self.nodes[-1].output[0]

    def weight(self, *shape: int) -> np.ndarray[Any, Any]:
        """Make seeded weights."""
        return (self.random.standard_normal(shape) / shape[0] ** 0.5).astype("float32")

    def linear(self, data: str, width: int, outputs: int) -> str:
        """Add a dense layer over the last axis."""
        return self.op("Add", self.op("MatMul", data, self.weight(width, outputs)), self.weight(outputs))

    def model(self, inputs: Mapping[str, np.ndarray[Any, Any]], output: str, opset: int) -> onnx.ModelProto:
        """Make a model with fixed shapes."""
        infos = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in inputs.items()
        ]
        result = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "attention", infos, [result], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and what it is given."""

    name: str
    tokens: int
    model: onnx.ModelProto
    inputs: dict[str, np.ndarray[Any, Any]]


def list_cases() -> Iterator[Case]:
    """List attention in all forms, then the encoders."""
    random = np.random.default_rng(1)
    for tokens, form in itertools.product((128, 512), FORMS):
        inputs = {name: random.standard_normal((1, HEADS, tokens, SIZE)).astype("float32") for name in "qkv"}
        graph = Graph()
        if form in ("operator", "causal"):
            output = graph.op("Attention", "q", "k", "v", is_causal=int(form == "causal"))
        else:
            mask = ""
            if form == "masked":
                inputs["mask"] = _mask(tokens)
                mask = add_mask(graph)
            if form == "grouped":
                inputs |= {name: inputs[name][:, : HEADS // 4] for name in "kv"}
            key, value = (_repeat(graph, name, tokens) if form == "grouped" else name for name in "kv")
            output = attend(graph, "q", graph.op("Transpose", key, perm=[0, 1, 3, 2]), value, SIZE, mask)
        yield Case(form, tokens, graph.model(inputs, output, 23), inputs)
    for name, (width, heads, layers, tokens) in ENCODERS.items():
        yield encoder(name, width, heads, layers, tokens)


def encoder(name: str, width: int, heads: int, layers: int, tokens: int) -> Case:
    """Make an encoder: layers after Hugging Face's BertLayer (with a mask) and ViTLayer (norms before)."""
    graph, is_text = Graph(), not name.startswith("ViT")
    inputs = {"data": graph.random.standard_normal((1, tokens, width)).astype("float32")}
    mask = ""
    if is_text:
        inputs["mask"] = _mask(tokens)
        mask = add_mask(graph)

    def norm(data: str) -> str:
        return graph.op("LayerNormalization", data, np.ones(width, "float32"), np.zeros(width, "float32"), axis=-1)

    def self_attention(data: str) -> str:
        parts = []
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            heads_apart = graph.op("Reshape", graph.linear(data, width, width), [1, tokens, heads, width // heads])
            parts.append(graph.op("Transpose", heads_apart, perm=perm))
        seen = graph.op("Transpose", attend(graph, *parts, width // heads, mask), perm=[0, 2, 1, 3])
        return graph.linear(graph.op("Reshape", seen, [1, tokens, width]), width, width)

    def feed_forward(data: str) -> str:
        inner = graph.linear(data, width, 4 * width)
        erf = graph.op("Add", graph.op("Erf", graph.op("Div", inner, np.float32(2**0.5))), np.float32(1))
        return graph.linear(graph.op("Mul", graph.op("Mul", inner, erf), np.float32(0.5)), 4 * width, width)

    data = "data"
    for _ in range(layers):
        for part in (self_attention, feed_forward):
            data = norm(graph.op("Add", part(data), data)) if is_text else graph.op("Add", part(norm(data)), data)
    return Case(name, tokens, graph.model(inputs, data, 17), inputs)


def attend(graph: Graph, query: str, key: str, value: str, size: int, mask: str) -> str:
    """Write attention out; `key` is transposed, `mask` is added to the scores."""
    scores = graph.op("Div", graph.op("MatMul", query, key), np.float32(size**0.5))
    if mask:
        scores = graph.op("Add", scores, mask)
    return graph.op("MatMul", graph.op("Softmax", scores, axis=-1), value)


def add_mask(graph: Graph) -> str:
    """Turn the mask of tokens (1: seen) into what is added to scores."""
    wide = graph.op("Cast", graph.op("Unsqueeze", "mask", [1, 2]), to=TensorProto.FLOAT)
    return graph.op("Mul", graph.op("Sub", np.float32(1), wide), np.float32(np.finfo("float32").min))


def _mask(tokens: int) -> np.ndarray[Any, Any]:
    return (np.arange(tokens)[None] < tokens * 3 // 4).astype("int64")


def _repeat(graph: Graph, name: str, tokens: int) -> str:
    wide = graph.op("Expand", graph.op("Unsqueeze", name, [2]), [1, HEADS // 4, 4, tokens, SIZE])
    return graph.op("Reshape", wide, [1, HEADS, tokens, SIZE])


def time_once(call: Callable[[], object], seconds: float) -> float:
    """Median seconds of a call, over so many seconds."""
    taken: list[float] = []
    while sum(taken) < seconds:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def measure(case: Case, threads: int, folder: pathlib.Path, options: Any) -> dict[str, Any]:
    """Compile a case, compare it with ONNX Runtime and time both in turns."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(case.model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    shapes = {name: value.shape for name, value in case.inputs.items()}
    compiled = compile_model(case.model, shapes, tvm_env.host_target(threads), "graph/2", [], None)
    path = folder / f"{case.name.replace('/', '-')}-{case.tokens}-{threads}.so"
    path.write_bytes(compiled.library)
    tvm.get_global_func("runtime.config_threadpool")(1, threads)
    machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
    given = [tvm.runtime.tensor(each) for each in case.inputs.values()]
    expected = session.run(None, case.inputs)[0]
    off = np.abs(machine["main"](*given).numpy() - expected).max() / np.abs(expected).max()
    pairs = [
        (
            time_once(lambda: machine["main"](*given), options.seconds),
            time_once(lambda: session.run(None, case.inputs), options.seconds),
        )
        for _ in range(options.rounds)
    ]
    return {
        "name": case.name,
        "tokens": case.tokens,
        "threads": threads,
        "ours_ms": _machine.spread([a for a, _ in pairs], 1e3),
        "onnxruntime_ms": _machine.spread([b for _, b in pairs], 1e3),
        "ratio": _machine.spread([a / b for a, b in pairs]),
        "largest_difference": float(off),
    }


def main() -> None:
    """Run all of them and print the figures."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each timing (default: 0.3)")
    parser.add_argument("--rounds", type=int, default=7, help="timings of each (default: 7)")
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rounds = 0.01, 1
    with _machine.only_json() as emit, _machine.scratch() as folder:
        rows = []
        for case, threads in itertools.product((c for c in list_cases() if options.only in c.name), (1, 2)):
            rows.append(measure(case, threads, folder, options))
            said = ", ".join(f"{rows[-1][key]}" for key in ("name", "tokens", "threads", "ratio", "largest_difference"))
            _machine.say(said)
        emit("attention", vars(options), {"attention": rows})


if __name__ == "__main__":
    main()
