"""Check a board's answers, which are not trusted: all of them pass here.

The protocol checks types, bounds and text (`device_agent.protocol.load_json`). Here values must be possible and of
this board.
`farm.connectivity.frames` decides which frames reach the farm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TypeVar

from device_agent import protocol
from device_agent.protocol import (
    PROTOCOL_VERSION,
    Description,
    Energy,
    Outcome,
    PowerWindow,
    ProtocolError,
    Status,
    load_json,
)
from farm.errors import UnavailableError

A = TypeVar("A", bound=protocol.Message)

# A year: no time that a board reports is longer.
_LONGEST_S = 3.2e7
# Since 1970, or since a board's start by all its cores together: the year 2286, and 40 years of eight cores.
_LATEST_S = 1e10
_SINCE_THEN = frozenset(["started_at", "started_s", "busy_s"])
# No watt, joule or hertz of a board is near; sums of a few are still finite.
_HIGHEST = 1e15
_MAX_SAMPLES = 100_000
# Absolute zero, and above any board's melting point.
_TEMPERATURES_C = (-273.15, 1000.0)
# A sensor's noise is on both sides of zero; so is what is left above the idle baseline.
_MAY_BE_NEGATIVE = frozenset(
    ["power_w", "power_ci_w", "energy_j", "energy_ci_j", "per_call_ci_j", "above_idle_j", "above_idle_ci_j", "samples"]
)
# Statuses that only the coordinator sets.
_NEVER_A_BOARDS = frozenset({Status.BUILD_FAILED, Status.BUILD_TIMEOUT, Status.WRONG_RESULT, Status.BOARD_LOST})


def require_own_protocol(key: str, description: str) -> None:
    """Raise UnavailableError where an agent speaks another version, ProtocolError where it names none."""
    try:
        version = load_json(description)["protocol_version"]
    except (ValueError, TypeError, LookupError) as error:
        raise ProtocolError("its description names no protocol version") from error
    if version != PROTOCOL_VERSION:
        newer = isinstance(version, int) and version > PROTOCOL_VERSION
        raise UnavailableError(
            f"the agent on {key} speaks protocol {version}, this farm speaks {PROTOCOL_VERSION}",
            "The agent is newer: update tvm-farm here."
            if newer
            else "The agent is older: update device-agent on the board.",
        )


def read_text(value: object) -> str:
    """Return a text answer. Raises ProtocolError."""
    if not isinstance(value, str):
        raise ProtocolError(f"an answer of type {type(value).__name__} instead of text")
    return value


def read_bytes(value: object) -> bytes:
    """Return an answer of bytes. Raises ProtocolError; `bytes` would take a number for a size."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ProtocolError(f"an answer of type {type(value).__name__} instead of bytes")
    return bytes(value)


def read_answer(kind: type[A], value: object, board: str, simulated: bool | None = None) -> A:
    """Parse a board's answer. Raises ProtocolError where it is malformed, impossible, or another board's.

    `simulated`: the board's earlier statement; None for its first answer.
    """
    answer = kind.from_json(read_text(value))
    name = answer.name if isinstance(answer, Description) else getattr(answer, "board", board)
    if name != board:
        raise ProtocolError(f"it says that it is {name!r}, not {board!r}")
    if simulated is not None and getattr(answer, "simulated", simulated) is not simulated:
        raise ProtocolError(f"it says simulated: {not simulated}, after it said {simulated}")
    for said, problem in _find_problems(answer):
        raise ProtocolError(f"{kind.__name__}.{said} {problem}")
    if isinstance(answer, Outcome):
        _check_outcome(answer)
    return answer


def _check_outcome(outcome: Outcome) -> None:
    if outcome.status in _NEVER_A_BOARDS:
        raise ProtocolError(f"Outcome.status {outcome.status} is not for a board to say")
    if len(outcome.latency_s) > _MAX_SAMPLES:
        raise ProtocolError(f"Outcome.latency_s has {len(outcome.latency_s)} samples")
    if not all(0 < sample < _LONGEST_S for sample in outcome.latency_s):
        raise ProtocolError("Outcome.latency_s has an impossible sample")
    if outcome.status is Status.OK and not outcome.latency_s:
        raise ProtocolError("Outcome.latency_s is empty with the status ok")


def require_possible(outcome: Outcome) -> None:
    """Raise ProtocolError where an outcome of another farm has an impossible number."""
    for said, problem in _find_problems(outcome):
        raise ProtocolError(f"Outcome.{said} {problem}")
    if len(outcome.latency_s) > _MAX_SAMPLES:
        raise ProtocolError(f"Outcome.latency_s has {len(outcome.latency_s)} samples")


def _find_problems(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """List the fields with impossible numbers in an answer and its parts."""
    if isinstance(value, protocol.Message):
        if isinstance(value, Energy) and value.busy.enough and value.per_call_j == 0:
            yield "per_call_j", "is zero"
        if isinstance(value, PowerWindow) and not 0 < value.window_s < _LONGEST_S:
            yield "window_s", "is no window"
        for field in dataclasses.fields(value):  # type: ignore[arg-type]  # mypy: every message is a dataclass
            yield from _find_problems(getattr(value, field.name), field.name)
    elif isinstance(value, tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _find_problems(item, name)
    elif isinstance(value, int | float):
        lowest, highest = _find_bounds(name)
        if not lowest <= value <= highest:
            yield name, f"is {value:g}"


def _find_bounds(name: str) -> tuple[float, float]:
    """Return the bounds of a field's value."""
    if name == "temperature_c":
        return _TEMPERATURES_C
    if name in _SINCE_THEN:
        return 0, _LATEST_S
    if name.endswith("_s"):
        return 0, _LONGEST_S
    return -_HIGHEST if name in _MAY_BE_NEGATIVE else 0, _HIGHEST
