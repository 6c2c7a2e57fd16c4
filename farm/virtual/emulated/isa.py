"""Decode aarch64 instructions: the kind of each, what it reads and writes. Costs are in `pipeline.py`.

Only `server.py`'s process imports this. Kinds are those of the cores' optimization guides; a `_q` kind is the same on
128-bit registers, for cores that treat those differently.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import capstone

_QUAD = re.compile(r"\bq\d+|\.(?:4s|2d|16b|8h)\b")
_VECTOR = re.compile(r"\b[vqdsbh]\d+")
_GENERAL = re.compile(r"\b[wx](?:\d+|zr)\b")
_SHIFTED = re.compile(r"\b(?:lsl|lsr|asr|ror) #|[su]xt[bhwx]")
_BRANCHES = frozenset({"b", "br", "ret", "cbz", "cbnz", "tbz", "tbnz"})
_CALLS = frozenset({"bl", "blr"})
_SCALAR_ADDING = frozenset({"fmadd", "fmsub", "fnmadd", "fnmsub"})
_PERMUTING = ("zip", "uzp", "trn", "ext", "tbl", "rev", "tbx")
_SHIFTABLE = frozenset({"add", "sub", "and", "orr", "eor", "cmp", "cmn", "adds", "subs", "bic", "tst", "neg", "orn"})
_LONG = frozenset({"smull", "umull", "smull2", "umull2", "smlal", "umlal", "smlal2", "umlal2"})
_DOTS = frozenset({"sdot", "udot"})
_PAIRED = frozenset({"sadalp", "uadalp"})
_ADDING = (
    _DOTS | _PAIRED | {"fmla", "fmls", "fmlal", "fmlsl", "mla", "mls", "bfdot", "smlal", "umlal", "smlal2", "umlal2"}
)
_PRODUCTS = frozenset({"mul", "madd", "msub", "mneg", "smull", "umull", "smaddl", "umaddl", "smsubl", "umsubl"})
_FIELDS = frozenset({"bfi", "bfxil", "bfm", "extr"})
_MOVES = frozenset({"dup", "ins", "fmov", "mov", "umov", "smov"})
# The disassembler lists these results as read, but they are overwritten whole (Arm ARM, C6.2 and C7.2). Single-lane
# loads do read their results.
_OVERWRITING = frozenset(
    {"ld1r", "ld2r", "ld3r", "ld4r", "ld1", "ld2", "ld3", "ld4", "fmov", "movi", "mvni", "sshr", "ushr", "shl"}
    | {"asr", "lsl", "lsr", "ror", "sbfx", "ubfx", "sbfiz", "ubfiz", "sxtb", "sxth", "sxtw", "uxtb", "uxth"}
)
_SAME = {"wsp": "sp", "fp": "x29", "lr": "x30"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`adds_to` is the accumulator of an FMA, "" for others; `times` is the number of registers moved.

    `writes_back`: also updates its address, which takes a separate operation.
    """

    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    adds_to: str = ""
    times: int = 1
    writes_back: bool = False


class Decoder:
    """Reads instructions. Not thread-safe."""

    def __init__(self) -> None:
        self._capstone = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
        self._capstone.detail = True
        self._known: dict[bytes, Instruction] = {}

    def read(self, code: bytes) -> list[Instruction]:
        """Decode code; an unknown instruction counts as a simple one, since it was executed."""
        return [self._read_one(code[at : at + 4]) for at in range(0, len(code), 4)]

    def _read_one(self, word: bytes) -> Instruction:
        found = self._known.get(word)
        if found is None:
            each = next(self._capstone.disasm(word, 0), None)
            found = Instruction("integer", (), ()) if each is None else _judge(each)
            self._known[word] = found
        return found


def _judge(each: capstone.CsInsn) -> Instruction:
    kind, times = find_kind(each.mnemonic, each.op_str)
    read, written = each.regs_access()
    reads, writes = (
        tuple(dict.fromkeys(name for number in numbers if (name := _name(each.reg_name(number)))))
        for numbers in (read, written)
    )
    if each.mnemonic in _OVERWRITING and "}[" not in each.op_str:
        reads = _without_results(each, reads)
    adds_to = ""
    if each.mnemonic in _ADDING or each.mnemonic in _SCALAR_ADDING:
        number = 0 if each.mnemonic in _ADDING else 3
        names = [_name(each.reg_name(operand.reg)) for operand in each.operands]
        factors = [name for at, name in enumerate(names) if at not in (0, number)]
        adds_to = "" if names[number] in factors else names[number]
    moves = each.mnemonic[:2] in ("ld", "st") and ("]!" in each.op_str or "], " in each.op_str)
    return Instruction(kind, reads, writes, adds_to, times, moves)


