"""LSTM, GRU and RNN of ONNX: one matrix product for the inputs of all steps, and one loop over the steps.

The loop is a scheduled TIR function: register tiles for a step's product, then the gates. Its code size does not depend
on the sequence length. Only the product before it is a workload. Formulas and the order of gates are from ONNX's
operator definitions (onnx.ai, operators LSTM, GRU, RNN, opset 14); `find_unsupported` names what is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm.script
from tvm import relax

from farm.search.graph import bindings, quantisation

# Gates of each operator in the order of their weights, by index of their activation.
_GATES: Mapping[str, tuple[int, ...]] = {"LSTM": (0, 0, 0, 1), "GRU": (0, 0, 1), "RNN": (0,)}
OPERATORS = tuple(_GATES)
# ONNX Runtime's LSTM with weights of bytes.
DYNAMIC = "DynamicQuantizeLSTM"
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}
# As TIR text. Others (Affine, Elu, ScaledTanh ...) have parameters; no known exporter writes them.
_ACTIVATIONS = {"sigmoid": "T.sigmoid({})", "tanh": "T.tanh({})", "relu": "T.max({}, T.float32(0))"}
# Columns of a tile: eight 256-bit vectors fit the registers of x86 and Arm.
_TILES = (64, 48, 32, 24, 16, 12, 8, 4, 2)
_LANES = (8, 4, 2)
# FMAs in a step from which a parallel region of some microseconds pays.
_PARALLEL_PRODUCTS = 1 << 19

# Annotation of such a loop.
MARK = "farm.recurrent"


@dataclasses.dataclass(frozen=True)
class Layer:
    """One direction of one operator: `steps` over a `batch` of rows of `hidden` numbers."""

    operator: str
    activations: tuple[str, ...]
    steps: int
    batch: int
    hidden: int
    is_reversed: bool
    resets_after_product: bool
    has_peepholes: bool
    clip: float
    quantises_state: bool

    @property
    def has_inner_bias(self) -> bool:
        """Whether the state's product has its own bias, since it is not just added."""
        return self.operator == "GRU" and self.resets_after_product

    @property
    def columns(self) -> int:
        """Sums per row and step."""
        return len(_GATES[self.operator]) * self.hidden


def find_unsupported(operator: str, attributes: Mapping[str, Any], inputs: Sequence[str]) -> str:
    """Name the unsupported part of an operator, to follow "does not support"; "" for none."""
    names = [_text(each) for each in attributes.get("activations", ())]
    if strange := [name for name in names if name.lower() not in _ACTIVATIONS]:
        return f"the activation {strange[0]}"
    if attributes.get("input_forget"):
        return "the attribute input_forget"
    if len(inputs) > 4 and inputs[4]:
        return "sequences of different lengths (sequence_lens)"
    return ""


def convert(operator: str, inputs: Any, attributes: Mapping[str, Any]) -> Any:
    """Return the operator's outputs as a Relax tuple: all states, the last state and, for LSTM, the last cell."""
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
        layer = Layer(
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
        )
        own = [_take(builder, each, at) for each in (weights, recurrent, bias, state, cells, peepholes)]
        found.append(_convert_direction(builder, layer, rows, *own))
    return _join(builder, found, batch_first)


def convert_dynamic(inputs: Any, attributes: Mapping[str, Any]) -> Any:
    """Convert ONNX Runtime's LSTM with weights of bytes, stored by columns; the state is quantised in each step."""
    found = quantisation.convert_dynamic_quantize_linear(inputs, {})
    data = bindings.bind(relax.op.dequantize(*found.fields, 0, "float32"))
    weights = (_widen(inputs[at], inputs[6 + 2 * at], inputs[7 + 2 * at]) for at in (1, 2))
    rest = (inputs[at] for at in range(3, 8))
    return convert("LSTM", [data, *weights, *rest], {**attributes, "quantises_state": 1})


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
    builder: Any, layer: Layer, rows: Any, weights: Any, recurrent: Any, bias: Any, state: Any, cells: Any, peep: Any
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
        builder.emit(relax.op.permute_dims(recurrent, [1, 0])),
        none if state is None else state,
    ]
    is_lstm = layer.operator == "LSTM"
    if is_lstm:
        arguments.append(none if cells is None else cells)
    arguments += [each for each in (peep, inner) if each is not None]
    results = [relax.TensorType((layer.steps, layer.batch, layer.hidden), "float32")]
    results += [relax.TensorType((layer.batch, layer.hidden), "float32")] * (2 if is_lstm else 1)
    function = builder.add_func(make_loop(layer), layer.operator.lower())
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
    return bool(function.attrs and MARK in function.attrs)


