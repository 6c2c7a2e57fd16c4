"""Bodies of ONNX Runtime's own operators, as its optimiser and its quantiser write them, in ONNX's operators.

Definitions: ONNX Runtime's docs/ContribOperators.md. Operators of 8 bits compute between DequantizeLinear and
QuantizeLinear, which the pipeline takes together again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

DOMAIN = "com.microsoft"
_ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "Clip": ("min", "max"), "HardSigmoid": ("alpha", "beta"), "LeakyRelu": ("alpha",), "Relu": (), "Sigmoid": (),
    "Tanh": (),
}  # fmt: skip
_OF_CONVOLUTIONS = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
# Attributes with these values change what a body computes.
_REFUSED = {"channels_last": 1, "transBatchA": 1, "transBatchB": 1}


class _Body:
    """A body under construction: calling it adds a node and returns its result."""

    def __init__(self, node: onnx.NodeProto) -> None:
        self.given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        self.inputs = [f"in{at}" if name else "" for at, name in enumerate(node.input)]
        self.graph = onnx.GraphProto()

    def __call__(self, operator: str, *inputs: str, **attributes: Any) -> str:
        return self.several(1, operator, *inputs, **attributes)[0]

    def several(self, count: int, operator: str, *inputs: str, **attributes: Any) -> list[str]:
        """Add a node with so many results."""
        names = [f"n{len(self.graph.node)}.{at}" for at in range(count)]
        given = {key: value for key, value in attributes.items() if value is not None}
        self.graph.node.append(onnx.helper.make_node(operator, inputs, names, **given))
        return names

    def __getitem__(self, at: int) -> str:
        """Return an input, "" where it is not given."""
        return self.inputs[at] if at < len(self.inputs) else ""

    def number(self, value: Any, dtype: str = "float32") -> str:
        """Add a constant."""
        return self("Constant", value=onnx.numpy_helper.from_array(np.array(value, dtype)))

    def like(self, value: float, other: str) -> str:
        """Add a constant of another value's type."""
        return self("CastLike", self.number(value), other)

    def plus(self, data: str, *others: str) -> str:
        """Add all that are given."""
        for other in filter(None, others):
            data = self("Add", data, other)
        return data

    def turned(self, data: str, name: str, rank: int) -> str:
        """Transpose the last two dimensions where the attribute `name` asks for it."""
        if not self.given.get(name):
            return data
        return self("Transpose", data, perm=[*range(rank - 2), rank - 1, rank - 2])

    def activated(self, data: str, parameters: list[float]) -> str:
        """Apply the attribute `activation`."""
        kind = self.given.get("activation", b"").decode()
        if not kind:
            return data
        named = dict(zip(_ACTIVATIONS[kind], parameters, strict=False))
        if kind == "Clip":
            return self("Clip", data, *(self.like(named[each], data) for each in ("min", "max")))
        return self(kind, data, **named)

    def split(self, data: str, sizes: list[int], axis: int = -1) -> list[str]:
        """Split along an axis."""
        return self.several(len(sizes), "Split", data, self.number(sizes, "int64"), axis=axis)

    def attention(self, inputs: list[str], heads: int, groups: int, causal: int) -> list[str]:
        """Add ONNX's Attention of query, key, value, mask, past key and past value."""
        counts = {"q_num_heads": heads, "kv_num_heads": groups, "is_causal": causal}
        own = {key: self.given.get(key) or None for key in ("scale", "softcap")}
        return self.several(3, "Attention", *inputs, **counts, **own)

    def wide(self, at: int) -> str:
        """Dequantise the input at a place, followed by its scale and zero point."""
        return self("DequantizeLinear", self[at], self[at + 1], self[at + 2])

    def narrow(self, data: str, at: int) -> str:
        """Quantise to the scale and the zero point at a place."""
        return self("QuantizeLinear", data, self[at], self[at + 1])


def _fused_matmul(b: _Body, types: list[onnx.TypeProto]) -> list[str]:
    left, right = (b.turned(b[at], f"trans{'AB'[at]}", len(types[at].tensor_type.shape.dim)) for at in (0, 1))
    product = b("MatMul", left, right)
    alpha = b.given.get("alpha", 1.0)
    return [product if alpha == 1 else b("Mul", product, b.like(alpha, product))]


