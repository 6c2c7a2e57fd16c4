"""Switch a board's power by the user's commands. Callers decide when."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

from farm.errors import FarmError, UsageError
from farm.inventory.power_commands import BOARD, PowerCommands
from farm.processes import children
from farm.store import Store
from farm.values import Health, Lease

# Retries of the command that switches on, so that one failure does not leave the board off.
_TRIES_ON = 2
# Time of the lease beyond the commands'.
_MARGIN_S = 30.0


def parse_power(document: dict[str, Any] | None) -> PowerCommands | None:
    """Parse the commands in the store's column; None where there are none."""
    return None if document is None else PowerCommands.model_validate(document)


def take_board(
    store: Store, name: str, owner: str, purpose: str, commands: PowerCommands, allowed: Collection[Health]
) -> Lease:
    """Lease a board, connected or not, for the duration of switching. Raises TransientError where it is taken."""
    ttl_s = (1 + _TRIES_ON) * commands.timeout_s + commands.pause_s + _MARGIN_S
    return store.acquire_lease(name, owner, purpose, ttl_s=ttl_s, allowed=frozenset(allowed), within_reach=False)


def switch(board: str, commands: PowerCommands, action: str, hurry: threading.Event | None = None) -> str:
    """Switch a board `off`, `on`, or `cycle` it; return the last output. Blocks.

    `hurry` shortens the pause between off and on. Raises UsageError where there is no command for it, PermanentError or
    TransientError where one fails; the message says if the board stays off.
    """
    if not commands.can(action):
        raise UsageError(
            f"no command switches {board} {action}" if action != "cycle" else f"no command cycles the power of {board}",
            "Its `power:` in the fleet file says which there are; docs/howto/switch-power.md says how.",
        )
    if (words := getattr(commands, action)) is not None:
        return _run(board, commands, words, action)
    assert commands.off is not None and commands.on is not None  # noqa: PT018 - guaranteed by `can`
    _run(board, commands, commands.off, "off")
    (hurry or threading.Event()).wait(commands.pause_s)
    for left in reversed(range(_TRIES_ON)):
        try:
            return _run(board, commands, commands.on, "on")
        except FarmError as error:
            if not left:
                raise type(error)(f"{board} was switched off and not on again: {error.message}") from error
    raise AssertionError


def _run(board: str, commands: PowerCommands, words: list[str], action: str) -> str:
    command = [words[0], *(word.replace(BOARD, board) for word in words[1:])]
    environment = {"FARM_BOARD": board, "FARM_POWER": action}
    return children.run(command, commands.timeout_s, environment=environment)
