"""What the graph pipeline `graph/2` leaves to run: few functions, which compute what ONNX Runtime computes."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import onnx
import pytest

from farm.models import inputs as model_inputs
from farm.search import cores, tvm_env, workloads
from farm.search.graph import bindings, channel_padding, importer, pipelines
from tests.integration import onnx_graphs
from tests.integration.onnx_graphs import make_model, node, random

tvm = tvm_env.load()

CONFIG = tvm_env.host_target(2)


@pytest.fixture(scope="module")
def host() -> Any:
    return tvm_env.make_target(CONFIG)


def prepare(model: onnx.ModelProto, host: Any) -> tuple[Any, Any]:
    shapes = {spec.name: spec.static_shape for spec in model_inputs.read_inputs(model)}
    return pipelines.prepare(importer.import_onnx(model, shapes), host, pipelines.require_pipeline("graph/2"))


def run(model: onnx.ModelProto, host: Any) -> list[str]:
    """Compile, compare with ONNX Runtime, and give what the compiled model calls, without TVM's numbers."""
    module, used = prepare(model, host)
    assert used.name == "graph/2"
    finished = pipelines.finish(module, host, None, used)
    assert onnx_graphs.largest_error(model, tvm.compile(finished, target=host)) < 1e-4
    calls = [
        binding.value.args[0].name_hint
        for _, function in bindings.list_functions(finished)
        for binding in bindings.list_bindings(function)
        if bindings.is_call(binding.value, "relax.call_tir")
        or bindings.is_call(binding.value, "relax.call_tir_inplace")
    ]
    return ["_".join(w.rstrip("0123456789") for w in name.removeprefix("fused_").split("_")) for name in calls]


def fire(branches: int = 2) -> onnx.ModelProto:
    """Convolutions of one value, of 1x1 and 3x3, joined along their channels, and a convolution that reads them."""
    weights = {"w": random(5, 8 * branches, 1, 1)}
    nodes = []
    for at in range(branches):
        size = 1 + 2 * (at % 2)
        weights[f"w{at}"] = random(8, 8, size, size)
        nodes += [node("Conv", f"x w{at}", f"c{at}", pads=[at % 2] * 4), node("Relu", f"c{at}", f"r{at}")]
    nodes.append(node("Concat", " ".join(f"r{at}" for at in range(branches)), "j", axis=1))
    return make_model([*nodes, node("Conv", "j w", "y")], {"x": (1, 8, 6, 6)}, weights)


def test_joined_values_are_written_where_they_are_read(host: Any) -> None:
    """Three convolutions whose results are joined are three functions, and nothing copies. A concatenation that only
    another one of the same axis reads is taken apart. Where no operand is made for the concatenation alone, TVM's
    own function copies. Rows are joined as channels are.
    """
    calls = collections.Counter(run(fire(3), host))
    assert calls["conv2d_relu"] == 3
    assert not any("concat" in name or "join" in name or "copy" in name for name in calls)
    nodes = [
        node("Conv", "x w", "a"), node("Conv", "x v", "b"), node("Concat", "a b", "i", axis=1),
        node("Relu", "x", "c"), node("Concat", "c i", "y", axis=1),
    ]  # fmt: skip
    calls = run(make_model(nodes, {"x": (1, 8, 6, 6)}, {"w": random(8, 8, 1, 1), "v": random(3, 8, 1, 1)}), host)
    assert not any("concat" in name or "join" in name for name in calls)
    nodes = [node("Concat", "x z", "j", axis=1), node("Relu", "j", "y")]
    assert run(make_model(nodes, {"x": (1, 3, 4, 4), "z": (1, 2, 4, 4)}), host) == ["concatenate_relu"]
    nodes = [node("MatMul", "x w", "a"), node("MatMul", "x v", "b"), node("Concat", "a b", "y", axis=1)]
    calls = run(make_model(nodes, {"x": (1, 4, 6)}, {"w": random(6, 8), "v": random(6, 8)}), host)
    assert calls == ["matmul", "matmul"]


