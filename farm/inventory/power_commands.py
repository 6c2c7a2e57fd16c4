"""The user's commands that switch a board's power, in a fleet file and in the store.

`farm.services.powering` runs them; `farm.services.powering` decides when.
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection
from typing import Annotated, Any

import pydantic

from farm.inventory import documents

# The placeholder for the board's name.
BOARD = "{board}"
_MOST_WORDS = 64


def _check_word(word: str) -> str:
    if not word.isprintable():
        raise ValueError("a character in it cannot be printed")
    return word


def _check_command(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(  # noqa: TRY004 - pydantic takes ValueError
            "no shell reads a power command: write its words as a list, such as [/usr/local/bin/pdu, cycle, '{board}']"
        )
    return value


def _check_program(words: list[str]) -> list[str]:
    if BOARD in words[0] or words[0].startswith("-"):
        raise ValueError("its first word is the program")
    return words


Word = Annotated[str, pydantic.Field(min_length=1, max_length=1024), pydantic.AfterValidator(_check_word)]
Command = Annotated[
    list[Word],
    pydantic.BeforeValidator(_check_command),
    pydantic.Field(min_length=1, max_length=_MOST_WORDS),
    pydantic.AfterValidator(_check_program),
]


def can_switch(given: Collection[str], action: str) -> bool:
    """Whether these commands can switch a board `off`, `on`, or `cycle` it."""
    return action in given or (action == "cycle" and {"off", "on"} <= set(given))


class PowerCommands(documents.StrictModel):
    """Commands to switch a board off, on, and to cycle it; times are in seconds.

    Each command ends within `timeout_s`. Without `cycle`, `off` is followed by `on` after `pause_s`. `boot_s` is the
    time from power to an agent that answers.
    """

    off: Command | None = None
    on: Command | None = None
    cycle: Command | None = None
    timeout_s: Annotated[float, pydantic.Field(gt=0, le=300)] = 30.0
    pause_s: Annotated[float, pydantic.Field(ge=0, le=120)] = 5.0
    boot_s: Annotated[float, pydantic.Field(gt=0, le=3600)] = 120.0

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_switches(cls, value: Any) -> Any:
        # YAML 1.1 reads the keys `on` and `off` as true and false.
        if isinstance(value, dict):
            return {
                {True: "on", False: "off"}.get(key, key) if isinstance(key, bool) else key: value[key] for key in value
            }
        return value

    @pydantic.model_validator(mode="after")
    def _require_a_command(self) -> PowerCommands:
        if not self.can("cycle") and not (self.off or self.on):
            raise ValueError("power needs `cycle`, or `off` and `on`")
        return self

    def can(self, action: str) -> bool:
        """Whether it can switch a board `off`, `on`, or `cycle` it."""
        return can_switch([name for name in ("off", "on", "cycle") if getattr(self, name)], action)

    def place(self, folder: pathlib.Path) -> PowerCommands:
        """Resolve a program's relative path from `folder`; a bare name is found by PATH."""
        moved = {
            name: [str(folder / words[0]) if "/" in words[0] else words[0], *words[1:]]
            for name in ("off", "on", "cycle")
            if (words := getattr(self, name))
        }
        return self.model_copy(update=moved)

    def to_document(self) -> dict[str, Any]:
        """As the store keeps them."""
        return self.model_dump(mode="json", exclude_none=True)
