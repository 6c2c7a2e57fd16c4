"""Seeded randomness for tests that throw garbage: the same every time, and as long as `FARM_FUZZ_ROUNDS` says.

`FARM_FUZZ_ROUNDS=100 FARM_FUZZ_SEED=7 pytest -k fuzz` runs a hundred times as long, with other garbage.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import typer.testing

from farm.cli.main import make_app

ROUNDS = int(os.environ.get("FARM_FUZZ_ROUNDS", "1"))
SEED = int(os.environ.get("FARM_FUZZ_SEED", "1"))
# What readers of numbers and texts trip over.
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, -(2**31), 2**63, 2**64, 10**400, 1e308, -1e308, 5e-324),
    *(float("nan"), float("inf"), -float("inf"), -0.0, -1.0),
    *("", "nan", "\ud800", "\x00", "\x1b[2J\x1b]0;owned\x07", "../../x", "a" * 70_000, "\u202e", "ok", "crashed"),
    *([], {}, [[]], {"": None}, [None] * 200_000, {"status": "ok"}),
)

# Far above what any of them takes: beyond it something hangs.
DEADLINE_S = 20.0
WORDS = (
    "", "null", "true", "-1", "0", "1e999", ".nan", "-.inf", "9" * 400, "1_000", "0x10", "'", '"', "|", "&a [*a]",
    "*a", "<<: {a: 1}", "!!python/object:os.system [ls]", "!!binary aaaa", "!!set {a}", "2001-01-01", "? [a]: b",
    "[" * 3000, "{a: " * 500, "\x00", "\x1b[2J", "\ud800", "\u202e", "é" * 300, "../../x", "/etc/passwd", "~", "%s",
    "{}", "[]", "[1-999999999]", "[a-z][a-z][a-z][a-z][a-z][a-z]", "[9-1]", "a" * 10_000, "${HOME}", "-", ":", "\t",
    "ssh", "virtual", "jetson-nano", "1-", "b-[1-3]", "127.0.0.1", "[::1]:99999", "user@", "12h", "-5s", "1e300h",
)  # fmt: skip


def each(count: int) -> Iterator[random.Random]:
    """`count` sources of randomness, times `FARM_FUZZ_ROUNDS`; a failing one is found again by its number."""
    for number in range(count * ROUNDS):
        yield random.Random(f"{SEED}/{number}")


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
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


def mutate_text(text: str, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 4)):
        lines = text.split("\n")
        number = rng.randrange(len(lines))
        line = lines[number]
        token = rng.choice(WORDS)
        kind = rng.randrange(8)
        if kind == 0:
            key, colon, _ = line.partition(":")
            lines[number] = f"{key}{colon} {token}"
        elif kind == 1:
            lines[number] = line[: len(line) - len(line.lstrip())] + token
        elif kind == 2:
            lines.insert(number, rng.choice(lines))
        elif kind == 3:
            del lines[number]
        elif kind == 4:
            lines[number] = " " * rng.randint(0, 12) + line.lstrip()
        elif kind == 5:
            place = rng.randint(0, len(line))
            lines[number] = line[:place] + token + line[place:]
        elif kind == 6:
            lines[number] = line.replace(rng.choice(line or " "), rng.choice(":-[]{},&*#?|>!%@`\"' "))
        else:
            lines = lines[: number + 1]
        text = "\n".join(lines)
    data = bytearray(text.encode(errors="surrogatepass"))
    if data and rng.random() < 0.2:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


@contextlib.contextmanager
def deadline(what: str) -> Iterator[None]:
    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"hangs: {what}")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_command(*arguments: str) -> str:
    """Run `farm` in this process; returns why its end is none that a user should see, empty where it is."""
    with deadline(" ".join(arguments)):
        done = typer.testing.CliRunner().invoke(make_app(arguments[0]), arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return f"{' '.join(arguments)}: {done.exception!r}"
    if "internal error" in done.output or "Traceback" in done.output or done.exit_code not in range(5):
        return f"{' '.join(arguments)}: exit {done.exit_code}, {done.output[-400:]}"
    return ""
