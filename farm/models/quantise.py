"""Quantise models to 8 bits with ONNX Runtime's static quantisation, and measure the loss of accuracy."""

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
from farm.models.reference import open_session
from farm.models.source import ModelSource
from farm.search.graph import bindings

Arrays = Mapping[str, npt.NDArray[Any]]

# Older opsets have no per-channel scale in QuantizeLinear.
_LEAST_OPSET = 13


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