def make_loop(layer: Layer) -> Any:
    """Make the function of all steps.

    Arguments: added [steps, batch, columns], weights [hidden, columns], state [batch, hidden]; for LSTM cells [batch,
    hidden]; optional peepholes [3 hidden]; for a GRU that resets after its product, the inner bias [columns]. Results:
    all states [steps, batch, hidden], the last state and, for LSTM, the last cell.
    """
    return tvm.script.from_source(_write(layer))


def _write(layer: Layer) -> str:
    steps, batch, hidden, columns = layer.steps, layer.batch, layer.hidden, layer.columns
    is_lstm, is_gru = layer.operator == "LSTM", layer.operator == "GRU"
    row = f'T.Buffer(({batch}, {hidden}), "float32")'
    parameters = [
        f'added: T.Buffer(({steps}, {batch}, {columns}), "float32")',
        f'weights: T.Buffer(({hidden}, {columns}), "float32")',
        f"first: {row}",
    ]
    parameters += [f"cells: {row}"] if is_lstm else []
    parameters += [f'peep: T.Buffer(({3 * hidden},), "float32")'] if layer.has_peepholes else []
    inner = layer.has_inner_bias
    parameters += [f'inner: T.Buffer(({columns},), "float32")'] if inner else []
    parameters += [f'y: T.Buffer(({steps}, {batch}, {hidden}), "float32")', f"h: {row}"]
    parameters += [f"c: {row}"] if is_lstm else []
    lines = _Lines()
    lines.add("@T.prim_func(private=True)", f"def {layer.operator.lower()}({', '.join(parameters)}):")
    with lines.inside():
        lines.add(
            'T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": 8, "' + MARK + '": True})',
            f'sums = T.alloc_buffer(({batch}, {columns}), "float32")',
        )
        if layer.quantises_state or (is_gru and not inner):
            lines.add(f'kept = T.alloc_buffer(({batch}, {hidden}), "float32")')
        if layer.quantises_state:
            lines.add(f'limits = T.alloc_buffer((2, {_LANES[0]}), "float32")', 'unit = T.alloc_buffer((2,), "float32")')
        lines.add(f"for b in range({batch}):")
        with lines.inside():
            _each(lines, hidden, ["h[b, {j}] = first[b, {j}]", *(["c[b, {j}] = cells[b, {j}]"] if is_lstm else [])])
        lines.add(f"for t in range({steps}):")
        with lines.inside():
            step = f"{steps - 1} - t" if layer.is_reversed else "t"
            if layer.quantises_state:
                _quantise(lines, layer)
            lines.add(f"for b in range({batch}):")
            with lines.inside():
                if is_gru and not inner:
                    _product(lines, layer, 0, 2 * hidden, "h", f"added[{step}, b, {{at}}]")
                    _each(lines, hidden, _gru_gates(layer))
                    _product(lines, layer, 2 * hidden, columns, "kept", f"added[{step}, b, {{at}}]")
                elif inner:
                    _product(lines, layer, 0, columns, "h", "inner[{at}]")
                else:
                    factor = "kept" if layer.quantises_state else "h"
                    _product(lines, layer, 0, columns, factor, f"added[{step}, b, {{at}}]")
                _each(lines, hidden, [*_end_of_step(layer, step), f"y[{step}, b, {{j}}] = h[b, {{j}}]"])
    return lines.text


