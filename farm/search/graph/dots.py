"""int8 dot products: functions and instructions that sum four int8 products (`vpdpbusd`, `sdot`) or emulate that.

Integer convolutions and matrix products become functions whose weights store four input channels together, as the
instruction reads them. A core without it multiplies to 16 bits, where two products fit as long as no weight is -128,
and adds pairs (Arm: `smull`, `smlal`, `sadalp`; x86: `vpmaddubsw`, `vpmaddwd`). `farm.search.families.dense` schedules
these functions. One module: functions, packed weights and instructions agree on one data layout.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax, te, tirx
from tvm.ir import GenericConst
from tvm.s_tir import TensorIntrin
from tvm.target import codegen

from farm.search.graph import bindings

# Products that one lane sums at once.
STEP = 4

# Tensor intrinsics in TVM's script, by name: their frame, their meaning, their code.
_TEXT = re.sub(r"(?m)^#.*\n", "", Path(__file__).with_suffix(".tvmscript").read_text(encoding="utf-8"))
_PARTS = dict(part.split("\n", 1) for part in _TEXT.split("=== ")[1:])
# Annotation of the block of products: block names are replaced by numbers in workloads.
MARK = "farm.dots"
Shape = tuple[int, ...]
# Returns the channels per panel of weights for a function with unpanelled ones; 0 for all.
ChoosePanel = Callable[[Any], int]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Sums of four products of `data` by signed bytes for `lanes` lanes, the most first.

    The target needs one of LLVM's `features`; `name` is LLVM's, with the bits of a vector. The instruction sums
    `at_once` of the four products itself. It is exact for weights from `least`; `code` is its implementation.
    """

    data: str
    lanes: tuple[int, ...]
    features: tuple[str, ...]
    name: str
    at_once: int = STEP
    least: int = -128
    code: str = "code"


# By machine, the best first.
INSTRUCTIONS: Mapping[str, tuple[Instruction, ...]] = {
    "x86_64": (
        Instruction("uint8", (16, 8, 4), ("avx512vnni", "avxvnni"), "llvm.x86.avx512.vpdpbusd.{bits}"),
        Instruction("int8", (8,), ("avx2",), "llvm.x86.avx2.pmadd.ub.sw", 2, -127, "code_of_signed_pairs"),
    ),
    "aarch64": (
        Instruction("int8", (4,), ("dotprod",), "llvm.aarch64.neon.sdot.v4i32.v16i8"),
        Instruction("int8", (4,), ("neon",), "llvm.aarch64.neon.smull.v8i16", 2, -127, "code_of_pairs"),
    ),
}


def list_lanes(machine: str, at_once: int) -> tuple[int, ...]:
    """List the lanes for which a machine has an instruction that sums `at_once` products."""
    return tuple(lanes for each in INSTRUCTIONS[machine] if each.at_once == at_once for lanes in each.lanes)


def _machine(target: Any) -> str:
    return str(dict(target.export()).get("mtriple", "")).partition("-")[0]


def name_bytes(lanes: int) -> str:
    """Return LLVM's name of the x86 instruction for so many lanes."""
    return INSTRUCTIONS["x86_64"][0].name.format(bits=32 * lanes)


def find_instruction(target: Any) -> Instruction | None:
    """Return the best instruction of a target (TVM's), or None."""
    for found in INSTRUCTIONS.get(_machine(target), ()):
        if any(codegen.target_has_features(feature, target) for feature in found.features):
            return found
    return None


def data_type(target: Any) -> str:
    """Return the type of the data in int8 products for a target (TVM's), with or without an instruction."""
    found = find_instruction(target)
    return found.data if found else "uint8"


@functools.cache
def register(data: str, lanes: int, at_once: int = STEP) -> str:
    """Register the instruction with TVM and return its name in traces."""
    every = itertools.chain(*INSTRUCTIONS.values())
    found = next(each for each in every if (each.data, each.at_once) == (data, at_once) and lanes in each.lanes)
    words = {"data": data, "lanes": lanes, "size": STEP * lanes, "pairs": 2 * lanes}
    words |= {"instruction": found.name.format(bits=32 * lanes), "pixel": _PARTS["pixel"].rstrip().format(**words)}
    meaning, code = (
        tvm.script.from_source(_PARTS["script"].format(name=name, body=body.strip().format(**words), **words))
        for name, body in (("meaning", _PARTS["meaning"]), ("code", _PARTS[found.code]))
    )
    name = f"farm.{'dots' if at_once == STEP else 'pairs'}_{data}x{lanes}"
    TensorIntrin.register(name, meaning, code, override=True)
    return name


