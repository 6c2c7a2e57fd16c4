"""LSTM, GRU and RNN of ONNX: one matrix product for the inputs of all steps, and one loop over the steps.

The loop is a scheduled TIR function (`recurrent_code`). Its code size does not depend on the sequence length. Only the
product before it is a workload. `find_unsupported` names what is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst
from tvm.target import codegen

from farm.search.graph import bindings, dots, quantisation, recurrent_code

OPERATORS = tuple(recurrent_code.GATES)
# ONNX Runtime's LSTM with weights of bytes.
DYNAMIC = "DynamicQuantizeLSTM"
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}


def find_unsupported(operator: str, attributes: Mapping[str, Any], inputs: Sequence[str]) -> str:
    """Name the unsupported part of an operator, to follow "does not support"; "" for none."""
    names = [_text(each) for each in attributes.get("activations", ())]
    if strange := [name for name in names if name.lower() not in recurrent_code.ACTIVATIONS]:
        return f"the activation {strange[0]}"
    if attributes.get("input_forget"):
        return "the attribute input_forget"
    if len(inputs) > 4 and inputs[4]:
        return "sequences of different lengths (sequence_lens)"
    return ""


def convert(operator: str, inputs: Any, attributes: Mapping[str, Any], packed: _Packed | None = None) -> Any:
    """Return the operator's outputs as a Relax tuple: all states, the last state and, for LSTM, the last cell.

    `packed` replaces the state's weights.
    """
    builder = relax.BlockBuilder.current()
    data, weights, recurrent, bias, _, state, cells, peepholes = (inputs[at] for at in range(8))
    batch_first = bool(attributes.get("layout"))
    if batch_first:
        data, state, cells = (
            None if each is None else builder.emit(relax.op.permute_dims(each, [1, 0, 2]))
            for each in (data, state, cells)
        )
    steps, batch, width = (int(size) for size in data.ty.shape)
    directions, hidden = int(weights.ty.shape[0]), int(recurrent.ty.shape[2])
    rows = builder.emit(relax.op.reshape(data, (steps * batch, width)))
    direction = _text(attributes.get("direction", "forward")).lower()
    names = [_text(each).lower() for each in attributes.get("activations", _DEFAULTS[operator] * directions)]
    each_has = len(names) // directions
    found = []
    for at in range(directions):
        layer = recurrent_code.Layer(
            operator,
            tuple(names[at * each_has : (at + 1) * each_has]),
            steps,
            batch,
            hidden,
            is_reversed=at == 1 or direction == "reverse",
            resets_after_product=bool(attributes.get("linear_before_reset", 0)),
            has_peepholes=peepholes is not None,
            clip=float(attributes.get("clip", 0.0)),
            quantises_state=bool(attributes.get("quantises_state", 0)),
            lanes=packed.lanes if packed else 0,
        )
        own = [_take(builder, each, at) for each in (weights, recurrent, bias, state, cells, peepholes)]
        if packed:
            own[1] = [relax.const(each[at]) for each in (packed.weights, packed.scales, packed.sums)]
        found.append(_convert_direction(builder, layer, rows, *own))
    return _join(builder, found, batch_first)


def convert_dynamic(inputs: Any, attributes: Mapping[str, Any]) -> Any:
    """Convert ONNX Runtime's LSTM with weights of bytes, stored by columns; the state is quantised in each step."""
    found = quantisation.convert_dynamic_quantize_linear(inputs, {})
    data = bindings.bind(relax.op.dequantize(*found.fields, 0, "float32"))
    weights = (_widen(inputs[at], inputs[6 + 2 * at], inputs[7 + 2 * at]) for at in (1, 2))
    rest = (inputs[at] for at in range(3, 8))
    packed = _pack(inputs[2], inputs[10], inputs[11])
    return convert("LSTM", [data, *weights, *rest], {**attributes, "quantises_state": 1}, packed)


@dataclasses.dataclass(frozen=True)
class _Packed:
    """Weights [directions, hidden / 4, columns * 4] for an instruction with `lanes`; scales and sums by column."""

    lanes: int
    weights: Any
    scales: Any
    sums: Any


