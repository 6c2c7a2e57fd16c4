"""ONNX Runtime: sessions whose 8-bit sums are exact, static quantisation to 8 bits, and the accuracy that it costs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from farm.errors import PermanentError, UsageError
from farm.models.source import ModelSource
from farm.search.graph import bindings

# ONNX Runtime's kernels for uint8 times int8 add pairs of products in 16 bits where x86-64 has no VNNI; sums saturate.
# The places of such an operand and its zero point, by operator, those of ONNX Runtime's own too.
_SIGNED_OPERAND = {
    "ConvInteger": (1, 3), "DynamicQuantizeMatMul": (1, 3), "MatMulInteger": (1, 3), "MatMulIntegerToFloat": (1, 5),
    "QAttention": (1, 7), "QGemm": (3, 5), "QLinearConv": (3, 5), "QLinearMatMul": (3, 5),
}  # fmt: skip
Arrays = Mapping[str, npt.NDArray[Any]]
# Older opsets have no per-channel scale in QuantizeLinear.
_LEAST_OPSET = 13


def open_session(data: bytes, *, optimised: bool = True) -> Any:
    """Return a CPU session of a model in which no sum of 8-bit products saturates.

    Raises ImportError without ONNX Runtime, and its own errors for a model that it refuses.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # QuantizeLinear and DequantizeLinear stay what ONNX defines: floats around float operators.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    # ONNX Runtime's own operators with constant weights: unsigned weights, whose kernels are exact.
    options.add_session_config_entry("session.x64quantprecision", "1")
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(_make_unsigned(data) or data, options, providers=["CPUExecutionProvider"])


def _make_unsigned(data: bytes) -> bytes | None:
    """Move second operands of integer products from int8 to uint8: values and zero points plus 128.

    Return None for a model without such operands.
    """
    model = onnx.load_model_from_string(data)
    if not any(node.op_type in _SIGNED_OPERAND for node in model.graph.node):
        return None
    graph, kinds = model.graph, _find_types(model)
    nodes, moved = list[onnx.NodeProto](), dict[str, str]()

    def move(name: str) -> str:
        if name not in moved:
            moved[name], wide, sum_ = (f"{name}.{each}.unsigned" for each in ("moved", "wide", "sum"))
            nodes.append(onnx.helper.make_node("Cast", [name], [wide], to=onnx.TensorProto.INT32))
            nodes.append(onnx.helper.make_node("Add", [wide, "128.unsigned"], [sum_]))
            nodes.append(onnx.helper.make_node("Cast", [sum_], [moved[name]], to=onnx.TensorProto.UINT8))
        return moved[name]

    for node in graph.node:
        places = _SIGNED_OPERAND.get(node.op_type, ())
        if places and kinds.get(node.input[places[0]]) == onnx.TensorProto.INT8:
            given = [*node.input, *[""] * (places[1] + 1 - len(node.input))]
            given[places[0]] = move(given[places[0]])
            given[places[1]] = move(given[places[1]]) if given[places[1]] else "zero.unsigned"
            node.input[:] = given
        nodes.append(node)
    if not moved:
        return None
    constants = {"128.unsigned": (onnx.TensorProto.INT32, 128), "zero.unsigned": (onnx.TensorProto.UINT8, 128)}
    graph.initializer.extend(
        onnx.helper.make_tensor(name, kind, [], [value]) for name, (kind, value) in constants.items()
    )
    copies = [onnx.NodeProto.FromString(each.SerializeToString()) for each in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return bytes(model.SerializeToString())


def _find_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return element types by name: of initializers, of declared values, and of those that can be inferred."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = [*inferred.input, *inferred.value_info, *inferred.output]
    found = {each.name: each.type.tensor_type.elem_type for each in values}
    return found | {each.name: each.data_type for each in model.graph.initializer}


@dataclasses.dataclass(frozen=True)
class Loss:
    """What rounding to 8 bits did to one output over all calibration inputs.

    `rms` is the root mean square of the difference over that of the float model's output, `largest` the largest
    difference over the largest output. `top1` is the share of rows whose largest entry stayed where it was, None for
    outputs that are no scores (batch, classes).
    """

    output: str
    rms: float
    largest: float
    top1: float | None


@dataclasses.dataclass(frozen=True)
class Quantised:
    """The model as ONNX with QuantizeLinear and DequantizeLinear, and the loss by output on `examples` inputs."""

    onnx_bytes: bytes = dataclasses.field(repr=False)
    examples: int
    losses: tuple[Loss, ...]


def quantise(source: ModelSource, examples: Sequence[Arrays]) -> Quantised:
    """The model in 8 bits: activations by their range over the examples, weights by their own, per channel.

    Batch normalisation is folded into convolutions first. Raises UsageError for a model that is quantised already or
    has nothing to quantise, PermanentError where ONNX Runtime fails.
    """
    from onnxruntime import quantization

    if source.is_quantised:
        raise UsageError(f"{source.name} is quantised already")
    model = source.load()
    opset = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 1)
    if opset < _LEAST_OPSET:
        raise UsageError(
            f"{source.name} has ONNX opset {opset}; scales per channel need {_LEAST_OPSET}",
            "Export it with a newer opset; onnx.version_converter can convert many models.",
        )
    bindings.fold_batch_norm(model.graph)
    with tempfile.TemporaryDirectory(prefix="farm-quantise-") as folder, _without_advice():
        path = pathlib.Path(folder) / "model.onnx"
        try:
            quantization.quantize_static(
                model,
                path,
                _Reader(examples),
                quant_format=quantization.QuantFormat.QDQ,
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
            )
            data = onnx.load(path).SerializeToString(deterministic=True)
        except Exception as error:  # ONNX Runtime and its tools raise errors of any type
            raise PermanentError(f"ONNX Runtime cannot quantise {source.name}: {error}") from error
    if not any(node.op_type == "QuantizeLinear" for node in onnx.load_model_from_string(data).graph.node):
        raise UsageError(f"{source.name} has no operator that can be quantised")
    return Quantised(data, len(examples), measure_loss(source.onnx_bytes, data, examples))


