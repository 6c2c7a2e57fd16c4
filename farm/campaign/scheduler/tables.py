"""A map that is never changed, of which a changed copy costs little: what lets the fleet scheduler be a pure function.

Entries are spread over shards. A copy shares all shards but those that its edit wrote to. Nothing here knows of boards.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", int, str)
V = TypeVar("V")

# With some thousand entries (a thousand boards, twice as many jobs) the list of shards and one shard are about equally
# long, and both are copied in under a microsecond.
_SHARDS = 64


def _shard_of(key: int | str) -> int:
    """Where a key belongs. Not `hash`: that of a text differs from process to process, and decisions must not."""
    return key % _SHARDS if isinstance(key, int) else zlib.crc32(key.encode()) % _SHARDS


class _Shards(Generic[K, V]):
    """What a table and its edit have in common: looking something up."""

    __slots__ = ("_shards", "_size")

    _shards: Sequence[dict[K, V]]
    _size: int

    def __getitem__(self, key: K) -> V:
        return self._shards[_shard_of(key)][key]

    def __contains__(self, key: K) -> bool:
        return key in self._shards[_shard_of(key)]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        """The keys of this moment, smallest first: never the order in which they came."""
        return iter(sorted(key for shard in self._shards for key in shard))

    def find(self, key: K) -> V | None:
        """The value of a key, None where there is none."""
        return self._shards[_shard_of(key)].get(key)

    def values(self) -> list[V]:
        """The values of this moment in the order of their keys."""
        return [self[key] for key in self]


class Table(_Shards[K, V]):
    """An immutable map. `edit()` begins a changed copy."""

    __slots__ = ()

    _shards: tuple[dict[K, V], ...]

    def __init__(self, shards: tuple[dict[K, V], ...] | None = None, size: int = 0) -> None:
        # Empty shards may be one and the same: an edit copies a shard before it writes to it.
        empty: dict[K, V] = {}
        self._shards = (empty,) * _SHARDS if shards is None else shards
        self._size = size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._shards == other._shards

    __hash__ = None  # type: ignore[assignment]

    def edit(self) -> TableEdit[K, V]:
        """A copy that can be changed; this table stays as it is."""
        return TableEdit(self._shards, self._size)


class TableEdit(_Shards[K, V]):
    """A table while it is being changed. It belongs to one function and never leaves it; `freeze()` ends it."""

    __slots__ = ("_base", "_owned")

    _shards: list[dict[K, V]]

    def __init__(self, shards: tuple[dict[K, V], ...], size: int) -> None:
        self._base: tuple[dict[K, V], ...] = shards
        self._shards = list(shards)
        self._owned: set[int] = set()
        self._size = size

    def __setitem__(self, key: K, value: V) -> None:
        shard = self._writable(_shard_of(key))
        self._size += key not in shard
        shard[key] = value

    def pop(self, key: K) -> V:
        """Take an entry out. Raises KeyError where there is none."""
        value = self._writable(_shard_of(key)).pop(key)
        self._size -= 1
        return value

    def freeze(self) -> Table[K, V]:
        """The table as it is now; this edit must not be used afterwards."""
        return Table(tuple(self._shards) if self._owned else self._base, self._size)

    def _writable(self, index: int) -> dict[K, V]:
        if index not in self._owned:
            self._owned.add(index)
            self._shards[index] = self._shards[index].copy()
        return self._shards[index]
