"""Parse what users type for a sweep: frequencies, cores, points. `grid` knows what a board has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from device_agent.protocol import (
    Clocks,
    Description,
    DomainClocks,
    OperatingPoint,
    ProtocolError,
    format_table,
    parse_cpus,
    parse_hz,
)
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.points.grid import GPU, MEMORY
from farm.values import DEFAULT_POINT

ALL = "all"


def find_clocks(board_type: BoardType, description: Mapping[str, Any]) -> Clocks | None:
    """Return the clocks of a board's last description, else those of its type's file; None where neither has any."""
    try:
        clocks = Description.from_dict(dict(description)).clocks if description else None
    except ProtocolError:
        # Kept by another version: the type's file is then the better source.
        clocks = None
    if clocks is not None and (clocks.clusters or clocks.power_modes):
        return clocks
    if not board_type.clusters and not board_type.power_modes:
        return None
    gpu, memory = board_type.gpu, board_type.memory
    # The table depends on the board's release: any of them will do until it has been asked.
    tables = (gpu.freqs_hz, *gpu.other_freqs_hz) if gpu else ()
    return Clocks(
        clusters=tuple(
            DomainClocks(each.name, available_hz=each.freqs_hz, cpus=each.cpus, isolated=each.isolated)
            for each in board_type.clusters
        ),
        gpu=DomainClocks(GPU, available_hz=tuple(sorted({hz for table in tables for hz in table}))) if gpu else None,
        memory=DomainClocks(MEMORY, available_hz=memory.freqs_hz) if memory else None,
        power_modes=tuple(mode.name for mode in board_type.power_modes),
    )


def parse_freqs(text: str, available_hz: Sequence[int]) -> tuple[int, ...]:
    """Parse `all`, or a list of frequencies and ranges: `600,921.6MHz,1.2GHz..1.5GHz`.

    A range stands for the board's frequencies in it. Raises UsageError for what is no frequency, and for an empty
    range; single frequencies are checked with the grid.
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
    """Parse one frequency in Hz; without a unit it is in MHz. Raises UsageError."""
    try:
        return parse_hz(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def parse_core_sets(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse sets of CPUs, divided by `/`: `0-3/0,3-5` is two sets. Raises UsageError."""
    return tuple(parse_cores(part) for part in text.split("/"))


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse one set of CPUs as the kernel writes it: `0,3-5`. Raises UsageError."""
    try:
        cores = parse_cpus(text)
    except ValueError as error:
        raise UsageError(str(error), hint="write 0-3 or 0,3-5; divide sets by /") from error
    if not cores:
        raise UsageError(f"{text.strip()!r} names no CPUs", hint="write 0-3 or 0,3-5; divide sets by /")
    return cores


def parse_point(text: str) -> OperatingPoint:
    """Parse a point as `grid.format_point` writes it: `mode=MAXN`, `cores=0-3 a57=921.6MHz gpu=921.6MHz`, or `default`.

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
