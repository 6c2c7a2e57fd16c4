"""An aarch64 machine with one library: load it, call its packed functions, count executed instructions.

Only `server.py`'s process imports this. Tensors are in memory that the caller shares; costs are in `estimate.py`.
Calling convention: TVM's packed functions over its C ABI (tvm_ffi/c_api.h), tensors as DLPack lays them out.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from unicorn import (
    UC_ARCH_ARM64,
    UC_HOOK_BLOCK,
    UC_HOOK_INTR,
    UC_HOOK_MEM_READ,
    UC_HOOK_MEM_WRITE,
    UC_MODE_ARM,
    UC_PROT_ALL,
    Uc,
    UcError,
    arm64_const,
)
from unicorn.unicorn_py3.unicorn import uclib

from farm.virtual.emulated.elf import Elf
from farm.virtual.emulated.estimate import Block

# The memory map; the C library is at its own addresses, below all of these. Nothing is mapped at 0.
_LIBRARY, _HEAP, TENSORS, _CALL = 0x1_0000_0000, 0x10_0000_0000, 0x20_0000_0000, 0x8000_0000
_STACK_BYTES, _ARGUMENT_BYTES, _PAGE, _LINE = 8 << 20, 64 << 10, 4096, 64
_R_ABS64, _R_GLOB_DAT, _R_JUMP_SLOT, _R_RELATIVE = 257, 1025, 1026, 1027
# Imports of a library that the emulator itself serves.
_ANSWERS = {
    "TVMBackendParallelLaunch": "farm_launch",
    "TVMBackendParallelBarrier": "farm_barrier",
    "TVMBackendAllocWorkspace": "farm_allocate",
    "TVMBackendFreeWorkspace": "farm_free",
}
MOST_REGIONS = 16
_DESK = struct.Struct("<6I3Q")
_TENSOR = struct.Struct("<QiiiBBHQQQ")
_ANY = struct.Struct("<iIQ")
_INDEX_OF_TENSOR = 7  # kTVMFFIDLTensorPtr
_CPU = 1  # kDLCPU
# DLPack's type codes by NumPy's kind; bfloat16 has no kind.
_CODES = {"i": 0, "u": 1, "f": 2, "bfloat16": 4, "b": 6}


# Unicorn's cores with the instructions of an architecture; the second adds half precision and int8 dot products,
# which are optional in Armv8.2.
_MODELS = {"armv8": arm64_const.UC_CPU_ARM64_A72, "armv8.2": arm64_const.UC_CPU_ARM64_MAX}


class CapError(Exception):
    """The program exceeded its instruction limit."""


class FaultError(Exception):
    """The program did what would kill it on a board: a bad address, an undefined instruction."""


class MissingError(Exception):
    """The library imports a function that does not exist, or lacks the one called."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in shared memory: address, shape, and DLPack's type code and bits."""

    offset: int
    shape: tuple[int, ...]
    kind: str
    bits: int

    @property
    def size_bytes(self) -> int:
        return max(1, self.bits // 8) * math.prod(self.shape)


class _Text(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64), ("slots", ctypes.c_uint64), ("first", ctypes.c_uint64)]