def _pack(weights: Any, scale: Any, zero: Any) -> _Packed | None:
    """Pack constant weights for the target's products of unsigned by signed bytes; None where it has none for them."""
    target = tvm.target.Target.current(allow_none=True)
    instruction = None if target is None else dots.find_instruction(target)
    if instruction is None or instruction.data != "uint8" or not isinstance(weights, GenericConst):
        return None
    numbers, zeros = weights.value.numpy(), zero.value.numpy()
    directions, depth, columns = numbers.shape
    most = 16 if codegen.target_has_features("avx512f", target) else 8
    lanes = next((each for each in instruction.lanes if each <= most and columns % each == 0), 0)
    if numbers.dtype != np.int8 or zeros.any() or depth % dots.STEP or not lanes:
        return None
    packed = np.stack([dots.pack(each).reshape(-1, columns * dots.STEP) for each in numbers])
    scales = np.broadcast_to(scale.value.numpy().reshape(directions, -1), (directions, columns))
    return _Packed(lanes, packed, scales, numbers.sum(1, dtype="int32").astype("float32"))


def _widen(steps: Any, scale: Any, zero: Any) -> Any:
    """Return weights [directions, columns, rows] from bytes [directions, rows, columns]."""
    shape = (int(steps.ty.shape[0]), 1, -1)
    steps, zero = (relax.op.astype(each, "float32") for each in (steps, zero))
    steps = relax.op.subtract(steps, bindings.bind(relax.op.reshape(bindings.bind(zero), shape)))
    wide = relax.op.multiply(bindings.bind(steps), bindings.bind(relax.op.reshape(scale, shape)))
    return bindings.bind(relax.op.permute_dims(bindings.bind(wide), [0, 2, 1]))


def _take(builder: Any, value: Any, at: int) -> Any:
    """Return one direction's part of an input, or None."""
    if value is None:
        return None
    part = builder.emit(relax.op.strided_slice(value, [0], [at], [at + 1]))
    return builder.emit(relax.op.squeeze(part, [0]))


def _convert_direction(
    builder: Any,
    layer: recurrent_code.Layer,
    rows: Any,
    weights: Any,
    recurrent: Any,
    bias: Any,
    state: Any,
    cells: Any,
    peep: Any,
) -> Any:
    """Emit a direction's loop, after the product of the inputs of all steps, `rows`."""
    none = relax.const(np.zeros((layer.batch, layer.hidden), "float32"))
    added = builder.emit(relax.op.matmul(rows, builder.emit(relax.op.permute_dims(weights, [1, 0]))))
    inner = relax.const(np.zeros(layer.columns, "float32")) if layer.has_inner_bias else None
    if bias is not None:
        outer, inner = (
            builder.emit(relax.op.strided_slice(bias, [0], [begin], [begin + layer.columns]))
            for begin in (0, layer.columns)
        )
        if not layer.has_inner_bias:  # both biases are just added
            outer, inner = builder.emit(relax.op.add(outer, inner)), None
        added = builder.emit(relax.op.add(added, outer))
    arguments = [
        builder.emit(relax.op.reshape(added, (layer.steps, layer.batch, layer.columns))),
        recurrent[0] if layer.lanes else builder.emit(relax.op.permute_dims(recurrent, [1, 0])),
        none if state is None else state,
    ]
    is_lstm = layer.operator == "LSTM"
    if is_lstm:
        arguments.append(none if cells is None else cells)
    arguments += [each for each in (peep, inner) if each is not None]
    arguments += recurrent[1:] if layer.lanes else []
    results = [relax.TensorType((layer.steps, layer.batch, layer.hidden), "float32")]
    results += [relax.TensorType((layer.batch, layer.hidden), "float32")] * (2 if is_lstm else 1)
    function = builder.add_func(recurrent_code.make_loop(layer), layer.operator.lower())
    return builder.emit(relax.call_tir(function, relax.Tuple(arguments), results))


def _join(builder: Any, found: Sequence[Any], batch_first: bool) -> Any:
    """Join the directions' results in ONNX's layout."""
    outputs = []
    for position in range(len(found[0].ty.fields)):
        parts = [builder.emit(relax.TupleGetItem(each, position)) for each in found]
        axis = 1 if batch_first or position == 0 else 0
        if batch_first and position == 0:  # [steps, batch, hidden]
            parts = [builder.emit(relax.op.permute_dims(each, [1, 0, 2])) for each in parts]
            axis = 2
        parts = [builder.emit(relax.op.expand_dims(each, [axis])) for each in parts]
        outputs.append(parts[0] if len(parts) == 1 else builder.emit(relax.op.concat(parts, axis)))
    return relax.Tuple(outputs)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def is_loop(function: Any) -> bool:
    """Say whether a function is such a loop, which is scheduled and no workload."""
    return bool(function.attrs and recurrent_code.MARK in function.attrs)