def _fused_gemm(b: _Body, _: list[onnx.TypeProto]) -> list[str]:
    own = {key: b.given.get(key) for key in ("alpha", "beta", "transA", "transB")}
    parameters = [b.given[f"activation_{key}"] for key in ("alpha", "beta") if f"activation_{key}" in b.given]
    return [b.activated(b("Gemm", *b.inputs, **own), parameters)]


def _fused_conv(b: _Body, _: list[onnx.TypeProto]) -> list[str]:
    own = {key: b.given.get(key) for key in _OF_CONVOLUTIONS}
    data = b.plus(b("Conv", *b.inputs[:3], **own), b[3])
    return [b.activated(data, b.given.get("activation_params", []))]


def _quick_gelu(b: _Body, _: list[onnx.TypeProto]) -> list[str]:
    scaled = b("Mul", b[0], b.like(b.given.get("alpha", 1.702), b[0]))
    return [b("Mul", b[0], b("Sigmoid", scaled))]


def _skip_norm(operator: str) -> Callable[[_Body, list[onnx.TypeProto]], list[str]]:
    """Make the body of a norm of a sum, which is the fourth result."""

    def make(b: _Body, _: list[onnx.TypeProto]) -> list[str]:
        rest = b.inputs[3:4] if operator == "LayerNormalization" else []
        total = b.plus(b[0], b[1], b[3 + (operator == "LayerNormalization")])
        epsilon = b.given.get("epsilon", 1e-12 if rest else 1e-6)
        return [b(operator, total, b[2], *rest, axis=-1, epsilon=epsilon), "", "", total]

    return make


def _rms_norm(b: _Body, _: list[onnx.TypeProto]) -> list[str]:
    return [b("RMSNormalization", b[0], b[1], axis=b.given.get("axis", -1), epsilon=b.given.get("epsilon", 1e-5))]


def _binary(operator: str) -> Callable[[_Body, list[onnx.TypeProto]], list[str]]:
    return lambda b, _: [b.narrow(b(operator, b.wide(0), b.wide(3)), 6)]


def _unary(operator: str, *own: str) -> Callable[[_Body, list[onnx.TypeProto]], list[str]]:
    return lambda b, _: [b.narrow(b(operator, b.wide(0), **{key: b.given.get(key) for key in own}), 3)]


def _concat(b: _Body, _: list[onnx.TypeProto]) -> list[str]:
    parts = [b.wide(at) for at in range(2, len(b.inputs), 3)]
    return [b.narrow(b("Concat", *parts, axis=b.given["axis"]), 0)]


def _gemm(b: _Body, _: list[onnx.TypeProto]) -> list[str]:
    """Multiply matrices of 8 bits; the bias has the scale of the products. Without a last scale, floats result."""
    own = {key: b.given.get(key) for key in ("alpha", "transA", "transB")}
    left, right = b.wide(0), b.wide(3)
    bias = [b("DequantizeLinear", b[6], b("Mul", b[1], b[4]))] if b[6] else []
    product = b("Gemm", left, right, *bias, **own)
    return [b.narrow(product, 7) if b[7] else product]


def _integers_to_float(b: _Body, _: list[onnx.TypeProto]) -> list[str]:
    left, right = (b("DequantizeLinear", b[at], b[2 + at], b[4 + at]) for at in (0, 1))
    return [b.plus(b("MatMul", left, right), b[6])]


def _group_query_attention(b: _Body, types: list[onnx.TypeProto]) -> list[str]:
    """Attention of grouped queries; the cache grows by the new tokens, whose number all sequences share."""
    heads, groups = b.given["num_heads"], b.given["kv_num_heads"]
    batch, tokens, width = (each.dim_value for each in types[0].tensor_type.shape.dim)
    query, key, value = b[0], b[1], b[2]
    if not key:
        each = width // (heads + 2 * groups)
        query, key, value = b.split(query, [heads * each, groups * each, groups * each])
    past = types[3].tensor_type.shape.dim[2].dim_value if b[3] else 0
    if b.given.get("do_rotary"):
        places = b.number(np.broadcast_to(past + np.arange(tokens), (batch, tokens)), "int64")
        interleaved = b.given.get("rotary_interleaved", 0)
        query, key = (
            b("RotaryEmbedding", data, b[7], b[8], places, num_heads=count, interleaved=interleaved)
            for data, count in ((query, heads), (key, groups))
        )
    ends = b("Reshape", b("Cast", b[5], to=onnx.TensorProto.INT64), b.number([batch, 1, 1, 1], "int64"))
    mask = b("LessOrEqual", b.number(np.arange(past + tokens), "int64"), ends)
    return b.attention([query, key, value, mask, b[3], b[4]], heads, groups, causal=1)


