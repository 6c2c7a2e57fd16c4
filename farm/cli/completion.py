"""`farm completion SHELL`, and the names that a shell completes: read from the store as it is, without a word."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Annotated

import typer

from farm import settings
from farm.cli import output
from farm.errors import UsageError

# Set by the script in the shell; what it holds says which shell asks, and what for.
VARIABLE = "_FARM_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
# A shell waits for this at every tab.
_BUSY_TIMEOUT_S = 0.2


@output.command
def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell to write it for.")],
) -> None:
    """Print what makes a shell complete commands, options, and names of boards and campaigns.

    For bash: `source <(farm completion bash)`, in ~/.bashrc for always.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in SHELLS:
        raise UsageError(f"there is no completion for {shell!r}", f"Known: {', '.join(SHELLS)}.")
    print(get_completion_script(prog_name="farm", complete_var=VARIABLE, shell=shell))


def find_words() -> list[str]:
    """The words typed so far, of which a shell asks for the last; what it says depends on the shell."""
    typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return typed.split()[1:]


def list_boards(incomplete: str) -> list[str]:
    """Names of registered boards."""
    return _read_names("boards", incomplete)


def list_campaigns(incomplete: str) -> list[str]:
    """Names of campaigns."""
    return _read_names("fleet_campaigns", incomplete)


def _read_names(table: str, incomplete: str) -> list[str]:
    # Past the store, which would make or migrate one; of a database elsewhere nobody waits for an answer here.
    with contextlib.suppress(Exception):
        location = settings.load().store_location
        if isinstance(location, Path) and location.is_file():
            uri = f"{location.absolute().as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, _BUSY_TIMEOUT_S, uri=True)) as connection:
                rows = connection.execute(f"SELECT name FROM {table} ORDER BY name")  # noqa: S608 - one of ours
                return [name for (name,) in rows if str(name).startswith(incomplete)]
    return []
