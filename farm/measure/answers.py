"""What a board answers, read as by somebody who does not trust it: the one border between boards and the farm.

Types, bounds and text are the protocol's business (`device_agent.load_json`); here it is whether an answer can
be true and is this board's own. What may reach the farm at all is `farm.connectivity.frames`'.
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

# A year: nothing that a board times, waits for or counts in seconds takes longer.
_LONGEST_S = 3.2e7
# Since 1970, or since a board's start by all its cores together: the year 2286, and 40 years of eight cores.
_LATEST_S = 1e10
_SINCE_THEN = frozenset(["started_at", "started_s", "busy_s"])
# No watt, joule or hertz of a board's comes near; a few of them together are still a number.
_HIGHEST = 1e15
_MAX_SAMPLES = 100_000
# Below absolute zero no sensor reads; above this the board has melted.
_TEMPERATURES_C = (-273.15, 1000.0)
# A sensor's noise is on both sides of nothing; so is what is left above the idle baseline.
_MAY_BE_NEGATIVE = frozenset(
    ["power_w", "power_ci_w", "energy_j", "energy_ci_j", "per_call_ci_j", "above_idle_j", "above_idle_ci_j", "samples"]
)
# What only the coordinator can find out.
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
    """A function's answer that is to be text. Raises ProtocolError; `str` would ask the board what it looks like."""
    if not isinstance(value, str):
        raise ProtocolError(f"an answer of the kind {type(value).__name__} where text belongs")
    return value


def read_bytes(value: object) -> bytes:
    """A function's answer that is to be bytes. Raises ProtocolError; `bytes` would take a number for a size."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ProtocolError(f"an answer of the kind {type(value).__name__} where bytes belong")
    return bytes(value)


def read_answer(kind: type[A], value: object, board: str, simulated: bool | None = None) -> A:
    """A board's answer. Raises ProtocolError for what is none, cannot be true, or speaks for another board.

    `simulated`: what the board said of itself before; None where this is the first that is heard of it.
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
        raise ProtocolError("Outcome.latency_s has a sample that no run takes")
    if outcome.status is Status.OK and not outcome.latency_s:
        raise ProtocolError("Outcome.latency_s is empty, and yet all is well")


def require_possible(outcome: Outcome) -> None:
    """Raise ProtocolError where an outcome that another farm kept has a number that cannot be."""
    for said, problem in _find_problems(outcome):
        raise ProtocolError(f"Outcome.{said} {problem}")
    if len(outcome.latency_s) > _MAX_SAMPLES:
        raise ProtocolError(f"Outcome.latency_s has {len(outcome.latency_s)} samples")


def _find_problems(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Every number that cannot be, with the field that it is in, of an answer and all that it is made of."""
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
    """Between which figures what a field holds has to lie."""
    if name == "temperature_c":
        return _TEMPERATURES_C
    if name in _SINCE_THEN:
        return 0, _LATEST_S
    if name.endswith("_s"):
        return 0, _LONGEST_S
    return -_HIGHEST if name in _MAY_BE_NEGATIVE else 0, _HIGHEST
