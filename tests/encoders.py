"""A small text encoder as exporters write one: two layers, open batch and sequence, an attention mask."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from tests.integration.exported_graphs import Writer
from tests.integration.onnx_graphs import random

_WIDE, _HEADS = 16, 2


def make_encoder(layers: int = 2, *, masked: bool = True) -> onnx.ModelProto:
    """Its inputs `ids` and `mask` are (batch, tokens); it gives the tokens' states, and scores of the first one."""
    write = Writer(17)
    data = write.op("Gather", random(40, _WIDE), "ids")
    mask = write.op("Mul", write.op("Sub", 1.0, write.op("Cast", "mask", to=TensorProto.FLOAT)), -1e4)
    mask = write.op("Unsqueeze", mask, [1, 2])
    for _ in range(layers):
        query, key, value = (_split(write, data, perm) for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
        scores = write.op("Div", write.op("MatMul", query, key), 2.8)
        weights = write.op("Softmax", write.op("Add", scores, mask) if masked else scores, axis=-1)
        seen = write.op("Transpose", write.op("MatMul", weights, value), perm=[0, 2, 1, 3])
        data = _normalise(write, data, write.op("Reshape", seen, [0, 0, _WIDE]))
        inner = write.op("Relu", write.op("MatMul", data, random(_WIDE, 32)))
        data = _normalise(write, data, write.op("MatMul", inner, random(32, _WIDE)))
    scores = write.op("Gemm", write.op("Gather", data, 0, axis=1), random(_WIDE, 3), random(3))
    integers = dict.fromkeys(("ids", "mask"), TensorProto.INT64)
    model = write.model(dict.fromkeys(integers, ("batch", "tokens")), {}, **integers)
    for name, shape in {data: ("batch", "tokens", _WIDE), scores: ("batch", 3)}.items():
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    return model


def _split(write: Writer, data: str, perm: list[int]) -> str:
    heads = write.op("Reshape", write.op("MatMul", data, random(_WIDE, _WIDE)), [0, 0, _HEADS, _WIDE // _HEADS])
    return str(write.op("Transpose", heads, perm=perm))


def _normalise(write: Writer, data: str, added: str) -> str:
    return str(write.op("LayerNormalization", write.op("Add", data, added), random(_WIDE), random(_WIDE), axis=-1))