def test_what_others_read_too_is_copied_into_its_part(host: Any) -> None:
    """A value that a concatenation shares with another reader, and one that is joined twice, are copied."""
    nodes = [
        node("Conv", "x w", "a"), node("Relu", "a", "b"), node("Conv", "b v", "c"),
        node("Conv", "b w", "d"), node("Concat", "c b c", "j", axis=1), node("Concat", "j d", "k", axis=1),
        node("Relu", "k", "y"),
    ]  # fmt: skip
    calls = collections.Counter(
        run(make_model(nodes, {"x": (1, 8, 6, 6)}, {"w": random(8, 8, 1, 1), "v": random(8, 8, 1, 1)}), host)
    )
    assert calls["copy"] == 3
    assert not any("join" in name for name in calls)


def test_a_constant_is_joined(host: Any, caplog: pytest.LogCaptureFixture) -> None:
    """TVM folds the copy of a constant, so a function joins the two."""
    nodes = [node("Conv", "x w", "a"), node("Concat", "a c", "y", axis=1)]
    calls = run(make_model(nodes, {"x": (1, 8, 6, 6)}, {"w": random(8, 8, 1, 1), "c": random(1, 8, 6, 6)}), host)
    assert calls.count("join") == 1
    assert not caplog.records


def test_a_joining_function_is_no_workload_and_hashes_are_stable(host: Any) -> None:
    """Only what computes is tuned, and it keeps its identity."""

    def extract() -> list[workloads.Workload]:
        return workloads.extract(prepare(fire(), host)[0], host, CONFIG, "graph/2")

    found = extract()
    assert not any("join" in w.name for w in found)
    assert [(w.name, w.hash) for w in found] == [(w.name, w.hash) for w in extract()]


def conv(x: str, y: str, **attributes: Any) -> onnx.NodeProto:
    """A 3x3 convolution that keeps the size and has eight channels before and after it."""
    return node("Conv", f"{x} w", y, **{"pads": [1] * 4, **attributes})


def with_conv(*nodes: onnx.NodeProto, **weights: Any) -> onnx.ModelProto:
    return make_model(list(nodes), {"x": (1, 8, 6, 6)}, {"w": random(8, 8, 3, 3), **weights})


@pytest.mark.parametrize(
    "nodes",
    [
        [node("LeakyRelu", "a", "b", alpha=0.1)],
        [node("LeakyRelu", "a", "b", alpha=1.5)],
        [node("Sigmoid", "a", "s"), node("Mul", "a s", "b")],
        [node("HardSwish", "a", "b")],
        [node("Clip", "a low high", "b")],
        [node("Elu", "a", "b")],
        [node("Add", "a x", "s"), node("Relu", "s", "b")],
        [node("Mul", "a c", "s"), node("Tanh", "s", "b")],
    ],
    ids=lambda nodes: "-".join(n.op_type for n in nodes),
)
def test_an_activation_between_convolutions_is_a_part_of_the_first(nodes: list[onnx.NodeProto], host: Any) -> None:
    """Two convolutions are two functions; what else there is are the transpositions at the ends."""
    bounds = {"low": np.array(-0.1, "float32"), "high": np.array(0.2, "float32"), "c": random(1, 8, 1, 1)}
    calls = run(with_conv(conv("x", "a"), *nodes, conv("b", "y"), **bounds), host)
    assert sum("conv2d" in name for name in calls) == 2
    assert {name for name in calls if "conv2d" not in name} == {"transpose"}


def test_pooling_and_joining_after_an_activation_keep_the_layout(host: Any) -> None:
    """No transposition but those at the ends, with any layout rules of TVM."""
    nodes = [
        conv("x", "a"), node("LeakyRelu", "a", "b", alpha=0.1), node("Softplus", "b", "c"),
        node("MaxPool", "c", "d", kernel_shape=[2, 2], strides=[2, 2]), conv("d", "e"),
        node("Concat", "e d", "f", axis=1), node("ReduceMean", "f", "g", axes=[2, 3]), node("Conv", "g v", "y"),
    ]  # fmt: skip
    calls = run(with_conv(*nodes, v=random(3, 16, 1, 1)), host)
    assert sum("transpose" in name for name in calls) == 1


def test_a_transposition_stays_where_moving_it_saves_nothing(host: Any) -> None:
    """A sum of a transposed value and another one, read by no transposition, is computed as it is written."""
    nodes = [
        node("Transpose", "x", "a", perm=[0, 2, 1]), node("MatMul", "a w", "b"),
        node("Transpose", "b", "c", perm=[0, 2, 1]), node("Add", "c z", "d"), node("Softmax", "d", "y"),
    ]  # fmt: skip
    calls = run(make_model(nodes, {"x": (1, 4, 6), "z": (1, 8, 6)}, {"w": random(4, 8)}), host)
    assert calls == ["transpose", "matmul", "transpose_add", "softmax"]


