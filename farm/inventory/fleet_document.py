"""What a fleet file may hold, key by key. What the keys add up to is not here."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic

from device_agent.protocol.hardware import Text
from farm import foreign
from farm.errors import UsageError
from farm.inventory import document_lines, documents, fleet_addresses, fleet_ranges
from farm.inventory.power_commands import PowerCommands


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
    # It is printed to terminals, which take some characters for commands.
    if not value.isprintable():
        raise ValueError("a character in it cannot be printed")
    return value


def _quoted(value: Any) -> Any:
    """YAML reads 010 as 8 and `no` as false; names and labels must be what was written."""
    if not isinstance(value, str):
        raise ValueError("text is needed here; write it in quotes")  # noqa: TRY004 - pydantic takes ValueError
    return value


Label = Annotated[
    str,
    pydantic.BeforeValidator(_quoted, json_schema_input_type=str),
    pydantic.Field(max_length=255),
    pydantic.AfterValidator(_printable),
]
LabelName = Annotated[str, pydantic.Field(pattern=r"^[a-z0-9]([a-z0-9_./-]*[a-z0-9])?$", max_length=63)]
Pattern = Annotated[str, pydantic.BeforeValidator(_quoted, json_schema_input_type=str)]
_LABELS = pydantic.TypeAdapter(dict[LabelName, Label])
GroupName = Annotated[
    str,
    pydantic.BeforeValidator(_quoted, json_schema_input_type=str),
    pydantic.Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=63),
]


class Variables(documents.StrictModel):
    """What a group may say for all its boards. `null` takes away what an outer group said."""

    type: Text | None = None
    transport: Literal["ssh", "direct", "virtual"] | None = None
    address: Text | None = None
    port: Annotated[str, pydantic.BeforeValidator(_port_text, json_schema_input_type=int | str)] | None = None
    user: Annotated[str, pydantic.AfterValidator(fleet_addresses.parse_user)] | None = None
    key_file: Annotated[str, pydantic.Field(min_length=1), pydantic.AfterValidator(_path_text)] | None = None
    # As `ssh-keygen -lf` prints it.
    host_key: Annotated[str, pydantic.Field(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$")] | None = None
    # Where the agent listens on the board's own loopback.
    agent_port: Annotated[int, pydantic.Field(strict=True, ge=1, le=65535)] | None = None
    # Where it finds the farm's tracker there.
    tracker_port: Annotated[int, pydantic.Field(strict=True, ge=1, le=65535)] | None = None
    seed: Annotated[int, pydantic.Field(strict=True, ge=0, lt=1 << 31)] | None = None
    # What harms a virtual board, for tests and demonstrations; its agent says which there are.
    faults: list[Annotated[str, pydantic.Field(pattern=r"^[a-z_]+([:@][!-~]+)?$", max_length=200)]] | None = None
    # Whether a virtual board's time jumps, or passes as this machine's does.
    time: Literal["lapsed", "live"] | None = None
    # Commands that switch its power, run on the host of the farm's services.
    power: PowerCommands | None = None
    labels: dict[LabelName, Label] | None = None


class Host(Variables):
    """What is said of one board, or of the boards of one range. `count` makes several virtual ones of one name."""

    count: Annotated[int, pydantic.Field(strict=True, ge=1, le=fleet_ranges.MAX_EXPANDED)] | None = None


class Group(documents.StrictModel):
    """Boards that have variables in common, and groups inside it."""

    vars: Variables | None = None
    hosts: dict[Pattern, Host | None] | None = None
    groups: dict[GroupName, Group | None] | None = None


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels that were given elsewhere, held to the rule for those of a file. Raises UsageError."""
    try:
        return _LABELS.validate_python(dict(labels))
    except pydantic.ValidationError as error:
        detail = error.errors()[0]
        raise UsageError(
            f"{detail['input']!r} cannot be in a label: {foreign.say_plainly(detail['msg'])}",
            "Keys are lower-case letters and digits, with . _ - / between them.",
        ) from error


def read_groups(path: pathlib.Path) -> Group:
    """The outermost group of a fleet file. Raises UsageError naming the line and key of everything that is wrong."""
    return document_lines.read_located(path, Group)
