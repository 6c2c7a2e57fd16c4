"""Seeded noise: the same board gives the same sequence for the same questions, whatever else is asked in between."""

from __future__ import annotations

import math
import zlib

_MASK = (1 << 64) - 1


class Noise:
    """Numbers that depend on the seed, on what they are for, and on how often that was asked."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._asked: dict[tuple[str, str], int] = {}

    def begin_anew(self) -> None:
        """Give the same numbers again."""
        self._asked.clear()

    def share(self, purpose: str, name: str) -> float:
        """The next number in [0, 1) for this purpose."""
        key = (purpose, name)
        count = self._asked[key] = self._asked.get(key, 0) + 1
        return uniform(self._seed, zlib.crc32(f"{purpose} {name}".encode()), count)


def uniform(*numbers: int) -> float:
    """A number in [0, 1) that depends on `numbers` alone (splitmix64, Steele, Lea, Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state / (1 << 64)


def gaussian(*numbers: int) -> float:
    """A standard normal number that depends on `numbers` alone (Box and Muller)."""
    radius = math.sqrt(-2 * math.log(1 - uniform(*numbers, 1)))
    return radius * math.cos(2 * math.pi * uniform(*numbers, 2))