def test_convolutions_take_pads_and_images_as_they_come(host: Any) -> None:
    """A Pad of zeros, also on one side only, is no function of its own; one of other values is. Its transposition, and
    slices of what it reads, are no functions of their own. What two convolutions read is transposed once.
    """
    pads = np.array([0, 0, 1, 2, 0, 0, 0, 1])
    zeros = with_conv(node("Pad", "x p", "a"), conv("a", "y"), p=pads)
    assert not any("pad" in name for name in run(zeros, host))
    ones = with_conv(node("Pad", "x p one", "a"), conv("a", "y"), p=pads, one=np.array(1, "float32"))
    assert any("pad" in name for name in run(ones, host))
    nodes = [node("Slice", "x begin end axis", "a"), node("Conv", "a w", "y", pads=[1] * 4)]
    limits = {"begin": np.array([1]), "end": np.array([7]), "axis": np.array([2])}
    model = make_model(nodes, {"x": (1, 3, 9, 8)}, {"w": random(4, 3, 3, 3), **limits})
    assert run(model, host) == ["strided_slice_transpose_conv2d", "transpose"]
    model = make_model([node("Conv", "x w", "y")], {"x": (1, 3, 9, 8)}, {"w": random(4, 3, 3, 3)})
    assert run(model, host) == ["transpose_conv2d", "transpose"]
    nodes = [node("Conv", "x w", "a", pads=[1] * 4), node("Conv", "x v", "b", pads=[1] * 4), node("Mul", "a b", "y")]
    weights = {"w": random(4, 3, 3, 3), "v": random(4, 3, 3, 3)}
    assert run(make_model(nodes, {"x": (1, 3, 6, 6)}, weights), host)[0] == "transpose"