def _without_results(each: capstone.CsInsn, reads: tuple[str, ...]) -> tuple[str, ...]:
    """Drop pure results from the registers read: those a load lists, the first one of others."""
    count = each.op_str.split("}")[0].count("v") if each.op_str.startswith("{") else 1
    numbers = [number for operand in each.operands[count:] for number in _list_registers(operand)]
    sources = {_name(each.reg_name(number)) for number in numbers}
    results = {_name(each.reg_name(operand.reg)) for operand in each.operands[:count]}
    return tuple(name for name in reads if name in sources or name not in results)


def _list_registers(operand: Any) -> list[int]:
    kind = operand.type
    if kind == capstone.CS_OP_MEM:
        return [number for number in (operand.mem.base, operand.mem.index) if number]
    return [operand.reg] if kind == capstone.CS_OP_REG else []


def find_kind(mnemonic: str, operands: str) -> tuple[str, int]:
    """The kind of an instruction in assembler syntax, and the number of registers it moves."""
    quad, vector = bool(_QUAD.search(operands)), bool(_VECTOR.search(operands))
    wide = "_q" if quad else ""
    if mnemonic.startswith("b.") or mnemonic in _BRANCHES:
        return "branch", 1
    if mnemonic in _CALLS:
        return "call", 1
    if mnemonic.startswith("prf"):
        return "prefetch", 1
    if mnemonic[:2] in ("ld", "st"):
        return _find_move(mnemonic, operands, quad, vector)
    if vector:
        return _find_vector(mnemonic, operands) + wide, 1
    if mnemonic in _PRODUCTS:
        return ("multiply_x" if operands.startswith("x") else "multiply"), 1
    if mnemonic in ("smulh", "umulh"):
        return "multiply_high", 1
    if mnemonic in ("sdiv", "udiv"):
        return "divide", 1
    if mnemonic in _FIELDS or (mnemonic in _SHIFTABLE and _SHIFTED.search(operands)):
        return "shifted", 1
    return "integer", 1


def _find_move(mnemonic: str, operands: str, quad: bool, vector: bool) -> tuple[str, int]:
    word = "load" if mnemonic[0] == "l" else "store"
    wide = "_q" if quad else ""
    listed = operands.split("}")[0] if operands.startswith("{") else ""
    registers = max(1, len(re.findall(r"v\d+", listed)))
    if mnemonic in ("ldp", "ldnp", "stp", "stnp", "ldpsw"):
        return f"{word}_vector_pair{wide}" if vector else f"{word}_pair", 1
    if mnemonic == "ld1r" or (listed and "}[" in operands):
        return f"{word}_lane", registers
    if mnemonic[:3] in ("ld2", "ld3", "ld4", "st2", "st3", "st4"):
        return f"{word}_woven{wide}", registers
    if listed:
        return f"{word}_vectors{wide}", registers
    return (f"{word}_vector{wide}", 1) if vector else (word, 1)


def _find_vector(mnemonic: str, operands: str) -> str:
    if mnemonic in _LONG:
        return "vector_multiply_long"
    if mnemonic in _DOTS:
        return "vector_dot"
    if mnemonic in _PAIRED:
        return "vector_add_pairs"
    if mnemonic in _ADDING:
        return "fma" if mnemonic[0] in "fb" else "vector_multiply_add"
    if mnemonic in _SCALAR_ADDING:
        return "fma"
    if mnemonic in ("fdiv", "fsqrt"):
        return "fp_divide"
    if mnemonic in _MOVES and _GENERAL.search(operands):
        return "transfer"
    if mnemonic.startswith(("fcvt", "scvtf", "ucvtf")):
        return "convert"
    if mnemonic.startswith(_PERMUTING):
        return "permute"
    if mnemonic in ("mul", "pmul"):
        return "vector_multiply"
    if mnemonic.startswith("f") and mnemonic not in ("fmov", "fabs", "fneg"):
        return "fp"
    return "vector"


def _name(register: str) -> str:
    """The canonical name of a register of any width; "" for the zero register."""
    if register in ("xzr", "wzr"):
        return ""
    letter, number = register[:1], register[1:]
    if number.isdigit():
        return f"v{number}" if letter in "vqdsbh" else f"x{number}"
    return _SAME.get(register, register)