def measure_loss(before: bytes, after: bytes, examples: Sequence[Arrays]) -> tuple[Loss, ...]:
    """Compare the outputs of two models on the same inputs with ONNX Runtime."""
    names, wanted = _run(before, examples)
    _, found = _run(after, examples)
    return tuple(
        _compare(name, np.stack([each[at] for each in wanted]), np.stack([each[at] for each in found]))
        for at, name in enumerate(names)
    )


def _run(data: bytes, examples: Iterable[Arrays]) -> tuple[list[str], list[list[npt.NDArray[Any]]]]:
    session = open_session(data)
    return [output.name for output in session.get_outputs()], [session.run(None, dict(each)) for each in examples]


def _compare(name: str, wanted: npt.NDArray[Any], found: npt.NDArray[Any]) -> Loss:
    a, b = wanted.astype(np.float64), found.astype(np.float64)
    size, peak = float(np.sqrt(np.mean(a**2))), float(np.abs(a).max())
    top1 = None
    # Examples, batch, classes.
    if a.ndim == 3 and a.shape[2] > 1:
        top1 = float(np.mean(a.argmax(axis=2) == b.argmax(axis=2)))
    return Loss(
        name,
        float(np.sqrt(np.mean((a - b) ** 2))) / size if size else 0.0,
        float(np.abs(a - b).max()) / peak if peak else 0.0,
        top1,
    )


class _Reader:
    """Examples one by one, in ONNX Runtime's interface."""

    def __init__(self, examples: Sequence[Arrays]) -> None:
        self._left: Iterator[Arrays] = iter(examples)

    def get_next(self) -> dict[str, npt.NDArray[Any]] | None:
        example = next(self._left, None)
        return None if example is None else dict(example)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Required by ONNX Runtime, but never called with the MinMax method."""


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Silence ONNX Runtime's tools, which log advice to the root logger."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