class _Counts(ctypes.Structure):
    _fields_ = [
        ("texts", _Text * 2),
        ("all_slots", ctypes.c_uint64),
        ("count", ctypes.c_void_p),
        ("size", ctypes.c_void_p),
        ("lane", ctypes.c_void_p),
        ("lanes", ctypes.c_uint64),
        ("total", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("stop", ctypes.c_void_p),
        ("engine", ctypes.c_void_p),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [("lines", ctypes.c_void_p), ("sets", ctypes.c_uint64), ("ways", ctypes.c_uint64)]


class _Memory(ctypes.Structure):
    _fields_ = [
        ("first", _Cache),
        ("second", _Cache),
        ("lane", ctypes.c_void_p),
        ("lanes", ctypes.c_uint64),
        ("missed", ctypes.c_void_p),
        ("last_line", ctypes.c_uint64),
        ("last_lane", ctypes.c_uint64),
        ("heap", ctypes.c_uint64),
        ("heap_bytes", ctypes.c_uint64),
        ("seen", ctypes.c_void_p),
    ]


class _Math(ctypes.Structure):
    _fields_ = [
        ("lane", ctypes.c_void_p),
        ("lanes", ctypes.c_uint64),
        ("calls", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("write", ctypes.c_void_p),
        ("read_memory", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
        ("refused", ctypes.c_uint64),
        ("program_counter", ctypes.c_int),
        ("first", ctypes.c_int),
        ("second", ctypes.c_int),
    ]


class Machine:
    """A machine with a library in it. `tasks` is the number of threads in a parallel region."""

    def __init__(
        self,
        library: bytes,
        folder: Path,
        tensors: mmap.mmap,
        tasks: int,
        heap_bytes: int,
        architecture: str,
        caches: Sequence[int] | None = None,
    ) -> None:
        """`folder` holds the build of `farm/emulation.py`; `tensors` is the shared memory, of whole pages. `caches`
        (bytes and ways of two) turns on cache simulation, which is five times slower. `architecture` selects the
        instructions.

        Raises ElfError, MissingError.
        """
        self._uc = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        self._uc.ctl_set_cpu_model(_MODELS[architecture])
        self._uc.reg_write(arm64_const.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # enable vector registers
        self._kept: list[Any] = [tensors]
        self._world = Elf((folder / "world.elf").read_bytes())
        self._elf = Elf(library)
        self.tasks = tasks
        world = self._map_segments(self._world, 0)
        self._library = self._map_segments(self._elf, _LIBRARY)
        self._heap_bytes = _round_up(heap_bytes)
        self._map(_HEAP, mmap.mmap(-1, self._heap_bytes))
        self._map(TENSORS, tensors)
        self._call = mmap.mmap(-1, _STACK_BYTES + _ARGUMENT_BYTES + _PAGE)
        self._map(_CALL, self._call)
        self._uc.reg_write(arm64_const.UC_ARM64_REG_TPIDR_EL0, _CALL + _PAGE)
        first = min(each.address for each in self._world.segments) & -_PAGE
        self._desk = memoryview(world)[self._world.symbols["farm_desk"] - first :][: _DESK.size]
        self._relocate()
        self._count()
        hooks = ctypes.CDLL(str(folder / "hooks.so"))
        self._add_hook(UC_HOOK_BLOCK, hooks.farm_on_block, self._counts)
        self._answer_math(hooks)
        self.missed = np.zeros((len(self._counted), 2), np.uint64)
        if caches is not None:
            self._follow(hooks, caches)

    def _map(self, address: int, memory: mmap.mmap) -> mmap.mmap:
        self._kept.append(memory)
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._uc.mem_map_ptr(address, len(memory), UC_PROT_ALL, pointer)
        return memory

    def _map_segments(self, elf: Elf, base: int) -> mmap.mmap:
        first = min(each.address for each in elf.segments) & -_PAGE
        size = _round_up(max(each.address + each.size for each in elf.segments) - first)
        memory = mmap.mmap(-1, size)
        for each in elf.segments:
            memory[each.address - first : each.address - first + len(each.data)] = each.data
        return self._map(base + first, memory)

    def _relocate(self) -> None:
        for each in self._elf.relocations:
            if each.kind == _R_RELATIVE:
                value = _LIBRARY + each.addend
            elif each.kind in (_R_ABS64, _R_GLOB_DAT, _R_JUMP_SLOT):
                value = self._resolve(each.symbol) + each.addend
            else:
                raise MissingError(f"the library needs a relocation of kind {each.kind}")
            self._write(each.offset, value)
        for name, answer in _ANSWERS.items():
            if at := self._elf.symbols.get(f"__{name}"):
                self._write(at, self._world.symbols[answer])

    def _write(self, at: int, value: int) -> None:
        self._library[at : at + 8] = struct.pack("<Q", value & (2**64 - 1))

    def _resolve(self, name: str) -> int:
        if at := self._elf.symbols.get(name):
            return _LIBRARY + at
        found = self._world.symbols.get(_ANSWERS.get(name, name))
        if found is None and name.startswith("TVMFFI"):
            # Raising an error ends the call: a wrong shape must not look like a result.
            found = self._world.symbols["farm_stop"]
        if found is None:
            raise MissingError(f"the library needs {name}, which the emulated board does not have")
        return found

    def _count(self) -> None:
        texts = [(_LIBRARY + self._elf.text[0], self._elf.text[1]), self._world.text]
        slots = [len(data) // 4 for _, data in texts]
        lanes = 1 + MOST_REGIONS * self.tasks
        self._texts = texts
        self._counted = np.zeros((lanes, sum(slots)), np.uint64)
        self._sizes = np.zeros(sum(slots), np.uint32)
        self._counts = _Counts(
            texts=(_Text * 2)(_Text(texts[0][0], slots[0], 0), _Text(texts[1][0], slots[1], slots[0])),
            all_slots=sum(slots),
            count=self._counted.ctypes.data,
            size=self._sizes.ctypes.data,
            lane=ctypes.addressof(ctypes.c_char.from_buffer(self._desk)),
            lanes=lanes,
            stop=ctypes.cast(uclib.uc_emu_stop, ctypes.c_void_p),
            engine=self._uc._uch,
        )

    def _follow(self, hooks: ctypes.CDLL, sizes: Sequence[int]) -> None:
        """Simulate two caches; `sizes` holds bytes and ways of each."""
        first_bytes, first_ways, second_bytes, second_ways = sizes
        caches = [
            np.zeros((size // _LINE // ways, ways), np.uint64)
            for size, ways in ((first_bytes, first_ways), (second_bytes, second_ways))
        ]
        self._memory = _Memory(
            *(_Cache(each.ctypes.data, *each.shape) for each in caches),
            lane=self._counts.lane,
            lanes=len(self._counted),
            missed=self.missed.ctypes.data,
        )
        hooks.farm_warm.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
        self._hooks = hooks
        seen = np.zeros(self._heap_bytes // _LINE // 8 + 1, np.uint8)
        self._memory.heap, self._memory.heap_bytes, self._memory.seen = _HEAP, self._heap_bytes, seen.ctypes.data
        self._kept += [*caches, seen]
        self._add_hook(UC_HOOK_MEM_READ | UC_HOOK_MEM_WRITE, hooks.farm_on_memory, self._memory)

    def _answer_math(self, hooks: ctypes.CDLL) -> None:
        self.math_calls = np.zeros(len(self._counted), np.uint64)
        functions = (uclib.uc_reg_read, uclib.uc_reg_write, uclib.uc_mem_read, uclib.uc_emu_stop)
        self._math = _Math(
            self._counts.lane,
            len(self._counted),
            self.math_calls.ctypes.data,
            *(ctypes.cast(each, ctypes.c_void_p) for each in functions),
            0,
            arm64_const.UC_ARM64_REG_PC,
            arm64_const.UC_ARM64_REG_D0,
            arm64_const.UC_ARM64_REG_D1,
        )
        self._add_hook(UC_HOOK_INTR, hooks.farm_on_interrupt, self._math)

    def _add_hook(self, kind: int, function: Any, data: ctypes.Structure) -> None:
        handle = ctypes.c_size_t()
        whole = (ctypes.c_uint64(1), ctypes.c_uint64(0))
        called = ctypes.cast(function, ctypes.c_void_p)
        if status := uclib.uc_hook_add(self._uc._uch, ctypes.byref(handle), kind, called, ctypes.byref(data), *whole):
            raise UcError(status)

    def warm(self, tensor: Tensor) -> None:
        """Load a tensor into L2, as far as it fits."""
        start = TENSORS + tensor.offset
        self._hooks.farm_warm(ctypes.byref(self._memory), start, ctypes.c_uint64(tensor.size_bytes))

    @property
    def functions(self) -> list[str]:
        return [name.removeprefix("__tvm_ffi_") for name in self._elf.symbols if name.startswith("__tvm_ffi_")]

    def call(self, entry: str, tensors: Sequence[Tensor], cap: int, *, first_only: bool = False) -> int:
        """Call a packed function; return the number of instructions. `first_only`: only the first task of a region.

        Raises MissingError, CapError after `cap` instructions, FaultError.
        """
        symbol = self._elf.symbols.get(f"__tvm_ffi_{entry}")
        if not symbol:
            raise MissingError(f"the library has no function {entry!r}")
        arguments, result = self._place(tensors)
        words = (0, 0, self.tasks, MOST_REGIONS, first_only, 0, _HEAP, _HEAP + self._heap_bytes, _HEAP)
        _DESK.pack_into(self._desk, 0, *words)
        self._counts.total, self._counts.limit = 0, cap
        self._counted[:] = 0
        self.missed[:] = 0
        self.math_calls[:] = 0
        self._math.refused = 0
        uc, end = self._uc, _CALL
        for number, value in enumerate((0, arguments, len(tensors), result)):
            uc.reg_write(arm64_const.UC_ARM64_REG_X0 + number, value)
        uc.reg_write(arm64_const.UC_ARM64_REG_SP, _CALL + _STACK_BYTES)
        uc.reg_write(arm64_const.UC_ARM64_REG_LR, end)
        try:
            uc.emu_start(_LIBRARY + symbol, end)
        except UcError as error:
            raise FaultError(self._describe(error)) from error
        if refused := self._math.refused:
            raise FaultError(f"an undefined instruction at {refused:#x}")
        if self._counts.total > cap:
            raise CapError(f"more than {cap:,} instructions")
        status = uc.reg_read(arm64_const.UC_ARM64_REG_X0) & 0xFFFFFFFF
        if status:
            raise FaultError(f"the function returned {status}")
        return int(self._counts.total)

    def _place(self, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """Write a call's arguments; return the addresses of arguments and result."""
        start = _STACK_BYTES + _PAGE
        at = start + (len(tensors) + 1) * _ANY.size
        result = _CALL + start + len(tensors) * _ANY.size
        words = []
        for each in tensors:
            shape = struct.pack(f"<{len(each.shape)}q", *each.shape)
            tensor = _TENSOR.pack(
                *(TENSORS + each.offset, _CPU, 0, len(each.shape), _CODES[each.kind], each.bits, 1),
                *(_CALL + at + _TENSOR.size, 0, 0),
            )
            words.append(_ANY.pack(_INDEX_OF_TENSOR, 0, _CALL + at))
            if at + len(tensor) + len(shape) > len(self._call):
                raise MissingError("the function takes more tensors than there is room for")
            self._call[at : at + len(tensor) + len(shape)] = tensor + shape
            at += len(tensor) + len(shape) + (-len(shape)) % 8
        self._call[start : start + len(words) * _ANY.size + _ANY.size] = b"".join([*words, bytes(_ANY.size)])
        return _CALL + start, result

    def _describe(self, error: UcError) -> str:
        at = self._uc.reg_read(arm64_const.UC_ARM64_REG_PC)
        if at == self._world.symbols["farm_stop"] or self._is_in_stop(at):
            return "the function refused its arguments"
        name = "the library" if at >= _LIBRARY else "the C library"
        return f"{error} at {at:#x} in {name}"

    def _is_in_stop(self, at: int) -> bool:
        start = self._world.symbols["farm_stop"]
        return start <= at < start + 32

    def blocks(self) -> Iterator[Block]:
        """The basic blocks that the last call executed, by address."""
        for slot in np.flatnonzero(self._counted.any(axis=0)):
            first = 0
            for base, data in self._texts:
                if slot < first + len(data) // 4:
                    start = 4 * (int(slot) - first)
                    code = data[start : start + int(self._sizes[slot])]
                    yield Block(base + start, code, tuple(map(int, self._counted[:, slot])))
                    break
                first += len(data) // 4

    def count_by_lane(self) -> Any:
        return self._counted @ (self._sizes.astype(np.uint64) // 4)

    @property
    def heap_peak_bytes(self) -> int:
        """The peak workspace of the last call."""
        return int(_DESK.unpack_from(self._desk)[-1]) - _HEAP


def _round_up(size: int) -> int:
    return (size + _PAGE - 1) & -_PAGE
