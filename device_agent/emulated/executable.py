"""The program inside a compiled model's library: bytes that TVM's virtual machine runs on any machine.

The library holds it as TVM packs modules (tvm_ffi, `__tvm_ffi__library_bin`): the tree of modules, then each one's kind
and bytes. The functions that it calls are code for the board; whoever runs it here says where they go.
"""

from __future__ import annotations

import struct

from device_agent.emulated.elf import Elf, ElfError

KIND = "relax.VMExecutable"
_SYMBOL = "__tvm_ffi__library_bin"
_HERE = "_lib"  # the library itself
_MOST_MODULES = 64


def read_executable(library: bytes) -> bytes:
    """The bytes of the executable in a library. Raises ElfError where it holds none."""
    elf = Elf(library)
    at = elf.symbols.get(_SYMBOL)
    if at is None:
        raise ElfError("the library holds no Relax VM program")
    data = next((s.data[at - s.address :] for s in elf.segments if s.address <= at < s.address + len(s.data)), b"")
    try:
        return _find(_Reader(data))
    except (struct.error, UnicodeDecodeError) as error:
        raise ElfError(f"the library's program is damaged: {error}") from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self) -> int:
        (value,) = struct.unpack_from("<Q", self._data, self._at)
        self._at += 8
        return int(value)

    def numbers(self) -> list[int]:
        count = self.number()
        if count > _MOST_MODULES:
            raise ElfError("the library's program is damaged: too many modules")
        return [self.number() for _ in range(count)]

    def bytes(self) -> bytes:
        size = self.number()
        if self._at + size > len(self._data):
            raise ElfError("the library's program is cut short")
        self._at += size
        return self._data[self._at - size : self._at]


def _find(reader: _Reader) -> bytes:
    reader.number()  # the length of all
    modules = len(reader.numbers()) - 1
    reader.numbers()  # whose children they are
    for _ in range(max(0, modules)):
        kind = reader.bytes().decode()
        if kind == _HERE:
            continue
        data = reader.bytes()
        if kind == KIND:
            return data
    raise ElfError("the library holds no Relax VM program")
