"""Count the work of one kernel launch from its CUDA source as TVM writes it. Pure.

Loop bounds are constant and indices are plain arithmetic, so one block in the middle of the grid is representative.
Its threads are evaluated side by side, every loop at its middle iteration. Short loops without a barrier are unrolled,
as NVRTC does: repeated reads stay in registers. `gpu_time.py` turns the counts into time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_agent.protocol.processors import SECTOR_BYTES, WARP

# Shared memory has 32 banks of 4 bytes.
_BANKS, _WORD_BYTES = 32, 4
# Instructions per warp for each, beyond one addition or multiplication: divisions and functions expand to several.
_DIVISION, _FUNCTION, _SHUFFLE = 8, 10, 2
# The unroll limit, and the values kept in registers meanwhile. Assumed.
_MOST_UNROLLED, _MOST_KEPT = 64, 32

_COMMENT = re.compile(r"/\*.*?\*/")
_NUMBER = re.compile(r"-?0x[0-9a-f.]+p[+-]\d+f?|\d+\.\d*(?:e[+-]\d+)?f?", re.IGNORECASE)
_CASTS = re.compile(r"\((?:u?int|u?int64_t|long)\)")
_FACTS = re.compile(r"^// farm: (\w+) registers=(\d+) shared_bytes=(\d+)$", re.MULTILINE)
_ARRAY = re.compile(r"(__shared__\s+)?(?:alignas\(\d+\)\s+)?(?:volatile\s+)?([a-z]\w*)\s+(\w+)\[(\d+)\];")
_FOR = re.compile(r"for \(\w+ (\w+) = (?:\(int64_t\))?(.+?); \1 < (?:\(int64_t\))?(.+?); \+\+\1\) \{")
_INTEGERS = re.compile(r"(?:u?int|u?int64_t|bool|long) (\w+) = (.*);")
_PAIRED = re.compile(r"u?int[234] (\w+) = make_u?int[234]\((.*)\);")
_VECTOR = re.compile(r"\*\((?:const )?([a-z]+)(\d)\s*\*\)\((\w+) \+ ")
_VOLATILE = re.compile(r"\(\(volatile \w+\s*\*\)(\w+)\)\[")
_PLAIN = re.compile(r"\b(\w+)\[")
_NAME = re.compile(r"\b[A-Za-z_]\w*")
_CALLS = re.compile(r"\b(?!make_|max\b|min\b|float\b|int\b|__sync|__active|__shfl)(\w+)\(")
_BYTES = {"double": 8, "int64_t": 8, "longlong": 8, "long": 8, "half": 2, "short": 2, "ushort": 2}
_SMALL = {"char", "uchar", "bool", "signed", "int8_t", "uint8_t"}

# Marks an expression that differs between threads.
_THREAD = "threadIdx"

Lanes = NDArray[Any]


@dataclasses.dataclass
class Counts:
    """The work of one block: warp instructions issued, arithmetic ones among them, shared-memory cycles with bank
    conflicts, global-memory sectors by argument, barriers, memory stalls; and values held by each thread.
    """

    issued: float = 0.0
    arithmetic: float = 0.0
    shared: float = 0.0
    sectors: dict[int, float] = dataclasses.field(default_factory=dict)
    barriers: float = 0.0
    waits: float = 0.0
    held: int = 1


def read_usages(source: str) -> Mapping[str, tuple[int, int]]:
    """Registers per thread and static shared bytes per block, by kernel, if the source says so."""
    return {name: (int(registers), int(shared)) for name, registers, shared in _FACTS.findall(source)}


def count(source: str, kernel: str, grid: Sequence[int], block: Sequence[int]) -> Counts:
    """Count the work of one block of a launch; all zero for an unknown kernel."""
    found = re.search(rf"__(?:global|kernel)__ void (?:__launch_bounds__\(\d+\) )?{kernel}\(([^)]*)\)\s*\{{\n", source)
    if found is None:
        return Counts()
    end = source.find("\n}\n", found.end())
    return _Walk(found[1], grid, block).follow(source[found.end() : end if end >= 0 else None].splitlines())


class _Walk:
    """One pass over a kernel's lines. Threads whose condition is false are masked."""

    def __init__(self, parameters: str, grid: Sequence[int], block: Sequence[int]) -> None:
        threads = math.prod(block)
        at = np.arange(threads)
        self._warps = at // WARP
        ours = (at % block[0], at // block[0] % block[1], at // (block[0] * block[1]))
        names = "xyz"
        self._values: dict[str, Any] = {f"threadIdx_{n}": each for n, each in zip(names, ours, strict=True)}
        self._values |= {f"blockIdx_{n}": size // 2 for n, size in zip(names, grid, strict=True)}
        self._masks: list[Lanes] = [np.ones(threads, bool)]
        self._times = [1.0]
        # The open loops, the outermost first: variable, trip count, whether unrolled.
        self._loops: list[tuple[str, int, bool]] = [("", 1, False)]
        self._depends: dict[str, frozenset[str]] = {name: frozenset({_THREAD}) for name in self._values}
        self._barred: set[int] = set()
        self._global: dict[str, tuple[int, int]] = {}
        for number, words in enumerate(parameters.split(",")):
            if "*" in words:
                kind, *_, name = words.replace("const ", "").split()
                self._global[name.strip("*")] = (number, _size(kind.strip("*")))
        self._shared: dict[str, int] = {}
        self._local: set[str] = set()
        self._multiplied = self._added = 0.0
        self._counts = Counts()
        self._waits = False  # since the last barrier, or within this loop: consecutive loads overlap

    def follow(self, lines: Sequence[str]) -> Counts:
        """Count; an addition paired with a multiplication is one FMA."""
        self._barred = _find_barred(lines)
        for number, line in enumerate(lines):
            self._line(_NUMBER.sub("1", _COMMENT.sub("", line.strip())), number)
        self._counts.arithmetic += max(self._multiplied, self._added)
        self._counts.issued += self._counts.arithmetic
        return self._counts

    def _line(self, line: str, number: int) -> None:
        counts, times, mask = self._counts, self._times[-1], self._masks[-1]
        if line.startswith("} else"):
            self._times.pop()
            self._loops.pop()
            inside = self._masks.pop()
            self._push(times, self._masks[-1] & ~inside)
        elif line == "}":
            if len(self._masks) > 1:
                self._masks.pop()
                self._times.pop()
                self._loops.pop()
        elif found := _FOR.match(line):
            first, last = (self._number(words) for words in found.groups()[1:])
            self._values[found[1]] = (first + last - 1) // 2 if last > first else first
            self._depends[found[1]] = frozenset({found[1]})
            rounds = max(0, last - first)
            unrolled = number not in self._barred and rounds <= _MOST_UNROLLED
            self._push(times * rounds, mask, (found[1], rounds, unrolled))
            if not unrolled:
                self._waits = False
                counts.issued += self._count_warps(mask) * self._times[-1]
        elif line.startswith("if (") and line.endswith("{"):
            self._push(times, mask & self._condition(line[4 : line.rindex(")")]))
        elif line.endswith("{"):
            self._push(times, mask)
        elif found := _ARRAY.match(line):
            self._declare(*found.groups())
        elif "__syncthreads" in line:
            counts.barriers += times
            self._waits = False
            counts.issued += self._count_warps(mask) * times
        elif found := _INTEGERS.match(line):
            self._values[found[1]] = self._evaluate(found[2])
            self._depends[found[1]] = self._list_dependences(found[2])
            counts.issued += self._count_warps(mask) * self._count_integers(found[2])
        elif found := _PAIRED.match(line):
            for name, words in zip("xyzw", _split(found[2]), strict=False):
                self._values[f"{found[1]}_{name}"] = self._evaluate(words)
                self._depends[f"{found[1]}_{name}"] = self._list_dependences(words)
            counts.issued += self._count_warps(mask) * self._count_integers(found[2])
        elif line:
            self._statement(line, times, mask)

    def _push(self, times: float, mask: Lanes, loop: tuple[str, int, bool] = ("", 1, False)) -> None:
        self._times.append(times)
        self._masks.append(mask)
        self._loops.append(loop)

    def _list_dependences(self, words: str) -> frozenset[str]:
        """The loops that an expression varies with; `_THREAD` if it differs between threads, or is loaded."""
        found: set[str] = set()
        for name in _NAME.findall(re.sub(r"\b(\w+)\.([xyzw])\b", r"\1_\2", _CASTS.sub("", words))):
            is_memory = name in self._global or name in self._shared
            found |= self._depends.get(name, frozenset({_THREAD} if is_memory else ()))
        return frozenset(found)

    def _count_times(self, words: str) -> float:
        """How often an expression is evaluated: in unrolled loops, only once per value."""
        times, depends, kept = self._times[-1], self._list_dependences(words), 1
        for name, rounds, unrolled in reversed(self._loops):
            if not name:
                continue
            if not unrolled or not rounds:
                break
            if name in depends:
                kept *= rounds
            elif kept <= _MOST_KEPT:
                times /= rounds
        return times

    def _count_integers(self, words: str) -> float:
        """As `_count_times`, for integer arithmetic, which is free if constant after unrolling."""
        unrolled = {name for name, _, is_unrolled in self._loops if is_unrolled}
        return 0.0 if self._list_dependences(words) <= unrolled else self._count_times(words)

    def _count_rounds(self) -> float:
        """How often a memory stall starts: loads of unrolled loops overlap."""
        times = self._times[-1]
        for name, rounds, unrolled in reversed(self._loops):
            if not name:
                continue
            if not unrolled or not rounds:
                break
            times /= rounds
        return times

    def _count_warps(self, mask: Lanes) -> int:
        return len(np.unique(self._warps[mask]))

    def _declare(self, shared: str | None, kind: str, name: str, length: str) -> None:
        if shared:
            self._shared[name] = _size(kind)
        else:
            self._local.add(name)
            digits = kind[-1:] if kind[-1:].isdigit() else "1"
            self._counts.held = max(self._counts.held, int(length) * int(digits))

    def _statement(self, line: str, times: float, mask: Lanes) -> None:
        warps = self._count_warps(mask)
        if not warps:
            return
        line = self._take_accesses(line, times, mask)
        value = line.partition(" = ")[2] or line
        weight = warps * times
        self._multiplied += weight * value.count("*")
        self._added += weight * (value.count("+") + value.count(" - ") + len(re.findall(r"\b(?:max|min)\(", value)))
        calls = _FUNCTION * len(_CALLS.findall(value)) + _SHUFFLE * value.count("__shfl")
        self._counts.arithmetic += weight * (_DIVISION * value.count("/") + calls)

    def _take_accesses(self, line: str, times: float, mask: Lanes) -> str:
        """Count the line's memory accesses; return the line without indices."""
        waited = False
        while True:
            vector, plain = _VECTOR.search(line), _VOLATILE.search(line) or self._find_plain(line)
            if vector and (not plain or vector.start() <= plain.start()):
                first, name, width, ends = vector, vector[3], int(vector[2]), "()"
            elif plain:
                first, name, width, ends = plain, plain[1], 1, "[]"
            else:
                break
            end = _closing(line, first.end(), *ends)
            words = line[first.end() : end]
            read = " = " in line[: first.start()]
            waited = self._access(name, words, width, self._count_times(words) if read else times, mask) or waited
            line = f"{line[: first.start()]}M{line[end + 1 :]}"
        if waited and not self._waits:
            self._waits = True
            self._counts.waits += self._count_rounds()
        return line

    def _find_plain(self, line: str) -> re.Match[str] | None:
        known = (*self._global, *self._shared, *self._local)
        return next((found for found in _PLAIN.finditer(line) if found[1] in known), None)

    def _access(self, name: str, words: str, width: int, times: float, mask: Lanes) -> bool:
        """Count one access; return whether it is to global memory."""
        if name not in self._global and name not in self._shared:
            return False
        index = np.broadcast_to(self._evaluate(words), mask.shape)[mask]
        warps = self._warps[mask]
        self._counts.issued += times * len(np.unique(warps))
        if name in self._global:
            number, size = self._global[name]
            sectors = (
                index[:, None] * size + np.arange(0, width * size, min(size * width, SECTOR_BYTES))
            ) // SECTOR_BYTES
            moved = len(np.unique(warps[:, None] * (1 << 40) + sectors))
            self._counts.sectors[number] = self._counts.sectors.get(number, 0.0) + times * moved
            return True
        size = self._shared[name]
        span = max(1, width * size // _WORD_BYTES)
        lanes = index[:, None] * size // _WORD_BYTES + np.arange(span)
        found = np.unique(warps[:, None] * (1 << 40) + lanes)
        turns = np.zeros((int(warps.max()) + 1, _BANKS), int)
        np.add.at(turns, (found >> 40, found % _BANKS), 1)
        self._counts.shared += times * float(turns.max(axis=1).sum())
        return False

    def _number(self, words: str) -> int:
        return int(np.max(self._evaluate(words)))

    def _condition(self, words: str) -> Lanes:
        return np.broadcast_to(np.asarray(self._evaluate(words), bool), self._masks[0].shape)

    def _evaluate(self, words: str) -> Any:
        """Evaluate an integer expression per thread; an index loaded from memory counts as random."""
        expression = _to_python(words)
        try:
            return eval(expression, {"__builtins__": {}}, self._values)  # noqa: S307 - written by the farm's compiler
        except (SyntaxError, NameError, TypeError, ValueError, ZeroDivisionError):
            return np.arange(self._masks[0].size) * 1009 % 65521


def _find_barred(lines: Sequence[str]) -> set[int]:
    """Line numbers that open a block with a barrier in it."""
    barred: set[int] = set()
    opened: list[int] = []
    for number, line in enumerate(lines):
        text = line.strip()
        if text.startswith("}") and opened:
            opened.pop()
        if text.endswith("{"):
            opened.append(number)
        if "__syncthreads" in text:
            barred |= set(opened)
    return barred


def _to_python(words: str) -> str:
    words = re.sub(r"\b(\w+)\.([xyzw])\b", r"\1_\2", _CASTS.sub("", words))
    return words.replace("&&", "&").replace("||", "|").replace("/", "//").replace("!(", "~(")


def _split(words: str) -> list[str]:
    """Split the arguments of a call."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(words):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(words[start:at])
            start = at + 1
    return [*parts, words[start:]]


def _closing(line: str, start: int, opening: str, closing: str) -> int:
    """Find the bracket that closes the one before `start`."""
    depth = 1
    for at in range(start, len(line)):
        depth += (line[at] == opening) - (line[at] == closing)
        if depth == 0:
            return at
    return len(line)


def _size(kind: str) -> int:
    """Bytes of a type such as float or float4."""
    name, digits = (kind[:-1], int(kind[-1])) if kind[-1:].isdigit() and not kind.endswith("_t") else (kind, 1)
    return digits * (1 if name in _SMALL else _BYTES.get(name, 4))