def _multi_head_attention(b: _Body, types: list[onnx.TypeProto]) -> list[str]:
    """Attention of several heads, its inputs with three dimensions; a padding mask names keys that count."""
    heads = b.given["num_heads"]
    parts = [b[0], b[1], b[2]]
    if b[3]:
        widths = [types[at].tensor_type.shape.dim[2].dim_value for at in (0, 1, 2)]
        biases = b.split(b[3], widths, axis=0)
        parts = [b("Add", part, bias) for part, bias in zip(parts, biases, strict=True)]
    mask = b[5]
    if b[4]:
        keep = b("Unsqueeze", b("Cast", b[4], to=onnx.TensorProto.BOOL), b.number([1, 2], "int64"))
        least = b.like(b.given.get("mask_filter_value", -10000.0), b[0])
        padding = b("Where", keep, b.like(0.0, b[0]), least)
        mask = b.plus(padding, mask)
    return b.attention([*parts, mask, b[6], b[7]], heads, heads, causal=b.given.get("unidirectional", 0))


BODIES: Mapping[str, Callable[[_Body, list[onnx.TypeProto]], list[str]]] = {
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "GroupQueryAttention": _group_query_attention,
    "MatMulIntegerToFloat": _integers_to_float,
    "MultiHeadAttention": _multi_head_attention,
    "QGemm": _gemm,
    "QLinearAdd": _binary("Add"),
    "QLinearAveragePool": _unary("AveragePool", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides"),
    "QLinearConcat": _concat,
    "QLinearGlobalAveragePool": _unary("GlobalAveragePool"),
    "QLinearLeakyRelu": _unary("LeakyRelu", "alpha"),
    "QLinearMul": _binary("Mul"),
    "QLinearSigmoid": _unary("Sigmoid"),
    "QLinearSoftmax": _unary("Softmax", "axis"),
    "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _rms_norm,
    "SkipLayerNormalization": _skip_norm("LayerNormalization"),
    "SkipSimplifiedLayerNormalization": _skip_norm("RMSNormalization"),
}
# Bodies with operators of this opset, to which the whole model is then converted.
NEWER, NEWER_OPSET = frozenset({"GroupQueryAttention", "MultiHeadAttention"}), 23


def widen_blocks(
    packed: npt.NDArray[np.uint8], scales: npt.NDArray[Any], zeros: npt.NDArray[Any] | None, columns: int, bits: int
) -> npt.NDArray[Any]:
    """Return the weights [rows, columns] of MatMulNBits from `packed` [rows, blocks, bytes], low bits first.

    A zero point is packed likewise by row, or of the scales' type; without them it is the middle.
    """
    rows, blocks = packed.shape[:2]

    def spread(data: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        parts = [(data >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
        return np.stack(parts, -1).reshape(*data.shape[:-1], -1)

    middle: Any = 2 ** (bits - 1)
    if zeros is not None:
        own = spread(zeros.reshape(rows, -1))[:, :blocks] if zeros.dtype == np.uint8 else zeros.reshape(rows, blocks)
        middle = own[..., None].astype("float32")
    steps = spread(packed).astype("float32") - middle
    wide: npt.NDArray[Any] = steps * scales.reshape(rows, blocks, 1).astype("float32")
    return wide.reshape(rows, -1)[:, :columns].astype(scales.dtype, copy=False)


def is_known(node: onnx.NodeProto) -> bool:
    """Say whether there is a body; ONNX Runtime writes one norm into ONNX's own domain."""
    own = node.domain == DOMAIN or node.op_type == "SimplifiedLayerNormalization"
    return own and node.op_type in BODIES and not any(_REFUSED.get(each.name) == each.i for each in node.attribute)


def make_body(node: onnx.NodeProto, types: list[onnx.TypeProto]) -> onnx.GraphProto:
    """Return the body of a node whose inputs have `types`."""
    body = _Body(node)
    results = BODIES[node.op_type](body, types)
    body.graph.input.extend(onnx.ValueInfoProto(name=name or f"none{at}") for at, name in enumerate(body.inputs))
    body.graph.output.extend(onnx.ValueInfoProto(name=name) for name in results)
    return body.graph