def register_all() -> None:
    """Register all instructions, since a trace may name any."""
    for each in itertools.chain(*INSTRUCTIONS.values()):
        for lanes in each.lanes:
            register(each.data, lanes, each.at_once)


@dataclasses.dataclass(frozen=True)
class DotWindow:
    """The window of a convolution; a matrix product has a 1x1 window.

    `padding` is top, left, bottom, right, with bytes of `fill`.
    """

    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    fill: int = 0


def pack(weights: npt.NDArray[np.int8], panel: int = 0) -> npt.NDArray[np.int8]:
    """Pack weights [..., in, out] as [..., in / 4, out, 4], with zeros for missing channels.

    With a `panel`, as [out / panel, ..., in / 4, panel, 4].
    """
    *before, depth, channels = weights.shape
    missing = -depth % STEP
    filled = np.pad(weights, [*[(0, 0)] * len(before), (0, missing), (0, 0)])
    packed = np.moveaxis(filled.reshape(*before, -1, STEP, channels), -2, -1)
    if panel:
        packed = np.moveaxis(packed.reshape(*packed.shape[:-2], -1, panel, STEP), -3, 0)
    return np.ascontiguousarray(packed)


def _make_weight(before: Shape, channels: int, panel: int) -> tuple[Any, Any]:
    """Return a placeholder for packed weights, and a function that reads it at [*before, channel, step]."""
    if not panel:
        weight = te.placeholder((*before, channels, STEP), "int8", name="weight")
        return weight, lambda *at: weight(*at)
    weight = te.placeholder((channels // panel, *before, panel, STEP), "int8", name="weight")
    return weight, lambda *at: weight(at[-2] // panel, *at[:-2], at[-2] % panel, at[-1])


@functools.cache
def make_convolution(
    shape: Shape, dtype: str, channels: int, window: DotWindow, at_once: int = STEP, panel: int = 0
) -> Any:
    """Make the TIR function of a convolution of bytes [n, h, w, c] with packed weights, marked for an instruction."""
    batch, height, width, depth = shape
    (rows, columns), (down, right_by), (dy, dx) = window.kernel, window.strides, window.dilation
    top, left, bottom, right = window.padding
    groups = -(-depth // STEP)
    tall, wide = height + top + bottom, width + left + right
    data = te.placeholder(shape, dtype, name="data")
    weight, read = _make_weight((rows, columns, groups), channels, panel)
    source = data
    if any(window.padding) or depth % STEP:
        source = te.compute(
            (batch, tall, wide, groups * STEP),
            lambda n, y, x, c: tirx.if_then_else(
                tirx.all(y >= top, y < top + height, x >= left, x < left + width, c < depth),
                data[n, y - top, x - left, c],
                tirx.IntImm(dtype, window.fill),
            ),
            name="dots_pad",
        )
    y, x = te.reduce_axis((0, rows), name="ky"), te.reduce_axis((0, columns), name="kx")
    group, step = te.reduce_axis((0, groups), name="group"), te.reduce_axis((0, STEP), name="step")
    result = te.compute(
        (batch, (tall - dy * (rows - 1) - 1) // down + 1, (wide - dx * (columns - 1) - 1) // right_by + 1, channels),
        lambda n, i, j, o: te.sum(
            source[n, i * down + y * dy, j * right_by + x * dx, group * STEP + step].astype("int32")
            * read(y, x, group, o, step).astype("int32"),
            axis=[y, x, group, step],
        ),
        # MetaSchedule's rules would reorder the four products.
        attrs={MARK: at_once, "schedule_rule": "None"},
        name="dots_conv2d",
    )
    return te.create_prim_func([data, weight, result], index_dtype_override="int64")


@functools.cache
def make_product(shape: Shape, dtype: str, channels: int, at_once: int = STEP, panel: int = 0) -> Any:
    """Make the TIR function of rows of bytes [..., depth] times packed weights, marked for an instruction."""
    *rows, depth = shape
    groups = -(-depth // STEP)
    data = te.placeholder(shape, dtype, name="data")
    weight, read = _make_weight((groups,), channels, panel)
    source = data
    if depth % STEP:
        source = te.compute(
            (*rows, groups * STEP),
            lambda *at: tirx.if_then_else(at[-1] < depth, data(*at), tirx.IntImm(dtype, 0)),
            name="dots_pad",
        )
    group, step = te.reduce_axis((0, groups), name="group"), te.reduce_axis((0, STEP), name="step")
    result = te.compute(
        (*rows, channels),
        lambda *at: te.sum(
            source(*at[:-1], group * STEP + step).astype("int32") * read(group, at[-1], step).astype("int32"),
            axis=[group, step],
        ),
        attrs={MARK: at_once, "schedule_rule": "None"},
        name="dots_matmul",
    )
    return te.create_prim_func([data, weight, result], index_dtype_override="int64")


def use_instruction(target: Any, choose_panel: ChoosePanel) -> Any:
    """Make a module pass that replaces byte products with constant weights by these functions, for a target (TVM's).

    Where a product takes several instructions, weights are stored in panels: otherwise a tile's weights are strided
    and alias in a two-way L1.
    """
    instruction = find_instruction(target)

    def run(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
        values = {binding.var: binding.value for binding in bindings.list_bindings(function)}
        others: dict[Any, Sequence[Any]] = {}
        for variable, call in values.items():
            found = None if instruction is None else _read(call, values, instruction)
            if instruction is None or found is None:
                continue
            name, make, data, weights = found
            at_once = instruction.at_once
            panel = 0 if at_once == STEP else choose_panel(make(at_once))
            # Private, since every public function is called main.
            called = builder.add_func(make(at_once, panel).without_attr("global_symbol"), name)
            call = relax.call_tir(called, (data, relax.const(pack(weights, panel), "int8")), call.ty)
            others[variable] = [relax.VarBinding(variable, call)]
        return others

    return bindings.rewriting_pass(run, "UseDots")


def _read(
    call: Any, values: Mapping[Any, Any], instruction: Instruction
) -> tuple[str, Callable[..., Any], Any, npt.NDArray[np.int8]] | None:
    """Return the name of a byte product's function, what makes it, its data and its weights, or None.

    Data have the right type; weights are constant and have enough channels for the shortest form.
    """
    convolves = bindings.is_call(call, "relax.nn.conv2d") and bindings.is_nhwc(call.attrs)
    if not convolves and not bindings.is_call(call, "relax.matmul"):
        return None
    data, kernel = call.args[0], values.get(call.args[1], call.args[1])
    if not isinstance(kernel, GenericConst) or [str(x.ty.dtype) for x in (data, call)] != [instruction.data, "int32"]:
        return None
    weights = kernel.value.numpy()
    if weights.dtype != np.int8 or weights.shape[-1] % instruction.lanes[-1]:
        return None
    if weights.min(initial=0) < instruction.least:
        return None
    if not convolves:
        shape = bindings.static_shape(data.ty)
        if shape is None or len(shape) < 2 or weights.ndim != 2:
            return None
        return "dots_matmul", functools.partial(make_product, shape, instruction.data, weights.shape[1]), data, weights
    (height, width), (down, right_by), (dy, dx) = (
        map(int, each) for each in (weights.shape[:2], call.attrs.strides, call.attrs.dilation)
    )
    top, left, bottom, right = (int(p) for p in call.attrs.padding)
    fill, before = 0, values.get(data, data)
    if bindings.is_call(before, "relax.nn.pad") and not top + left + bottom + right:
        widths = [int(w) for w in before.attrs.pad_width]
        if before.attrs.pad_mode == "constant" and not any((*widths[:2], *widths[6:])):
            top, bottom, left, right = widths[2:6]
            data, fill = before.args[0], int(before.attrs.pad_value)
    shape = bindings.static_shape(data.ty)
    if shape is None:
        return None
    window = DotWindow((height, width), (down, right_by), (dy, dx), (top, left, bottom, right), fill)
    make = functools.partial(make_convolution, shape, instruction.data, weights.shape[3], window)
    return "dots_conv2d", make, data, weights
