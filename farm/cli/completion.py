"""`farm completion SHELL`: the shell's script. `completing.py` answers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farm.cli import output
from farm.cli.completing import VARIABLE
from farm.errors import UsageError

# Each passes the words up to the cursor. Without an answer the shell completes file names.
_SHELLS = ("bash", "zsh", "fish")


@output.command
def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell to write it for.")],
) -> None:
    """Print what makes a shell complete commands, options, and names of boards, board types, campaigns and models.

    For bash: `source <(farm completion bash)`, in ~/.bashrc for always.
    """
    if shell not in _SHELLS:
        raise UsageError(f"there is no completion for {shell!r}", f"Known: {', '.join(_SHELLS)}.")
    script = Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8")
    print(script.replace("VARIABLE", VARIABLE), end="")
