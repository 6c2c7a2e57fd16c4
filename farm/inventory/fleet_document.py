"""The keys of a fleet file, validated. `fleets.py` combines them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from device_agent.protocol.hardware import Text
from farm import foreign
from farm.errors import UsageError
from farm.inventory import documents, fleet_addresses
from farm.inventory.power_commands import Command, PowerCommands

# A longer range is a typing error; a larger rack can be written as two ranges.
MAX_EXPANDED = 1000
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_MOST_DIGITS = 12

LabelName = Annotated[str, pydantic.Field(pattern=r"^[a-z0-9]([a-z0-9_./-]*[a-z0-9])?$", max_length=63)]


def expand(pattern: str) -> list[str]:
    """Expand a pattern to names; one without a range is returned alone.

    `[first:last]` or `[first:last:step]`, both ends included; numbers, or one letter each. Leading zeros in `first` fix
    the number of digits. Several ranges give every combination, the last one fastest. Source: Ansible's user guide,
    "Adding ranges of hosts". Raises ValueError before anything is expanded.
    """
    pieces = _BRACKETS.split(pattern)
    # Captured groups are at the odd positions.
    texts, ranges = pieces[::2], [_parse(inner) for inner in pieces[1::2]]
    if any(bracket in text for text in texts for bracket in "[]"):
        raise ValueError(f"{pattern!r} has a bracket without its partner")
    count = math.prod(len(values) for values, _ in ranges)
    if count > MAX_EXPANDED:
        raise ValueError(f"{pattern!r} stands for {count}; at most {MAX_EXPANDED} are taken, so write several ranges")
    choices = [[_spell(value, width) for value in values] for values, width in ranges]
    return [
        "".join(itertools.chain.from_iterable(itertools.zip_longest(texts, chosen, fillvalue="")))
        for chosen in itertools.product(*choices)
    ]


def _parse(inner: str) -> tuple[range, int | None]:
    """Numbers or code points of one range, and its digits (0: as needed; None: letters)."""
    parts = inner.split(":")
    if len(parts) not in {2, 3} or not all(parts):
        raise ValueError(f"the range [{inner}] must be [first:last] or [first:last:step]")
    first, last = parts[:2]
    if any(len(part) > _MOST_DIGITS for part in parts):
        raise ValueError(f"the range [{inner}] has a number of more than {_MOST_DIGITS} digits")
    step = parts[2] if len(parts) > 2 else "1"
    if not re.fullmatch(r"0*[1-9][0-9]*", step):
        raise ValueError(f"the range [{inner}] has the step {step!r}; it must be a whole number of at least 1")
    if re.fullmatch(r"[0-9]+", first) and re.fullmatch(r"[0-9]+", last):
        width = len(first) if first.startswith("0") and len(first) > 1 else 0
        if width and len(last) != width:
            raise ValueError(f"the range [{inner}] has leading zeros, so both ends must have as many digits")
        return _ascending(int(first), int(last), int(step), inner), width
    for kind in ("[a-z]", "[A-Z]"):
        if re.fullmatch(kind, first) and re.fullmatch(kind, last):
            return _ascending(ord(first), ord(last), int(step), inner), None
    raise ValueError(f"the range [{inner}] must go from a number to a number, or from a letter to a letter")


def _ascending(first: int, last: int, step: int, inner: str) -> range:
    if last < first:
        raise ValueError(f"the range [{inner}] ends before it begins")
    return range(first, last + 1, step)


def _spell(value: int, width: int | None) -> str:
    return chr(value) if width is None else f"{value:0{width}d}"


def number(name: str, count: int) -> Sequence[str]:
    """`count` names from one: `sim-1`, `sim-2` …, with leading zeros so that they sort."""
    width = len(str(count))
    return [f"{name}-{index:0{width}d}" for index in range(1, count + 1)]


def _port_text(value: Any) -> Any:
    """A port is a number or, for a range of boards, a text such as `22[01:16]`."""
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    raise ValueError("a port is a whole number, or a range in quotes such as '22[01:16]'")


def _path_text(value: str) -> str:
    if "-----BEGIN" in value:
        raise ValueError("a path is needed here; a private key has no place in this file")
    return _printable(value)


def _printable(value: str) -> str:
    # It is printed to terminals, which interpret some characters as commands.
    if not value.isprintable():
        raise ValueError("a character in it cannot be printed")
    return value


def _quoted(value: Any) -> Any:
    """Refuse unquoted scalars: YAML reads 010 as 8 and `no` as false."""
    if not isinstance(value, str):
        raise ValueError("text is needed here; write it in quotes")  # noqa: TRY004 - pydantic takes ValueError
    return value


Label = Annotated[
    str,
    pydantic.BeforeValidator(_quoted, json_schema_input_type=str),
    pydantic.Field(max_length=255),
    pydantic.AfterValidator(_printable),
]
Pattern = Annotated[str, pydantic.BeforeValidator(_quoted, json_schema_input_type=str)]
_LABELS = pydantic.TypeAdapter(dict[LabelName, Label])
GroupName = Annotated[
    str,
    pydantic.BeforeValidator(_quoted, json_schema_input_type=str),
    pydantic.Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=63),
]


class Variables(documents.StrictModel):
    """A group's variables for all its boards. `null` removes an outer group's value."""

    type: Text | None = None
    transport: Literal["ssh", "direct", "virtual"] | None = None
    address: Text | None = None
    port: Annotated[str, pydantic.BeforeValidator(_port_text, json_schema_input_type=int | str)] | None = None
    user: Annotated[str, pydantic.AfterValidator(fleet_addresses.parse_user)] | None = None
    key_file: Annotated[str, pydantic.Field(min_length=1), pydantic.AfterValidator(_path_text)] | None = None
    # As `ssh-keygen -lf` prints it.
    host_key: Annotated[str, pydantic.Field(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$")] | None = None
    # The agent's port on the board's loopback.
    agent_port: Annotated[int, pydantic.Field(strict=True, ge=1, le=65535)] | None = None
    # The farm's tracker on the board's loopback.
    tracker_port: Annotated[int, pydantic.Field(strict=True, ge=1, le=65535)] | None = None
    seed: Annotated[int, pydantic.Field(strict=True, ge=0, lt=1 << 31)] | None = None
    # Faults of a virtual board, for tests and demonstrations; its agent defines them.
    faults: list[Annotated[str, pydantic.Field(pattern=r"^[a-z_]+([:@][!-~]+)?$", max_length=200)]] | None = None
    # Whether a virtual board's time jumps or runs live.
    time: Literal["lapsed", "live"] | None = None
    # A program on the board that prints lines `SECONDS WATTS` of an external power meter.
    meter: Command | None = None
    # Commands that switch its power, run on the host of the farm's services.
    power: PowerCommands | None = None
    labels: dict[LabelName, Label] | None = None


class Host(Variables):
    """One board, or the boards of one range. `count` makes several virtual ones."""

    count: Annotated[int, pydantic.Field(strict=True, ge=1, le=MAX_EXPANDED)] | None = None


class Group(documents.StrictModel):
    """Boards with common variables, and inner groups."""

    vars: Variables | None = None
    hosts: dict[Pattern, Host | None] | None = None
    groups: dict[GroupName, Group | None] | None = None


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Validate labels from elsewhere by the rule for a file's. Raises UsageError."""
    try:
        return _LABELS.validate_python(dict(labels))
    except pydantic.ValidationError as error:
        detail = error.errors()[0]
        raise UsageError(
            f"{detail['input']!r} cannot be in a label: {foreign.say_plainly(detail['msg'])}",
            "Keys are lower-case letters and digits, with . _ - / between them.",
        ) from error
