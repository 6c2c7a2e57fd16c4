"""Seeded mutations of what people and other programs write, and commands run on them in this process."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator
from types import FrameType

import typer.testing

from farm.cli.main import app

# Far above what any of them takes: beyond it something hangs.
DEADLINE_S = 20.0
TOKENS = (
    "", "null", "true", "-1", "0", "1e999", ".nan", "-.inf", "9" * 400, "1_000", "0x10", "'", '"', "|", "&a [*a]",
    "*a", "<<: {a: 1}", "!!python/object:os.system [ls]", "!!binary aaaa", "!!set {a}", "2001-01-01", "? [a]: b",
    "[" * 3000, "{a: " * 500, "\x00", "\x1b[2J", "\ud800", "\u202e", "é" * 300, "../../x", "/etc/passwd", "~", "%s",
    "{}", "[]", "[1-999999999]", "[a-z][a-z][a-z][a-z][a-z][a-z]", "[9-1]", "a" * 10_000, "${HOME}", "-", ":", "\t",
    "ssh", "virtual", "jetson-nano", "1-", "b-[1-3]", "127.0.0.1", "[::1]:99999", "user@", "12h", "-5s", "1e300h",
)  # fmt: skip


def mutate(text: str, random_: random.Random) -> bytes:
    """The text with a few things wrong: bytes, words, lines, indentation."""
    for _ in range(random_.randint(1, 4)):
        lines = text.split("\n")
        number = random_.randrange(len(lines))
        line = lines[number]
        token = random_.choice(TOKENS)
        kind = random_.randrange(8)
        if kind == 0:
            key, colon, _ = line.partition(":")
            lines[number] = f"{key}{colon} {token}"
        elif kind == 1:
            lines[number] = line[: len(line) - len(line.lstrip())] + token
        elif kind == 2:
            lines.insert(number, random_.choice(lines))
        elif kind == 3:
            del lines[number]
        elif kind == 4:
            lines[number] = " " * random_.randint(0, 12) + line.lstrip()
        elif kind == 5:
            place = random_.randint(0, len(line))
            lines[number] = line[:place] + token + line[place:]
        elif kind == 6:
            lines[number] = line.replace(random_.choice(line or " "), random_.choice(":-[]{},&*#?|>!%@`\"' "))
        else:
            lines = lines[: number + 1]
        text = "\n".join(lines)
    data = bytearray(text.encode(errors="surrogatepass"))
    if data and random_.random() < 0.2:
        data[random_.randrange(len(data))] = random_.randrange(256)
    return bytes(data)


@contextlib.contextmanager
def deadline(what: str) -> Iterator[None]:
    """Fail naming `what` where the block takes longer than anything may."""

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
        done = typer.testing.CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return f"{' '.join(arguments)}: {done.exception!r}"
    if "internal error" in done.output or "Traceback" in done.output or done.exit_code not in range(5):
        return f"{' '.join(arguments)}: exit {done.exit_code}, {done.output[-400:]}"
    return ""
