"""Instructions that sum up four products of bytes, or a few that do: which a target has, and what TVM makes of them.

Which functions use them is the business of `dots`, how these are scheduled that of `farm.search.families.dots`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import tvm
from tvm.s_tir import TensorIntrin
from tvm.target import codegen

# Products that one lane sums up at once.
STEP = 4

# Instructions as TVM's script: what they do, and how it is done. Since LLVM 22 the bytes of x86's are bytes; TVM's own
# intrinsic of 0.27 still passes words.
_SCRIPT = """
@T.prim_func(s_tir=True)
def {name}(
    A: T.Buffer((4,), "{data}", offset_factor=1),
    B: T.Buffer(({lanes}, 4), "int8", offset_factor=1),
    C: T.Buffer(({lanes},), "int32", offset_factor=1),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:{lanes}], A[0:4], B[0:{lanes}, 0:4])
        T.writes(C[0:{lanes}])
        {body}
"""
_MEANING = """
        for i in T.serial(0, {lanes}):
            for k in T.serial(0, 4):
                with T.sblock("update"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    C[vi] = C[vi] + T.cast(A[vk], "int32") * T.cast(B[vi, vk], "int32")
"""
# Four products' data in every lane.
_PIXEL = """T.reinterpret(
    T.broadcast(T.reinterpret(A.vload([0], "{data}x4"), dtype="int32"), {lanes}), dtype="int8x{size}"
)"""
_CODE = """
        C[T.ramp(T.int32(0), 1, {lanes})] = T.call_llvm_pure_intrin(
            T.llvm_lookup_intrinsic_id("{instruction}"),
            C.vload([0], dtype="int32x{lanes}"),
            {pixel},
            B.vload([0, 0], dtype="int8x{size}"),
            dtype="int32x{lanes}",
        )
"""
# The first two of four products for each lane and the other two, in 16 bits, are added up there and then in pairs: what
# is loaded as bytes is read as words of two.
_CODE_OF_PAIRS = """
        C[T.ramp(T.int32(0), 1, {lanes})] = C.vload([0], dtype="int32x{lanes}") + T.call_llvm_pure_intrin(
            T.llvm_lookup_intrinsic_id("llvm.aarch64.neon.saddlp.v4i32.v8i16"),
            T.call_llvm_pure_intrin(
                T.llvm_lookup_intrinsic_id("{instruction}"),
                T.reinterpret(
                    T.broadcast(T.reinterpret(A.vload([0], "{data}x2"), dtype="int16"), {lanes}), dtype="int8x8"
                ),
                T.reinterpret(
                    T.Cast("int16x{lanes}", T.reinterpret(B.vload([0, 0], dtype="int8x{size}"), dtype="int32x{lanes}")),
                    dtype="int8x8",
                ),
                dtype="int16x8",
            )
            + T.call_llvm_pure_intrin(
                T.llvm_lookup_intrinsic_id("{instruction}"),
                T.reinterpret(
                    T.broadcast(T.reinterpret(A.vload([2], "{data}x2"), dtype="int16"), {lanes}), dtype="int8x8"
                ),
                T.reinterpret(
                    T.Cast(
                        "int16x{lanes}",
                        T.shift_right(
                            T.reinterpret(B.vload([0, 0], dtype="int8x{size}"), dtype="int32x{lanes}"),
                            T.broadcast(T.int32(16), {lanes}),
                        ),
                    ),
                    dtype="int8x8",
                ),
                dtype="int16x8",
            ),
            dtype="int32x{lanes}",
        )
"""
# Of x86's two factors one is without a sign: the data's goes to the weights. 127 times 128 twice has room in 16 bits.
_CODE_OF_SIGNED_PAIRS = """
        C[T.ramp(T.int32(0), 1, {lanes})] = C.vload([0], dtype="int32x{lanes}") + T.call_llvm_pure_intrin(
            T.llvm_lookup_intrinsic_id("llvm.x86.avx2.pmadd.wd"),
            T.call_llvm_pure_intrin(
                T.llvm_lookup_intrinsic_id("{instruction}"),
                T.call_llvm_pure_intrin(
                    T.llvm_lookup_intrinsic_id("llvm.x86.avx2.psign.b"),
                    {pixel},
                    {pixel},
                    dtype="int8x{size}",
                ),
                T.call_llvm_pure_intrin(
                    T.llvm_lookup_intrinsic_id("llvm.x86.avx2.psign.b"),
                    B.vload([0, 0], dtype="int8x{size}"),
                    {pixel},
                    dtype="int8x{size}",
                ),
                dtype="int16x{pairs}",
            ),
            T.broadcast(T.int16(1), {pairs}),
            dtype="int32x{lanes}",
        )
"""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Sums of four products of `data` by signed bytes for so many `lanes` each, the most first.

    `features`: LLVM's, any of which a target must have; `name`: LLVM's, with the bits of a vector in it. `at_once`: how
    many of the four it sums up itself. `least` is the least weight with which it is exact; `code` what is made of it.
    """

    data: str
    lanes: tuple[int, ...]
    features: tuple[str, ...]
    name: str
    at_once: int = STEP
    least: int = -128
    code: str = _CODE


# By a target's machine, the best first.
INSTRUCTIONS: Mapping[str, tuple[Instruction, ...]] = {
    "x86_64": (
        Instruction("uint8", (16, 8, 4), ("avx512vnni", "avxvnni"), "llvm.x86.avx512.vpdpbusd.{bits}"),
        Instruction("int8", (8,), ("avx2",), "llvm.x86.avx2.pmadd.ub.sw", 2, -127, _CODE_OF_SIGNED_PAIRS),
    ),
    "aarch64": (
        Instruction("int8", (4,), ("dotprod",), "llvm.aarch64.neon.sdot.v4i32.v16i8"),
        Instruction("int8", (4,), ("neon",), "llvm.aarch64.neon.smull.v8i16", 2, -127, _CODE_OF_PAIRS),
    ),
}


def list_lanes(machine: str, at_once: int) -> tuple[int, ...]:
    """Lanes for which a machine has an instruction that sums up so many products itself."""
    return tuple(lanes for each in INSTRUCTIONS[machine] if each.at_once == at_once for lanes in each.lanes)


def _machine(target: Any) -> str:
    return str(dict(target.export()).get("mtriple", "")).partition("-")[0]


def find_instruction(target: Any) -> Instruction | None:
    """The instruction that a target (TVM's) has."""
    for found in INSTRUCTIONS.get(_machine(target), ()):
        if any(codegen.target_has_features(feature, target) for feature in found.features):
            return found
    return None


def data_type(target: Any) -> str:
    """The kind of bytes that products of a target (TVM's) take for data, whether by an instruction or not."""
    found = find_instruction(target)
    return found.data if found else "uint8"


@functools.cache
def register(data: str, lanes: int, at_once: int = STEP) -> str:
    """Make the instruction for such data and so many lanes known to TVM; returns its name in traces."""
    every = itertools.chain(*INSTRUCTIONS.values())
    found = next(each for each in every if (each.data, each.at_once) == (data, at_once) and lanes in each.lanes)
    words = {"data": data, "lanes": lanes, "size": STEP * lanes, "pairs": 2 * lanes}
    words |= {"instruction": found.name.format(bits=32 * lanes), "pixel": _PIXEL.format(**words)}
    meaning, code = (
        tvm.script.from_source(_SCRIPT.format(name=name, body=body.strip().format(**words), **words))
        for name, body in (("meaning", _MEANING), ("code", found.code))
    )
    name = f"farm.{'dots' if at_once == STEP else 'pairs'}_{data}x{lanes}"
    TensorIntrin.register(name, meaning, code, override=True)
    return name


def register_all() -> None:
    """Make all of them known, as a trace may ask for any."""
    for each in itertools.chain(*INSTRUCTIONS.values()):
        for lanes in each.lanes:
            register(each.data, lanes, each.at_once)
