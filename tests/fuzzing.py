"""Seeded randomness for tests that throw garbage: the same every time, and as long as `FARM_FUZZ_ROUNDS` says.

`FARM_FUZZ_ROUNDS=100 FARM_FUZZ_SEED=7 pytest -k fuzz` runs a hundred times as long, with other garbage.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

ROUNDS = int(os.environ.get("FARM_FUZZ_ROUNDS", "1"))
SEED = int(os.environ.get("FARM_FUZZ_SEED", "1"))
# What readers of numbers and texts trip over.
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, -(2**31), 2**63, 2**64, 10**400, 1e308, -1e308, 5e-324),
    *(float("nan"), float("inf"), -float("inf"), -0.0, -1.0),
    *("", "nan", "\ud800", "\x00", "\x1b[2J\x1b]0;owned\x07", "../../x", "a" * 70_000, "\u202e", "ok", "crashed"),
    *([], {}, [[]], {"": None}, [None] * 200_000, {"status": "ok"}),
)


def each(count: int) -> Iterator[random.Random]:
    """`count` sources of randomness, times `FARM_FUZZ_ROUNDS`; a failing one is found again by its number."""
    for number in range(count * ROUNDS):
        yield random.Random(f"{SEED}/{number}")


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut out, doubled, or put where a number may be read."""
    mutated = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(mutated) + 1)
        match rng.randrange(6):
            case 0:
                mutated[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del mutated[at : at + rng.choice((1, 4, 8, 100))]
            case 2:
                mutated[at:at] = mutated[max(0, at - rng.choice((1, 4, 8, 40))) : at]
            case 3:
                size = rng.choice((4, 8))
                value = rng.choice((0, 1, 2, 7, 8, 64, 255, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1))
                mutated[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
            case 4:
                mutated[at:at] = rng.randbytes(rng.choice((1, 4, 8, 50)))
            case _:
                del mutated[at:]
        mutated = mutated or bytearray(b"\x00")
    return bytes(mutated)


def mutate_value(value: Any, rng: random.Random) -> Any:
    """A JSON value with one thing somewhere in it replaced, left out or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if rng.random() < 0.05:
            return {**value, str(rng.choice(_ODD)): rng.choice(_ODD)}
        return {**value, key: mutate_value(value[key], rng)}
    if isinstance(value, list | tuple) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_value(value[at], rng), *value[at + 1 :]]
    return rng.choice(_ODD)
