"""Reading what users type for a sweep: frequencies, cores, points. What a board has is `grid`'s business."""

from __future__ import annotations

from collections.abc import Sequence

from device_agent.protocol import OperatingPoint, format_table, parse_cpus, parse_hz
from farm.errors import UsageError
from farm.points.grid import GPU, MEMORY
from farm.values import DEFAULT_POINT

ALL = "all"


def parse_freqs(text: str, available_hz: Sequence[int]) -> tuple[int, ...]:
    """`all`, or a list of frequencies and ranges: `600,921.6MHz,1.2GHz..1.5GHz`.

    A range takes what the board has in it. Raises UsageError for what is no frequency, and for a range that the board
    has nothing in; that a single frequency exists is checked with the grid.
    """
    if text.strip().lower() == ALL:
        return tuple(sorted(available_hz))
    found: set[int] = set()
    for word in text.split(","):
        low, dots, high = word.partition("..")
        if not dots:
            found.add(parse_freq(word))
            continue
        low_hz, high_hz = parse_freq(low), parse_freq(high)
        inside = {hz for hz in available_hz if low_hz <= hz <= high_hz}
        if not inside:
            raise UsageError(
                f"the board has no frequency in {word.strip()}", hint=f"it has {format_table(sorted(available_hz))}"
            )
        found |= inside
    return tuple(sorted(found))


def parse_freq(text: str) -> int:
    """One frequency in Hz; without a unit it is in MHz. Raises UsageError."""
    try:
        return parse_hz(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def parse_core_sets(text: str) -> tuple[tuple[int, ...], ...]:
    """Sets of CPUs, divided by `/`: `0-3/0,3-5` is two sets. Raises UsageError."""
    return tuple(parse_cores(part) for part in text.split("/"))


def parse_cores(text: str) -> tuple[int, ...]:
    """One set of CPUs as the kernel writes it: `0,3-5`. Raises UsageError."""
    try:
        cores = parse_cpus(text)
    except ValueError as error:
        raise UsageError(str(error), hint="write 0-3 or 0,3-5; divide sets by /") from error
    if not cores:
        raise UsageError(f"{text.strip()!r} names no CPUs", hint="write 0-3 or 0,3-5; divide sets by /")
    return cores


def parse_point(text: str) -> OperatingPoint:
    """A point as `grid.format_point` writes it: `mode=MAXN`, `cores=0-3 a57=921.6MHz gpu=921.6MHz`, or `default`.

    Raises UsageError.
    """
    given: dict[str, str] = {}
    for word in [] if text.strip() == DEFAULT_POINT else text.split():
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise UsageError(
                f"{text!r} is no operating point: {word!r} is not NAME=VALUE",
                "Examples: default; mode=MAXN; cores=0-3 a57=921.6MHz. `farm record list` shows those of records.",
            )
        given[name] = value
    mode, cores = given.pop("mode", None), given.pop("cores", None)
    clocks = {name: parse_freq(value) for name, value in given.items()}
    gpu, memory = clocks.pop(GPU, None), clocks.pop(MEMORY, None)
    return OperatingPoint(mode, None if cores is None else parse_cores(cores), clocks, gpu, memory)
