"""Parse an aarch64 library or program: its segments, symbols and relocations. Loads nothing.

Formats: System V ABI, ELF-64 object files; Arm, ELF for the Arm 64-bit Architecture (AAELF64), dynamic relocations.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

MACHINE_AARCH64 = 183
_PT_LOAD, _PT_DYNAMIC = 1, 2
_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_DT_RELA, _DT_RELASZ, _DT_JMPREL, _DT_PLTRELSZ, _DT_SYMTAB, _DT_STRTAB = 7, 8, 23, 2, 6, 5
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QIIq")
_MOST_SYMBOLS = 100_000


class ElfError(ValueError):
    """Not an aarch64 ELF file, or truncated."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """A mapped part of the file: `size` bytes at `address`, of which `data` come from the file."""

    address: int
    size: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class Relocation:
    """One relocation: `offset`, kind, symbol ("" for none) and addend."""

    offset: int
    kind: int
    symbol: str
    addend: int


class Elf:
    """One file. Raises ElfError for anything else."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        try:
            header = _HEADER.unpack_from(data)
            identity, machine = header[0], header[2]
            if identity[:6] != b"\x7fELF\x02\x01" or machine != MACHINE_AARCH64:
                raise ElfError("the library is not code for aarch64")
            self._segments = [_SEGMENT.unpack_from(data, header[5] + index * header[9]) for index in range(header[10])]
            self._sections = [_SECTION.unpack_from(data, header[6] + index * header[11]) for index in range(header[12])]
            self.segments = tuple(
                Segment(each[3], each[6], self._slice(each[2], each[5]))
                for each in self._segments
                if each[0] == _PT_LOAD
            )
            names = self._sections[header[13]] if self._sections else None
            self.text = self._find_text(names)
            self.symbols, self._dynamic_names = self._read_symbols()
            self.relocations = tuple(self._read_relocations())
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ElfError(f"the library is damaged: {error}") from error

    def _slice(self, offset: int, size: int) -> bytes:
        if offset + size > len(self._data):
            raise ElfError("the library is cut short")
        return self._data[offset : offset + size]

    def _string(self, start: int) -> str:
        return self._data[start : self._data.index(b"\0", start)].decode()

    def _find_text(self, names: tuple[int, ...] | None) -> tuple[int, bytes]:
        for section in self._sections if names else ():
            assert names is not None
            if self._string(names[4] + section[0]) == ".text":
                return section[3], self._slice(section[4], section[5])
        raise ElfError("the library holds no code")

    def _read_symbols(self) -> tuple[dict[str, int], list[tuple[str, int]]]:
        """Addresses by name; and by symbol number the name, with its address or 0 for an import."""
        defined: dict[str, int] = {}
        dynamic: list[tuple[str, int]] = []
        for section in self._sections:
            if section[1] not in (_SHT_SYMTAB, _SHT_DYNSYM):
                continue
            strings = self._sections[section[6]][4]
            count = section[5] // _SYMBOL.size
            if count > _MOST_SYMBOLS:
                raise ElfError("the library has too many symbols")
            self._slice(section[4], section[5])
            for index in range(count):
                name_at, _, _, where, value, _ = _SYMBOL.unpack_from(self._data, section[4] + index * _SYMBOL.size)
                name = self._string(strings + name_at)
                if where and name:
                    defined[name] = value
                if section[1] == _SHT_DYNSYM:
                    dynamic.append((name, value if where else 0))
        return defined, dynamic

    def _read_relocations(self) -> Iterator[Relocation]:
        tags = dict(self._read_tags())
        for start, size in ((_DT_RELA, _DT_RELASZ), (_DT_JMPREL, _DT_PLTRELSZ)):
            if start not in tags:
                continue
            offset = self._find_offset(tags[start])
            for at in range(offset, offset + tags.get(size, 0), _RELOCATION.size):
                where, kind, symbol, addend = _RELOCATION.unpack_from(self._data, at)
                yield Relocation(where, kind, self._dynamic_names[symbol][0] if symbol else "", addend)

    def _read_tags(self) -> Iterator[tuple[int, int]]:
        for each in self._segments:
            if each[0] == _PT_DYNAMIC:
                for at in range(each[2], each[2] + each[5], 16):
                    tag, value = struct.unpack_from("<qQ", self._data, at)
                    if not tag:
                        return
                    yield tag, value

    def _find_offset(self, address: int) -> int:
        for each in self._segments:
            if each[0] == _PT_LOAD and each[3] <= address < each[3] + each[5]:
                return int(address - each[3] + each[2])
        raise ElfError("the library refers to nothing")