class _Lines:
    """Program text with automatic indentation."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    @property
    def text(self) -> str:
        """The program."""
        return "\n".join(self._lines) + "\n"

    def add(self, *lines: str) -> None:
        """Append lines at the current depth."""
        self._lines += ["    " * self._depth + line for line in lines]

    def inside(self) -> _Lines:
        """Open a block after the last line; use it in `with`."""
        return self

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


def _each(lines: _Lines, count: int, statements: Sequence[str]) -> None:
    """Write the statements for `j` up to `count`, in vectors where possible."""
    lanes = next((each for each in _LANES if count % each == 0), 1)
    lines.add(f"for o in range({count // lanes}):")
    with lines.inside():
        for statement in statements:
            _vector(lines, lanes, statement.format(j=f"o * {lanes} + v"))


def _quantise(lines: _Lines, layer: Layer) -> None:
    """Write into `kept` the state of all rows as steps of a byte between its limits (DynamicQuantizeLinear)."""
    _vector(lines, _LANES[0], "limits[0, v] = T.float32(0)")
    _vector(lines, _LANES[0], "limits[1, v] = T.float32(0)")
    lines.add(f"for b in range({layer.batch}):")
    with lines.inside():
        kinds = ("min", "max")
        _each(lines, layer.hidden, [f"limits[{at}, v] = T.{kinds[at]}(limits[{at}, v], h[b, {{j}}])" for at in (0, 1)])
    lines.add(f"for v in range(1, {_LANES[0]}):")
    with lines.inside():
        lines.add(*(f"limits[{at}, 0] = T.{kinds[at]}(limits[{at}, 0], limits[{at}, v])" for at in (0, 1)))
    width = "limits[1, 0] - limits[0, 0]"
    lines.add(
        f"unit[0] = T.if_then_else({width} == T.float32(0), T.float32(1), ({width}) / T.float32(255))",
        "unit[1] = T.round(T.float32(0) - limits[0, 0] / unit[0])",
    )
    number = "T.min(T.max(T.round(h[b, {j}] / unit[0]), T.float32(0) - unit[1]), T.float32(255) - unit[1])"
    lines.add(f"for b in range({layer.batch}):")
    with lines.inside():
        _each(lines, layer.hidden, [f"kept[b, {{j}}] = {number} * unit[0]"])


def _product(lines: _Lines, layer: Layer, begin: int, end: int, factor: str, start: str) -> None:
    """Write columns `begin` to `end` of row b of `sums`: their start plus the product of a row with the weights."""
    count = end - begin
    tile = next((each for each in _TILES if count % each == 0), 1)
    lanes = next((each for each in _LANES if tile % each == 0), 1)
    kind = "T.parallel" if layer.hidden * count >= _PARALLEL_PRODUCTS else "range"
    own = f"u * {lanes} + v"
    at = f"{begin} + n * {tile} + {own}"
    lines.add(f"for n in {kind}({count // tile}):")
    with lines.inside():
        lines.add(f'acc = T.alloc_buffer(({tile},), "float32", scope="local")')

        def each_vector(statement: str) -> None:
            lines.add(f"for u in T.unroll({tile // lanes}):")  # only unrolled accumulators stay in registers
            with lines.inside():
                _vector(lines, lanes, statement)

        each_vector(f"acc[{own}] = {start.format(at=at)}")
        lines.add(f"for k in range({layer.hidden}):")
        with lines.inside():
            each_vector(f"acc[{own}] = acc[{own}] + {factor}[b, k] * weights[k, {at}]")
        each_vector(f"sums[b, {at}] = acc[{own}]")


def _vector(lines: _Lines, lanes: int, statement: str) -> None:
    lines.add(f"for v in T.vectorized({lanes}):")
    with lines.inside():
        lines.add(statement)


def _gate(layer: Layer, activation: int, value: str) -> str:
    """Return a gate's activation of a value, clipped first where the operator says so."""
    if layer.clip > 0:
        value = f"T.min(T.max({value}, T.float32({-layer.clip!r})), T.float32({layer.clip!r}))"
    return _ACTIVATIONS[layer.activations[activation]].format(value)


def _gru_gates(layer: Layer) -> list[str]:
    """Write the update gate into its sums, and the state after the reset gate."""
    hidden = layer.hidden
    return [
        "sums[b, {j}] = " + _gate(layer, 0, "sums[b, {j}]"),
        "kept[b, {j}] = h[b, {j}] * " + _gate(layer, 0, f"sums[b, {hidden} + {{j}}]"),
    ]


def _end_of_step(layer: Layer, step: str) -> list[str]:
    """Return the statements from a step's sums to the next state."""
    hidden = layer.hidden
    sums = [f"sums[b, {at * hidden} + {{j}}]" for at in range(len(_GATES[layer.operator]))]
    if layer.operator == "RNN":
        return ["h[b, {j}] = " + _gate(layer, 0, sums[0])]
    if layer.operator == "GRU":
        if not layer.resets_after_product:
            return [f"h[b, {{j}}] = (T.float32(1) - {sums[0]}) * {_gate(layer, 1, sums[2])} + {sums[0]} * h[b, {{j}}]"]
        added = [f"added[{step}, b, {at * hidden} + {{j}}]" for at in range(3)]
        return [
            f"{sums[0]} = {_gate(layer, 0, f'{sums[0]} + {added[0]}')}",
            f"{sums[1]} = {_gate(layer, 0, f'{sums[1]} + {added[1]}')}",
            f"{sums[2]} = {_gate(layer, 1, f'{added[2]} + {sums[1]} * {sums[2]}')}",
            f"h[b, {{j}}] = (T.float32(1) - {sums[0]}) * {sums[2]} + {sums[0]} * h[b, {{j}}]",
        ]
    into, out, forget, new = sums

    def peep(at: int) -> str:
        return f" + peep[{at * hidden} + {{j}}] * c[b, {{j}}]" if layer.has_peepholes else ""

    last = _ACTIVATIONS[layer.activations[2]].format("c[b, {j}]")
    return [
        f"{into} = {_gate(layer, 0, into + peep(0))}",
        f"{forget} = {_gate(layer, 0, forget + peep(2))}",
        f"c[b, {{j}}] = {forget} * c[b, {{j}}] + {into} * {_gate(layer, 1, new)}",
        f"h[b, {{j}}] = {_gate(layer, 0, out + peep(1))} * {last}",
    ]