@pytest.mark.parametrize(("shape", "groups"), [((1, 8, 20), 1), ((1, 8, 20), 2), ((1, 8, 5, 6, 7), 1)])
def test_convolutions_of_other_dimensions_have_their_channels_last_too(
    shape: tuple[int, ...], groups: int, host: Any
) -> None:
    """Of one and of three, grouped or not."""
    kernel = (3,) * (len(shape) - 2)
    nodes = [
        node("Conv", "x w", "a", pads=[1] * (2 * len(kernel)), group=groups), node("Relu", "a", "b"),
        node("Conv", "b w", "y", group=groups),
    ]  # fmt: skip
    model = make_model(nodes, {"x": shape}, {"w": random(8, 8 // groups, *kernel)})
    calls = run(model, host)
    assert sum(f"conv{len(kernel)}d" in name for name in calls) == 2
    assert {name for name in calls if "conv" not in name} == {"transpose"}


def test_global_means_leave_nothing_but_a_change_of_shape(host: Any) -> None:
    """A transposition of single pixels and the flattening after it are one reshape, which copies nothing."""
    nodes = [conv("x", "a"), node("GlobalAveragePool", "a", "b"), node("Flatten", "b", "c"), node("MatMul", "c v", "y")]
    assert run(with_conv(*nodes, v=random(8, 4)), host)[1:] == ["mean", "reshape", "matmul"]


@pytest.mark.parametrize(
    ("mcpu", "channels", "pixels", "wanted"),
    [
        ("znver4", 1000, (1,), 1000), ("znver4", 1000, (13, 13), 1008), ("skylake-avx512", 1000, (1,), 1008),
        ("znver4", 24, (56, 56), 24), ("skylake-avx512", 24, (56, 56), 24), ("znver4", 255, (13, 13), 256),
        ("skylake-avx512", 56, (32, 32), 64), ("skylake-avx512", 40, (16, 32), 48), ("znver4", 40, (16, 32), 40),
        ("x86-64-v3", 3, (8, 8), 4), ("skylake-avx512", 3, (8, 8), 8), ("znver4", 1, (8, 8), 1),
    ],
)  # fmt: skip
def test_channels_are_filled_up_where_the_core_gains(
    mcpu: str, channels: int, pixels: tuple[int, ...], wanted: int
) -> None:
    """A vector in halves costs nothing where the core computes it in halves and tiles of it load no more; a scalar loop
    costs much everywhere.
    """
    core = cores.core_of({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu})
    assert channel_padding.widened(channels, 4, pixels, core=core) == wanted


def weights_of(model: onnx.ModelProto) -> list[tuple[int, ...]]:
    """The shapes of the convolutions' and products' weights after `graph/2`, for cores with vectors of 8 lanes."""
    config = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}
    avx2 = tvm_env.make_target(config)
    found = workloads.extract(prepare(model, avx2)[0], avx2, config, "graph/2")
    return sorted(w.arguments[1][0] for w in found if w.kind in ("conv2d", "dense"))


def test_channels_that_fill_no_vector_are_filled_up_and_cut_off_at_the_end(host: Any) -> None:
    """Through bias, activation, pooling over all pixels and the next layer's weights; results are the same."""
    nodes = [
        node("Conv", "x w b", "a", pads=[1] * 4), node("Sigmoid", "a", "s"), node("Mul", "a s", "c"),
        node("Conv", "c v", "d"), node("GlobalAveragePool", "d", "y"),
    ]  # fmt: skip
    model = make_model(
        nodes, {"x": (1, 8, 6, 6)}, {"w": random(31, 8, 3, 3), "b": random(31), "v": random(23, 31, 1, 1)}
    )
    assert weights_of(model) == [(1, 1, 32, 24), (3, 3, 8, 32)]
    assert sum("slice" in name for name in run(model, host)) == 1


def test_what_reads_too_many_channels_more_reads_them_cut_off(host: Any) -> None:
    """Three channels are computed as four, and the next convolution reads three."""
    model = make_model(
        [node("Conv", "x w", "a"), node("Relu", "a", "c"), node("Conv", "c v", "y")],
        {"x": (1, 8, 6, 6)}, {"w": random(3, 8, 1, 1), "v": random(8, 3, 3, 3)},
    )  # fmt: skip
    assert weights_of(model) == [(1, 1, 8, 4), (3, 3, 3, 8)]
    assert run(model, host)[-1] == "transpose"


@pytest.mark.parametrize(("tokens", "wanted"), [(37, 40), (64, 64), (1, 1)])
@pytest.mark.parametrize("mask", ["added", "of heads", "where", "none"])
def test_attention_over_a_number_of_tokens_that_fills_no_vector_is_filled_up(
    tokens: int, wanted: int, mask: str, host: Any
) -> None:
    """Also where masks are added to the scores or take their place; the additional rows are cut off."""
    shape = {"added": (tokens,), "of heads": (2, tokens, tokens), "where": (1, tokens, tokens), "none": (1,)}[mask]
    masks = {"m": np.triu(random(*shape)) > 0 if mask == "where" else random(*shape), "low": random(1)}
    masked = {"where": node("Where", "m low c", "a"), "none": node("Identity", "c", "a")}
    nodes = [
        node("MatMul", "q k", "s"), node("Div", "s by", "c"), masked.get(mask, node("Add", "c m", "a")),
        node("Softmax", "a", "p", axis=-1), node("MatMul", "p v", "y"),
    ]  # fmt: skip
    inputs = {"q": (1, 2, tokens, 8), "k": (1, 2, 8, tokens), "v": (1, 2, tokens, 8)}
    model = make_model(nodes, inputs, {"by": np.float32([2.8]), **masks})
    config = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}
    avx2 = tvm_env.make_target(config)
    found = workloads.extract(prepare(model, avx2)[0], avx2, config, "graph/2")
    assert {w.arguments[1][0][-1] for w in found if w.arguments[1][0][-2:-1] == (8,)} <= {wanted}
    assert {w.arguments[-1][0][-1] for w in found if "softmax" in w.name} == {wanted}
    run(model, host)


def test_axes_counted_from_the_end_keep_the_layout(host: Any) -> None:
    """TVM's layout conversion fails on such a squeeze."""
    nodes = [node("Conv", "x w", "c"), node("MaxPool", "c", "m", kernel_shape=[14]), node("Squeeze", "m axes", "y")]
    weights = {"w": random(8, 4, 3), "axes": np.array([-1], "int64")}
    run(make_model(nodes, {"x": (1, 4, 16)}, weights), host)
