"""The loops of LSTM, GRU and RNN as scheduled TIR functions: register tiles for a step's product, then the gates.

Formulas and the order of gates are from ONNX's operator definitions (onnx.ai, operators LSTM, GRU, RNN, opset 14).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tvm.script

from farm.search.graph import dots

# Gates of each operator in the order of their weights, by index of their activation.
GATES: Mapping[str, tuple[int, ...]] = {"LSTM": (0, 0, 0, 1), "GRU": (0, 0, 1), "RNN": (0,)}
# As TIR text. Others (Affine, Elu, ScaledTanh ...) have parameters; no known exporter writes them.
ACTIVATIONS = {"sigmoid": "T.sigmoid({})", "tanh": "T.tanh({})", "relu": "T.max({}, T.float32(0))"}
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
    # Of the instruction for int8 dot products; 0: weights are floats.
    lanes: int

    @property
    def has_inner_bias(self) -> bool:
        """Whether the state's product has its own bias, since it is not just added."""
        return self.operator == "GRU" and self.resets_after_product

    @property
    def columns(self) -> int:
        """Sums per row and step."""
        return len(GATES[self.operator]) * self.hidden


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
        f'weights: T.Buffer(({hidden // dots.STEP}, {columns * dots.STEP}), "int8")'
        if layer.lanes
        else f'weights: T.Buffer(({hidden}, {columns}), "float32")',
        f"first: {row}",
    ]
    parameters += [f"cells: {row}"] if is_lstm else []
    parameters += [f'peep: T.Buffer(({3 * hidden},), "float32")'] if layer.has_peepholes else []
    inner = layer.has_inner_bias
    parameters += [f'inner: T.Buffer(({columns},), "float32")'] if inner else []
    parameters += [f'{name}: T.Buffer(({columns},), "float32")' for name in ("scales", "fixed") if layer.lanes]
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
            stored = "uint8" if layer.lanes else "float32"
            lines.add(f'kept = T.alloc_buffer(({batch}, {hidden}), "{stored}")')
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
                elif layer.lanes:
                    _dots(lines, layer, f"added[{step}, b, {{at}}]")
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
        "unit[1] = T.nearbyint(T.float32(0) - limits[0, 0] / unit[0])",
    )
    number = "T.min(T.max(T.nearbyint(h[b, {j}] / unit[0]), T.float32(0) - unit[1]), T.float32(255) - unit[1])"
    lines.add(f"for b in range({layer.batch}):")
    with lines.inside():
        stored = f'T.Cast("uint8", {number} + unit[1])' if layer.lanes else f"{number} * unit[0]"
        _each(lines, layer.hidden, [f"kept[b, {{j}}] = {stored}"])


def _dots(lines: _Lines, layer: Layer, start: str) -> None:
    """Write row b of `sums` as `_product` does, of bytes; `fixed` times the zero point is in all sums."""
    lanes, size = layer.lanes, layer.lanes * dots.STEP
    count = next(each for each in (8, 6, 4, 3, 2, 1) if layer.columns // lanes % each == 0)
    kind = "T.parallel" if layer.hidden * layer.columns >= dots.STEP * _PARALLEL_PRODUCTS else "range"
    sums = f"acc[T.ramp(u * {lanes}, 1, {lanes})]"
    data = f'T.reinterpret(kept.vload([b, k * {dots.STEP}], "uint8x{dots.STEP}"), dtype="int32")'
    at = f"(n * {count} + u) * {lanes} + v"
    lines.add(f"for n in {kind}({layer.columns // lanes // count}):")
    with lines.inside():
        lines.add(f'acc = T.alloc_buffer(({count * lanes},), "int32", scope="local")')
        lines.add(f"for u in T.unroll({count}):", f"    {sums} = T.broadcast(T.int32(0), {lanes})")
        lines.add(f"for k in range({layer.hidden // dots.STEP}):")
        with lines.inside():
            lines.add(
                f"for u in T.unroll({count}):",
                f'    {sums} = T.call_llvm_pure_intrin(T.llvm_lookup_intrinsic_id("{dots.name_bytes(lanes)}"), {sums},'
                f' T.reinterpret(T.broadcast({data}, {lanes}), dtype="int8x{size}"),'
                f' weights.vload([k, (n * {count} + u) * {size}], dtype="int8x{size}"), dtype="int32x{lanes}")',
            )
        lines.add(f"for u in T.unroll({count}):")
        with lines.inside():
            number = f'T.Cast("float32", acc[u * {lanes} + v]) - unit[1] * fixed[{at}]'
            _vector(lines, lanes, f"sums[b, {at}] = {start.format(at=at)} + unit[0] * scales[{at}] * ({number})")


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
    return ACTIVATIONS[layer.activations[activation]].format(value)


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
    sums = [f"sums[b, {at * hidden} + {{j}}]" for at in range(len(GATES[layer.operator]))]
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

    last = ACTIVATIONS[layer.activations[2]].format("c[b, {j}]")
    return [
        f"{into} = {_gate(layer, 0, into + peep(0))}",
        f"{forget} = {_gate(layer, 0, forget + peep(2))}",
        f"c[b, {{j}}] = {forget} * c[b, {{j}}] + {into} * {_gate(layer, 1, new)}",
        f"h[b, {{j}}] = {_gate(layer, 0, out + peep(1))} * {last}",
    ]
